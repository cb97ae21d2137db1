"""Auxiliary hidden states: what some layers of a loaded model are given, returned by its forward.

    model.set_aux_hidden_state_layers((2, n // 2, n - 3))
    model(input_ids).aux_hidden_states        [state 2, state n // 2, state n - 3], [B, T, H] each

State i is the residual stream after i layers: what layer i is given, and for i = n, the number of
layers, what the last one returns, before the final norm. So state 0 is what the embedding gives,
and state i is entry i of transformers' `output_hidden_states` for i < n (of Mamba i - 1: it leaves
the first out). States come in ascending order, each once. Drafting heads of the Eagle-3 kind read
them.

    output object     field and key `aux_hidden_states`, last
    tuple             appended
    `generate`        with `return_dict_in_generate=True` a tuple of lists, one for each forward

Source: vLLM 0.32, `set_aux_hidden_state_layers` and `EagleModelMixin` (numbers of layers, order and
the usual choice (2, n // 2, n - 3)); Eagle-3, https://arxiv.org/abs/2503.01840.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.utils.generic import ModelOutput

from quantload.arguments import plain
from quantload.errors import ConfigError, ModelError
from quantload.layers.meta_model import TransformersModel
from quantload.layers.pipeline import PipelineCut
from quantload.runtime.parallel import Parallel

FIELD = "aux_hidden_states"

_SETTER = "set_aux_hidden_state_layers"
_COMPILED = 0  # stands for the thread in compiled code; never the id of one
_COUNTS = ("num_hidden_layers", "num_decoder_layers", "decoder_layers")


def offer_aux_hidden_states(model: TransformersModel, parallel: Parallel | None = None) -> None:
    """Give a model the method `set_aux_hidden_state_layers`.

    Args:
        model: A loaded model.
        parallel: This process among those that share it; all stages then return all states.
    """
    model.__dict__[_SETTER] = AuxHiddenStates(model, parallel or Parallel())


class AuxHiddenStates:
    """The method `set_aux_hidden_state_layers` of one model.

    Args:
        model: The model, held weakly: a cycle would keep its memory until the garbage collector
            runs.
        parallel: This process among those that share it.
    """

    def __init__(self, model: TransformersModel, parallel: Parallel) -> None:
        self._model, self.parallel = weakref.ref(model), parallel
        self.handles: list[RemovableHandle] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle with the model, so that the copy of a model gets one of its own."""
        return AuxHiddenStates, (self._model(), self.parallel), {"handles": self.handles}

    def __call__(self, layers: Iterable[int]) -> None:
        """Let the forward return the states before these layers, and no others from now on.

        Args:
            layers: Numbers from 0 to n, the number of layers; n is after the last. () returns none.

        Raises:
            ConfigError: A number is not in that range.
            ModelError: The layers of the model cannot be told.
        """
        model = self._model()
        assert model is not None, "called through the model"
        modules = decoder_layers(model)
        wanted = _checked(layers, len(modules), type(model).__name__)
        for handle in self.handles:
            handle.remove()
        self.handles = []
        model.__dict__.pop("generate", None)
        if not wanted:
            return
        recorder = _Recorder(wanted, len(modules), self.parallel)
        for number in wanted:
            if number < len(modules):
                hook = functools.partial(recorder.enter, number)
                handle = modules[number].register_forward_pre_hook(hook, with_kwargs=True)
            else:
                handle = modules[-1].register_forward_hook(recorder.leave)
            self.handles.append(handle)
        self.handles.append(model.register_forward_pre_hook(recorder.begin))
        self.handles.append(model.register_forward_hook(recorder.end, always_call=True))
        if hasattr(model, "generate"):
            model.__dict__["generate"] = _Generate(model, recorder)


def _checked(layers: Iterable[int], count: int, name: str) -> tuple[int, ...]:
    """Return the numbers in ascending order, each once."""
    given: Any = layers  # whatever is passed
    found = [plain(number) for number in (given if isinstance(given, Iterable) else (given,))]
    wrong = [n for n in found if type(n) is not int or not 0 <= n <= count]
    if wrong:
        raise ConfigError(
            f"auxiliary hidden states of layer `{wrong[0]}`, expected numbers from 0 to {count}: "
            f"`{name}` has {count} layers, and {count} stands for what the last one returns"
        )
    return tuple(sorted(set(found)))


def decoder_layers(model: TransformersModel) -> nn.ModuleList:
    """Return the layers that hidden states run through, one after the other.

    Raises:
        ModelError: There is no such list, or more than one.
    """
    config = model.config.get_text_config(decoder=True)
    counts = {int(getattr(config, name)) for name in _COUNTS if getattr(config, name, None)}
    find: Callable[[], object] = model.get_decoder
    decoder = find()
    inside = decoder if isinstance(decoder, nn.Module) else model
    lists = {path: m for path, m in inside.named_modules() if isinstance(m, nn.ModuleList)}
    found = [path for path, modules in lists.items() if len(modules) in counts]
    found = [path for path in found if not any(path.startswith(f"{other}.") for other in lists)]
    if len(found) != 1:
        raise ModelError(
            f"the layers of `{type(model).__name__}` cannot be told: found {len(found)} lists of "
            f"{' or '.join(str(count) for count in sorted(counts)) or 'any'} modules, expected one",
            hint="`output_hidden_states=True` returns the states of all layers where the model's "
            "own code knows them",
        )
    return lists[found[0]]


class _Recorder:
    """Takes the states of running forwards, each thread its own.

    Args:
        layers: Numbers of the states, ascending.
        count: Number of layers.
        parallel: This process among those that share the model.
    """

    def __init__(self, layers: tuple[int, ...], count: int, parallel: Parallel) -> None:
        self.layers, self.count, self.parallel = layers, count, parallel
        self.running: dict[int, dict[int, Tensor]] = {}
        self.steps: dict[int, list[list[Tensor]]] = {}  # of `generate`, where it collects them

    def __getstate__(self) -> dict[str, Any]:
        """Return what is copied and pickled: without the states, which belong to running calls."""
        return {**self.__dict__, "running": {}, "steps": {}}

    def begin(self, *_: object) -> None:
        """Start a forward of the model; a forward pre-hook."""
        self.running[_thread()] = {}

    def enter(
        self, number: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Take what a layer is given; a forward pre-hook."""
        self._take(number, args[0] if args else kwargs.get("hidden_states"))

    def leave(self, _: nn.Module, __: tuple[Any, ...], output: object) -> None:
        """Take what the last layer returns; a forward hook."""
        self._take(self.count, output[0] if isinstance(output, tuple) else output)

    def _take(self, number: int, state: object) -> None:
        states = self.running.get(_thread())
        if states is None:  # a part of the model is run on its own
            return
        if not isinstance(state, Tensor) or state.ndim != 3:
            found = tuple(state.shape) if isinstance(state, Tensor) else type(state).__name__
            raise ModelError(
                f"layer {number} has no hidden states `[B, T, H]`: found `{found}`",
                hint="`set_aux_hidden_state_layers(())` lets the model run without",
            )
        # a copy: layers may write to what they are given
        states[number] = state.clone()

    def end(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:  # noqa: ANN401
        """Hand the states out with the output of the model; a forward hook."""
        states = self.running.pop(_thread(), {})
        if output is None:  # the forward failed
            return None
        missing = [number for number in self.layers if number not in states]
        if missing:
            raise ModelError(
                f"the forward did not come to layer {missing[0]}, whose auxiliary hidden state was "
                "asked for",
                hint="`set_aux_hidden_state_layers(())` lets the model run without",
            )
        found = [self._from_stage(number, states[number]) for number in self.layers]
        if not torch.compiler.is_compiling() and _thread() in self.steps:
            self.steps[_thread()].append(found)
        if isinstance(output, ModelOutput):
            output[FIELD] = found
            return output
        return (*output, found) if isinstance(output, tuple) else (output, found)

    def _from_stage(self, number: int, state: Tensor) -> Tensor:
        """Return the state of the stage whose layers computed it."""
        if self.parallel.pp_size == 1:
            return state
        return self.parallel.broadcast(state, self._stage(number))

    def _stage(self, number: int) -> int:
        cut = PipelineCut(
            layers="", count=self.count, embedding="", after=(), head="", is_declared=True
        )
        return cut.stage_of(min(number, self.count - 1), self.parallel.pp_size)


def _thread() -> int:
    """Return the id of the running thread; compiled code cannot ask, and is traced in one."""
    return _COMPILED if torch.compiler.is_compiling() else threading.get_ident()


class _Generate:
    """Stands in for `generate` of a model: hands the states of all forwards out with its output.

    Args:
        model: The model, held weakly.
        recorder: What takes the states.
    """

    def __init__(self, model: TransformersModel, recorder: _Recorder) -> None:
        self._model, self.recorder = weakref.ref(model), recorder
        self.__name__, self.__doc__ = "generate", _own_generate(model).__doc__

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle with the model."""
        return _Generate, (self._model(), self.recorder)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Generate, as the model does."""
        model = self._model()
        assert model is not None, "called through the model"
        own = _own_generate(model)
        config = kwargs.get("generation_config") or model.generation_config
        is_output = getattr(config, "return_dict_in_generate", False)
        if not kwargs.get("return_dict_in_generate", is_output):
            return own(model, *args, **kwargs)
        steps = self.recorder.steps.setdefault(_thread(), [])
        try:
            output: Any = own(model, *args, **kwargs)
        finally:
            self.recorder.steps.pop(_thread(), None)
        if isinstance(output, ModelOutput):
            output[FIELD] = tuple(steps)
        return output


def _own_generate(model: TransformersModel) -> Callable[..., object]:
    """Return `generate` of the model's class."""
    own: Any = type(model)
    return own.generate  # type: ignore[no-any-return]


__all__ = ["FIELD", "AuxHiddenStates", "decoder_layers", "offer_aux_hidden_states"]
