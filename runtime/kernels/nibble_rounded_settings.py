"""How the GEMM of rounded inputs with weights of up to four bits is launched.

Letters: M tokens, N output features, K input features, C columns of a slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
import triton

from quantload.runtime.kernels.byte_settings import Settings, card
from quantload.runtime.kernels.nibble_rounded_layout import PackedForBytes
from quantload.runtime.kernels.pairs_settings import fits, hopper_candidates, hopper_rule
from quantload.runtime.launch_settings import find

__all__ = [
    "MOST_FUSED",
    "Settings",
    "candidates",
    "functions_for",
    "kernel_name",
    "rule",
    "settings_for",
]

# Tokens from which on the weight is dequantized for cuBLAS. Up to 1024, the most that was measured,
# `pairs_hopper` takes 17 to 49 % less time, and its time grows with the tokens.
MOST_FUSED = 8192
_MOST_FUSED_BEFORE = 1024  # the same, of cards before sm_90; not measured


def kernel_name(form: str, grouped: bool) -> str:
    """Return the name under which settings are kept."""
    return f"pairs {form} {'groups' if grouped else 'channel'}"


def _fewest_tokens(form: str) -> int:
    return 8 if form == "int" else 16  # FP8 products with fewer are left to slower instructions


def _shared_bytes(rows: int, tokens: int, columns: int, stages: int) -> int:
    return columns * (rows + 2 * tokens) * stages


def rule(
    form: str, m: int, n: int, k: int, columns: int, processors: int, shared: int
) -> dict[str, int]:
    """Return settings for shapes that were not measured.

    Args:
        form: Of the codes, see `nibble_rounded_layout`.
        m: Tokens.
        n: Output features.
        k: Input features.
        columns: C.
        processors: Of the device.
        shared: Bytes of shared memory that a program may use.
    """
    if m >= _MOST_FUSED_BEFORE:
        return {"dequantize": 1}
    tokens = max(_fewest_tokens(form), min(128, triton.next_power_of_2(m)))
    rows, warps, stages = (64, 4, 4) if tokens <= 64 else (128, 8, 3)
    while stages > 2 and _shared_bytes(rows, tokens, columns, stages) > shared:
        stages -= 1
    tiles = -(-n // rows) * -(-m // tokens)
    blocks = -(-k // (2 * columns))
    wanted = (4 if tokens <= 16 else 2) * processors // tiles
    splits = max(1, min(wanted, blocks // 4, 16))
    return {"rows": rows, "tokens": tokens, "warps": warps, "stages": stages, "splits": splits}


def candidates(m: int, n: int, k: int) -> Iterator[dict[str, int]]:
    """Yield settings worth measuring on the card that is here, for slices of 128 columns."""
    if m >= 128:
        yield {"dequantize": 1}
    if card(torch.device("cuda"))[2]:
        yield from hopper_candidates(m, n, k, 128, 1)
    else:
        yield from _candidates(m, n, k)


def _candidates(m: int, n: int, k: int) -> Iterator[dict[str, int]]:
    names = ("rows", "tokens", "warps", "stages", "splits")
    tokens, seen = max(16, min(128, triton.next_power_of_2(m))), set()
    processors, shared, _ = card(torch.device("cuda"))
    shapes = ((64, 4), (128, 4)) if m <= 64 else ((64, 4), (128, 4), (128, 8))
    for (rows, warps), stages, load in product(shapes, (3, 4, 6), (1, 2, 4, 8)):
        tiles = -(-n // rows) * -(-m // tokens)
        key = (
            rows,
            tokens,
            warps,
            stages,
            max(1, min(-(-k // 128), round(processors * load / tiles))),
        )
        if key not in seen and _shared_bytes(rows, tokens, 64, stages) <= shared:
            seen.add(key)
            yield dict(zip(names, key, strict=True))


def settings_for(
    form: str, slices: int, device: torch.device, m: int, n: int, k: int, columns: int
) -> Settings:
    """Return what was measured on this card, else the rule's choice.

    Args:
        form: Of the codes, see `nibble_rounded_layout`.
        slices: Slices of a group, 0 where a row has one scale.
        device: Where the kernel runs.
        m: Tokens.
        n: Output features.
        k: Input features.
        columns: C.
    """
    processors, shared, hopper = card(device)
    settings = find(kernel_name(form, slices > 0), device, m=m, n=n, k=k)
    if settings is not None and (settings.get("dequantize") or fits(settings, columns, shared, 1)):
        return settings
    if hopper and m < MOST_FUSED:
        sums = 2 if slices % 2 else 1 if slices or form != "int" else 0
        return hopper_rule(
            m, n, k, columns=columns, processors=processors, shared=shared, x_bytes=1, sums=sums
        )
    return rule(form, m, n, k, columns, processors, shared)


def functions_for(packed: PackedForBytes, tokens: int) -> tuple[str, ...]:
    """Return the device functions of a product with `tokens` tokens, cuBLAS's own as "cuBLAS".

    Those that round the input are not among them, nor is the one of torch that turns its codes into
    floats for cuBLAS.
    """
    if tokens == 0:
        return ()
    settings = settings_for(
        packed.form,
        0 if packed.scale is None else packed.slices_per_group,
        packed.pairs.device,
        tokens,
        packed.out_features,
        packed.in_features,
        packed.pairs.shape[2],
    )
    if settings.get("dequantize"):
        return ("nibble_rounded_dequantize_kernel", "cuBLAS")
    return ("pairs_gemm_hopper",) if card(packed.pairs.device)[2] else ("nibble_rounded_kernel",)
