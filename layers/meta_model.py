"""The transformers model of a checkpoint, built without memory for its parameters.

Parameters are on the meta device. Buffers that are not in a checkpoint (rotary frequencies, masks)
are computed on the CPU, as the model's own code does it. This file is one of the few that import
transformers; what the rest of the package has to know about its models is asked here.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from quantload.errors import ModelError
from quantload.layers.config_class import decoded
from quantload.mappers.dtype_names import check_dtypes

_log = logging.getLogger("quantload")

TransformersModel: TypeAlias = PreTrainedModel

_PROBE_ATTENTION = "quantload_probe"
_BY_HEAD = ("s_aux", "sinks", "position_bias")  # what attention functions are given for each head
# Where a config names no architecture: the first that knows its class.
_AUTO_CLASSES: tuple[Any, ...] = (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModel,
)
# A parameter created by one of these is never read before it is loaded; above this size the memory
# is not even reserved.
_FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn)
_LARGE = 1 << 22
_FILLING = frozenset((Tensor.normal_, Tensor.uniform_, Tensor.zero_, Tensor.fill_))
_INITIALIZERS = ("torch.nn.init", "transformers.initialization")  # modules of functions that fill


def build_on_meta(
    config: Mapping[str, Any],
    folder: Path,
    *,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """Build the model that a config describes, with parameters on the meta device.

    Args:
        config: Content of config.json; a quantization config in it is ignored.
        folder: Folder of the checkpoint, for generation_config.json and, if trusted, its code.
        dtype: dtype of the parameters; those that the model keeps in float32 stay so.
        trust_remote_code: Run model code that comes with the checkpoint.
        attn_implementation: Name of the attention function; None lets transformers choose.

    Returns:
        The model in eval mode, its tied parameters being one object.

    Raises:
        ModelError: transformers does not know the architecture, or cannot build this config.
    """
    hf_config = _config_object(config, folder, trust_remote_code=trust_remote_code)
    model_class = _model_class(config, hf_config, folder, trust_remote_code=trust_remote_code)
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    try:
        with _parameters_on_meta():
            # _from_config is what every Auto class calls: it sets dtype and attention, then builds
            build: Callable[..., PreTrainedModel] = model_class._from_config
            model = build(hf_config, dtype=dtype, **options)
            model.tie_weights()
    except Exception as error:
        raise ModelError(
            f"transformers {transformers.__version__} cannot build `{model_class.__name__}` from "
            f"the config of `{folder}`: {_first_line(error)}"
        ) from error
    _keep_float32(model, dtype)
    _check_buffers(model)
    if (folder / "generation_config.json").is_file():
        own = getattr(model, "generation_config_class", GenerationConfig)  # few have their own
        model.generation_config = own.from_pretrained(folder, local_files_only=True)
    model.train(False)
    return model


def _config_object(
    config: Mapping[str, Any], folder: Path, *, trust_remote_code: bool
) -> PreTrainedConfig:
    check_dtypes(config)
    values = decoded({k: v for k, v in config.items() if k != "quantization_config"})
    if trust_remote_code and "AutoConfig" in (config.get("auto_map") or {}):
        loaded = AutoConfig.from_pretrained(folder, trust_remote_code=True, local_files_only=True)
        if hasattr(loaded, "quantization_config"):
            del loaded.quantization_config
        return loaded  # type: ignore[no-any-return]
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise _unknown_architecture(config, f"model_type `{model_type}`")
    try:
        return CONFIG_MAPPING[str(model_type)].from_dict(values)
    except Exception as error:
        raise ModelError(
            f"the config of `{folder}` cannot be used: {type(error).__name__}: {error}"
        ) from error


def _model_class(
    config: Mapping[str, Any], hf_config: PreTrainedConfig, folder: Path, *, trust_remote_code: bool
) -> type[PreTrainedModel]:
    """Return the class that `architectures` names, else the Auto classes' choice for the config."""
    names = config.get("architectures") or []
    if not isinstance(names, list):
        raise _unknown_architecture(config, f"architectures `{names}`")
    if trust_remote_code and (remote := _remote_class(config, folder)) is not None:
        return remote
    for name in names:
        found = getattr(transformers, str(name), None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            if isinstance(hf_config, found.config_class or PreTrainedConfig):
                return found
            _log.warning(
                "`%s` of architectures does not go with model_type `%s`, which decides",
                name,
                config.get("model_type"),
            )
    for auto in _AUTO_CLASSES:
        mapping: Any = auto._model_mapping
        if type(hf_config) in mapping:
            chosen: Any = mapping[type(hf_config)]
            first: type[PreTrainedModel] = chosen[0] if isinstance(chosen, tuple) else chosen
            return first
    raise _unknown_architecture(config, f"architectures `{names}`")


def _remote_class(config: Mapping[str, Any], folder: Path) -> type[PreTrainedModel] | None:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    auto_map = config.get("auto_map") or {}
    for auto in ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModel"):
        if auto in auto_map:
            remote: type[PreTrainedModel] = get_class_from_dynamic_module(
                auto_map[auto], str(folder), local_files_only=True
            )
            return remote
    return None


def _first_line(error: Exception) -> str:
    """Return what an error says, without the C++ stack that torch puts below it."""
    return f"{type(error).__name__}: {error}".partition("\nException raised from ")[0]


def _unknown_architecture(config: Mapping[str, Any], found: str) -> ModelError:
    return ModelError(
        f"transformers {transformers.__version__} does not know {found}, "
        f"expected one of its model types; config names model_type `{config.get('model_type')}`, "
        f"architectures `{config.get('architectures')}`",
        hint="upgrade transformers, or pass `trust_remote_code=True` if the checkpoint brings its "
        "own model code that you trust",
    )


class _LargeOnMeta(TorchFunctionMode):
    """Creates large tensors on the meta device, and fills nothing there: that takes time too."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,  # noqa: ANN401 - the protocol of torch
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        if func in _FILLING or _initializes(func):
            filled = args[0] if args else kwargs.get("tensor")
            if isinstance(filled, Tensor) and filled.device.type == "meta":
                return filled
        if func in _FACTORIES and kwargs.get("device") is None:
            size = kwargs.get("size", args[0] if args and not isinstance(args[0], int) else args)
            count = 1
            for length in (size,) if isinstance(size, Tensor) else size:
                count *= int(length)
            if count >= _LARGE:
                kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def _initializes(func: Callable[..., Any]) -> bool:
    is_there = getattr(func, "__module__", "") in _INITIALIZERS
    return is_there and getattr(func, "__name__", "").endswith("_")


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move each parameter to the meta device the moment a module registers it."""
    original = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":  # tied parameters stay one object
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        original(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        with _LargeOnMeta():
            yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _keep_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give float32 to the parameters for which the model class asks it, as from_pretrained does."""
    names: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        names |= set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        names |= set(model._keep_in_fp32_modules or ())
    if not names:
        return
    pattern = re.compile("|".join(rf"(?:^|\.){name}(?:$|\.)" for name in sorted(names)))
    for name, param in model.named_parameters():
        if pattern.search(name) and param.is_floating_point():
            param.data = param.data.float()


def _check_buffers(model: PreTrainedModel) -> None:
    stored = set(model.state_dict())
    for name, buffer in model.named_buffers():
        if buffer.device.type == "meta" and name not in stored:
            raise ModelError(
                f"buffer `{name}` of `{type(model).__name__}` is not in a checkpoint and was "
                "created on the meta device, expected it to be computed while the model is built"
            )


# -- what the rest of the package asks about a model --------------------------------------------


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Return tied parameters by full name: {"lm_head.weight": "model.embed_tokens.weight"}."""
    owner: dict[int, str] = {}
    tied = {}
    declared = model.all_tied_weights_keys
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in sorted(parameters, key=lambda n: n in declared):  # sources first
        first = owner.setdefault(id(parameters[name]), name)
        if first != name:
            tied[name] = first
    return tied


def tensor_parallel_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return the model's own plan: {"model.layers.*.mlp.up_proj": "colwise"}; {} if it has none."""
    return {str(pattern): str(style) for pattern, style in (model.tp_plan or {}).items()}


def pipeline_plan(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the modules that the model's own plan for pipelines names, by path; () without one."""
    base = model.base_model_prefix
    inner = getattr(model, base, None) if base else None
    own = tuple(getattr(model, "_pp_plan", None) or ())
    plan = getattr(inner if inner is not None else model, "_pp_plan", None) or {}
    return (*(f"{base}.{name}" if inner is not None else name for name in plan), *own)


def is_transposed_linear(module: nn.Module) -> bool:
    """True for GPT-2's Conv1D: a linear layer that stores its weight as [K, N]."""
    return isinstance(module, Conv1D)


def output_head(model: PreTrainedModel) -> nn.Module | None:
    """Return the module that computes the logits, if the model has one."""
    find: Callable[[], object] = model.get_output_embeddings
    head = find()
    return head if isinstance(head, nn.Module) else None


@contextmanager
def without_attention(model: PreTrainedModel, *, masks: bool = False) -> Iterator[None]:
    """Let the model run on the meta device: attention returns zeros.

    Args:
        model: Its configs are restored afterwards.
        masks: Give the model masks, which hide nothing; else there are none.
    """
    AttentionInterface.register(_PROBE_ATTENTION, _no_attention)
    AttentionMaskInterface.register(_PROBE_ATTENTION, _open_mask if masks else _no_mask)
    configs = {id(c): c for m in model.modules() for c in _configs_of(m)}
    before = {key: config._attn_implementation_internal for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation_internal = _PROBE_ATTENTION
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]


def _configs_of(module: nn.Module) -> Iterator[PreTrainedConfig]:
    config = getattr(module, "config", None)
    if isinstance(config, PreTrainedConfig):
        yield config
        for name in config.sub_configs:
            part = getattr(config, name, None)
            if isinstance(part, PreTrainedConfig):
                yield part


def _no_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *_: object,
    **options: object,
) -> tuple[Tensor, None]:
    """Zeros of the right shape: query [B, H, T, D] and value [B, H', S, V] give [B, T, H, V].

    Raises:
        ValueError: A mask, bias or sink is for another number of heads.
    """
    heads = query.shape[1]
    for x in (attention_mask, *(options.get(name) for name in _BY_HEAD)):
        if isinstance(x, Tensor) and x.ndim in (1, 4):
            found = x.shape[0] if x.ndim == 1 else x.shape[1]
            if found != heads and not (found == 1 and x.ndim == 4):
                raise ValueError(f"a mask, bias or sink of {found} heads for {heads} query heads")
    shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
    return query.new_zeros(shape), None


def _no_mask(*_: object, **__: object) -> None:
    return None


def _open_mask(*_: object, **sizes: Any) -> Tensor | None:  # noqa: ANN401 - sizes of a mask
    """Return a mask [B, 1, T, S] that hides nothing, for models that look into it."""
    names = ("batch_size", "q_length", "kv_length")
    if any(name not in sizes for name in names):
        return None
    batch, queries, keys = (int(sizes[name]) for name in names)
    return torch.zeros(batch, 1, queries, keys)


def dummy_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the smallest text input [1, 4], with an image if the model cannot do without."""
    ids = torch.full((1, 4), 3)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    needed = inspect.signature(model.forward).parameters.get("pixel_values")
    if needed is not None and needed.default is inspect.Parameter.empty:
        size = getattr(getattr(model.config, "vision_config", None), "image_size", 32)
        inputs["pixel_values"] = torch.zeros(1, 3, int(size), int(size))
    return inputs


def untie_in_config(model: PreTrainedModel) -> None:
    """Note in the configs that embeddings are not tied, so that transformers never re-ties them."""
    for config in _configs_of(model):
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}
