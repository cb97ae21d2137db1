"""Any transformers model as decoding sees it: its own forward, over transformers' own caches.

Prompts are moved to the left of their rows' padding, as transformers pads: all rows then write to
the same place of the cache, and a mask leaves out what lies before a row's first token. With caches
of fixed size (attention, sliding windows, states of Mamba and linear attention, what MLA expands)
shapes and addresses never change, and a step can be captured. A layer with a sliding window keeps
all tokens, and its mask the window: transformers' own static layer goes over to other code when its
window is full, which a graph cannot. Where a model needs a cache that grows, steps run eagerly.

Source: transformers 5.17 and 5.24, `StaticCache`, `DynamicCache` and `create_causal_mask`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import (
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionAndStaticSlidingWindowAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from quantload.errors import ConfigError, ModelError
from quantload.runtime.parallel import Parallel
from quantload.runtime.step_model import CacheScales, StepCache

_CACHE_NAMES = ("cache", "past_key_values", "cache_params")  # the first that a model takes
# Models that build what they need from more than the cache, positions and a mask of what is there.
_OTHER_WAYS = ("cpmant", "hrm_text", "xlm")
# Layers that choose or pool keys: in transformers they see padding, and indexed ones over a static
# cache see places that are not filled yet.
_SEE_PADDING = ("indexed", "compressed", "sparse")
_HOST_ROPES = ("dynamic", "longrope")  # frequencies chosen on the host by the longest position


class _WholeWindow(StaticLayer):  # type: ignore[no-untyped-call]
    """Keys and values of all tokens; the mask holds the window."""

    is_sliding = True


class _HybridWholeWindow(
    LinearAttentionAndStaticFullAttentionLayer  # type: ignore[no-untyped-call]
):
    is_sliding = True


class TransformersCache:
    """The cache of one batch.

    Args:
        model: Of transformers.
        batch: Rows.
        length: The most tokens a row can hold.
    """

    def __init__(self, model: PreTrainedModel, batch: int, length: int) -> None:
        self.batch, self.length = batch, length
        self.is_static = not why_not_static(model)
        self._config = model.config
        self.inner = self._new()
        self.mask = torch.ones(batch, length, dtype=torch.bool, device=model.device)
        self.shift = torch.zeros(batch, dtype=torch.int64, device=model.device)
        self.seen = 0  # only of a cache that grows

    def _new(self) -> StaticCache | DynamicCache:
        if not self.is_static:
            return DynamicCache(config=self._config)
        return _static_cache(self._config, self.length)

    def reset(self) -> None:
        """Forget all tokens."""
        self.seen = 0
        if self.is_static:
            self.inner.reset()  # type: ignore[no-untyped-call]
        else:
            self.inner = self._new()

    def _tensors(self) -> list[tuple[Tensor, bool]]:
        """Return (tensor, True if it grows with the tokens) of what is kept."""
        found: list[tuple[Tensor | None, bool]] = []
        for layer in self.inner.layers:
            for name in ("keys", "values", "indexer_keys"):
                found.append((getattr(layer, name, None), True))
            for name in ("conv_states", "recurrent_states"):
                states = getattr(layer, name, None) or {}
                found += [(state, False) for state in states.values()]
        return [(tensor, grows) for tensor, grows in found if tensor is not None]

    @property
    def num_bytes(self) -> int:
        """What it takes, once a prompt was run."""
        return sum(tensor.nbytes for tensor, _ in self._tensors())

    def bytes_read(self, keys: int) -> int:
        """See `StepCache`."""
        room = self.length if self.is_static else max(self.seen, 1)
        return sum(
            tensor.nbytes * keys // room if grows else tensor.nbytes
            for tensor, grows in self._tensors()
        )


def _static_cache(config: Any, length: int) -> StaticCache:  # noqa: ANN401 - any model's config
    cache = StaticCache(config=config, max_cache_len=length)
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionAndStaticSlidingWindowAttentionLayer):
            whole = _HybridWholeWindow(length, number_of_states=layer.number_of_states)
            cache.layers[number] = whole
        elif type(layer) is StaticSlidingWindowLayer:
            cache.layers[number] = _WholeWindow(length)
    return cache


def why_not_static(model: PreTrainedModel) -> str:
    """Say why a model has no cache of fixed size; "" if it has one."""
    if kind := _sees_padding(model):
        return f"its `{kind}` layers look at places of a static cache that are not filled"
    try:
        cache = _static_cache(model.config, 32)
    except (KeyError, TypeError, AttributeError) as error:
        return f"transformers has no static cache for it ({type(error).__name__}: {error})"
    moving = [type(layer).__name__ for layer in cache.layers if not layer.is_compileable]
    if moving:
        return f"transformers' cache layer `{moving[0]}` has no fixed size"
    window = [type(layer).__name__ for layer in cache.layers if _has_window(layer)]
    if window:
        return f"its cache layer `{window[0]}` changes its code as it fills"
    own_biases = hasattr(model.base_model, "build_alibi_tensor")  # as wide as the mask
    if own_biases or not (all(cache.is_linear) or model._can_compile_fullgraph):
        return f"transformers does not run `{type(model).__name__}` with a static cache"
    return ""


def _sees_padding(model: PreTrainedModel) -> str:
    """Return a kind of layers to which padding shows; "" if there are none."""
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    return next((kind for kind in kinds if any(part in kind for part in _SEE_PADDING)), "")


def _has_window(layer: object) -> bool:
    return isinstance(layer, StaticSlidingWindowLayer)


def why_not_decodable(model: nn.Module) -> str:
    """Say why a model cannot be decoded token by token here; "" if it can."""
    if not isinstance(model, PreTrainedModel):
        return f"`{type(model).__name__}` is not a model of transformers"
    if not model.can_generate() or model.config.is_encoder_decoder:
        return f"`{type(model).__name__}` is no decoder of text"
    accepted = inspect.signature(model.forward).parameters
    if not any(name in accepted for name in _CACHE_NAMES):
        return f"the forward of `{type(model).__name__}` takes no cache"
    if model.config.model_type in _OTHER_WAYS:
        return f"`{type(model).__name__}` takes other arguments than tokens, positions and a mask"
    has_usual_cache = getattr(type(model), "_supports_default_dynamic_cache", None)
    if has_usual_cache is None or not has_usual_cache():
        return f"`{type(model).__name__}` has a cache of its own"
    return ""


def check_length(model: nn.Module, length: int) -> None:
    """Refuse rows that are longer than a table of learned positions of a text model.

    Raises:
        ConfigError: They are.
    """
    text = model
    if isinstance(model, PreTrainedModel) and not model.config.is_encoder_decoder:
        text = model.get_decoder()  # type: ignore[no-untyped-call]  # not what looks at pictures
    held = {id(module) for module in text.modules()}
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        is_table = isinstance(module, nn.Embedding) and id(module) in held
        if is_table and ("pos" in name or name == "wpe"):
            room = module.num_embeddings - int(getattr(module, "offset", 0))
            if length > room:
                raise ConfigError(
                    f"prompt and new tokens are `{length}` together, expected at most `{room}`: "
                    f"the positions of `{path}`"
                )


class TransformersStepModel:
    """A causal model of transformers, plain or with our layers, as a `StepModel`.

    Args:
        model: The model, in eval mode.

    Raises:
        ModelError: It is no decoder.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if reason := why_not_decodable(model):
            raise ModelError(reason, hint="call its own `generate`, if it has one")
        self.model = model
        accepted = inspect.signature(model.forward).parameters
        self._cache_name = next(name for name in _CACHE_NAMES if name in accepted)
        self._takes = {n for n in ("position_ids", "logits_to_keep") if n in accepted}
        self.vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self.model.device

    @property
    def why_not_captured(self) -> str:
        """See `StepModel`."""
        return why_not_static(self.model) or _why_host_decides(self.model)

    @property
    def captures_prompts(self) -> bool:
        """See `StepModel`: transformers looks at masks while it makes them."""
        return False

    def new_cache(
        self,
        batch: int,
        length: int,
        dtype: torch.dtype | None = None,
        *,
        scales: CacheScales | None = None,
    ) -> TransformersCache:
        """See `StepModel`; keys and values are in the dtype of the model.

        Raises:
            ConfigError: Another dtype or scales are asked for.
        """
        if scales is not None or dtype not in (None, self.model.dtype):
            asked = dtype if scales is None else f"{dtype} with scales"
            raise ConfigError(
                f"a key-value cache in `{asked}` is not built for "
                f"`{type(self.model).__name__}`, expected the model's `{self.model.dtype}`",
                hint="quantized caches go with the fused decoder, see `quantload bench`",
            )
        return TransformersCache(self.model, batch, length)

    def prefill(self, ids: Tensor, lengths: Tensor, cache: StepCache) -> Tensor:
        """See `StepModel`.

        Raises:
            ModelError: Prompts are not of one length, and padding would show.
        """
        held = _own(cache)
        longest = ids.shape[1]
        shift = longest - lengths
        if (kind := _sees_padding(self.model)) and bool(shift.any()):
            raise ModelError(
                f"prompts of {sorted(set(lengths.tolist()))} tokens in one batch: the `{kind}` "
                f"layers of `{type(self.model).__name__}` see padding",
                hint="run prompts of unequal lengths one by one",
            )
        place = torch.arange(longest, device=ids.device) - shift[:, None]
        moved = ids.gather(1, place.clamp(min=0))
        held.shift.copy_(shift)
        held.mask.fill_(True)
        held.mask[:, :longest] = place >= 0
        held.seen = longest
        return self._forward(moved, place.clamp(min=0), held.mask[:, :longest], held)

    def step(self, tokens: Tensor, positions: Tensor, cache: StepCache) -> Tensor:
        """See `StepModel`."""
        held = _own(cache)
        mask = held.mask
        if not held.is_static:
            held.seen += 1
            mask = mask[:, : held.seen]
        return self._forward(tokens[:, None], positions[:, None], mask, held)

    def _forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor, cache: TransformersCache
    ) -> Tensor:
        extra = {"position_ids": positions, "logits_to_keep": 1}
        output = self.model(
            input_ids=ids,
            attention_mask=mask.to(torch.int64),
            use_cache=True,
            **{self._cache_name: cache.inner},
            **{name: value for name, value in extra.items() if name in self._takes},
        )
        logits: Tensor = output.logits[:, -1]
        return logits


def _own(cache: StepCache) -> TransformersCache:
    assert isinstance(cache, TransformersCache), "a cache of `new_cache`"
    return cache


def _why_host_decides(model: PreTrainedModel) -> str:
    """Say what in the model looks at values on the host; "" if nothing is known to."""
    for module in model.modules():
        parallel = getattr(module, "parallel", None)
        if isinstance(parallel, Parallel) and max(parallel.tp_size, parallel.pp_size) > 1:
            return "several processes share the model"
        kind = getattr(module, "rope_type", None)
        kinds = kind.values() if isinstance(kind, dict) else (kind,)
        if any(one in _HOST_ROPES for one in kinds):
            return f"its rotary embedding (`{kind}`) chooses frequencies on the host"
    return ""


__all__ = [
    "TransformersCache",
    "TransformersStepModel",
    "check_length",
    "why_not_decodable",
    "why_not_static",
]
