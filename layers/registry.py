"""Models that are written by hand: which class serves an architecture, how one is built and named.

    class(config, *, parallel, prefix="")     floats are created in the dtype of the model
    embed_input_ids(input_ids)                tokens [T] to rows [T, K]
    forward(input_ids, positions)             tokens and positions [T] to hidden states [T, K]
    compute_logits(hidden_states)             [T, K] to [T, V]
    load_weights(source, **options)           if it has one; see `quantload.load_weights`

T are the tokens of all sequences, one after the other. docs/writing-a-model.md shows how to write
one. This file is one of the few that import transformers: it knows the configs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, overload

import torch
from torch import nn

from quantload.arguments import check_flags, check_type
from quantload.errors import ConfigError
from quantload.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from quantload.layers.linear import QuantLinear
from quantload.mappers.dtype_names import check_dtypes
from quantload.mappers.mapper import WeightMapper
from quantload.quant.scheme import DENSE, Scheme
from quantload.runtime.parallel import Parallel

M = TypeVar("M", bound=type[nn.Module])

_METHODS = ("embed_input_ids", "forward", "compute_logits")
_classes: dict[str, type[nn.Module]] = {}


@overload
def register_model(architecture: str) -> Callable[[M], M]: ...
@overload
def register_model(architecture: str, model_class: M, *, replace: bool = False) -> M: ...
def register_model(
    architecture: str, model_class: type[nn.Module] | None = None, *, replace: bool = False
) -> object:
    """Let a class serve an architecture: `quantload.load` builds it instead of transformers'.

        quantload.register_model("LlamaForCausalLM", MyLlama)

    or as a decorator, `@quantload.register_model("LlamaForCausalLM")`.

    Args:
        architecture: A name in `architectures` of a config.json.
        model_class: See the top of this file; returned as it is.
        replace: Take the place of another class for the same architecture.

    Raises:
        ConfigError: The class lacks a method, or another one serves the architecture.
    """
    hint = '`register_model("LlamaForCausalLM", MyLlama)`'
    expected = "the name of an architecture, as in `architectures` of a config.json"
    check_type("architecture", architecture, str, expected=expected, hint=hint)
    if not architecture.strip():
        raise ConfigError(f"`architecture` is empty, expected {expected}", hint=hint)
    check_flags(replace=replace)
    if model_class is None:
        return lambda decorated: register_model(architecture, decorated)
    check_type("model_class", model_class, type, expected="a class, not an object", hint=hint)
    missing = [name for name in _METHODS if not callable(getattr(model_class, name, None))]
    if missing or not issubclass(model_class, nn.Module):
        what = f"has no `{missing[0]}`" if missing else "is no `nn.Module`"
        raise ConfigError(
            f"`{model_class.__name__}` cannot serve `{architecture}`: it {what}",
            hint="see docs/writing-a-model.md for what a model needs",
        )
    other = _classes.get(architecture)
    if other is not None and other is not model_class and not replace:
        raise ConfigError(
            f"`{architecture}` is served by `{other.__name__}` already, found `"
            f"{model_class.__name__}`",
            hint="pass `replace=True`, or call `unregister_model` first",
        )
    _classes[architecture] = model_class
    return model_class


def unregister_model(architecture: str) -> None:
    """Let transformers serve an architecture again."""
    _classes.pop(architecture, None)


def model_class_for(config: Mapping[str, Any]) -> type[nn.Module] | None:
    """Return the class that serves a config.json; None if transformers does."""
    names = config.get("architectures")
    for name in names if isinstance(names, list) else ():
        if name in _classes:
            return _classes[name]
    return None


def build(
    model_class: type[nn.Module],
    config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    parallel: Parallel,
) -> nn.Module:
    """Build a model that is written by hand, in eval mode.

    Args:
        model_class: Registered for the architecture.
        config: Content of config.json. The class gets transformers' config of its model type, which
            has all defaults; of a type that transformers does not know, a config of the values.
        dtype: dtype in which floats are created.
        parallel: This process among those that share layers.

    Raises:
        ConfigError: There are several stages.
    """
    if parallel.pp_size > 1:
        raise ConfigError(
            f"`{model_class.__name__}` is written by hand and runs in one stage, found "
            f"{parallel.pp_size} stages",
            hint="use tensor parallelism alone, or let transformers serve the architecture",
        )
    make: Callable[..., nn.Module] = model_class
    with _default_dtype(dtype):
        model = make(_config_object(config), parallel=parallel)
    return model.eval()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _config_object(config: Mapping[str, Any]) -> object:
    from transformers import CONFIG_MAPPING, PreTrainedConfig  # seconds

    from quantload.layers.config_class import decoded

    check_dtypes(config)
    values = decoded({k: v for k, v in config.items() if k != "quantization_config"})
    kind = str(config.get("model_type"))
    if kind in CONFIG_MAPPING:
        return CONFIG_MAPPING[kind].from_dict(values)
    return PreTrainedConfig.from_dict(values)


def set_schemes(model: nn.Module, mapper: WeightMapper, schemes: Mapping[str, Scheme]) -> None:
    """Tell each layer how its weights are quantized.

    Args:
        model: Its layers were created without a scheme, or with one that this replaces.
        mapper: From checkpoint names to the model.
        schemes: Scheme of each quantized module, by its name in the checkpoint.
    """
    found: dict[str, dict[int, Scheme]] = {}
    for name, scheme in schemes.items():
        for target in mapper.targets(f"{name}.weight"):
            found.setdefault(target.module, {})[target.slot] = scheme
    for path, module in model.named_modules():
        by_slot = found.get(path, {})
        if isinstance(module, QuantLinear) and by_slot:
            slots = range(len(module.cut.sizes))
            module.set_schemes([by_slot.get(slot, DENSE) for slot in slots])
        elif isinstance(module, VocabParallelEmbedding) and by_slot:
            module.set_schemes(by_slot[0])


def tied_by_hand(model: nn.Module) -> dict[str, str]:
    """Return tied parameters by full name: {"lm_head.weight": "model.embed_tokens.weight"}."""
    paths: dict[int, str] = {id(module): path for path, module in model.named_modules()}
    tied = {}
    for path, module in model.named_modules():
        if isinstance(module, ParallelLMHead) and module.tied_to is not None:
            tied[f"{path}.weight"] = f"{paths[id(module.tied_to)]}.weight"
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = owners.setdefault(id(parameter), name)
        if first != name:
            tied[name] = first
    return tied


__all__ = [
    "build",
    "model_class_for",
    "register_model",
    "set_schemes",
    "tied_by_hand",
    "unregister_model",
]
