"""RMS norms in fewer passes, recognised by what they compute.

A module with one weight [H] is run on random rows of many sizes, in all dtypes; it is an RMS norm
if its results have the bits of one of these, for an `eps` among its own numbers:

    late weight     w * (x * rsqrt(mean(x^2) + eps)).to(x.dtype)          Llama
    early weight    (w * (x * rsqrt(mean(x^2) + eps))).to(x.dtype)        with 1 + w: Gemma

all in float32 but for what comes after the rounding. What then runs are the same operations, in
place where the tensor is the norm's own; on CUDA a kernel. The module's own forward remains for
everything else: other arguments, gradients, compiled code, dtypes in which it differs.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from quantload.layers.swapped_class import Swapped, swap_class

Dtypes = tuple[torch.dtype, torch.dtype]  # of x and of the weight

_F32, _BF16, _F16 = torch.float32, torch.bfloat16, torch.float16
_PAIRS: tuple[Dtypes, ...] = (
    *((_F32, _F32), (_BF16, _BF16), (_F16, _F16)),
    *((_BF16, _F32), (_F16, _F32), (_F32, _BF16), (_F32, _F16)),
)
_SCALES = (1e-4, 1e-3, 0.03, 1.0, 20.0)  # of rows: eps rules the first, nothing the last
_USUAL_EPS = (1e-6, 1e-5, 1e-8, 0.0)
_LARGEST_EPS = 0.1
_OTHER = "one weight, but not an RMS norm that is known"


@dataclass(frozen=True)
class NormFormula:
    """What a norm computes.

    Args:
        weight: Name of its parameter [H].
        eps: Added to the mean of squares.
        late: The weight is multiplied after rounding to x's dtype.
        offset: 1 + w in place of w.
        dtypes: Those of x and weight for which this was shown.
        kernel: "" without, "exact" for the kernel that takes torch's mean, "rounding" for the one
            that sums itself.
    """

    weight: str
    eps: float
    late: bool
    offset: bool
    dtypes: frozenset[Dtypes] = frozenset()
    kernel: str = ""

    def __str__(self) -> str:
        """Say it for people: `w * round(x * rsqrt(mean(x^2) + 1e-06))`."""
        norm = f"x * rsqrt(mean(x^2) + {self.eps:g})"
        weight = "(1 + w)" if self.offset else "w"
        return f"{weight} * round({norm})" if self.late else f"round({weight} * ({norm}))"

    def run(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the norm of x [..., H], with torch's operations."""
        y = x.float()
        scale = torch.rsqrt(y.pow(2).mean(-1, keepdim=True).add_(self.eps))
        y = y * scale if y is x else y.mul_(scale)
        if self.late:
            y = y.to(x.dtype)
            w = 1.0 + weight.float() if self.offset else weight
            return y.mul_(w) if torch.promote_types(y.dtype, w.dtype) == y.dtype else y * w
        w = weight.float()
        return y.mul_(1.0 + w if self.offset else w).to(x.dtype)

    def run_kernel(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the same from the kernel, on CUDA."""
        from quantload.runtime.kernels.rms_norm import rms_norm

        exact = self.kernel == "exact"
        variance = x.float().pow(2).mean(-1, keepdim=True) if exact else None
        return rms_norm(x, weight, self.eps, late=self.late, offset=self.offset, variance=variance)


class FastNorm(Swapped):
    """The forward of a recognised RMS norm."""

    def forward(self, *args: Tensor, **kwargs: object) -> Tensor:
        """Map x [..., H] to its norm."""
        formula: NormFormula = self.__dict__["fast_norm"]
        weight = self._parameters[formula.weight]
        if len(args) != 1 or kwargs or weight is None or not _serves(formula, args[0], weight):
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return]
        if formula.kernel and args[0].is_cuda:
            return formula.run_kernel(args[0], weight)
        return formula.run(args[0], weight)


def _serves(formula: NormFormula, x: Tensor, weight: Tensor) -> bool:
    if torch.compiler.is_compiling() or (x.dtype, weight.dtype) not in formula.dtypes:
        return False  # the compiler fuses by itself
    return not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))


def swap_norm(module: nn.Module, formula: NormFormula) -> None:
    """Let a norm run by its formula."""
    module.__dict__["fast_norm"] = formula
    swap_class(module, FastNorm)


# -- recognition -----------------------------------------------------------------------------------


def recognise_norm(module: nn.Module) -> NormFormula | str | None:
    """Return the formula of an RMS norm; why it has none; or None for anything that is no norm."""
    named = [(name, p) for name, p in module._parameters.items() if p is not None]
    if module._modules or len(named) != 1 or named[0][1].ndim != 1:
        return None
    name, weight = named[0]
    if isinstance(module, nn.RMSNorm):
        return "torch's own, which has a kernel"
    if module._buffers or not weight.is_floating_point() or not len(weight):
        return _OTHER
    own = (weight.dtype, weight.dtype)
    found = [replace(f, dtypes=_shown(module, f, len(weight))) for f in _formulas(module, name)]
    found = [formula for formula in found if own in formula.dtypes]
    return max(found, key=lambda formula: len(formula.dtypes), default=_OTHER)


def _formulas(module: nn.Module, weight: str) -> list[NormFormula]:
    numbers = [v for v in module.__dict__.values() if isinstance(v, float)]
    eps = dict.fromkeys(v for v in (*numbers, *_USUAL_EPS) if 0 <= v <= _LARGEST_EPS)
    kinds = itertools.product(eps, (True, False), (False, True))
    return [NormFormula(weight, value, late, offset) for value, late, offset in kinds]


def _shown(module: nn.Module, formula: NormFormula, width: int) -> frozenset[Dtypes]:
    """Return the dtypes in which the module has the bits of the formula."""
    seed = torch.Generator().manual_seed(0)
    rows, weight = _rows(width, seed), torch.randn(width, generator=seed)
    shown = []
    for pair in _PAIRS:
        x, w = rows.to(pair[0]), weight.to(pair[1])
        same = _is_same(module, formula, x, w) and _is_same(module, formula, x[None, :, None], w)
        if not same and pair == (_F32, _F32):
            break  # another formula: the narrower dtypes need not be tried
        shown += [pair] if same else []
    return frozenset(shown)


def _rows(width: int, seed: torch.Generator) -> Tensor:
    """Return rows of every scale: even ones, and such that one entry is nearly all of the norm."""
    rows = torch.randn(2 * len(_SCALES), width, generator=seed)
    rows *= torch.tensor(_SCALES).repeat(2)[:, None]
    rows[len(_SCALES) :, width // 2] *= 10 * width**0.5  # a bound on results shows here
    return rows


@lru_cache(maxsize=8)
def _probes(width: int) -> Tensor:
    """Return rows for all norms of a width; not to be changed."""
    return _rows(width, torch.Generator().manual_seed(1))


def _is_same(module: nn.Module, formula: NormFormula, x: Tensor, weight: Tensor) -> bool:
    alone = copy.copy(module)
    alone._parameters = {formula.weight: nn.Parameter(weight, requires_grad=False)}
    try:
        with torch.no_grad():
            expected = type(module).forward(alone, x.clone())
    except Exception:  # noqa: BLE001 - model code raises anything
        return False
    return _equal_bits(formula.run(x, weight), expected)


def _equal_bits(found: Tensor, expected: object) -> bool:
    if not isinstance(expected, Tensor) or expected.dtype != found.dtype:
        return False
    return torch.equal(found, expected)


def kernel_serves(
    module: nn.Module, formula: NormFormula, device: torch.device, *, exact: bool
) -> bool:
    """True if the kernel takes rows of this norm; where it has to be exact, if it shows that here.

    Args:
        module: The norm, on `device`.
        formula: With the kernel that is asked about.
        device: Where it runs.
        exact: Ask for the bits of the module's own forward on this device.
    """
    from quantload.runtime.kernels.rms_norm import why_not

    weight = module._parameters[formula.weight]
    assert weight is not None, "a recognised norm has a weight"
    if why_not(len(weight), device):
        return False
    if not exact:
        return True
    x = _probes(len(weight)).to(device, weight.dtype)
    with torch.no_grad():
        expected = type(module).forward(module, x.clone())
        return _equal_bits(formula.run_kernel(x, weight), expected)


__all__ = ["NormFormula", "kernel_serves", "recognise_norm", "swap_norm"]
