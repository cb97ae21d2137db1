"""`fp8` as a format that is written; the bytes are described in `fp8.py`.

    blocks    `weight` e4m3 and `weight_scale_inv` float32, a multiplier, as DeepSeek-V3 and
              transformers write them; inputs are quantized in groups while the model runs
    tensor    `weight_scale` and `input_scale`, float32 multipliers without dimensions, as AutoFP8
              wrote them and vLLM and SGLang read them. transformers does not look for these names

One model has one of them, and blocks of one size. Edges may be partial: transformers 5.24 and vLLM
refuse them in some layers, DeepSeek's own code reads them.

Source: `Fp8Quantize` of transformers 5.24.0; `Fp8Config` and `Fp8LinearMethod` of vLLM 0.33.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantload.errors import ConfigError, listed
from quantload.loader.formats.target import Target, WrittenConfig, WrittenModules
from quantload.loader.output_files import Leaf
from quantload.quant.grid import E4M3
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.scheme import Scheme, WeightScheme
from quantload.quant.stored_scales import quantize_on_stored_scales

_SCALES = torch.float32


class Fp8Target(Target):
    """What transformers, vLLM and SGLang load as `fp8`."""

    name = "fp8"
    title = "FP8_BLOCK for transformers, vLLM and SGLang; FP8 for vLLM and SGLang"
    has_rows_apart = True

    def obstacle(self, scheme: Scheme, shape: tuple[int, int]) -> str:
        """See `Target.obstacle`."""
        weight, input = scheme.weight, scheme.input
        if weight is None:
            return ""
        if weight.grid != E4M3 or weight.scale != "float":
            return f"its codes are {weight.grid.name}, expected e4m3 with scales of floats"
        if weight.granularity not in ("block", "tensor"):
            return f"{weight.sharing}, expected blocks or one scale for the tensor"
        if input is None or input.grid != E4M3:
            return "its inputs are not quantized to e4m3"
        if weight.granularity == "tensor":
            fits = input.granularity == "tensor" and not input.dynamic
            return "" if fits else "its inputs have no fixed scale"
        assert weight.block is not None, "a block scheme has a block"
        fits = input.granularity == "group" and input.group_size == weight.block[1]
        return "" if fits and input.dynamic else "its inputs are not quantized in groups of a block"

    def layout(
        self, scheme: Scheme, shape: tuple[int, int], scale_dtype: torch.dtype
    ) -> dict[str, Leaf]:
        """See `Target.layout`; scales are float32, whatever the model is."""
        weight = scheme.weight
        assert weight is not None, "full precision is not encoded"
        leaves = {"weight": Leaf(weight.grid.storage, shape)}
        if weight.granularity == "tensor":
            scalar = Leaf(_SCALES, ())
            return leaves | {"weight_scale": scalar, "input_scale": scalar}
        block = weight.block_of(*shape)
        blocks = tuple(-(-size // step) for size, step in zip(shape, block, strict=True))
        return leaves | {"weight_scale_inv": Leaf(_SCALES, blocks)}

    def quantize(
        self, weight: Tensor, scheme: WeightScheme, *, shared: Tensor | None = None
    ) -> QuantTensor:
        """See `Target.quantize`; computed in float32, see `quant/stored_scales.py`."""
        result = None if weight.dtype == torch.float32 else weight.dtype
        evaluation = Evaluation(torch.float32, result=result)
        return quantize_on_stored_scales(
            weight, scheme, scale_dtype=_SCALES, evaluation=evaluation, shared=shared
        )

    def encode(
        self, tensor: QuantTensor, scheme: Scheme, shape: tuple[int, int]
    ) -> dict[str, Tensor]:
        """See `Target.encode`."""
        assert scheme.weight is not None, "full precision is not encoded"
        scale = tensor.scale.to(_SCALES)
        if scheme.weight.granularity == "block":
            return {"weight": tensor.codes, "weight_scale_inv": scale}
        assert tensor.input_scale is not None, "what meets a fixed input scale has it"
        input_scale = tensor.input_scale.to(_SCALES)
        return {
            "weight": tensor.codes,
            "weight_scale": scale.reshape(()),
            "input_scale": input_scale.reshape(()),
        }

    def row_step(self, scheme: Scheme) -> int | None:
        """Blocks are not cut."""
        assert scheme.weight is not None, "full precision is not encoded"
        return scheme.weight.block[0] if scheme.weight.block is not None else 1

    def config(self, modules: WrittenModules) -> WrittenConfig:
        """See `Target.config`.

        Raises:
            ConfigError: Schemes differ, or the head or an embedding is quantized.
        """
        if modules.named:
            raise ConfigError(
                "fp8 has no form for quantized embeddings and heads, found "
                f"{listed(modules.named)}",
                hint=f"add a rule, for example `{next(iter(modules.named))} = keep`",
            )
        found: dict[tuple[int, int] | None, str] = {}
        for module, scheme in modules.schemes.items():
            assert scheme.weight is not None, "full precision has no scheme"
            found.setdefault(scheme.weight.block, module)
        if len(found) > 1:
            raise ConfigError(
                "fp8 has one kind of scales for the whole model, found several: "
                f"{listed(found.values())}",
                hint="quantize all layers in the same way, or write compressed-tensors",
            )
        block = next(iter(found), None)
        config = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic" if block is not None else "static",
            "weight_block_size": list(block) if block is not None else None,
            "modules_to_not_convert": list(modules.kept),
        }
        return WrittenConfig(config)
