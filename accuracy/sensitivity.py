"""How much each layer's quantization costs the model: one backward pass, no search.

    score = sum over tokens t and output features n of (g[t, n] * dY[t, n])^2

g is the gradient of the loss (cross-entropy of the next token) with respect to the layer's output,
dY = x' W'^T - x W^T what quantizing its weight (and rounding its input) changes. It is the
diagonal of the Fisher information's estimate of the loss, as ModelOpt's auto_quantize scores
layers; errors count by what the rest of the model makes of them, not by their size.

On SmolLM2-135M between int4 and int8 it costs 20 s where exchanging one group after the other
takes minutes, and gives better choices than weight errors or a rule by kind of layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quantload.accuracy.streaming import StreamedModel
from quantload.errors import ConfigError, listed
from quantload.layers.experts import FusedExperts
from quantload.loader.source import Source
from quantload.progress import Progress
from quantload.quant.activation import fake_quantize
from quantload.quant.qtensor import QuantTensor
from quantload.quant.scheme import InputScheme

Scores = dict[str, dict[str, float]]  # by module and scheme


def gradient_scores(
    model: StreamedModel,
    views: Mapping[str, Source],
    modules: Sequence[str],
    sequences: Sequence[Sequence[int]],
    progress: Progress,
) -> Scores:
    """Score what each scheme costs in each module; the model is in memory as a whole.

    Args:
        model: The reference, not run yet.
        views: The checkpoint with weights quantized when they are read, by name of the scheme.
        modules: Checkpoint names of the weights that are scored.
        sequences: Token ids of two and more tokens.
        progress: Advances by sequences.

    Raises:
        ConfigError: A module is no linear layer of the model, or the model gives no logits.
    """
    model = replace(model, cut=None, why_whole="gradients need all of it")
    (block,) = model.blocks(with_logits=True)
    layers = _layers_of(model, block.modules, modules)
    scores: Scores = {module: dict.fromkeys(views, 0.0) for module in modules}
    usable = [ids for ids in sequences if len(ids) > 1]
    if not usable:
        raise ConfigError("no sequence has two tokens", hint="give a longer text")
    progress.start("scores", total=len(usable), unit="sequences")
    with torch.enable_grad(), _scoring(layers, views, scores), _with_gradients(model):
        for ids in usable:
            tokens = torch.tensor([list(ids)], device=model.device)
            logits = model.model(input_ids=tokens, use_cache=False).logits[0]
            loss = nn.functional.cross_entropy(logits[:-1].float(), tokens[0, 1:], reduction="sum")
            loss.backward()  # type: ignore[no-untyped-call]
            progress.advance(1)
    progress.finish()
    return scores


def _layers_of(
    model: StreamedModel, inside: Mapping[str, nn.Module], modules: Sequence[str]
) -> dict[str, nn.Module]:
    """Return the layer of each module; each is the only one in it."""
    found: dict[str, nn.Module] = {}
    for module in modules:
        targets = list(model.mapper.targets(model.source.weights[module].parameter_name))
        layer = inside.get(targets[0].module) if len(targets) == 1 else None
        if layer is None or isinstance(layer, FusedExperts) or not hasattr(layer, "in_features"):
            raise ConfigError(
                f"`{module}` is no linear layer of its own in `{type(model.model).__name__}`: its "
                "cost cannot be told from gradients",
                hint="experts and rows of fused weights are not built; leave them to rules",
            )
        found[module] = layer
    shared = [module for module, layer in found.items() if list(found.values()).count(layer) > 1]
    if shared:
        raise ConfigError(f"{listed(shared)} are one layer of the model")
    return found


@contextmanager
def _with_gradients(model: StreamedModel) -> Iterator[None]:
    """Let gradients flow from the embedding on, for no parameter."""

    def start(_: nn.Module, __: object, output: Tensor) -> Tensor:
        return output.detach().requires_grad_()

    handle = model.model.get_input_embeddings().register_forward_hook(start)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _scoring(
    layers: Mapping[str, nn.Module], views: Mapping[str, Source], scores: Scores
) -> Iterator[None]:
    inputs: dict[str, Tensor] = {}
    handles: list[Any] = []

    def keep(module: str):  # type: ignore[no-untyped-def]  # noqa: ANN202 - a torch hook
        def hook(_: nn.Module, args: tuple[Tensor, ...], __: Tensor) -> None:
            inputs[module] = args[0].detach()

        return hook

    def score(module: str):  # type: ignore[no-untyped-def]  # noqa: ANN202 - a torch hook
        def hook(layer: nn.Module, _: object, gradients: tuple[Tensor, ...]) -> None:
            x = inputs.pop(module)
            weight = layer.weight
            assert isinstance(weight, Tensor), "a linear layer has a weight"
            for name, view in views.items():
                change = _change(view, module, x, weight.detach())
                scores[module][name] += float((gradients[0] * change).double().square().sum())

        return hook

    for module, layer in layers.items():
        handles.append(layer.register_forward_hook(keep(module)))
        handles.append(layer.register_full_backward_hook(score(module)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _change(view: Source, module: str, x: Tensor, weight: Tensor) -> Tensor:
    """Return x' W'^T - x W^T of a module under a scheme."""
    held = view.read_weight(module)
    values = held.dequantize(x.dtype) if isinstance(held, QuantTensor) else held.to(x.dtype)
    values = values.to(x.device)
    scheme = view.weights[module].scheme
    rounded = x if scheme is None else _rounded(x, scheme.input)
    return rounded @ values.t() - x @ weight.to(x.dtype).t()


def _rounded(x: Tensor, input: InputScheme | None) -> Tensor:
    """Round an input as its scheme does, where that needs nothing but the input."""
    is_plain = input is not None and input.dynamic and input.grid.table is None
    return fake_quantize(x, input) if is_plain and input is not None else x


__all__ = ["Scores", "gradient_scores"]
