"""Cut a model into stages that hold some of its layers each, from outside.

    first stage     token embedding, its layers
    other stages    their layers; what they enter with is what the stage before has sent
    last stage      its layers, the final norm, the output head; its logits go to all stages

Every stage runs the model's own forward. In the places of what it does not hold stand modules
without weights: an embedding of zeros, layers that let everything through, a head that waits for
the logits. So masks, positions, rotary tables and scalings of logits stay the model's own code, and
`generate` works: all stages go through the same steps with the same logits.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantload.errors import ModelError
from quantload.layers.meta_model import TransformersModel, output_head, pipeline_plan
from quantload.layers.pipeline_proof import trace
from quantload.runtime.parallel import Parallel

_log = logging.getLogger("quantload")

_ALONE = "use tensor parallelism alone"
_CACHES = ("cache", "past_key_values", "past_key_value")  # what layers call their cache


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
        returns_tuple: True if a layer returns a tuple, whose first part are the hidden states.
    """

    layers: str
    count: int
    embedding: str
    after: tuple[str, ...]
    head: str
    is_declared: bool
    returns_tuple: bool = False

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
    embedding = _path_of(model, model.get_input_embeddings())
    head_module = output_head(model)
    head = "" if head_module is None else _path_of(model, head_module)
    numbers = [f"{layers}.{n}" for n in range(count)]
    try:
        seen = trace(model, embedding=embedding, layers=numbers)
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
    return PipelineCut(
        layers=layers,
        count=count,
        embedding=embedding,
        after=tuple(after),
        head=head,
        is_declared=is_declared,
        returns_tuple=all(isinstance(output, tuple) for output in outputs),
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


def _path_of(model: nn.Module, module: nn.Module) -> str:
    return next((path for path, other in model.named_modules() if other is module), "")


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
            layers[number] = Passed(layers[number], index=number, returns_tuple=cut.returns_tuple)
    link = _Link(parallel)
    if not parallel.is_first_stage:
        layers[held[0]].register_forward_pre_hook(link.receive, with_kwargs=True)
        if not (parallel.is_last_stage and tied_head):
            elsewhere.append(cut.embedding)
            _put(model, cut.embedding, NoEmbedding(model.get_submodule(cut.embedding)))
    if not parallel.is_last_stage:
        layers[held[-1]].register_forward_hook(link.send)
    last = cut.head or (cut.after[-1] if cut.after else f"{cut.layers}.{cut.count - 1}")
    if parallel.is_last_stage:
        model.get_submodule(last).register_forward_hook(link.share_logits)
        return tuple(elsewhere)
    for path in cut.after:
        if path != last:
            elsewhere.append(path)
            passed = Passed(model.get_submodule(path), index=None, returns_tuple=False)
            _put(model, path, passed)
    elsewhere.append(last)
    _put(model, last, Awaited(link, width=_width(model.get_submodule(last))))
    return tuple(elsewhere)


def _width(module: nn.Module) -> int | None:
    """Return the features of the result of a module, None for as many as it takes."""
    return module.out_features if isinstance(module, nn.Linear) else None


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


class _Link:
    """What a stage exchanges with the others; one for each loaded model.

    Args:
        parallel: Which stage this is.
    """

    def __init__(self, parallel: Parallel) -> None:
        self.parallel = parallel

    def receive(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Let the first layer of the stage enter with what was sent; a forward pre-hook."""
        key = "hidden_states"
        placeholder: Tensor = args[0] if args else kwargs[key]
        x = self.parallel.receive(
            placeholder.shape, dtype=placeholder.dtype, device=placeholder.device
        )
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, key: x})

    def send(self, _: nn.Module, __: tuple[Any, ...], output: object) -> None:
        """Send what the last layer of the stage returns; a forward hook."""
        x = output[0] if isinstance(output, tuple) else output
        assert isinstance(x, Tensor), "a layer returns hidden states"
        self.parallel.send(x)

    def share_logits(self, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        """Give the result of the last stage to all stages; a forward hook."""
        return self.parallel.broadcast(output, -1)


class Passed(nn.Module):
    """Stands for a layer of another stage: lets hidden states through.

    A cache counts its tokens by its first layer, and masks are made for it: so an entry without
    content is made for each layer.

    Args:
        layer: The layer; only what model code asks it before it calls it is kept.
        index: Its number among the layers; None if it has no place in a cache.
        returns_tuple: True if it returns a tuple.
    """

    def __init__(self, layer: nn.Module, *, index: int | None, returns_tuple: bool) -> None:
        super().__init__()
        self.index, self.returns_tuple = index, returns_tuple
        for name, value in vars(layer).items():
            if isinstance(value, str | int | bool) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *_: object, **kwargs: Any) -> Any:  # noqa: ANN401
        """Return the hidden states as they are."""
        cache = next((kwargs[name] for name in _CACHES if kwargs.get(name) is not None), None)
        if cache is not None and self.index is not None:
            _fill(cache, self.index, hidden_states)
        return (hidden_states,) if self.returns_tuple else hidden_states


def _fill(cache: Any, index: int, x: Tensor) -> None:  # noqa: ANN401 - of transformers
    """Make an entry without content for the tokens of x [B, T, H] in a layer of a cache."""
    batch, tokens = x.shape[:2]
    layer = cache.layers[index] if index < len(cache.layers) else None
    if layer is None or hasattr(layer, "get_seq_length"):  # not what has no cache at all
        empty = x.new_zeros(batch, 1, tokens, 1)
        cache.update(empty, empty, index)
    for state in getattr(layer, "has_previous_state", ()):
        cache.update_conv_state(x.new_zeros(batch, 1, tokens), index, state)


class NoEmbedding(nn.Module):
    """Stands for the embedding of the first stage: zeros of its shape, which nobody reads.

    Args:
        embedding: The embedding.
    """

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        weight = embedding.weight
        assert isinstance(weight, Tensor), "an embedding has a weight"
        self.embedding_dim, self.dtype = weight.shape[-1], weight.dtype

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map [B, T] to zeros [B, T, H]."""
        return torch.zeros(
            *input_ids.shape, self.embedding_dim, dtype=self.dtype, device=input_ids.device
        )


class Awaited(nn.Module):
    """Stands for the head of the last stage: returns what that computes.

    Args:
        link: Of this stage.
        width: Features of the result; None for those of the input.
    """

    def __init__(self, link: _Link, *, width: int | None) -> None:
        super().__init__()
        self.__dict__["link"] = link
        self.width = width

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        """Map [..., H] to the last stage's result for it."""
        shape = (*hidden_states.shape[:-1], self.width or hidden_states.shape[-1])
        link: _Link = self.__dict__["link"]
        return link.parallel.broadcast(hidden_states.new_empty(shape), -1)


__all__ = ["PipelineCut", "cut_into_stages", "find_cut"]
