"""How the GEMM with weights of one byte is launched: what was measured, else a rule.

Letters: M tokens, N output features, K input features, C columns of a slice.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from itertools import product

import torch
import triton

from quantload.runtime.kernels.byte_layout import PackedBytes
from quantload.runtime.kernels.pairs_settings import fits, hopper_candidates, hopper_rule
from quantload.runtime.launch_settings import find

__all__ = [
    "MOST_FUSED",
    "Settings",
    "candidates",
    "card",
    "functions_for",
    "kernel_name",
    "rule",
    "settings_for",
]

MOST_FUSED = 640  # tokens from which on the weight is dequantized for cuBLAS
Settings = Mapping[str, int]


@functools.cache
def card(device: torch.device) -> tuple[int, int, bool]:
    """Return the processors, bytes of shared memory of a program, and whether it has wgmma."""
    if device.type != "cuda":
        return 8, 1 << 20, False  # the interpreter; few processors, so that small tests split K
    properties = torch.cuda.get_device_properties(device)
    shared: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return properties.multi_processor_count, shared, properties.major == 9


def kernel_name(form: str, grouped: bool) -> str:
    """Return the name under which settings are kept."""
    return f"byte {form} {'groups' if grouped else 'channel'}"


def rule(m: int, n: int, k: int, columns: int, processors: int, shared: int) -> dict[str, int]:
    """Return settings for shapes that were not measured.

    Args:
        m: Tokens.
        n: Output features.
        k: Input features.
        columns: C.
        processors: Of the device.
        shared: Bytes of shared memory that a program may use.
    """
    if m >= MOST_FUSED:
        return {"dequantize": 1}
    tokens = max(8, min(128, triton.next_power_of_2(m)))
    step = min(columns, 64)
    rows, warps, stages = (64, 4, 4) if tokens <= 64 else (128, 8, 3)
    while stages > 2 and _shared_bytes(rows, tokens, step, stages) > shared:
        stages -= 1
    tiles = -(-n // rows) * -(-m // tokens)
    blocks = -(-k // (2 * columns))
    wanted = (4 if tokens <= 16 else 2) * processors // tiles
    splits = max(1, min(wanted, blocks // 4, 16))
    return {
        "rows": rows,
        "tokens": tokens,
        "warps": warps,
        "stages": stages,
        "step": step,
        "splits": splits,
    }


def _shared_bytes(rows: int, tokens: int, step: int, stages: int) -> int:
    return 2 * step * (rows + 2 * tokens) * stages


def candidates(m: int, n: int, k: int, *, grouped: bool) -> Iterator[dict[str, int]]:
    """Yield settings worth measuring on the card that is here.

    Slices of a weight with a scale for each 128 columns have 64, of one with a scale a row 128.
    """
    if m >= 128:
        yield {"dequantize": 1}
    if card(torch.device("cuda"))[2]:
        yield from hopper_candidates(m, n, k, 64 if grouped else 128, 2)
    else:
        yield from _candidates(m, n, k)


def _candidates(m: int, n: int, k: int) -> Iterator[dict[str, int]]:
    names = ("rows", "tokens", "warps", "stages", "step", "splits")
    tokens, seen = max(8, min(128, triton.next_power_of_2(m))), set()
    processors, shared, _ = card(torch.device("cuda"))
    shapes = ((32, 1), (64, 2), (64, 4), (128, 4)) if m <= 64 else ((64, 4), (128, 4))
    for (rows, warps), stages, load in product(shapes, (3, 4, 6), (1, 2, 4, 8)):
        tiles = -(-n // rows) * -(-m // tokens)
        splits = max(1, min(-(-k // 128), round(processors * load / tiles)))
        key = (rows, tokens, warps, stages, 64, splits)
        if key not in seen and _shared_bytes(rows, tokens, 64, stages) <= shared:
            seen.add(key)
            yield dict(zip(names, key, strict=True))


def settings_for(
    form: str, slices: int, device: torch.device, m: int, n: int, k: int, columns: int
) -> Settings:
    """Return what was measured on this card, else the rule's choice.

    Those of sm_90 are for `pairs_hopper`, others, which have a "step", for `byte_linear`.

    Args:
        form: Of the codes.
        slices: Slices of a group, 0 where a row has one scale.
        device: Where the kernel runs.
        m: Tokens.
        n: Output features.
        k: Input features.
        columns: C.
    """
    processors, shared, hopper = card(device)
    settings = find(kernel_name(form, slices > 0), device, m=m, n=n, k=k)
    if settings is not None and _fits(settings, columns, shared, hopper):
        return settings
    if hopper and m < MOST_FUSED:
        sums = 0 if not slices else 1 if slices % 2 == 0 else 2
        return hopper_rule(
            m, n, k, columns=columns, processors=processors, shared=shared, x_bytes=2, sums=sums
        )
    return rule(m, n, k, columns, processors, shared)


def functions_for(packed: PackedBytes, tokens: int) -> tuple[str, ...]:
    """Return the device functions of a call with `tokens` tokens, cuBLAS's own as "cuBLAS"."""
    if tokens == 0:
        return ()
    settings = settings_for(
        packed.form,
        0 if packed.scale is None else packed.slices_per_group,
        packed.codes.device,
        tokens,
        packed.out_features,
        packed.in_features,
        packed.slice_columns,
    )
    if settings.get("dequantize"):
        return ("byte_dequantize_kernel", "cuBLAS")
    return ("byte_gemm_kernel",) if "step" in settings else ("pairs_gemm_hopper",)


def _fits(settings: Settings, columns: int, shared: int, hopper: bool) -> bool:
    """True if settings that were measured for one layout serve this one on this card."""
    if settings.get("dequantize"):
        return True
    if hopper or "step" not in settings:
        return hopper and "step" not in settings and fits(settings, columns, shared, 2)
    needed = _shared_bytes(*(settings[name] for name in ("rows", "tokens", "step", "stages")))
    return settings["step"] <= columns and needed <= shared
