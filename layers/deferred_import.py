"""A module of which only one function is named: it is imported when something of it is used.

transformers' model code imports `scipy.optimize` for the losses of detection models: 35 MiB and
half a second, for nothing where a model is built and probed.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class DeferredModule(ModuleType):
    """Stands in `sys.modules` for a module until an attribute of it is asked for.

    Args:
        spec: Where the module is found.
        functions: Functions that others import from it by name; each is the real one when called.
    """

    def __init__(self, spec: ModuleSpec, functions: tuple[str, ...]) -> None:
        super().__init__(spec.name)
        self.__spec__ = spec
        self.__file__ = spec.origin
        if spec.submodule_search_locations is not None:
            self.__path__ = list(spec.submodule_search_locations)
        for function in functions:
            setattr(self, function, self._deferred(function))

    def __getattr__(self, attribute: str) -> Any:  # noqa: ANN401 - whatever the module has
        if attribute.startswith("__") and attribute != "__all__":  # asked of every module
            raise AttributeError(f"module `{self.__name__}` has no attribute `{attribute}`")
        return getattr(self._imported(), attribute)

    def _deferred(self, function: str) -> Any:  # noqa: ANN401 - whatever the module has
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - those of the function
            return getattr(self._imported(), function)(*args, **kwargs)

        return call

    def _imported(self) -> ModuleType:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return importlib.import_module(self.__name__)


def defer_import(name: str, *functions: str) -> None:
    """Import a module only when it is used, unless it is imported already or not installed.

    Args:
        name: Name of the module, dotted.
        functions: Those that others import from it by name.
    """
    parent = name.partition(".")[0]
    if name in sys.modules or find_spec(parent) is None:
        return
    spec = find_spec(name)
    if spec is not None:
        sys.modules[name] = DeferredModule(spec, functions)
