"""What a user may ask of a plan beside rules."""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType
from typing import get_args

import torch

from quantload.arguments import as_bytes, check_choice, check_flags, check_type
from quantload.errors import listed
from quantload.loader.formats.target import Target
from quantload.loader.formats.targets import COMPRESSED_TENSORS, TARGETS
from quantload.loader.model_dtype import check_dtype
from quantload.loader.plan_groups import OnSplit
from quantload.loader.stats import InputStatistics
from quantload.quant.search import Observer


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of a plan.

    Args:
        dtype: dtype of everything in full precision, and of scales; None keeps what is stored.
        on_split: What to do when rules split a fused group: "error", "keep" or "promote".
        max_shard_bytes: Largest size of one output file's data; None is 5 GB, and less for an
            output that would have few files: see `usual_shard_bytes`.
        lossless: Refuse whatever would change a value.
        target: The format that is written.
        observer: How scales are found: "minmax" from the largest values, as llm-compressor does,
            or "search" for the least squared error.
        layers: Decoder layers to write, for example "0-1" or "0,5-7"; "" writes all.
        stats: What is known of the inputs of layers, for schemes with fixed input scales; and by
            which mean squares of inputs the observer "search" weighs errors.
    """

    dtype: torch.dtype | None = None
    on_split: OnSplit = "error"
    max_shard_bytes: int | None = None
    lossless: bool = False
    target: Target = COMPRESSED_TENSORS
    observer: Observer = "minmax"
    layers: str = ""
    stats: InputStatistics | None = None

    def __post_init__(self) -> None:
        check_dtype("dtype", self.dtype)
        check_choice("on_split", self.on_split, get_args(OnSplit))
        check_choice("observer", self.observer, get_args(Observer))
        check_flags(lossless=self.lossless)
        object.__setattr__(self, "lossless", bool(self.lossless))
        if self.max_shard_bytes is not None:
            size = as_bytes("max_shard_bytes", self.max_shard_bytes)
            object.__setattr__(self, "max_shard_bytes", size)
        hint = f"`TARGETS[name]` of `quantload.loader.formats.targets`, of {listed(TARGETS)}"
        check_type("target", self.target, Target, expected="a `Target`", hint=hint)
        check_type("layers", self.layers, str, expected="a text such as `0-1` or `0,5-7`")
        kinds = (InputStatistics, NoneType)
        check_type("stats", self.stats, kinds, expected="what `read_statistics` returns")
