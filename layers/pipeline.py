"""Cut a model into stages that hold some of its layers each, from outside.

    first stage     token embedding, its layers
    other stages    their layers; what they enter with is what the stage before has sent
    last stage      its layers, the final norm, the output head; its logits go to all stages

Where results are not computed by a head alone (hidden states, a pooler), or where what comes after
the layers changes their shape, all stages get what the last layer returns, and run what follows.

Every stage runs the model's own forward. In the places of what it does not hold stand modules
without weights: an embedding of zeros, layers that let everything through, a head that waits for
the logits. So masks, positions, rotary tables and scalings of logits stay the model's own code, and
`generate` works: all stages go through the same steps with the same logits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantload.errors import ModelError
from quantload.layers.meta_model import TransformersModel, output_head, pipeline_plan
from quantload.layers.pipeline_proof import trace
from quantload.layers.pipeline_stand_ins import Awaited, NoEmbedding, Passed
from quantload.layers.replacement import path_of, put
from quantload.runtime.parallel import Parallel

_log = logging.getLogger("quantload")

_ALONE = "use tensor parallelism alone"
_STATES = "hidden_states"
_OUTPUTS = ("output_hidden_states", "output_attentions")


@dataclass(frozen=True)
class PipelineCut:
    """What a model has to be cut into stages.

    Args:
        layers: Path of the list of layers.
        count: How many these are.
        embedding: Path of the token embedding.
        after: Paths of what follows the layers, in the order of the forward: norms, the head.
        head: Path of the output head; "" if the model has none.
        is_declared: True if the model's own plan names these modules.
        returned: For each layer, how many parts the tuple has that it returns, of which the hidden
            states are the first; 0 if it returns these alone.
        dtypes: Of the hidden states that each layer is given, then of those that the last one
            returns; None for that of the model.
        shares_states: True if all stages get what the last layer returns.
    """

    layers: str
    count: int
    embedding: str
    after: tuple[str, ...]
    head: str
    is_declared: bool
    returned: tuple[int, ...] = ()
    dtypes: tuple[torch.dtype | None, ...] = ()
    shares_states: bool = False

    def stage_of(self, layer: int, stages: int) -> int:
        """Return the stage that holds a layer: as many for each, the first ones one more."""
        each, more = divmod(self.count, stages)
        wide = more * (each + 1)
        return layer // (each + 1) if layer < wide else more + (layer - wide) // each

    def held_by(self, stage: int, stages: int) -> range:
        """Return the numbers of the layers that a stage holds."""
        held = [n for n in range(self.count) if self.stage_of(n, stages) == stage]
        return range(held[0], held[-1] + 1)


def find_cut(model: TransformersModel, stages: int) -> PipelineCut:
    """Say where a model on the meta device can be cut into stages.

    Raises:
        ModelError: It has no list of layers that run one after the other, or too few.
    """
    layers, is_declared = _layers_of(model)
    count = len(_list(model, layers))
    if count < stages:
        raise ModelError(
            f"`{type(model).__name__}` has {count} layers, expected at least one for each of "
            f"{stages} stages",
            hint=f"take at most {count} stages",
        )
    embedding = path_of(model, model.get_input_embeddings())
    head_module = output_head(model)
    head = "" if head_module is None else path_of(model, head_module)
    numbers = [f"{layers}.{n}" for n in range(count)]
    try:
        seen = trace(model, embedding=embedding, layers=numbers, head=head)
    except Exception as error:
        raise ModelError(
            f"`{type(model).__name__}` cannot be cut into stages: it does not run on the meta "
            f"device ({type(error).__name__}: {error})",
            hint=_ALONE,
        ) from error
    order, leaks = seen.order, seen.leaks
    if [path for path in order if path in numbers] != numbers:
        leaks = ["its layers do not run one after the other", *leaks]
    if getattr(model.config.get_text_config(), "num_kv_shared_layers", 0):
        leaks = ["layers share keys and values with others", *leaks]
    if model.config.is_encoder_decoder:
        leaks = ["it has an encoder and a decoder", *leaks]
    if not all(isinstance(order.get(path), tuple | Tensor) for path in numbers):
        leaks = ["its layers return neither hidden states nor a tuple", *leaks]
    if len({x.shape for x in seen.states}) > 1:
        leaks = ["its layers return hidden states of unlike shapes", *leaks]
    if leaks:
        raise ModelError(
            f"`{type(model).__name__}` cannot be cut into stages: {leaks[0]}", hint=_ALONE
        )
    places = {path: place for place, path in enumerate(order)}
    last = places[numbers[-1]]
    after = [
        path
        for path, place in places.items()
        if place > last and _owns_parameters(model, path) and not path.startswith(f"{layers}.")
    ]
    if not is_declared and stages > 1:
        _log.warning(
            "`%s` has no plan for pipelines: its %d layers in `%s` are cut into %d stages",
            type(model).__name__,
            count,
            layers,
            stages,
        )
    outputs = [order[path] for path in numbers]
    tokens = seen.states[-1].shape[:-1]
    return PipelineCut(
        layers=layers,
        count=count,
        embedding=embedding,
        after=tuple(path for path in after if path == head or not _holds(path, layers, head)),
        head=head,
        is_declared=is_declared,
        returned=tuple(len(x) if isinstance(x, tuple) else 0 for x in outputs),
        dtypes=tuple(
            torch.float32 if x.dtype == torch.float32 else None
            for x in (*seen.given, seen.states[-1])
        ),
        shares_states=seen.reads_states
        or seen.head_input is None
        or seen.head_input.shape[:-1] != tokens,
    )


def _layers_of(model: TransformersModel) -> tuple[str, bool]:
    """Return the path of the list of decoder layers, and whether the model's own plan names it."""
    lists = {path: m for path, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    for path in pipeline_plan(model):
        if path in lists:
            return path, True
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    found = [path for path, modules in lists.items() if len(modules) == count]
    found = [path for path in found if not any(path.startswith(f"{other}.") for other in lists)]
    if len(found) == 1:
        return found[0], False
    raise ModelError(
        f"`{type(model).__name__}` cannot be cut into stages: found {len(found)} lists of "
        f"{count} layers, expected one",
        hint=_ALONE,
    )


def _list(model: nn.Module, path: str) -> nn.ModuleList:
    modules = model.get_submodule(path)
    assert isinstance(modules, nn.ModuleList), f"{path} is a list of layers"
    return modules


def _holds(path: str, *others: str) -> bool:
    return any(not path or f"{other}.".startswith(f"{path}.") for other in others)


def _owns_parameters(model: nn.Module, path: str) -> bool:
    return any(True for _ in model.get_submodule(path).parameters(recurse=False))


def cut_into_stages(
    model: TransformersModel, cut: PipelineCut, parallel: Parallel, *, tied_head: bool
) -> tuple[str, ...]:
    """Leave in a model on the meta device what one stage holds.

    Args:
        model: The whole model; changed in place.
        cut: From `find_cut`.
        parallel: Which stage.
        tied_head: True if the head shares the weight of the embedding, which the last stage then
            holds as well.

    Returns:
        Paths of what other stages hold.
    """
    elsewhere: list[str] = []
    held = cut.held_by(parallel.pp_rank, parallel.pp_size)
    layers = _list(model, cut.layers)
    for number in range(cut.count):
        if number not in held:
            elsewhere.append(f"{cut.layers}.{number}")
            layers[number] = Passed(layers[number], index=number, returned=cut.returned[number])
    link = _Link(parallel, cut)
    _refuse_states_of_layers(model)
    if not parallel.is_first_stage:
        layers[held[0]].register_forward_pre_hook(link.receive, with_kwargs=True)
        if not (parallel.is_last_stage and tied_head):
            elsewhere.append(cut.embedding)
            put(model, cut.embedding, NoEmbedding(model.get_submodule(cut.embedding)))
    if not parallel.is_last_stage:  # after what the model does between two layers
        layers[held[-1] + 1].register_forward_pre_hook(link.send, with_kwargs=True)
    if cut.shares_states:
        layers[-1].register_forward_hook(link.share_states)
    return (*elsewhere, *_cut_after(model, cut, link))


def _cut_after(model: TransformersModel, cut: PipelineCut, link: _Link) -> list[str]:
    """Leave of what follows the layers what a stage holds; returns what it does not."""
    elsewhere: list[str] = []
    last = cut.head or ("" if cut.shares_states else cut.after[-1])
    if link.parallel.is_last_stage:
        if last:
            model.get_submodule(last).register_forward_hook(link.share_logits)
        return elsewhere
    for path in cut.after if not cut.shares_states else ():
        if path != last:
            elsewhere.append(path)
            put(model, path, Passed(model.get_submodule(path), index=None))
    if last:
        elsewhere.append(last)
        put(model, last, Awaited(link.parallel, model.get_submodule(last)))
    return elsewhere


def _refuse_states_of_layers(model: TransformersModel) -> None:
    """Let a model refuse to return what its layers computed: no stage has that of all layers."""

    def check(module: nn.Module, _: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name in _OUTPUTS:
            asked = kwargs.get(name)
            if getattr(module.config, name, False) if asked is None else asked:
                raise ModelError(
                    f"`{name}` is asked of a model that is cut into stages, expected none: no "
                    "stage has those of all layers",
                    hint="`model.set_aux_hidden_state_layers(...)` returns the hidden states of "
                    "chosen layers",
                )

    decoder: Callable[[], object] = model.get_decoder
    parts = {id(part): part for part in (model, model.base_model, decoder())}
    for part in parts.values():
        if isinstance(part, TransformersModel):
            part.register_forward_pre_hook(check, with_kwargs=True)


class _Link:
    """What a stage exchanges with the others; one for each loaded model.

    Args:
        parallel: Which stage this is.
        cut: How the model is cut.
    """

    def __init__(self, parallel: Parallel, cut: PipelineCut) -> None:
        self.parallel = parallel
        held = cut.held_by(parallel.pp_rank, parallel.pp_size)
        self.entered, self.left = cut.dtypes[held[0]], cut.dtypes[held[-1] + 1]
        self.returned = cut.dtypes[-1]

    def receive(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Let the first layer of the stage enter with what was sent; a forward pre-hook."""
        placeholder: Tensor = args[0] if args else kwargs[_STATES]
        x = self.parallel.receive(
            placeholder.shape, dtype=self.entered or placeholder.dtype, device=placeholder.device
        )
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, _STATES: x})

    def send(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Send what the first layer of the next stage is given; a forward pre-hook."""
        x: Tensor = args[0] if args else kwargs[_STATES]
        self.parallel.send(x.to(self.left or x.dtype))

    def share_states(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:  # noqa: ANN401
        """Give what the last layer returns to all stages; a forward hook."""
        x: Tensor = output[0] if isinstance(output, tuple) else output
        x = self.parallel.broadcast(x.to(self.returned or x.dtype).contiguous(), -1)
        return (x, *output[1:]) if isinstance(output, tuple) else x

    def share_logits(self, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        """Give the result of the last stage to all stages; a forward hook."""
        return self.parallel.broadcast(output, -1)


__all__ = ["PipelineCut", "cut_into_stages", "find_cut"]
