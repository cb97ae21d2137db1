"""ModelOpt as a format that is written: its unified Hugging Face export.

The bytes are described in `modelopt.py`, the config in `modelopt_config.py`.

    quant_algo                   scheme       scales, all float32 but where said
    FP8                          FP8          weight_scale [], input_scale []
    FP8_PER_CHANNEL_PER_TOKEN    FP8_DYNAMIC  weight_scale [N]
    FP8_PB_WO                    FP8_BLOCK    weight_scale [N/128, 1, K/128, 1]; of one block []
    MXFP8                        MXFP8        weight_scale uint8 [N, K/32]
    NVFP4                        NVFP4        weight_scale e4m3 [N, K/16], weight_scale_2 [],
                                              input_scale []
    W4A16_NVFP4                  NVFP4A16     the same without input_scale
    W4A16_AWQ                    W4A16        weight_scale [N, K/g], without factors of the input
    W8A16                        W8A16:channel    weight_scale [N]
    MIXED_PRECISION              several of them, each layer by name

`weight_scale_2` and `input_scale` multiply: a value is q * (s * s2). compressed-tensors divides by
its global scales. Weights are rounded on ModelOpt's own scales, so that no reciprocal is rounded;
the global scale of an input becomes `1 / g`, within half a unit in the last place.

The config is written twice, in `hf_quant_config.json` and for config.json. `producer.name` is the
name by which engines detect the format; the version is that of the layout, `converted_by` the tool.

Source: `export/quant_utils.py` and `export/convert_hf_config.py` of ModelOpt 0.47.0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantload import __version__
from quantload.errors import ConfigError, listed
from quantload.loader.formats.modelopt_config import ALGORITHMS, MIXED, Algorithm
from quantload.loader.formats.modelopt_layouts import packed_rows
from quantload.loader.formats.modelopt_written import cache_algorithm, flat_config
from quantload.loader.formats.target import Target, WrittenConfig, WrittenModules
from quantload.loader.output_files import Leaf
from quantload.quant.packing import pack_dense
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import PRESETS, Scheme, WeightScheme
from quantload.quant.stored_scales import quantize_on_stored_scales

_VERSION = "0.47.0"  # of ModelOpt, whose layout is written
_FLOAT = torch.float32
_EVALUATION = Evaluation(dtype=torch.float32, outer="scale*", inner="*")
_NAMES = {
    "FP8": "FP8",
    "FP8_DYNAMIC": "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_BLOCK": "FP8_PB_WO",
    "MXFP8": "MXFP8",
    "NVFP4": "NVFP4",
    "NVFP4A16": "W4A16_NVFP4",
    "W4A16": "W4A16_AWQ",
    "W8A16": "W8A16",
}


class ModelOptTarget(Target):
    """What TensorRT-LLM, vLLM and SGLang load as ModelOpt's."""

    name = "modelopt"
    title = "FP8(_DYNAMIC, _BLOCK), MXFP8, NVFP4(A16), W4A16, W8A16:channel for TensorRT-LLM"
    has_rows_apart = True

    def obstacle(self, scheme: Scheme, shape: tuple[int, int]) -> str:
        """See `Target.obstacle`."""
        if scheme.weight is None:
            return ""
        algorithm = _algorithm(scheme)
        if algorithm is None:
            return f"ModelOpt has no algorithm for it, expected one of {listed(_NAMES, limit=10)}"
        if algorithm.layout == "int8" and scheme.weight.granularity != "channel":
            return f"{scheme.weight.sharing}, expected one scale a row: `W8A16:channel`"
        if algorithm.layout == "int4" and shape[0] % 2:
            return f"it has {shape[0]} output features, expected an even number"
        if algorithm.layout == "nvfp4" and shape[1] % 16:
            return f"it has {shape[1]} input features, expected a multiple of 16"
        return ""

    def layout(
        self, scheme: Scheme, shape: tuple[int, int], scale_dtype: torch.dtype
    ) -> dict[str, Leaf]:
        """See `Target.layout`; scales have dtypes of their own, whatever the model is."""
        weight, algorithm = scheme.weight, _algorithm(scheme)
        assert weight is not None, "full precision is not encoded"
        assert algorithm is not None, "nothing stands against the scheme"
        rows, columns = shape
        scales = _scale_shape(weight, shape)
        leaves = {
            "e4m3": Leaf(torch.float8_e4m3fn, shape),
            "int8": Leaf(torch.int8, shape),
            "int4": Leaf(torch.uint8, (rows // 2, columns)),
            "nvfp4": Leaf(torch.uint8, (rows, columns // 2)),
        }
        leaves |= {"e4m3 blocks": leaves["e4m3"], "mxfp8": leaves["e4m3"]}
        dtypes = {"nvfp4": torch.float8_e4m3fn, "mxfp8": torch.uint8}
        made = {
            "weight": leaves[algorithm.layout],
            "weight_scale": Leaf(dtypes.get(algorithm.layout, _FLOAT), scales),
        }
        if algorithm.layout == "nvfp4":
            made["weight_scale_2"] = Leaf(_FLOAT, ())
        if scheme.input is not None and scheme.input.needs_scale:
            made["input_scale"] = Leaf(_FLOAT, ())
        return made

    def quantize(
        self, weight: Tensor, scheme: WeightScheme, *, shared: Tensor | None = None
    ) -> QuantTensor:
        """See `Target.quantize`; computed in float32, see `quant/stored_scales.py`."""
        if scheme.scale == "e8m0":  # powers of two are the same in every dtype
            made = quantize_rtn(weight.to(_FLOAT), scheme)
            return QuantTensor(
                grid=made.grid,
                codes=made.codes,
                scale=made.scale,
                block=made.block,
                evaluation=_EVALUATION,
            )
        return quantize_on_stored_scales(
            weight, scheme, scale_dtype=_FLOAT, evaluation=_EVALUATION, shared=shared
        )

    def encode(
        self, tensor: QuantTensor, scheme: Scheme, shape: tuple[int, int]
    ) -> dict[str, Tensor]:
        """See `Target.encode`.

        Args:
            tensor: With e4m3 scales, `outer` multiplies them.
            scheme: As in `Target.encode`.
            shape: As in `Target.encode`.
        """
        weight, algorithm = scheme.weight, _algorithm(scheme)
        assert weight is not None, "full precision is not encoded"
        assert algorithm is not None, "nothing stands against the scheme"
        leaves = {"weight": tensor.codes}
        if algorithm.layout == "int4":
            leaves["weight"] = packed_rows(tensor.codes)
        elif algorithm.layout == "nvfp4":
            leaves["weight"] = pack_dense(tensor.codes, 4).view(torch.uint8)
        scale = tensor.scale.view(torch.uint8) if weight.scale == "e8m0" else tensor.scale
        scale = scale.to(_FLOAT) if weight.scale == "float" else scale
        scales = _scale_shape(weight, shape)
        leaves["weight_scale"] = scale.reshape(-1, *scales[1:]) if scales else scale.reshape(())
        if algorithm.layout == "nvfp4":
            assert tensor.outer is not None, "NVFP4 has a scale for the tensor"
            assert tensor.evaluation.outer == "scale*", "ModelOpt's scale for the tensor multiplies"
            leaves["weight_scale_2"] = tensor.outer.to(_FLOAT).reshape(())
        if scheme.input is not None and scheme.input.needs_scale:
            leaves["input_scale"] = _input_scale(tensor)
        return leaves

    def row_step(self, scheme: Scheme) -> int | None:
        """Two rows of int4 share bytes, and blocks are not cut."""
        weight, algorithm = scheme.weight, _algorithm(scheme)
        assert weight is not None, "full precision is not encoded"
        assert algorithm is not None, "nothing stands against the scheme"
        if weight.block is not None:
            return weight.block[0]
        return 2 if algorithm.layout == "int4" else 1

    def config(self, modules: WrittenModules) -> WrittenConfig:
        """See `Target.config`.

        Raises:
            ConfigError: An embedding is quantized, or the cache in a way that ModelOpt has not.
        """
        others = [m for m in modules.named if m.rpartition(".")[2] != "lm_head"]
        if others:
            raise ConfigError(
                f"ModelOpt has no form for quantized embeddings, found {listed(others)}",
                hint=f"add a rule, for example `{others[0]} = keep`",
            )
        facts = {module: _facts(scheme) for module, scheme in modules.schemes.items()}
        kinds = {tuple(sorted(found.items())) for found in facts.values()}
        details: dict[str, Any] = {
            "quant_algo": MIXED if len(kinds) > 1 else next(iter(facts.values()), {}).get(_ALGO),
            "kv_cache_quant_algo": cache_algorithm(modules.cache_scheme),
        }
        if len(kinds) > 1:
            details["quantized_layers"] = facts
        else:
            details |= next(iter(facts.values()), {})
            details["exclude_modules"] = sorted(modules.kept)
        nested = {
            "producer": {
                "name": "modelopt",
                "version": _VERSION,
                "converted_by": f"quantload {__version__}",
            },
            "quantization": details,
        }
        return WrittenConfig(flat_config(nested), {"hf_quant_config.json": nested})


_ALGO = "quant_algo"


def _algorithm(scheme: Scheme) -> Algorithm | None:
    """Return the algorithm of a scheme; None if there is none."""
    for preset, name in _NAMES.items():
        if preset in PRESETS and _is_like(scheme, PRESETS[preset]):
            return ALGORITHMS[name]
    return None


def _is_like(scheme: Scheme, preset: Scheme) -> bool:
    """True if a scheme is the preset, or differs from it in its group size only."""
    weight, other = scheme.weight, preset.weight
    if weight is None or other is None or scheme.input != preset.input or weight.act_order:
        return False
    if (weight.grid, weight.scale, weight.symmetric) != (other.grid, other.scale, other.symmetric):
        return False
    if weight.granularity == "channel" and other.granularity == "group":
        return weight.scale == "float"
    fixed = weight.scale != "float"
    return (
        weight.granularity == other.granularity
        and weight.block == other.block
        and (not fixed or weight.group_size == other.group_size)
    )


def _facts(scheme: Scheme) -> dict[str, Any]:
    """Return what `quantized_layers` says of a layer."""
    algorithm, weight = _algorithm(scheme), scheme.weight
    assert algorithm is not None, "nothing stands against the scheme"
    assert weight is not None, "full precision has no scheme"
    found: dict[str, Any] = {_ALGO: algorithm.name}
    if weight.granularity == "group":
        found["group_size"] = weight.group_size
    if algorithm.layout == "int4":
        found |= {"has_zero_point": False, "pre_quant_scale": False}
    return found


def _scale_shape(weight: WeightScheme, shape: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape in which ModelOpt stores the scales of a weight of (N, K)."""
    rows, columns = shape
    block = weight.block_of(rows, columns)
    blocks, groups = -(-rows // block[0]), -(-columns // block[1])
    if weight.granularity == "tensor":
        return ()
    if weight.granularity == "channel" and weight.grid.bits == 8:
        return (blocks,)
    if weight.granularity == "block":
        return () if blocks == groups == 1 else (blocks, 1, groups, 1)
    return blocks, groups


def _input_scale(tensor: QuantTensor) -> Tensor:
    """[] float32 multiplier, of what may be a divisor."""
    assert tensor.input_scale is not None, "what meets a fixed input scale has it"
    scale = tensor.input_scale.to(_FLOAT).reshape(())
    return 1 / scale if tensor.evaluation.input == "/" else scale


__all__ = ["ModelOptTarget"]
