"""The peer made of vLLM's kernels, with stand-ins in torch for these.

Order, arguments and layouts are those of a Llama. The kernels themselves are held to float64 on a
card, before each timing.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "benchmarks"
MARLIN_ORDER = [i + 8 * j for i in range(8) for j in range(8)]


def _codes(words):
    """Codes 0..15 [N, K] of words [K / 8, N]."""
    return ((words.T[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15).flatten(1)


def _product_of_nibbles(x, words, scales):
    values = (_codes(words).double() - 8).unflatten(1, (len(scales), -1))
    return (x.double() @ (values * scales.T.double()[..., None]).flatten(1).T).to(x.dtype)


def _repack(words, k, n, bits, has_8_bit_input):
    assert words.shape == (k // 8, n)
    assert (bits, has_8_bit_input, words.is_contiguous()) == (4, False, True)
    return words.clone()


def _marlin(x, out, words, bias, scales, sx, sg, zeros, locks, kind, m, n, k, *flags):
    assert (kind, x.shape, flags) == (77, (m, k), (False, True, False))
    back = [MARLIN_ORDER.index(i) for i in range(64)]
    return _product_of_nibbles(x, words, scales.reshape(-1, 64)[:, back].reshape(-1, n))


def _machete(x, words, kind, out_dtype, scales, zeros, group, *rest):
    assert (kind, group, words.stride(0)) == (77, 128, 1)
    return _product_of_nibbles(x, words, scales)


def _cutlass(out, x, w, sx, sw, bias):
    assert (sx.shape, sw.shape, w.stride(0)) == ((len(x), 1), (w.shape[1], 1), 1)
    out.copy_((x.double() * sx) @ (w.double() * sw.T))


def _normed(x, factors, eps):
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * factors.double()


def _rms_norm(out, x, factors, eps):
    out.copy_(_normed(x, factors, eps))


def _add_norm(x, residual, factors, eps):
    residual.add_(x)
    x.copy_(_normed(residual, factors, eps))


def _to_codes(codes, x, scales, bound):
    scales.copy_(x.double().abs().amax(-1, keepdim=True) / 448)
    codes.copy_((x.double() / scales).clamp(-448, 448))


def _norm_to_codes(codes, x, factors, scales, eps, bound, residual):
    if residual is not None:
        residual.add_(x)
        x = residual
    _to_codes(codes, _normed(x, factors, eps), scales, bound)


def _silu_and_mul(out, both):
    gate, up = both.double().chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def _rotate(positions, q, k, head_dim, turns, by_halves):
    assert by_halves
    cos, sin = (part[:, None] for part in turns[positions].double().chunk(2, -1))
    for x in (q, k):
        low, high = x.unflatten(-1, (-1, head_dim)).double().chunk(2, -1)
        x.copy_(torch.cat([low * cos - high * sin, high * cos + low * sin], -1).flatten(1))


def _write(k, v, keys, values, slots, dtype, k_scale, v_scale):
    keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots] = k, v


@pytest.fixture
def plug_in(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import vllm_kernels
    import vllm_step

    ops = SimpleNamespace(
        gptq_marlin_repack=_repack,
        marlin_gemm=_marlin,
        machete_prepack_B=lambda words, *kinds: words,
        machete_mm=_machete,
        cutlass_scaled_mm=_cutlass,
        rms_norm=_rms_norm,
        fused_add_rms_norm=_add_norm,
        rms_norm_dynamic_per_token_quant=_norm_to_codes,
        dynamic_per_token_scaled_fp8_quant=_to_codes,
        silu_and_mul=_silu_and_mul,
        rotary_embedding=_rotate,
    )
    monkeypatch.setattr(vllm_kernels, "ops", lambda: ops)
    monkeypatch.setattr(vllm_kernels, "flash", lambda: None)
    monkeypatch.setattr(vllm_kernels, "code_type", lambda name: {"uint4b8": 77}[name])
    monkeypatch.setattr(vllm_kernels, "processors", lambda device: 1)
    writes = SimpleNamespace(reshape_and_cache_flash=_write)
    monkeypatch.setattr(torch.ops, "_C_cache_ops", writes, raising=False)
    small = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4,
             "num_key_value_heads": 1}  # fmt: skip
    monkeypatch.setattr(vllm_step, "SMALL", vllm_step.SMALL | small)
    monkeypatch.setattr(vllm_step, "SMALL_LENGTHS", (9, 20))
    yield vllm_step
    for name in ("vllm_step", "vllm_kernels", "llama_reference", "gemm_cells"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("scheme", "kind"), [("W4A16", "marlin"), ("W4A16", "machete"), ("FP8_DYNAMIC", "cutlass")]
)
@torch.no_grad()
def test_a_step_is_that_of_a_llama(plug_in, scheme, kind):
    right, wrong = plug_in.errors(scheme, kind, torch.device("cpu"), graph=False)
    assert right <= plug_in.TOLERANCE[scheme] < wrong


@torch.no_grad()
def test_a_wrong_step_shows(plug_in, monkeypatch):
    monkeypatch.setattr(plug_in.Step, "_rounded", lambda self, x: (x.flip(-1),))
    right, _ = plug_in.errors("W4A16", "marlin", torch.device("cpu"), graph=False)
    assert right > plug_in.TOLERANCE["W4A16"]
