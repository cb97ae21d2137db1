"""The attention hook: one function under which all attention of a transformers model runs.

Registered with transformers' attention and mask interfaces as `quantload`. It differs from the
functions that come with transformers in three points:

    grouped heads   the ratio is read from the tensors, never from `config` or
                    `module.num_key_value_groups`: right where a rank holds a part of the heads, or
                    where key heads are repeated over ranks
    features        soft caps and sinks too, which torch's kernels lack; masks as torch's kernels
                    take them, so that plain causal prefill needs none
    refusals        what it would have to ignore (attention over chosen blocks) is an error

Masks are those that transformers makes, sliding windows and packed sequences included. It goes by
the name of the function whether a mask is made at all; a module that is given none goes by its
`is_causal`, so one may only be left out where all modules agree with it:

    quantload             bool; left out where it is plain causal order from the first key on, or
                          where one query sees all keys: for models of causal modules
    quantload_two_sided   bool; left out where everything is seen: for encoders
    quantload_masked      bool; never left out: for models that have both
    quantload_additive    float, as for `eager`: for models that do not run on torch's kernels;
                          their code may add to a mask or widen it

`use_attention` switches a model to it. A model whose classes say that they run on torch's kernels
is switched as it is. The attention of any other (gpt-oss, Gemma 2) is first held against its own
eager function, on the tensors of one small forward.

Source: transformers 5.24, `AttentionInterface` and `AttentionMaskInterface`, and what its models
pass when they dispatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import eager_mask, sdpa_mask

from quantload.arguments import check_type
from quantload.errors import ModelError, ShapeError
from quantload.layers.attend import Rule, attend, heads_of, weigh
from quantload.layers.attention_proof import compare_with_eager
from quantload.layers.meta_model import TransformersModel

ATTENTION = "quantload"
TWO_SIDED = "quantload_two_sided"
MASKED = "quantload_masked"
ADDITIVE = "quantload_additive"

_LOCAL_HEADS = "quantload_heads"


def attention_forward(  # noqa: PLR0913 - what transformers' models pass
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    output_attentions: bool | None = None,
    **_: object,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention for a transformers module.

    Args:
        module: The attention module; its `is_causal` counts where the argument is None.
        query: [B, H, T, D]; H is the number of heads on this rank.
        key: [B, KV, S, D].
        value: [B, KV, S, V].
        attention_mask: [B, 1 or H, T, S or more], bool (True sees) or additive; it holds causal
            order and window. None: see above.
        scaling: Factor of the scores; None is D ** -0.5.
        dropout: Share of the weights that is dropped.
        is_causal: A query sees no later key; only where there is no mask.
        sliding_window: Keys from this distance on are not seen; only where there is no mask, and
            queries see no later key.
        softcap: Bound of the scores.
        s_aux: [H] sinks, those of this rank's heads or of all.
        sinks: [B, H, T, 1] sinks of each query.
        position_bias: Additive, broadcast to [B, H, T, S or more].
        indices: [B, T, k] keys that each query may see besides the mask.
        block_indices: Chosen blocks of keys; refused.
        output_attentions: Return the weights too; never through torch's kernels.

    Returns:
        [B, T, H, V], and the weights [B, H, T, S] or None.

    Raises:
        ModelError: The model asks for what is not built.
        ShapeError: The tensors do not fit each other.
    """
    if block_indices is not None:
        raise ModelError(
            f"`{type(module).__name__}` attends over chosen blocks of keys, which the attention "
            f"function `{ATTENTION}` does not build",
            hint='call `model.set_attn_implementation("sdpa")`',
        )
    rows, columns, heads = query.shape[2], key.shape[2], query.shape[1]
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    offset = None
    if attention_mask is not None or not is_causal:
        is_causal, sliding_window = False, None  # the mask has all, as for the eager functions
    elif rows > 1:
        key, value, offset = key[:, :, :rows], value[:, :, :rows], 0
        columns = key.shape[2]
    rule = Rule(
        scaling=scaling,
        is_causal=is_causal,
        offset=offset,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks if s_aux is None else _local(module, s_aux, heads),
        mask=_with_indices(_local(module, attention_mask, heads), indices, rows, columns),
        bias=_cut(_local(module, position_bias, heads), columns),
        dropout=dropout,
    )
    output, weights = weigh(query, key, value, rule, with_weights=bool(output_attentions))
    return output.transpose(1, 2).contiguous(), weights


def set_local_heads(module: nn.Module, start: int, count: int) -> None:
    """Tell an attention module which query heads this rank holds: `start` to `start + count - 1`.

    Sinks, masks and biases that come for all heads are then cut to these. Where the module's own
    parameters are cut already, nothing has to be told.
    """
    module.__dict__[_LOCAL_HEADS] = (start, count)


def _local(module: nn.Module, tensor: Tensor | None, heads: int) -> Tensor | None:
    """Return what belongs to this rank's heads of [H] sinks or of a [B, H, T, S] mask."""
    if tensor is None or tensor.ndim not in (1, 4):
        return tensor
    found = tensor.shape[0 if tensor.ndim == 1 else 1]
    if found in (1, heads) and not (found == 1 and tensor.ndim == 1 and heads > 1):
        return tensor
    start, count = module.__dict__.get(_LOCAL_HEADS, (0, 0))
    if count != heads or start + count > found:
        raise ShapeError(
            f"sinks, mask or bias of `{found}` heads for a query of `{heads}` heads in "
            f"`{type(module).__name__}`, expected as many",
            hint="under tensor parallelism call `set_local_heads` on the attention module",
        )
    return heads_of(tensor, range(start, start + count))


def _cut(tensor: Tensor | None, columns: int) -> Tensor | None:
    """Leave out what a mask or bias says of keys that are not there."""
    return tensor if tensor is None else tensor[..., :columns]


def _with_indices(
    mask: Tensor | None, indices: Tensor | None, rows: int, columns: int
) -> Tensor | None:
    """Return the mask with all keys masked but those of `indices` [B, T, k]."""
    mask = _cut(mask, columns)
    if indices is None:
        return mask
    chosen = torch.zeros(len(indices), rows, columns, dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter(-1, indices.long(), value=True)[:, None]
    if mask is None:
        return chosen
    if mask.dtype == torch.bool:
        return mask & chosen
    return mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


def _causal_mask(*args: Any, **kwargs: Any) -> Tensor | None:  # noqa: ANN401 - of transformers
    """Return the mask of `sdpa`, but never leave out one under which later keys are seen."""
    return _sdpa_mask(*args, **(kwargs | {"allow_is_bidirectional_skip": False}))


def _two_sided_mask(*args: Any, **kwargs: Any) -> Tensor | None:  # noqa: ANN401
    """Return the mask of `sdpa`, but never leave out one under which they are not."""
    return _sdpa_mask(*args, **(kwargs | {"allow_is_causal_skip": False}))


def _every_mask(*args: Any, **kwargs: Any) -> Tensor | None:  # noqa: ANN401
    """Return the mask of `sdpa`, but never leave it out."""
    skips = {"allow_is_bidirectional_skip": False, "allow_is_causal_skip": False}
    return _sdpa_mask(*args, **(kwargs | skips))


_sdpa_mask: Callable[..., Tensor | None] = sdpa_mask
_MASKS = {
    ATTENTION: _causal_mask,
    TWO_SIDED: _two_sided_mask,
    MASKED: _every_mask,
    ADDITIVE: eager_mask,
}
for _name, _mask in _MASKS.items():
    AttentionInterface.register(_name, attention_forward)
    AttentionMaskInterface.register(_name, _mask)


# -- switching a model -----------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionReport:
    """The attention of one part of a model: of all modules that share a config.

    Args:
        part: Path of the first module with that config, "" for the whole model.
        name: Class of that module.
        implementation: Name of the function that attention runs under.
        reason: Why it was not switched, "" if it was.
    """

    part: str
    name: str
    implementation: str
    reason: str = ""


@dataclass
class _Part:
    """Modules that share a config."""

    path: str
    config: PreTrainedConfig
    models: list[TransformersModel]


def use_attention(model: TransformersModel) -> tuple[AttentionReport, ...]:
    """Let all attention of a model run under this function, where that computes the same.

    Call it before heads are spread over ranks: the proof runs the modules' own eager functions.

    Args:
        model: On the meta device or loaded; nothing but its configs is changed.

    Returns:
        A report for each part of the model with a config of its own.
    """
    check_type("model", model, nn.Module, expected="a model of transformers")
    parts = _parts(model)
    unproven = [part for part in parts if not _reason_of_class(part) and not _runs_on_sdpa(part)]
    configs = [part.config for part in parts]
    wrong, failure = compare_with_eager(model, configs, attention_forward) if unproven else ({}, "")
    reports = []
    for part in parts:
        reason = _reason_of_class(part)
        if not reason and part in unproven:
            reason = wrong.get(
                id(part.config), failure or "its forward calls no attention that can be compared"
            )
        if not reason:
            name = ADDITIVE if part in unproven else _name_for(model, part)
            part.config._attn_implementation_internal = name
        name = str(part.config._attn_implementation)
        reports.append(AttentionReport(part.path, type(part.models[0]).__name__, name, reason))
    return tuple(reports)


def _parts(model: TransformersModel) -> list[_Part]:
    """Return the configs that modules of the model hold, each with its transformers models."""
    parts: dict[int, _Part] = {}
    owners: dict[str, TransformersModel] = {}
    for path, module in model.named_modules():
        if isinstance(module, TransformersModel):
            owners[path] = module
        config = getattr(module, "config", None)
        if not isinstance(config, PreTrainedConfig):
            continue
        part = parts.setdefault(id(config), _Part(path, config, []))
        owner = owners[max((p for p in owners if _is_inside(path, p)), key=len)]
        if owner not in part.models:
            part.models.append(owner)
    return list(parts.values())


def _is_inside(path: str, of: str) -> bool:
    return not of or path == of or path.startswith(f"{of}.")


def _reason_of_class(part: _Part) -> str:
    for model in part.models:
        if not model._can_set_attn_implementation():
            return (
                f"the attention of `{type(model).__name__}` does not dispatch through "
                "transformers' AttentionInterface"
            )
    return ""


def _name_for(model: TransformersModel, part: _Part) -> str:
    """Return the name under which masks fit the modules of a part; see above."""
    modules = [m for m in model.modules() if getattr(m, "config", None) is part.config]
    orders = {m.is_causal for m in modules if isinstance(getattr(m, "is_causal", None), bool)}
    if orders <= {True}:
        return ATTENTION
    return TWO_SIDED if orders == {False} else MASKED


def _runs_on_sdpa(part: _Part) -> bool:
    """True if transformers says that plain scaled dot product attention serves all of it."""
    return all(model._supports_sdpa for model in part.models)


__all__ = [
    "ADDITIVE",
    "ATTENTION",
    "MASKED",
    "TWO_SIDED",
    "AttentionReport",
    "attend",
    "attention_forward",
    "set_local_heads",
    "use_attention",
]
