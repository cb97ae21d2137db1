"""What transformers makes of the tensor names of a checkpoint, and the mapper to one of its models.

    renamings    transformers' own, in turn: the first stage of `NameRules`
    converters   at most one, read by `layers/converters.py`
    experts      single experts, and experts under other names, where transformers has no converter

This file is one of the few that import transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import GroupWeightRename, WeightConverter, WeightRenaming

from quantload.layers.converters import ModelShapes, Shape, ends_on_boundary, read_converter
from quantload.layers.model_leaves import leaves_of
from quantload.mappers.expert_layouts import ExpertLayout, layout_of
from quantload.mappers.mapper import Conversion, Converted, Piece, WeightMapper
from quantload.mappers.name_rules import NameRules, Renaming
from quantload.mappers.targets import Cut

_EXPERT_WEIGHT = re.compile(r"(?P<block>.*\.experts)\.(?P<expert>\d+)\.(?P<projection>\w+)\.weight")
# What fused-MoE engines call the parameters of all experts, in files that were saved from them.
_ENGINE_NAMES = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}
_PREDICTION = "multi-token prediction layer, which the model does not have"
_PREDICTION_COUNTS = ("num_nextn_predict_layers", "n_predict", "mtp_num_hidden_layers")


def mapper_of(model: PreTrainedModel, names: Collection[str] = ()) -> WeightMapper:
    """Return the mapper from checkpoint names to a model that surgery has not touched yet.

    Args:
        model: A model of transformers, its parameters on any device.
        names: Names of all tensors of the checkpoint: a few architectures have layouts that only
            differ in which names are there at all.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    _see_all(renamings, names)
    return WeightMapper(
        leaves_of(model),
        base_prefix=model.base_model_prefix,
        rules=NameRules(renamings=[_renaming(transform) for transform in renamings]),
        convert=_conversion(
            [t for t in transforms if isinstance(t, WeightConverter)],
            layout_of(model.config.to_dict()),
            _shapes(model),
        ),
        may_ignore=left_out_names(model),
    )


# -- what the rules need ------------------------------------------------------------------------


def _see_all(renamings: list[WeightRenaming], names: Collection[str]) -> None:
    """Let rules that depend on the presence of another tensor see all of them.

    A group of renamings is only meant if its first name is there: afterwards the same names mean
    other tensors (`norm0, norm1` become `norm1, norm2`).
    """
    if any(isinstance(renaming, GroupWeightRename) for renaming in renamings):
        for name in sorted(names):
            for renaming in renamings:
                name, _ = renaming.rename_source_key(name)


def _renaming(transform: WeightRenaming) -> Renaming:
    def rename(name: str) -> str:
        renamed: str = transform.rename_source_key(name)[0]
        return renamed

    patterns = " | ".join(transform.source_patterns)
    return Renaming(f"renaming `{patterns}` by `{transform.target_patterns[0]}`", rename)


def _shapes(model: PreTrainedModel) -> ModelShapes:
    """Remember the shapes of a model: surgery replaces its parameters."""
    shapes: dict[str, Shape] = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    base = f"{model.base_model_prefix}."

    def shape_of(name: str) -> Shape | None:
        spellings = (name, name.removeprefix(base), base + name)
        return next((shapes[spelling] for spelling in spellings if spelling in shapes), None)

    return ModelShapes(type(model).__name__, model.config, shape_of)


def _conversion(
    converters: list[WeightConverter], layout: ExpertLayout | None, shapes: ModelShapes
) -> Callable[[str], Conversion]:
    def convert(name: str) -> Conversion:
        for converter in converters:
            renamed, pattern = converter.rename_source_key(name)
            if pattern is not None and ends_on_boundary(pattern, name):
                return read_converter(converter, name, renamed, pattern, shapes)
        found = _one_expert(layout, name, shapes) or _all_experts(layout, name, shapes)
        return found or Conversion.unchanged(name)

    return convert


def _one_expert(layout: ExpertLayout | None, name: str, shapes: ModelShapes) -> Conversion | None:
    """Return the place of a single expert where transformers has no converter for it."""
    match = _EXPERT_WEIGHT.fullmatch(name)
    if match is None or layout is None:
        return None
    block, expert, projection = match["block"], int(match["expert"]), match["projection"]
    # "either" is that of files, not of models
    first = layout.orientation == "input first"
    for parameter, projections in layout.projections.items():
        place, parts = f"{block}.{parameter}", len(projections)
        shape = shapes.shape_of(place)
        ends: tuple[Converted, ...] = ()
        if projection in projections and not layout.is_converted:
            number = projections.index(projection)
            ends = (Converted(place, piece=Piece(expert, number, parts, is_transposed=first)),)
        elif projection == parameter and shape is not None:
            ends = tuple(
                Converted(
                    place,
                    piece=Piece(expert, part, parts, is_transposed=first),
                    cut=None if parts == 1 else Cut(rows=(rows,)),
                )
                for part, rows in enumerate(_parts(shape[2 if first else 1], parts))
            )
        if ends:
            return Conversion(ends, steps=(f"experts one by one -> {place}",))
    return None


def _parts(rows: int, parts: int) -> list[range]:
    each = rows // parts
    return [range(part * each, (part + 1) * each) for part in range(parts)]


def _all_experts(layout: ExpertLayout | None, name: str, shapes: ModelShapes) -> Conversion | None:
    """Return the parameter of all experts that a fused-MoE engine calls otherwise."""
    block, _, leaf = name.rpartition(".")
    parameter = _ENGINE_NAMES.get(leaf, "")
    if not parameter or layout is None or layout.orientation != "output first":
        return None
    renamed = f"{block}.{parameter}"
    if shapes.shape_of(renamed) is None or shapes.shape_of(name) is not None:
        return None
    return Conversion((Converted(renamed),), steps=(f"experts of an engine -> {renamed}",))


# -- what a checkpoint may have beside the model ----------------------------------------------


def left_out_names(model: PreTrainedModel) -> dict[str, str]:
    """Return patterns of tensors that may be left out, with the reason.

    What the model class names itself, and multi-token prediction layers: `mtp.*`, and those that
    follow the last layer of the decoder, as many as the config says.
    """
    ignored = sorted(model._keys_to_ignore_on_load_unexpected or ())
    patterns = dict.fromkeys(ignored, "left out by the model class")
    patterns[r"(^|\.)mtp\."] = _PREDICTION
    config = model.config.get_text_config()
    layers = int(getattr(config, "num_hidden_layers", 0) or 0)
    counts = (getattr(config, name, 0) for name in _PREDICTION_COUNTS)
    extra = max(count if isinstance(count, int) else 0 for count in counts)
    if extra:
        base = re.escape(f"{model.base_model_prefix}.")
        numbers = "|".join(str(layers + i) for i in range(extra))
        for path in _lists_of(model, layers):
            patterns[rf"^({base})?{re.escape(path)}\.({numbers})\."] = _PREDICTION
    return patterns


def _lists_of(model: PreTrainedModel, layers: int) -> list[str]:
    """Return the paths of lists of so many layers, without the base model's prefix."""
    base = f"{model.base_model_prefix}."
    return [
        path.removeprefix(base)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == layers
    ]


__all__ = ["left_out_names", "mapper_of"]
