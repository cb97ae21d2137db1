"""Rules of `doctor` about the quantization config: method, fields, formats of groups, the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from quantload.errors import QuantloadError, listed
from quantload.loader.doctor_subject import Finding, Subject
from quantload.loader.formats.compressed_tensors_arguments import (
    FLOAT,
    INT,
    NAIVE,
    NVFP4,
    PACKED,
)
from quantload.loader.formats.compressed_tensors_config import Group, parse_config

# Fields without which an engine stops, each with its other spellings.
_NEEDED: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "fp8": (("activation_scheme",),),
    "gptq": (("bits",), ("group_size",), ("desc_act",), ("sym",)),
    "awq": (("w_bit", "bits"), ("q_group_size", "group_size"), ("zero_point",)),
}
# `format`s whose groups may quantize inputs; compressed-tensors' own names.
_ACTIVATION_FORMATS = (NAIVE, INT, FLOAT, NVFP4)
_AUTO_ROUND_PACKINGS = {
    "vllm": (
        *("auto_round:auto_gptq", "auto_round:auto_awq", "auto_round:fp8"),
        "auto_round:llm_compressor",
    ),
    "sglang": ("auto_round:auto_gptq", "auto_round:auto_awq"),
}
_AUTO_ROUND_TYPES = {"vllm": ("int", "fp", "mx_fp"), "sglang": ("int",)}


def method_is_known(subject: Subject) -> Iterator[Finding]:
    """The engine has to know `quant_method`, and not to refuse it."""
    name, engine = subject.method_name, subject.engine
    if not name:
        return
    if subject.method is None:
        yield Finding(
            rule="method",
            level="error",
            found=f"quant_method `{name}`",
            expected=listed(engine.methods, limit=40),
            hint="convert it with `quantload convert` to a scheme of compressed-tensors",
            source=subject.cite(engine.methods_source),
        )
    elif subject.method.refused:
        yield Finding(
            rule="method",
            level="error",
            found=f"quant_method `{name}`",
            expected=f"another method: {subject.method.refused}",
            hint="convert it with `quantload convert`, for example to FP8_DYNAMIC",
            source=subject.cite(subject.method.source),
        )
    elif subject.method.package:
        yield Finding(
            rule="package",
            level="warning",
            found=f"quant_method `{name}`",
            expected=f"{engine.title} runs it with {subject.method.package} installed",
            hint=f"install {subject.method.package} beside {engine.title}",
            source=subject.cite(subject.method.source),
        )


def fields_are_there(subject: Subject) -> Iterator[Finding]:
    """The fields that the engine reads without a default have to be in the config."""
    method, config = subject.method, subject.quantization
    if method is None or not subject.engine.fuses:
        return
    for spellings in _NEEDED.get(subject.method_name, ()):
        if not any(key in config for key in spellings):
            yield Finding(
                rule="config-field",
                level="error",
                found=f"no `{spellings[0]}` in the quantization config, only {listed(config)}",
                expected=f"a field {' or '.join(f'`{key}`' for key in spellings)}",
                hint=f"add `{spellings[0]}` to the quantization config",
                source=subject.cite(method.source),
            )


def values_are_supported(subject: Subject) -> Iterator[Finding]:
    """The values of the config have to be among those that the engine has code for."""
    if subject.method is None or not subject.engine.fuses:
        return
    check = _VALUES.get(subject.method_name)
    if check is None:
        return
    for found, expected, hint in check(subject, subject.quantization):
        yield Finding(
            rule="config-value",
            level="error",
            found=found,
            expected=expected,
            hint=hint,
            source=subject.cite(subject.method.source),
        )


_Value = tuple[str, str, str]


def _fp8_values(subject: Subject, config: Mapping[str, Any]) -> Iterator[_Value]:
    scheme, block = config.get("activation_scheme"), config.get("weight_block_size")
    if scheme is not None and scheme not in ("static", "dynamic"):
        yield f"activation_scheme `{scheme}`", "`static` or `dynamic`", ""
    if block is None:
        return
    if not isinstance(block, list) or len(block) != 2:
        yield f"weight_block_size `{block}`", "two numbers, rows and columns", ""
    yield from inverse_scales(config)
    if scheme == "static":
        yield "static inputs with blocks of weights", "activation_scheme `dynamic`", ""


def inverse_scales(config: Mapping[str, Any]) -> Iterator[_Value]:
    """GPTQModel writes the inverse of scales under the name of scales, and says so."""
    if config.get("weight_scale_semantics") == "inverse":
        yield (
            "weight_scale_semantics `inverse`",
            "scales that multiply: the engine does not know this field, values are wrong",
            "convert it with `--scheme same`",
        )


def _gptq_values(subject: Subject, config: Mapping[str, Any]) -> Iterator[_Value]:
    bits, symmetric = config.get("bits"), config.get("sym")
    if (bits, symmetric) not in ((4, True), (8, True)):
        yield (
            f"bits `{bits}`, sym `{symmetric}`",
            "4 or 8 bits with sym `true`",
            "convert it with `--scheme W4A16_ASYM` or `same`",
        )
    if subject.engine.name == "vllm" and config.get("desc_act") and config.get("group_size") != -1:
        yield (
            "desc_act `true`",
            "desc_act `false`, or one scale a row: activation order is gone from its kernels",
            "convert it with `--scheme W4A16`",
        )


def _awq_values(subject: Subject, config: Mapping[str, Any]) -> Iterator[_Value]:
    bits = config.get("w_bit", config.get("bits"))
    if bits != 4:
        yield f"{bits} bits", "4 bits", "convert it with `--scheme same`"


def _auto_round_values(subject: Subject, config: Mapping[str, Any]) -> Iterator[_Value]:
    packings = _AUTO_ROUND_PACKINGS[subject.engine.name]
    packing = config.get("packing_format", packings[0])
    if packing not in packings:
        yield f"packing_format `{packing}`", listed(packings), "export it as `auto_round`"
    kinds = _AUTO_ROUND_TYPES[subject.engine.name]
    kind = str(config.get("data_type", "int"))
    if kind not in kinds and not ("mx_fp" in kinds and "mx_fp" in kind):
        yield f"data_type `{kind}`", listed(kinds), "export it as `llm_compressor`"
    if kind == "fp" and not isinstance(config.get("group_size"), list):
        yield (
            f"group_size `{config.get('group_size')}` of fp8 weights",
            "two numbers, rows and columns of a block",
            "export it as `llm_compressor`",
        )


def _modelopt_values(subject: Subject, config: Mapping[str, Any]) -> Iterator[_Value]:
    inner = config.get("quantization")
    holder = inner if isinstance(inner, Mapping) else config
    name = str(holder.get("quant_algo") or "").upper()
    known = (
        *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MXFP8"),
        "MIXED_PRECISION",
    )
    if name not in known:
        yield (
            f"quant_algo `{name}`",
            listed(known, limit=10),
            "convert it with `--scheme same`",
        )


_VALUES: Mapping[str, Callable[[Subject, Mapping[str, Any]], Iterator[_Value]]] = {
    "fp8": _fp8_values,
    "gptq": _gptq_values,
    "awq": _awq_values,
    "auto-round": _auto_round_values,
    "intel/auto-round": _auto_round_values,
    "modelopt": _modelopt_values,
    "modelopt-fp4": _modelopt_values,
    "modelopt-fp8": _modelopt_values,
}

# -- compressed-tensors ----------------------------------------------------------------------------


def groups_are_supported(subject: Subject) -> Iterator[Finding]:
    """Groups of compressed-tensors: sparsity, act-order, `format`, and what vLLM takes from it."""
    if subject.method_name != "compressed-tensors" or not subject.engine.fuses:
        return
    config = subject.quantization
    assert subject.method is not None, "both serving engines know compressed-tensors"
    where = subject.cite(subject.method.source)

    def error(found: str, expected: str, hint: str = "") -> Finding:
        return Finding(
            rule="config-group",
            level="error",
            found=found,
            expected=expected,
            hint=hint,
            source=where,
        )

    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("targets"):
        yield error(
            f"sparsity_config with targets {listed(sparsity['targets'])}",
            "no sparsity_config: support for sparse checkpoints was removed",
            "start from the dense model",
        )
    transforms = config.get("transform_config")
    if subject.engine.name == "sglang" and transforms:
        yield error("a `transform_config`", "none: rotations are not applied, values are wrong")
    elif subject.device == "cpu" and transforms:
        yield error("a `transform_config`", "none: the CPU build has no operator for rotations")
    for key, group in _raw_groups(config):
        order = (group.get("weights") or {}).get("actorder")
        if order in ("group", "dynamic") and subject.engine.name == "vllm":
            yield error(
                f"actorder `{order}` in group `{key}`",
                "actorder `static` or `weight`, or none",
                "convert it with `--scheme W4A16`",
            )
    for parsed in parsed_groups(config):
        yield from (error(*found) for found in _format_of(parsed))


def parsed_groups(config: Mapping[str, Any]) -> tuple[Group, ...]:
    """Return the groups of a compressed-tensors config; () for one that quantload does not read."""
    try:
        return parse_config(config).groups
    except QuantloadError:  # told when the checkpoint was opened
        return ()


def _raw_groups(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    groups = config.get("config_groups")
    for key, group in groups.items() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping):
            yield str(key), group


def _format_of(group: Group) -> Iterator[tuple[str, str, str]]:
    """Weight-only integers have to be packed; integers with inputs in an activation format."""
    weight = group.scheme.weight
    if weight is None or not weight.grid.is_integer or weight.grid.bits > 8:
        return
    if group.scheme.input is None and group.format != PACKED:
        yield (
            f"format `{group.format}` of weight-only integers in group `{group.name}`",
            f"format `{PACKED}`",
            "convert it with `--scheme same`",
        )
    allowed = (*_ACTIVATION_FORMATS, PACKED)
    if group.scheme.input is not None and group.format not in allowed:
        yield f"format `{group.format}` in group `{group.name}`", listed(allowed), ""


def cache_is_supported(subject: Subject) -> Iterator[Finding]:
    """A key-value cache has to be fp8 with fixed symmetric scales of a tensor or of a head."""
    scheme = subject.quantization.get("kv_cache_scheme")
    if not subject.engine.fuses or not isinstance(scheme, Mapping):
        return
    if subject.method_name != "compressed-tensors":
        return
    strategies = ("tensor", "attn_head") if subject.engine.name == "vllm" else ("tensor",)
    is_fp8 = scheme.get("type") == "float" and scheme.get("num_bits") == 8
    if is_fp8 and scheme.get("strategy") in strategies and scheme.get("symmetric", True):
        return
    keys = ("type", "num_bits", "strategy", "symmetric")
    yield Finding(
        rule="cache",
        level="error" if subject.engine.name == "vllm" else "warning",
        found=", ".join(f"{key} `{scheme.get(key)}`" for key in keys),
        expected=f"type `float`, num_bits `8`, strategy {listed(strategies)}, symmetric `true`",
        hint="remove `kv_cache_scheme` to serve without a quantized cache",
        source=subject.source_of("cache"),
    )


RULES = (
    method_is_known,
    fields_are_there,
    values_are_supported,
    groups_are_supported,
    cache_is_supported,
)
__all__ = ["RULES", "inverse_scales", "parsed_groups"]
