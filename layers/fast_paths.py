"""Fast paths of a loaded model: gated linear units and RMS norms in fewer passes over memory.

What a module computes is read from what it does to random tensors, never from its name; see
`fast_glu.py` and `fast_norm.py`. What was not recognised runs as before. By default only such paths
are taken as give the bits of the module's own forward on this device and dtype:

    where                    path                                             by default
    CPU                      the same operations, in place; one product of    yes
                             gate and up, handed on as it is
    CUDA                     kernel for act(gate) * up: every input of the    if all agree
                             activation is tried on the device
    CUDA                     kernel for the norm, after torch's own mean      if probes agree
    CUDA                     kernel for the norm and its mean: sums in        no: last bits differ
                             another order
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

import torch
from torch import nn

from quantload.arguments import check_type
from quantload.layers.fast_glu import GluFormula, recognise_glu, swap_glu
from quantload.layers.fast_norm import NormFormula, kernel_serves, recognise_norm, swap_norm
from quantload.layers.swapped_class import Swapped

_log = logging.getLogger("quantload")

_OWN, _IN_PLACE = "its own forward", "the same operations, in place"
_REPORTS = "fast_path_reports"
_KEPT = frozenset({*nn.Module().__dict__, "layer_idx", "prefix"})  # what each module has of its own

Found = TypeVar("Found", GluFormula, NormFormula)


@dataclass(frozen=True)
class FastPathReport:
    """A module that was looked at.

    Args:
        module: Dotted path in the model.
        kind: "glu" or "rms norm".
        formula: What it computes, "" if that was not recognised.
        runs: How it runs now; "its own forward" if nothing was changed.
        reason: Why nothing was changed, "" if something was.
    """

    module: str
    kind: str
    formula: str
    runs: str
    reason: str = ""


def use_fast_paths(
    model: nn.Module, *, dtype: torch.dtype, exact: bool = True
) -> tuple[FastPathReport, ...]:
    """Let modules of a loaded model run by fast paths, where they were shown to compute the same.

    Args:
        model: A model whose weights are loaded.
        dtype: dtype of its activations.
        exact: Only paths that give the bits of the module's own forward; False takes those too
            that differ by the rounding of sums and of activations.

    Returns:
        A report for each module that was looked at; `explain_fast_paths` returns the same later.
    """
    known: dict[object, GluFormula | NormFormula | str | None] = {}
    reports = []
    for path, module in model.named_modules():
        if isinstance(module, Swapped) or _device(module).type == "meta":
            continue
        glu = _once(known, "glu", module, recognise_glu)
        norm = _once(known, "rms norm", module, recognise_norm) if glu is None else None
        if isinstance(glu, GluFormula):
            reports.append(_take_glu(path, module, glu, dtype, exact=exact))
        elif isinstance(norm, NormFormula):
            reports.append(_take_norm(path, module, norm, exact=exact))
        elif glu or norm:
            kind = "glu" if glu else "rms norm"
            reports.append(FastPathReport(path, kind, "", _OWN, str(glu or norm)))
    model.__dict__[_REPORTS] = tuple(reports)
    return tuple(reports)


def explain_fast_paths(model: nn.Module) -> tuple[FastPathReport, ...]:
    """Return which modules of a loaded model run by fast paths, and which do not and why."""
    check_type("model", model, nn.Module, expected="a loaded model")
    reports: tuple[FastPathReport, ...] = model.__dict__.get(_REPORTS, ())
    return reports


def _once(
    known: dict[object, GluFormula | NormFormula | str | None],
    kind: str,
    module: nn.Module,
    recognise: Callable[[nn.Module], Found | str | None],
) -> GluFormula | NormFormula | str | None:
    """Recognise one module of each kind of its class: the layers of a model are alike."""
    key = (kind, type(module), _settings(module))
    if key not in known:
        known[key] = recognise(module)
    return known[key]


def _settings(module: nn.Module) -> tuple[object, ...]:
    """Return what a module of a class may compute differently by, as a key."""
    plain = (str, int, float, bool, tuple, torch.dtype, type(None))
    own = ((k, v if isinstance(v, plain) else id(v)) for k, v in module.__dict__.items())
    values = [(k, v) for k, v in own if k not in _KEPT and not k.startswith(("_forward", "_back"))]
    weights = [(k, p.shape, p.dtype) for k, p in module._parameters.items() if p is not None]
    children = [(k, type(c), _sizes(c)) for k, c in module._modules.items()]
    return (*sorted(values, key=lambda v: v[0]), *weights, *children)


def _sizes(child: nn.Module | None) -> tuple[object, ...]:
    return (getattr(child, "in_features", None), getattr(child, "out_features", None))


def _device(module: nn.Module) -> torch.device:
    first = next(chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def _take_glu(
    path: str, module: nn.Module, formula: GluFormula, dtype: torch.dtype, *, exact: bool
) -> FastPathReport:
    device, runs = _device(module), _IN_PLACE
    if device.type == "cuda":
        if not formula.known or not _glu_kernel_serves(formula, dtype, device, exact):
            return FastPathReport(path, "glu", str(formula), _OWN, _no_kernel(exact))
        formula, runs = replace(formula, kernel=frozenset({dtype})), "kernel"
    swap_glu(module, formula)
    return FastPathReport(path, "glu", str(formula), runs)


def _glu_kernel_serves(
    formula: GluFormula, dtype: torch.dtype, device: torch.device, exact: bool
) -> bool:
    try:
        from quantload.runtime.kernels.glu import glu, is_exact

        if exact:
            return is_exact(formula.known, dtype, device)
        few = torch.ones(1, 8, dtype=dtype, device=device)
        return bool(glu(few, few, formula.known).isfinite().all())
    except Exception as error:  # noqa: BLE001 - Triton raises anything
        return _without_kernel("gated linear units", error)


def _norm_kernel_serves(
    module: nn.Module, formula: NormFormula, device: torch.device, exact: bool
) -> bool:
    try:
        return kernel_serves(module, formula, device, exact=exact)
    except Exception as error:  # noqa: BLE001 - Triton raises anything
        return _without_kernel("RMS norms", error)


def _without_kernel(what: str, error: Exception) -> bool:
    """Say that a kernel cannot be used here; what it is for then runs by torch's operations."""
    _log.warning("no kernel for %s here: %s: %s", what, type(error).__name__, error)
    return False


def _take_norm(
    path: str, module: nn.Module, formula: NormFormula, *, exact: bool
) -> FastPathReport:
    device, runs = _device(module), _IN_PLACE
    if device.type == "cuda":
        formula = replace(formula, kernel="exact" if exact else "rounding")
        if not _norm_kernel_serves(module, formula, device, exact):
            return FastPathReport(path, "rms norm", str(formula), _OWN, _no_kernel(exact))
        runs = "kernel after torch's mean" if exact else "kernel"
    swap_norm(module, formula)
    return FastPathReport(path, "rms norm", str(formula), runs)


def _no_kernel(exact: bool) -> str:
    return "no kernel has its bits on this device" if exact else "no kernel serves it"


__all__ = ["FastPathReport", "explain_fast_paths", "use_fast_paths"]
