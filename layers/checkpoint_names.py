"""What transformers makes of the tensor names of a checkpoint.

This file is one of the few that import transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
)

from quantload.mappers.expert_layouts import ExpertLayout, layout_of
from quantload.mappers.mapper import Conversion, Piece

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_EXPERT_WEIGHT = re.compile(r"(?P<block>.*\.experts)\.(?P<expert>\d+)\.(?P<projection>\w+)\.weight")


def checkpoint_conversion(model: PreTrainedModel) -> Callable[[str], Conversion]:
    """Return what transformers makes of a checkpoint name of this model.

    Renamings are applied in turn. Converters that merge the weights of experts into one parameter
    tell which part a tensor fills; any other converter changes values, and is refused.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    layout = layout_of(model.config.to_dict())

    def convert(name: str) -> Conversion:
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        for converter in converters:
            target, pattern = converter.rename_source_key(name)
            if pattern is not None:
                return _converted(converter, name, target, pattern)
        return _one_expert(layout, name) or Conversion(name)

    return convert


def _converted(converter: WeightConverter, name: str, target: str, pattern: str) -> Conversion:
    steps = [(type(step), getattr(step, "dim", None)) for step in converter.operations]
    merges = steps in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])
    expert = _EXPERT.search(name)
    if not merges or expert is None:
        names = ", ".join(kind.__name__ for kind, _ in steps)
        return Conversion(name, refused=f"transformers converts it by {names}, which is not built")
    sources = list(converter.source_patterns)
    return Conversion(target, Piece(int(expert[1]), sources.index(pattern), len(sources)))


def _one_expert(layout: ExpertLayout | None, name: str) -> Conversion | None:
    """Return the place of a single expert where transformers has no converter for it."""
    match = _EXPERT_WEIGHT.fullmatch(name)
    if match is None or layout is None or layout.is_converted:
        return None
    for parameter, projections in layout.projections.items():
        if match["projection"] in projections:
            part, parts = projections.index(match["projection"]), len(projections)
            first = layout.orientation == "input first"  # "either" is that of files, not of models
            piece = Piece(int(match["expert"]), part, parts, is_transposed=first)
            return Conversion(f"{match['block']}.{parameter}", piece)
    return None
