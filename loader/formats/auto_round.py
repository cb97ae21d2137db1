"""AutoRound: the packings of other formats under a config of its own. Read.

    packing_format (the part after `auto_round:`)    tensors of              zero points
    auto_gptq                                        GPTQ                    stored less one (v1)
    "", gptqmodel, exllamav2, tritonv2               GPTQ                    as they are (v2)
    auto_awq                                         AWQ, `gemm`             as they are
    fp8; none, with data_type "fp"                   FP8
    llm_compressor                                   compressed-tensors
    llm_compressor_nvfp4_e5m3                        `auto_round_e5m3.py`

    bits, group_size, sym, data_type    of every layer in `block_name_to_quantize`
    act_bits, act_group_size, act_sym,  of inputs, where there is quantization of them
    act_data_type, act_dynamic
    extra_config    {module: {...}} or {regular expression: {...}}: what differs for these; 16 bits
                    and more are full precision

An entry of `extra_config` is a module's whole name; else a regular expression, searched in the
name, if it has characters that names do not have; else the last components of the name.

The config is translated into that of the packing, whose reader does the rest.

Source: AutoRound 0.16.1, `export/export_to_autoround/`, `inference/backend.py` (which packings
offset zero points) and `inference/convert_model.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantload.errors import UnsupportedVariant, listed
from quantload.loader.checkpoint import Checkpoint
from quantload.loader.formats.auto_round_e5m3 import E5m3Reader
from quantload.loader.formats.awq import AwqReader
from quantload.loader.formats.compressed_tensors import CompressedTensorsReader
from quantload.loader.formats.config_values import WHERE, wrong_value
from quantload.loader.formats.fp8 import Fp8Reader
from quantload.loader.formats.gptq import GptqReader
from quantload.loader.source import Reader, SourceWeight

Config = Mapping[str, Any]
_V1 = ("auto_gptq",)
_V2 = ("", "gptqmodel", "exllamav2", "tritonv2", "torch")
_AWQ = ("auto_awq", "awq")
_FP8 = ("fp8", "fp8_static")
_COMPRESSED = ("llm_compressor",)
_E5M3 = "llm_compressor_nvfp4_e5m3"
_FULL_PRECISION_BITS = 16
_NAME = re.compile(r"[\w\-.]+")
_INTEGERS = re.compile(r"(?:(?:opt_)?rtn_)?int(?:_sym|_asym|_sym_gptq)?")  # all stored alike
# Values that a layer may have of its own, for packings of integers.
_INT_VALUES = ("bits", "group_size", "sym")


def open_auto_round(checkpoint: Checkpoint) -> Reader:
    """Return the reader of an AutoRound checkpoint: that of its packing.

    Raises:
        UnsupportedVariant: A packing, data type or rotation that is not read.
        FormatMismatch: A value of the config makes no sense.
    """
    config = checkpoint.quantization_config
    assert config is not None, "detected by its config"
    name = checkpoint.name
    _refuse_unread(config, name)
    packing = _packing(config, name)
    is_float = str(config.get("data_type", "int")).startswith("fp")
    if packing == _E5M3:
        return E5m3Reader(checkpoint)
    if packing in _COMPRESSED:
        return CompressedTensorsReader(_with(checkpoint, _compressed_config(config, name)))
    if packing in _FP8 or is_float:
        return _open_fp8(checkpoint, config)
    _refuse_other_integers(config, name)
    _refuse_quantized_inputs(config, packing, name)
    if packing in _AWQ:
        return AwqReader(_with(checkpoint, _awq_config(config, name)))
    return GptqReader(_with(checkpoint, _gptq_config(config, packing, name)))


def _with(checkpoint: Checkpoint, config: Config) -> Checkpoint:
    return replace(checkpoint, quantization_config=config)


def _packing(config: Config, checkpoint_name: str) -> str:
    stated = config.get("packing_format", config.get("backend", ""))
    if not isinstance(stated, str):
        raise wrong_value("packing_format", stated, "a name", checkpoint_name)
    packing = stated.lower().removeprefix("auto_round").removeprefix(":")
    known = (*_V1, *_V2, *_AWQ, *_FP8, *_COMPRESSED, _E5M3)
    if packing not in known:
        raise UnsupportedVariant(
            f"AutoRound packing `{stated}` is not read, expected one of "
            f"{listed((p for p in known if p), limit=20)}, {WHERE} `{checkpoint_name}`",
            hint="export the model again in format `auto_round` or `llm_compressor`",
        )
    return packing


def _refuse_unread(config: Config, checkpoint_name: str) -> None:
    for key in ("rotation_config", "super_bits", "super_group_size"):
        if config.get(key):
            raise UnsupportedVariant(
                f"AutoRound checkpoints with `{key}` are not read, {WHERE} `{checkpoint_name}`",
                hint="export the model again without it",
            )


def _refuse_other_integers(config: Config, checkpoint_name: str) -> None:
    data_type = config.get("data_type", "int")
    if not _INTEGERS.fullmatch(str(data_type)):
        raise UnsupportedVariant(
            f"AutoRound data type `{data_type}` is not read, expected `int`, {WHERE} "
            f"`{checkpoint_name}`",
            hint="export the model again in format `llm_compressor`",
        )


def _refuse_quantized_inputs(config: Config, packing: str, checkpoint_name: str) -> None:
    bits = config.get("act_bits", _FULL_PRECISION_BITS)
    if isinstance(bits, int) and bits < _FULL_PRECISION_BITS:
        raise UnsupportedVariant(
            f"AutoRound packing `{packing or 'auto_round'}` with `act_bits` {bits} is not read, "
            f"{WHERE} `{checkpoint_name}`",
            hint="export the model again in format `llm_compressor`",
        )


# -- what differs from layer to layer ----------------------------------------------------------


def _entries(config: Config, checkpoint_name: str) -> list[tuple[str, Config]]:
    """Return (regular expression for `re.match`, values) of `extra_config`, what decides first."""
    extra = config.get("extra_config") or {}
    if not isinstance(extra, Mapping) or not all(isinstance(v, Mapping) for v in extra.values()):
        raise wrong_value("extra_config", extra, "an object of objects", checkpoint_name)
    names = [(key, values) for key, values in extra.items() if _NAME.fullmatch(key)]
    found = [(f"{re.escape(key)}$", values) for key, values in names]
    for key, values in extra.items():
        if not _NAME.fullmatch(key):
            found.append((f".*(?:{key})", values))
    return found + [(rf".*\.{re.escape(key)}$", values) for key, values in names]


def _is_full_precision(values: Config, checkpoint_name: str) -> bool:
    bits = values.get("bits", 0)
    if isinstance(bits, bool) or not isinstance(bits, int):
        raise wrong_value("bits", bits, "an integer", checkpoint_name)
    return bits >= _FULL_PRECISION_BITS


def _dynamic_rules(config: Config, checkpoint_name: str) -> dict[str, Config]:
    """Turn `extra_config` into the rules of GPTQModel's `dynamic`."""
    rules: dict[str, Config] = {}
    for pattern, values in _entries(config, checkpoint_name):
        if _is_full_precision(values, checkpoint_name):
            rules.setdefault(f"-:{pattern}", {})
        else:
            own = {key: values[key] for key in _INT_VALUES if values.get(key) is not None}
            _refuse_other_type(config, values, pattern, checkpoint_name)
            rules.setdefault(f"+:{pattern}", own)
    return rules


def _refuse_other_type(config: Config, values: Config, entry: str, checkpoint_name: str) -> None:
    own, common = values.get("data_type"), config.get("data_type", "int")
    if own is not None and own != common:
        raise UnsupportedVariant(
            f"`extra_config` gives `{entry}` the data type `{own}`, all others have `{common}`: "
            f"mixed types in one packing are not read, {WHERE} `{checkpoint_name}`"
        )


# -- configs of the packings -------------------------------------------------------------------


def _gptq_config(config: Config, packing: str, checkpoint_name: str) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        **{key: config.get(key) for key in _INT_VALUES},
        "checkpoint_format": "gptq" if packing in _V1 else "gptq_v2",
        "provider": "auto-round",
        "dynamic": _dynamic_rules(config, checkpoint_name),
    }


def _awq_config(config: Config, checkpoint_name: str) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        **{key: config.get(key) for key in _INT_VALUES},
        "version": "gemm",
        "dynamic": _dynamic_rules(config, checkpoint_name),
    }


def _open_fp8(checkpoint: Checkpoint, config: Config) -> Reader:
    block = config.get("weight_block_size", config.get("group_size"))
    translated = {
        "quant_method": "fp8",
        "activation_scheme": config.get("activation_scheme", "dynamic"),
        "weight_block_size": block if isinstance(block, list) else None,
        "fmt": config.get("fmt", "e4m3"),
        "extra_config": config.get("extra_config"),
    }
    reader = _WeightOnlyFp8 if "act_bits" not in config else Fp8Reader
    return reader(_with(checkpoint, translated))


class _WeightOnlyFp8(Fp8Reader):
    """FP8 weights whose inputs stay in full precision: no `act_bits` in the config."""

    def weights(self) -> Mapping[str, SourceWeight]:
        """Describe every weight, by module, without quantization of inputs."""
        return {
            module: replace(weight, scheme=replace(weight.scheme, input=None))
            if weight.scheme is not None
            else weight
            for module, weight in super().weights().items()
        }


def _compressed_config(config: Config, checkpoint_name: str) -> dict[str, Any]:
    """Return a compressed-tensors config: one group for all, one for each entry that differs."""
    groups: dict[str, Any] = {}
    ignored = []
    for pattern, values in _entries(config, checkpoint_name):
        target = f"re:{pattern}"
        if _is_full_precision(values, checkpoint_name):
            ignored.append(target)
        else:
            group = _compressed_group({**config, **values}, [target], checkpoint_name)
            groups[f"group_{len(groups)}"] = group
    groups[f"group_{len(groups)}"] = _compressed_group(config, ["Linear"], checkpoint_name)
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": groups,
        "ignore": ignored,
    }


def _compressed_group(values: Config, targets: list[str], checkpoint_name: str) -> dict[str, Any]:
    weights = _arguments(values, "", checkpoint_name)
    has_input = values.get("act_bits", _FULL_PRECISION_BITS) < _FULL_PRECISION_BITS
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": _arguments(values, "act_", checkpoint_name) if has_input else None,
        "format": _compressed_format(str(values.get("data_type", "int")), weights, has_input),
    }


def _arguments(values: Config, prefix: str, checkpoint_name: str) -> dict[str, Any]:
    """Return arguments of weights, or of inputs with the prefix "act_", as the library has them."""
    data_type = str(values.get(f"{prefix}data_type") or "int")
    size = values.get(f"{prefix}group_size")
    if isinstance(size, bool) or not isinstance(size, int):
        raise wrong_value(f"{prefix}group_size", size, "an integer", checkpoint_name)
    kind = "int" if data_type.startswith("int") else "float"
    arguments: dict[str, Any] = {
        "num_bits": values.get(f"{prefix}bits"),
        "type": kind,
        "symmetric": values.get(f"{prefix}sym", True),
        "dynamic": bool(values.get(f"{prefix}dynamic", True)) if prefix else False,
        "group_size": size if size > 0 else None,
        "strategy": "group" if size > 0 else "channel" if size == -1 else "tensor",
    }
    if data_type.startswith("nv_fp"):
        arguments |= {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
        arguments["dynamic"] = "local" if prefix else False
    elif data_type.startswith("mx_fp"):
        arguments["scale_dtype"] = "torch.uint8"
    return arguments


def _compressed_format(data_type: str, weights: Config, has_input: bool) -> str:
    if data_type.startswith("nv_fp"):
        return "nvfp4-pack-quantized"
    if data_type.startswith("mx_fp"):
        return "mxfp4-pack-quantized" if weights["num_bits"] == 4 else "mxfp8-quantized"
    if data_type.startswith("fp"):
        return "float-quantized"
    return "int-quantized" if has_input else "pack-quantized"


__all__ = ["open_auto_round"]
