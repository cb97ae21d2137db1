"""Put parts of one model into another of the same architecture, and take them out again.

Whole modules are exchanged, so that what goes with a weight (bias, rounding of the input, the
kernel) comes along; a single tensor where its module holds others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from quantload.accuracy.attribution_units import Site
from quantload.accuracy.output_errors import OutputErrors
from quantload.errors import ModelError
from quantload.layers.experts import FusedExperts

Mode = Literal["swap", "noise", "nothing"]


class Exchange:
    """Puts parts of one model into another, and takes them out again.

    Args:
        own: The model that runs.
        other: The model that the parts come from.
        mode: See `Variant`.
        errors: Gets the errors of the outputs of the exchanged modules, by path; None measures
            nothing.
        seed: Of the noise.
    """

    def __init__(
        self,
        own: nn.Module,
        other: nn.Module,
        mode: Mode,
        errors: dict[str, OutputErrors] | None,
        seed: int,
    ) -> None:
        self._own, self._other, self._mode, self._errors = own, other, mode, errors
        self._generator = torch.Generator().manual_seed(seed)
        self._undo: list[Callable[[], object]] = []

    def undo(self) -> None:
        """Put everything back, last first."""
        while self._undo:
            self._undo.pop()()

    def put(self, site: Site) -> None:
        """Exchange a module, or one tensor of it."""
        own = self._own.get_submodule(site.path)
        other = own if self._mode == "nothing" else self._other.get_submodule(site.path)
        if site.leaf:
            self._put_tensor(own, other, site)
        elif self._mode == "noise":
            self._hook(own, self._noisy(other))
        else:
            self._put_module(own, other, site.path)

    def _put_module(self, own: nn.Module, other: nn.Module, path: str) -> None:
        parent_path, _, name = path.rpartition(".")
        parent = self._own.get_submodule(parent_path)
        if isinstance(parent, FusedExperts):
            self._put_rounding(parent, parent_path, name)
        parent._modules[name] = other
        self._undo.append(lambda: parent._modules.__setitem__(name, own))
        if other is not own:
            self._hook(other, self._measured(own, path))

    def _put_rounding(self, parent: FusedExperts, path: str, name: str) -> None:
        """Exchange what rounds the inputs of `down`, which `FusedExperts` keeps beside it."""
        twin = self._other.get_submodule(path) if self._mode == "swap" else parent
        assert isinstance(twin, FusedExperts), "projections are exchanged between such"
        if name == f"{parent.layout.down.leaf}_experts":
            before = parent.round_down
            parent.round_down = twin.round_down
            self._undo.append(lambda: setattr(parent, "round_down", before))

    def _put_tensor(self, own: nn.Module, other: nn.Module, site: Site) -> None:
        for table in (own._parameters, own._buffers):
            if site.leaf in table:
                break
        else:
            raise ModelError(f"`{site}` is no tensor of the model")
        tables: dict[str, Any] = table
        before, value = tables[site.leaf], getattr(other, site.leaf)
        if isinstance(before, nn.Parameter) and not isinstance(value, nn.Parameter):
            value = nn.Parameter(value, requires_grad=False)
        tables[site.leaf] = value
        self._undo.append(lambda: tables.__setitem__(site.leaf, before))

    def _hook(self, module: nn.Module, hook: Callable[..., object]) -> None:
        handle = module.register_forward_hook(hook, with_kwargs=True)
        self._undo.append(handle.remove)

    def _measured(self, own: nn.Module, path: str) -> Callable[..., object]:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: object) -> None:  # noqa: ANN401
            if self._errors is not None and isinstance(output, Tensor):
                errors = self._errors.setdefault(path, OutputErrors())
                errors.add(output, own(*args, **kwargs))

        return hook

    def _noisy(self, other: nn.Module) -> Callable[..., object]:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: object) -> object:  # noqa: ANN401
            if not isinstance(output, Tensor):
                raise ModelError(f"`{type(other).__name__}` returns no tensor: no noise to add")
            error = (other(*args, **kwargs) - output).float()
            noise = torch.randn(error.shape, generator=self._generator).to(error.device)
            factor = error.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
            return output + (noise * factor).to(output.dtype)

        return hook


__all__ = ["Exchange", "Mode"]
