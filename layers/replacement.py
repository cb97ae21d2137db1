"""Where a module is in a model, and how another takes its place."""

from __future__ import annotations

from torch import nn


def path_of(model: nn.Module, module: nn.Module | None) -> str:
    """Return the dotted path of a module; "" if the model does not have it."""
    return next((path for path, other in model.named_modules() if other is module), "")


def put(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module at a path, in eval mode; hooks of the one before it go on with it."""
    parent_path, _, name = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    before = getattr(parent, name)
    module._forward_hooks.update(before._forward_hooks)
    module._forward_pre_hooks.update(before._forward_pre_hooks)
    module._forward_pre_hooks_with_kwargs.update(before._forward_pre_hooks_with_kwargs)
    module._forward_hooks_with_kwargs.update(before._forward_hooks_with_kwargs)
    module._forward_hooks_always_called.update(before._forward_hooks_always_called)
    setattr(parent, name, module.eval())


__all__ = ["path_of", "put"]
