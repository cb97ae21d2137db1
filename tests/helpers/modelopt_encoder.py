"""Checkpoints as ModelOpt stores them, from the format's specification in NumPy."""

import json
from dataclasses import dataclass, field

import narrow_floats as nf
import numpy as np
import tiny_checkpoints as tiny
import torch


@dataclass
class Encoded:
    """Tensors of one module by leaf, and what they mean.

    values: float32 [N, K], `pre_quant_scale` and low-rank product left out.
    """

    values: np.ndarray
    leaves: dict = field(default_factory=dict)


def encoded(algorithm, rows, columns, *, group_size=16, seed=0):
    """A random weight in one algorithm; `group_size` where it has groups."""
    random = np.random.default_rng(seed)
    kind = algorithm.split(":")[0].upper()
    made = _ENCODERS[kind](random, rows, columns, group_size)
    if kind in _STATIC:
        made.leaves["input_scale"] = _float(random, ())
    return made


def _float(random, shape, low=-6, high=-1):
    values = np.exp2(random.uniform(low, high, shape)).astype(np.float32)
    return torch.from_numpy(np.asarray(values))


def _fp8_codes(random, shape):
    codes = random.integers(0, 256, shape, dtype=np.uint8)
    return np.where((codes & 0x7F) == 0x7F, np.uint8(0x3C), codes)


def _as_fp8(codes):
    return torch.from_numpy(codes).view(torch.float8_e4m3fn)


def _fp8(random, rows, columns, scale, spread):
    codes = _fp8_codes(random, (rows, columns))
    values = nf.E4M3[codes] * spread(scale.numpy())
    return Encoded(values, {"weight": _as_fp8(codes), "weight_scale": scale})


def _tensor(random, rows, columns, _):
    return _fp8(random, rows, columns, _float(random, ()), lambda s: s)


def _channel(random, rows, columns, _):
    return _fp8(random, rows, columns, _float(random, (rows,)), lambda s: s[:, None])


def _blocks(random, rows, columns, _):
    grid = -(-rows // 128), -(-columns // 128)

    def spread(scale):
        return np.repeat(np.repeat(scale, 128, 0), 128, 1)[:rows, :columns]

    made = _fp8(random, rows, columns, _float(random, grid), spread)
    made.leaves["weight_scale"] = made.leaves["weight_scale"].reshape(grid[0], 1, grid[1], 1)
    return made


def _exponents(random, shape):
    return random.integers(100, 140, shape, dtype=np.uint8)


def _mxfp8(random, rows, columns, _):
    codes = _fp8_codes(random, (rows, columns))
    scale = _exponents(random, (rows, columns // 32))
    values = nf.E4M3[codes] * np.repeat(nf.e8m0(scale), 32, 1)
    return Encoded(values, {"weight": _as_fp8(codes), "weight_scale": torch.from_numpy(scale)})


def _int8(random, rows, columns, _):
    codes = random.integers(-128, 128, (rows, columns), dtype=np.int8)
    scale = _float(random, (rows,))
    values = codes.astype(np.float32) * scale.numpy()[:, None]
    return Encoded(values, {"weight": torch.from_numpy(codes), "weight_scale": scale})


def _int4(random, rows, columns, group_size):
    codes = random.integers(-8, 8, (rows, columns), dtype=np.int8)
    scale = _float(random, (rows, columns // group_size))
    values = codes.astype(np.float32) * np.repeat(scale.numpy(), group_size, 1)
    stored = np.zeros((rows // 2, columns), dtype=np.uint8)
    for row in range(rows):
        stored[row // 2] |= (codes[row].astype(np.uint8) & 15) << (4 * (row % 2))
    return Encoded(values, {"weight": torch.from_numpy(stored), "weight_scale": scale})


def _w4a8_awq(random, rows, columns, group_size):
    made = _int4(random, rows, columns, group_size)
    made.leaves["weight_scale_2"] = _float(random, ())
    return made


def _fp4_codes(random, rows, columns):
    codes = random.integers(0, 16, (rows, columns), dtype=np.uint8)
    return codes, torch.from_numpy(nf.packed(codes, 4))


def _nvfp4(random, rows, columns, group_size):
    codes, stored = _fp4_codes(random, rows, columns)
    scale = _fp8_codes(random, (rows, columns // group_size)) & 0x7F
    outer = _float(random, ())
    factor = (nf.E4M3[scale] * outer.numpy()).astype(np.float32)
    values = nf.E2M1[codes] * np.repeat(factor, group_size, 1)
    leaves = {"weight": stored, "weight_scale": _as_fp8(scale), "weight_scale_2": outer}
    return Encoded(values, leaves)


def _mxfp4(random, rows, columns, _):
    codes, stored = _fp4_codes(random, rows, columns)
    scale = _exponents(random, (rows, columns // 32))
    values = nf.E2M1[codes] * np.repeat(nf.e8m0(scale), 32, 1)
    return Encoded(values, {"weight": stored, "weight_scale": torch.from_numpy(scale)})


def with_low_rank(made, rank=4, *, seed=1):
    """Add a low-rank product and a factor; returns (W + B A) * pre_quant_scale in float64."""
    random = np.random.default_rng(seed)
    rows, columns = made.values.shape
    factors = {
        "a": torch.from_numpy(random.standard_normal((rank, columns), np.float32)).bfloat16(),
        "b": torch.from_numpy(random.standard_normal((rows, rank), np.float32)).bfloat16(),
    }
    for side, factor in factors.items():
        made.leaves[f"weight_quantizer._svdquant_lora_{side}"] = factor
    inner = with_inner(made, seed=seed)
    product = factors["b"].double().numpy() @ factors["a"].double().numpy()
    return (made.values.astype(np.float64) + product) * inner.astype(np.float64)


def with_inner(made, *, seed=1):
    """Add `pre_quant_scale`; returns it as float32 [K]."""
    random = np.random.default_rng(seed)
    made.leaves["pre_quant_scale"] = _float(random, made.values.shape[1], -1, 1).bfloat16()
    return made.leaves["pre_quant_scale"].float().numpy()


_ENCODERS = {
    "FP8": _tensor,
    "FP8_PER_CHANNEL_PER_TOKEN": _channel,
    "FP8_PB_WO": _blocks,
    "FP8_BLOCK_SCALES": _blocks,
    "MXFP8": _mxfp8,
    "W8A8_SQ_PER_CHANNEL": _int8,
    "W8A16": _int8,
    "W4A16_AWQ": _int4,
    "W4A8_AWQ": _w4a8_awq,
    "NVFP4": _nvfp4,
    "NVFP4_AWQ": _nvfp4,
    "NVFP4_SVD": _nvfp4,
    "W4A16_NVFP4": _nvfp4,
    "W4A8_NVFP4_FP8": _nvfp4,
    "W4A8_MXFP4_FP8": _mxfp4,
    "MXFP4": _mxfp4,
}
_STATIC = {"FP8", "W8A8_SQ_PER_CHANNEL", "W4A8_AWQ", "NVFP4", "NVFP4_AWQ", "NVFP4_SVD"}
_STATIC |= {"W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8"}


def flat(algorithm, **more):
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "ignore": ["lm_head"],
        "producer": {"name": "modelopt", "version": "0.47.0"},
        **more,
    }


def write(folder, modules, quantization, *, side_file=None, plain=None):
    """A checkpoint of a few modules; a config of None leaves config.json without one."""
    content = tiny.config(layers=1)
    if quantization is not None:
        content["quantization_config"] = quantization
    tensors = {"lm_head.weight": torch.ones(4, 8, dtype=torch.bfloat16), **(plain or {})}
    for module, made in modules.items():
        tensors |= {f"{module}.{leaf}": tensor for leaf, tensor in made.leaves.items()}
    tiny.write(folder, content, tensors)
    if side_file is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(side_file))
    return folder
