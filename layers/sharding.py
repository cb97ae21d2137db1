"""How the layers of a model are shared by the ranks of a tensor parallel group.

The model's own plan (`tp_plan` of transformers) says which linear layers are cut along their
outputs and which along their inputs. It is taken for what it is, a proposal:

    heads     a cut between q, k or v heads, never through one; ranks that outnumber the k and v
              heads share them (transformers' own loading fails there)
    blocks    the layers of one block are cut together or not at all
    proof     the cut model is run on the meta device; a block whose shapes do not fit is replicated

A replicated layer is never wrong, only slower; each has its reason.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn

from quantload.layers.attention import ATTENTION
from quantload.layers.meta_model import (
    TransformersModel,
    is_transposed_linear,
    output_head,
    tensor_parallel_plan,
    tied_names,
)
from quantload.layers.probe import probe
from quantload.layers.sharding_proof import Steps, first_difference, watch_steps
from quantload.layers.siblings import is_plain_linear

Kind = Literal["column", "column gathered", "row", "row split", "vocabulary", "replicated"]

# Styles of transformers 5.24 (`integrations/tensor_parallel.py`), and older names of two of them.
_KINDS: dict[str, Kind] = {
    "colwise": "column",
    "colwise_gather_output": "column gathered",
    "colwise_rep": "column gathered",
    "rowwise": "row",
    "rowwise_split_input": "row split",
    "rowwise_rep": "row split",
    "embedding_rowwise": "vocabulary",
}
_ATTENTION = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
# Of latent attention what has heads; the projections to the latents are whole on every rank.
_LATENT = {"q_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
_LATENT_BOTH = {"q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
_GATED = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
_HEAD_SIZES = ("head_dim", "head_size")
_CUT = ("column", "row")
_UNPROVEN = "cannot be shared: its attention does not run under a function for any number of heads"


@dataclass(frozen=True)
class Style:
    """How one layer is shared.

    Args:
        kind: "column" cuts outputs, "row" inputs; "column gathered" and "row split" do so for a
            model that has whole tensors around the layer; "vocabulary" cuts rows of an embedding or
            of the output head, which need not divide.
        unit: Rows ("column") or columns ("row") that stay together: those of one head.
        reason: Why the layer is replicated, "" if it is not.
    """

    kind: Kind
    unit: int = 1
    reason: str = ""

    def rows(self, size: int, rank: int, ranks: int) -> tuple[int, int] | None:
        """Return (start, stop) of the outputs that a rank holds of `size`; None for all."""
        if self.kind not in ("column", "column gathered"):
            return None
        units = size // self.unit
        if units >= ranks:
            return rank * size // ranks, (rank + 1) * size // ranks
        head = rank // (ranks // units)
        return head * self.unit, (head + 1) * self.unit

    def columns(self, size: int, rank: int, ranks: int) -> tuple[int, int] | None:
        """Return (start, stop) of the inputs that a rank holds of `size`; None for all."""
        if self.kind not in ("row", "row split"):
            return None
        return rank * size // ranks, (rank + 1) * size // ranks


@dataclass(frozen=True)
class ShardPlan:
    """How the layers of a model are shared.

    Args:
        ranks: Ranks that share it.
        styles: By model path, of every linear layer and embedding.
        vectors: Parameters with one number a head that are cut with the heads of their block.
    """

    ranks: int
    styles: Mapping[str, Style]
    vectors: tuple[str, ...] = field(default=())

    def without(self, kept: Mapping[str, str]) -> ShardPlan:
        """Return the plan with some layers held whole: {path: reason}."""
        whole = {path: Style("replicated", reason=reason) for path, reason in kept.items()}
        return replace(self, styles={**self.styles, **whole})

    def replicated(self) -> dict[str, list[str]]:
        """Return the layers that every rank holds whole, by reason."""
        found: dict[str, list[str]] = {}
        for path, style in self.styles.items():
            if style.kind == "replicated":
                found.setdefault(style.reason, []).append(path)
        return found


def plan_sharding(model: TransformersModel, ranks: int) -> ShardPlan:
    """Decide how the layers of a model on the meta device are shared by `ranks` ranks."""
    declared = dict(_declared(model))
    inferred = _inferred(model, declared)
    declared |= inferred
    styles = {path: _style(model, path, declared.get(path), ranks) for path in _layers(model)}
    styles |= _tied(model, styles)
    styles |= _together(styles)
    plan = ShardPlan(ranks, styles, tuple(_head_vectors(model, styles, ranks)))
    return _proven(model, plan, inferred)


def _layers(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        is_linear = is_plain_linear(module) or is_transposed_linear(module)
        if is_linear or isinstance(module, nn.Embedding):
            yield path


def _declared(model: TransformersModel) -> Iterator[tuple[str, str]]:
    """Yield (path, style) of each layer that the model's own plan names; its first pattern wins."""
    patterns = [
        (re.compile(re.escape(pattern).replace(r"\*", r"[^.]+")), style)
        for pattern, style in tensor_parallel_plan(model).items()
    ]
    for path in _layers(model):
        for pattern, style in patterns:
            if pattern.fullmatch(path):
                yield path, style
                break


def _inferred(model: nn.Module, declared: Mapping[str, str]) -> dict[str, str]:
    """Propose styles for blocks that the plan leaves out, where all of a block is in sight.

    Attention by its four projections (gpt-oss), latent attention by what has heads (DeepSeek-V3),
    both only under the function that takes any number of heads, see `use_attention`; and gated
    linear units (those of Jamba).
    """
    found: dict[str, str] = {}
    for path, block in model.named_modules():
        for styles in (_ATTENTION, _LATENT_BOTH, _LATENT, _GATED):
            paths = [f"{path}.{name}" for name in styles]
            if _is_whole(block, styles) and not any(one in declared for one in paths):
                found |= dict(zip(paths, styles.values(), strict=True))
                break
    return found


def _is_whole(block: nn.Module, styles: Mapping[str, str]) -> bool:
    """True if a block has all of these layers, and can be cut by its heads if it has some."""
    if not all(is_plain_linear(getattr(block, name, None)) for name in styles):  # type: ignore[arg-type]
        return False
    if styles is _GATED:
        return True
    return _runs_ours(block) and (styles is _ATTENTION or _latent_heads(block) > 0)


def _latent_heads(block: nn.Module) -> int:
    """Return the heads of a block of latent attention; 0 of any other."""
    heads = getattr(block, "num_heads", 0)
    queries = getattr(block, "q_b_proj", None) or getattr(block, "q_proj", None)
    linears = (queries, getattr(block, "kv_b_proj", None), getattr(block, "o_proj", None))
    if not isinstance(heads, int) or heads < 1:
        return 0
    found = [linear for linear in linears if isinstance(linear, nn.Linear)]
    if len(found) < len(linears):
        return 0
    sizes = (found[0].out_features, found[1].out_features, found[2].in_features)
    return 0 if any(size % heads for size in sizes) else heads


def _runs_ours(block: nn.Module) -> bool:
    """True if attention runs under the function that takes any number of heads."""
    config = getattr(block, "config", None)
    return str(getattr(config, "_attn_implementation", "")).startswith(ATTENTION)


def _is_attention_proven(model: TransformersModel, path: str) -> bool:
    """False for a block whose attention the proof does not see, and which does not run ours."""
    block = model.get_submodule(path.rpartition(".")[0])
    is_attention = hasattr(block, "config") and hasattr(block, "scaling")
    return not is_attention or _runs_ours(block) or not model._can_set_attn_implementation()


def _style(model: TransformersModel, path: str, declared: str | None, ranks: int) -> Style:
    if declared is None:
        return Style("replicated", reason="not in the tensor parallel plan of the model")
    kind = _KINDS.get(declared)
    module = model.get_submodule(path)
    if kind is None:
        return Style("replicated", reason=f"style `{declared}` of the plan")
    if kind in _CUT and not _is_attention_proven(model, path):
        return Style("replicated", reason=_UNPROVEN)
    if kind == "vocabulary" or (kind == "column gathered" and module is output_head(model)):
        return Style("vocabulary")
    if not isinstance(module, nn.Linear):
        return Style("replicated", reason=f"a `{type(module).__name__}`")
    size = module.out_features if kind.startswith("column") else module.in_features
    unit = _unit(model, path, size) if kind in _CUT else 1
    units = size // unit
    if units % ranks == 0:
        return Style(kind, unit)
    if kind == "column" and unit > 1 and ranks % units == 0:
        return Style(kind, unit)  # fewer heads than ranks: some ranks hold the same
    what = f"{units} heads" if unit > 1 else f"{size} features"
    return Style("replicated", reason=f"{what} cannot be shared by {ranks} ranks")


def _unit(model: nn.Module, path: str, size: int) -> int:
    """Return the size of a head if the layer belongs to an attention block, else 1."""
    block = model.get_submodule(path.rpartition(".")[0])
    heads = _latent_heads(block)
    if (
        heads and size % heads == 0
    ):  # those of queries, of keys with values and of values have sizes of their own
        return size // heads
    sizes = [getattr(block, name, None) for name in _HEAD_SIZES]
    head = next((size for size in sizes if isinstance(size, int) and size > 0), 1)
    return head if size % head == 0 else 1


def _together(styles: Mapping[str, Style]) -> dict[str, Style]:
    """Replicate all of a block if one of its layers cannot be cut."""
    blocks: dict[str, list[str]] = {}
    for path in styles:
        blocks.setdefault(path.rpartition(".")[0], []).append(path)
    changed: dict[str, Style] = {}
    for members in blocks.values():
        failed = [p for p in members if "cannot be shared" in styles[p].reason]
        if not failed:
            continue
        reason = f"its block is: {failed[0].rpartition('.')[2]} has {styles[failed[0]].reason}"
        for path in members:
            if styles[path].kind in _CUT:
                changed[path] = Style("replicated", reason=reason)
    return changed


def _tied(model: TransformersModel, styles: Mapping[str, Style]) -> dict[str, Style]:
    """Replicate linear layers whose weight is that of another: they stay one parameter."""
    ties = tied_names(model)
    modules = {name.rpartition(".")[0] for names in ties.items() for name in names}
    reason = "cannot be shared: its weight is that of another layer as well"
    return {
        path: Style("replicated", reason=reason)
        for path, style in styles.items()
        if path in modules and style.kind not in ("vocabulary", "replicated")
    }


def _head_vectors(model: nn.Module, styles: Mapping[str, Style], ranks: int) -> Iterator[str]:
    """Yield parameters with one number a query head, such as attention sinks, of cut blocks."""
    for path, style in styles.items():
        if style.kind != "row" or style.unit == 1:
            continue
        linear = model.get_submodule(path)
        assert isinstance(linear, nn.Linear), f"{path} is cut as a linear layer"
        heads = linear.in_features // style.unit
        block = path.rpartition(".")[0]
        for name, parameter in model.get_submodule(block)._parameters.items():
            if parameter is not None and tuple(parameter.shape) == (heads,):
                yield f"{block}.{name}"


# -- proof ----------------------------------------------------------------------------------------


def _proven(model: TransformersModel, plan: ShardPlan, inferred: Collection[str]) -> ShardPlan:
    """Run the cut model on the meta device; replicate the blocks that do not fit.

    Args:
        model: On the meta device.
        plan: What is proposed.
        inferred: Layers of which nobody but us proposed that they are cut.
    """
    cut = _cut_paths(plan)
    if not cut:
        return plan
    try:
        whole = probe(model, lambda: watch_steps(model, cut))
    except Exception as error:  # noqa: BLE001 - model code raises anything
        reason = f"cannot be proven: the model does not run on meta ({type(error).__name__})"
        return _without(plan, cut, reason)
    unseen = [p for p in cut if p in inferred and p.rpartition(".")[0] not in whole.callers]
    if unseen:
        plan = _without(plan, unseen, "cannot be proven: a forward of the model does not reach it")
        cut = _cut_paths(plan)
    while cut:
        blame = _mismatch(model, plan, whole)
        if blame is None:
            return plan
        plan = _without(plan, _blamed(cut, blame[0]), blame[1])
        cut = _cut_paths(plan)
    return plan


def _cut_paths(plan: ShardPlan) -> list[str]:
    return [path for path, style in plan.styles.items() if style.kind in _CUT]


def _blamed(cut: list[str], block: str) -> list[str]:
    """Return the layers that are cut in a block, or in the nearest around it that has any."""
    while block:
        inside = [path for path in cut if path.startswith(f"{block}.")]
        if inside:
            return inside
        block = block.rpartition(".")[0]
    return cut


def _without(plan: ShardPlan, paths: list[str], reason: str) -> ShardPlan:
    changed = {path: Style("replicated", reason=reason) for path in paths}
    blocks = {path.rpartition(".")[0] for path in paths}
    vectors = tuple(v for v in plan.vectors if v.rpartition(".")[0] not in blocks)
    return ShardPlan(plan.ranks, {**plan.styles, **changed}, vectors)


def _mismatch(model: TransformersModel, plan: ShardPlan, whole: Steps) -> tuple[str, str] | None:
    """Return the block that computes something else when it is cut, and why; None if none does."""
    cut = copy.deepcopy(model)
    paths = _cut_paths(plan)
    for path in paths:
        _cut(cut, path, plan.styles[path], plan.ranks)
    for name in plan.vectors:
        path, _, leaf = name.rpartition(".")
        block = cut.get_submodule(path)
        parameter = block._parameters[leaf]
        assert parameter is not None, f"{name} is a parameter"
        block._parameters[leaf] = nn.Parameter(parameter[: parameter.shape[0] // plan.ranks])
    running: list[str] = []
    for path, module in cut.named_modules():
        if path and any(True for _ in module.children()):
            module.register_forward_pre_hook(lambda _, __, path=path: running.append(path))
            module.register_forward_hook(lambda _, __, ___: _leave(running))
    try:
        found = probe(cut, lambda: watch_steps(cut, paths))
    except Exception as error:  # noqa: BLE001 - model code raises anything
        at = next((p for p in reversed(running) if _has_cut(plan, p)), "")
        return at, f"shapes do not fit when it is cut ({type(error).__name__})"
    return first_difference(whole, found)


def _leave(running: list[str]) -> None:
    running.pop()


def _has_cut(plan: ShardPlan, block: str) -> bool:
    return any(
        style.kind in _CUT and f"{path}.".startswith(f"{block}." if block else "")
        for path, style in plan.styles.items()
    )


def _cut(model: nn.Module, path: str, style: Style, ranks: int) -> None:
    """Put a linear layer of the size of one rank's part in the place of a whole one."""
    linear = model.get_submodule(path)
    assert isinstance(linear, nn.Linear), f"{path} is cut as a linear layer"
    rows = style.rows(linear.out_features, 0, ranks) or (0, linear.out_features)
    columns = style.columns(linear.in_features, 0, ranks) or (0, linear.in_features)
    part = nn.Linear(
        columns[1] - columns[0],
        rows[1] - rows[0],
        bias=linear.bias is not None,
        device="meta",
        dtype=linear.weight.dtype,
    )
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, part)


__all__ = ["Kind", "ShardPlan", "Style", "plan_sharding"]
