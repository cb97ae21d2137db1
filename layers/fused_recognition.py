"""A decoder layer taken apart, from what a recorded forward of it called and with what.

    norm, attention, norm, MLP                Llama, Qwen, Mistral, Phi-3, Mixtral
    norm, attention, norm, norm, MLP, norm    Gemma 2 and 3
    attention, norm, MLP, norm                OLMo 2

What a layer really computes between these calls is not read here: `fused_proof.py` holds what comes
of it against the layer itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from quantload.layers.fast_glu import GluFormula, is_linear, recognise_glu
from quantload.layers.fast_norm import NormFormula, recognise_norm
from quantload.layers.fused_layer import FusedLayer, GatedMlp, OwnMlp, Projection
from quantload.layers.fused_recording import Call, HeadsCall, Recording, is_attention
from quantload.layers.fused_router import with_fast_router
from quantload.layers.stack import LinearStack, StackView

if TYPE_CHECKING:
    from quantload.runtime.kernels.add_norm import NormWeight
    from quantload.runtime.kernels.decode_attention import HeadRule

# By the kinds of calls: which norm is before and behind attention, before and behind the MLP.
_ORDERS: dict[tuple[str, ...], tuple[int | None, int | None, int | None, int | None]] = {
    ("norm", "attention", "norm", "mlp"): (0, None, 2, None),
    ("norm", "attention", "norm", "norm", "mlp", "norm"): (0, 2, 3, 5),
    ("attention", "norm", "mlp", "norm"): (None, 1, None, 3),
}


class Unfit(Exception):
    """Why a layer cannot be taken apart."""


@dataclass(frozen=True)
class Parts:
    """The parts of a layer, as the layer calls them.

    Args:
        attention: The call of its attention.
        mlp: The call of its MLP.
        norms: Its norms: before and behind attention, before and behind the MLP.
    """

    attention: Call
    mlp: Call
    norms: tuple[nn.Module | None, nn.Module | None, nn.Module | None, nn.Module | None]


def listened_to(layer: nn.Module) -> list[nn.Module]:
    """Return the modules of a layer whose calls tell how it works."""
    found = [layer, *layer.children()]
    for child in layer.children():
        if is_attention(child):
            found += list(child.children())
    return found


def norm_formula(module: nn.Module) -> NormFormula | None:
    """Return what an RMS norm computes; None for any other module."""
    found = module.__dict__.get("fast_norm") or recognise_norm(module)
    return found if isinstance(found, NormFormula) else None


def norm_weight(module: nn.Module) -> NormWeight:
    """Return an RMS norm for the kernels.

    Raises:
        Unfit: It is none, or its weight is of another dtype than it was shown for.
    """
    from quantload.runtime.kernels.add_norm import NormWeight

    formula = norm_formula(module)
    if formula is None:
        raise Unfit(f"`{type(module).__name__}` is no RMS norm that is known")
    weight = module._parameters[formula.weight]
    assert weight is not None, "a recognised norm has a weight"
    return NormWeight(weight.detach(), formula.eps, late=formula.late, offset=formula.offset)


def parts_of(layer: nn.Module, record: Recording) -> Parts:
    """Return the parts of a layer.

    Raises:
        Unfit: It calls them in an order that is not known.
    """
    children = [child for child in layer.children() if not _is_idle(child)]
    calls = record.among(children)
    kinds = tuple(_kind(call.module) for call in calls)
    if kinds not in _ORDERS:
        order = ", ".join(f"{type(call.module).__name__}" for call in calls)
        raise Unfit(f"a layer calls {order or 'nothing'}: no order that is known")
    norms = [None if i is None else calls[i].module for i in _ORDERS[kinds]]
    attention, mlp = calls[kinds.index("attention")], calls[kinds.index("mlp")]
    return Parts(attention, mlp, (norms[0], norms[1], norms[2], norms[3]))


def _is_idle(module: nn.Module) -> bool:
    """True for what does nothing when nobody trains."""
    return isinstance(module, (nn.Dropout, nn.Identity)) or _is_stack(module)


def _is_stack(module: nn.Module) -> bool:
    return isinstance(module, LinearStack)


def _kind(module: nn.Module) -> str:
    if is_attention(module):
        return "attention"
    return "norm" if norm_formula(module) is not None else "mlp"


def take_apart(layer: nn.Module, record: Recording) -> FusedLayer:
    """Return a layer in parts.

    Raises:
        Unfit: Its parts are not such as the fused step knows.
    """
    parts = parts_of(layer, record)
    norms = [None if module is None else norm_weight(module) for module in parts.norms]
    before_heads, after_heads, before_mlp, after_mlp = norms
    attention = parts.attention.module
    heads = record.heads.get(id(attention))
    if heads is None:
        raise Unfit("its attention does not dispatch through transformers' AttentionInterface")
    inner = record.among([child for child in attention.children() if not _is_idle(child)])
    linear = [call for call in inner if is_linear(call.module)]
    head_norms = [call for call in inner if not is_linear(call.module)]
    rule = _rule(heads)
    projection = _projection(linear, parts.attention, rule)
    rule, projection = _with_norms(rule, projection, head_norms)
    return FusedLayer(
        before_heads=before_heads,
        projection=projection,
        rule=rule,
        output=_output(linear, parts.attention),
        after_heads=after_heads,
        before_mlp=before_mlp,
        mlp=_mlp(parts.mlp),
        after_mlp=after_mlp,
    )


# -- attention -------------------------------------------------------------------------------------


def _rule(heads: HeadsCall) -> HeadRule:
    from quantload.runtime.kernels.decode_attention import HeadRule

    options = dict(heads.options)
    known = ("scaling", "dropout", "sliding_window", "softcap", "s_aux", "is_causal")
    others = [key for key in options if key not in known and _says_something(key, options[key])]
    if others:
        raise Unfit(f"its attention is called with `{others[0]}`")
    if options.get("is_causal") is False or options.get("dropout"):
        raise Unfit("its attention is not causal, or drops weights")
    _, count, _, width = heads.query
    if heads.value[-1] != width:
        raise Unfit(f"heads of {width} columns with values of {heads.value[-1]}")
    scaling = options.get("scaling")
    return HeadRule(
        heads=count,
        kv_heads=heads.key[1],
        width=width,
        scale=width**-0.5 if scaling is None else float(scaling),
        window=int(options.get("sliding_window") or 0),
        softcap=float(options.get("softcap") or 0.0),
        sinks=_sinks(options.get("s_aux")),
    )


def _says_something(key: str, value: Any) -> bool:  # noqa: ANN401 - of any model
    """True for options that may change the result: not for what the whole model is given."""
    passed_on = ("position_ids", "use_cache", "cache_position", "output_attentions", "position_")
    return value is not None and value is not False and not key.startswith(passed_on)


def _sinks(sinks: Tensor | None) -> Tensor | None:
    if sinks is None:
        return None
    if sinks.ndim != 1:
        raise Unfit(f"sinks of shape {tuple(sinks.shape)}, expected one a head")
    return sinks.detach()


def _with_norms(
    rule: HeadRule, projection: Projection, calls: Sequence[Call]
) -> tuple[HeadRule, Projection]:
    """Add the norms of queries and keys, which are called in this order: of heads, or of all."""
    if not calls:
        return rule, projection
    if len(calls) != 2:
        raise Unfit(f"{len(calls)} modules between q, k, v and attention, expected two norms")
    q_norm, k_norm = (norm_weight(call.module) for call in calls)
    sizes = len(q_norm.weight), len(k_norm.weight)
    if sizes == (rule.width, rule.width):
        return replace(rule, q_norm=q_norm, k_norm=k_norm), projection
    if sizes == projection.sizes[:2]:
        return rule, replace(projection, norms=(q_norm, k_norm))
    raise Unfit(f"norms of q and k of {sizes} columns, expected heads of {rule.width}")


def _projection(calls: Sequence[Call], attention: Call, rule: HeadRule) -> Projection:
    """Return what is called with the attention's own input: one layer, or three in their order."""
    members = [call.module for call in calls if call.x is attention.x]
    kv = rule.kv_heads * rule.width
    sizes = (rule.heads * rule.width, kv, kv)
    if len(members) == 1 and _width(members[0]) == sum(sizes):
        return Projection(members, sizes)
    if len(members) != 3 or tuple(_width(m) for m in members) != sizes:
        found = [_width(member) for member in members]
        raise Unfit(f"its attention reads its input by layers of {found} features: not q, k and v")
    stack = _stack_of(members)
    return Projection(members if stack is None else [stack], sizes)


def _width(module: nn.Module) -> int:
    return int(module.out_features)  # type: ignore[arg-type]


def _stack_of(members: Sequence[nn.Module]) -> LinearStack | None:
    """Return the stack that views stand for, if they are all of one, in its order."""
    if not all(isinstance(member, StackView) for member in members):
        return None
    stack: LinearStack = members[0].__dict__["stack"]
    of_one = all(member.__dict__["stack"] is stack for member in members)
    in_order = [member.slot for member in members] == list(range(len(stack.part_sizes)))
    return stack if of_one and in_order and stack.separate is None else None


def _output(calls: Sequence[Call], attention: Call) -> nn.Module:
    """Return the layer whose result attention returns."""
    if not calls or calls[-1].output is not attention.output:
        raise Unfit("its attention returns something else than its last linear layer does")
    return calls[-1].module


def _mlp(call: Call) -> GatedMlp | OwnMlp:
    module, x = call.module, call.x
    formula = module.__dict__.get("fast_glu") or recognise_glu(module)
    if isinstance(formula, GluFormula) and formula.known:
        return GatedMlp(module, formula)
    assert x is not None, "an MLP is given rows"
    return OwnMlp(with_fast_router(module, x.reshape(-1, x.shape[-1])[:1]))


__all__ = ["Parts", "Unfit", "listened_to", "norm_formula", "norm_weight", "parts_of", "take_apart"]
