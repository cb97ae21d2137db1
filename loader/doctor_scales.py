"""Rule of `doctor` that reads: scales have to be finite, and those that divide positive."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quantload.loader.checkpoint import files_kept_open
from quantload.loader.doctor_subject import Finding, Subject
from quantload.loader.source import SourceWeight

# Scales that an engine divides by, or of which it makes the scale of everything else.
_POSITIVE = {"weight_global_scale", "weight_scale_2", "input_global_scale", "input_scale"}
_FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2}


@files_kept_open()
def scales_are_sound(subject: Subject) -> Iterator[Finding]:
    """Every scale has to be finite; scales of a tensor and fp8 scales have to be positive."""
    found: list[Finding] = []
    for weight in subject.source.weights.values():
        if weight.is_quantized:
            for leaf, name in weight.leaves.items():
                if "scale" in leaf:
                    found += _about_scale(subject, weight, leaf, name)
    return iter(found)


def _about_scale(subject: Subject, weight: SourceWeight, leaf: str, name: str) -> Iterator[Finding]:
    if not holds_numbers(subject.source.checkpoint.tensors[name].dtype):
        return
    problem = scale_problem(weight, leaf, subject.source.checkpoint.read(name))
    if problem:
        yield Finding(
            rule="scale",
            level="error",
            layer=weight.module,
            found=f"`{leaf}` with {problem}",
            expected="finite scales" + (", above zero" if "finite" not in problem else ""),
            hint="the export is damaged: quantize it again",
            source=subject.source_of("scale"),
        )


def holds_numbers(dtype: torch.dtype) -> bool:
    """True if a scale of this dtype is a number by itself, or an exponent."""
    return dtype.is_floating_point or dtype == torch.uint8


def scale_problem(weight: SourceWeight, leaf: str, value: Tensor) -> str:
    """Say what is wrong with a scale: values that are not finite, zero or negative; "" if nothing.

    Args:
        weight: What it belongs to.
        leaf: Name of the scale in its module.
        value: [...] of a dtype that `holds_numbers`.
    """
    if value.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return _problem_of_bytes(weight, value)
    return _problem_of(weight, leaf, value)


def _problem_of_bytes(weight: SourceWeight, value: Tensor) -> str:
    """Bytes of MX formats are exponents, and 255 is NaN."""
    is_mx = weight.scheme is not None and weight.scheme.weight is not None
    if not is_mx or weight.scheme.weight.scale != "e8m0":  # type: ignore[union-attr]
        return ""
    bad = int((value.view(torch.uint8) == 255).sum())
    return f"{bad} of {value.numel()} values not finite (NaN)" if bad else ""


def _problem_of(weight: SourceWeight, leaf: str, value: Tensor) -> str:
    wide = value.to(torch.float32)
    bad = int((~torch.isfinite(wide)).sum())
    if bad:
        return f"{bad} of {value.numel()} values not finite"
    if leaf in _POSITIVE and bool((wide <= 0).any()):
        return f"{int((wide <= 0).sum())} of {value.numel()} values zero or negative"
    grid = weight.scheme.weight.grid if weight.scheme and weight.scheme.weight else None
    is_float = grid is not None and not grid.is_integer  # signed scales of integers are used
    if is_float and bool((wide < 0).any()):
        return f"{int((wide < 0).sum())} of {value.numel()} values negative"
    return ""


RULES = (scales_are_sound,)
__all__ = ["RULES", "holds_numbers", "scale_problem"]
