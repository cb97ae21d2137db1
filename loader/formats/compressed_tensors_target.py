"""compressed-tensors as a format that is written; the bytes are described in its reader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantload.loader.formats.compressed_tensors_config import (
    build_config,
    import_library,
    validate_config,
)
from quantload.loader.formats.compressed_tensors_encode import encode, layout
from quantload.loader.formats.target import Target, WrittenConfig, WrittenModules
from quantload.loader.output_files import Leaf
from quantload.quant.qtensor import QuantTensor
from quantload.quant.scheme import Scheme

_WORD = 32  # fields of any width fill whole words after so many


class CompressedTensorsTarget(Target):
    """What vLLM, SGLang and transformers load."""

    name = "compressed-tensors"
    title = "all schemes, for vLLM, SGLang and transformers"
    has_rows_apart = True
    keeps_values = True

    def prepare(self) -> None:
        """Import the library that checks the config."""
        import_library()

    def obstacle(self, scheme: Scheme, shape: tuple[int, int]) -> str:
        """Every scheme of ours has a form in compressed-tensors."""
        return ""

    def layout(
        self, scheme: Scheme, shape: tuple[int, int], scale_dtype: torch.dtype
    ) -> dict[str, Leaf]:
        """See `Target.layout`."""
        return layout(scheme, shape, scale_dtype)

    def encode(
        self, tensor: QuantTensor, scheme: Scheme, shape: tuple[int, int]
    ) -> dict[str, Tensor]:
        """See `Target.encode`."""
        leaves = encode(tensor, scheme)
        if "weight_shape" in leaves:
            leaves["weight_shape"] = torch.tensor(shape, dtype=torch.int64)
        return leaves

    def row_step(self, scheme: Scheme) -> int | None:
        """Zero points are packed along the rows, and blocks are not cut."""
        weight = scheme.weight
        assert weight is not None, "full precision is not encoded"
        if weight.block is not None:
            return weight.block[0]
        return 1 if weight.symmetric else _WORD

    def check(self, quantization_config: Mapping[str, Any]) -> None:
        """See `Target.check`."""
        validate_config(quantization_config)

    def config(self, modules: WrittenModules) -> WrittenConfig:
        """See `Target.config`."""
        config = build_config(
            modules.schemes,
            modules.kept,
            named=modules.named,
            cache_scheme=modules.cache_scheme,
        )
        return WrittenConfig(config)
