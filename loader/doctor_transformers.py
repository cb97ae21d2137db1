"""Rules of `doctor` about what transformers does not load, or loads with other values.

All were seen with transformers 5.24.0 and compressed-tensors 0.20.1, see docs/engines.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quantload.errors import listed
from quantload.loader.doctor_config import inverse_scales
from quantload.loader.doctor_subject import Finding, Level, Subject
from quantload.loader.engine_facts import FP8, INT, NVFP4, NVFP4_WEIGHT
from quantload.loader.formats.compressed_tensors_config import parse_config
from quantload.loader.source import SourceWeight

_WAY = "load it with `CompressedTensorsConfig(dequantize=True)`"
_FILE = "quantizers/quantizer_compressed_tensors.py"


def layers_load(subject: Subject) -> Iterator[Finding]:
    """Layouts of compressed-tensors that transformers does not load."""
    if subject.engine.fuses or subject.method_name != "compressed-tensors":
        return
    for weight, scheme, family in subject.quantized():
        assert scheme.weight is not None, "only quantized weights are asked about"
        packed = "weight_packed" in weight.leaves
        entries = subject.source.checkpoint.tensors
        zeros = weight.leaves.get("weight_zero_point") if family == INT and packed else None
        if zeros and entries[zeros].shape[0] != weight.shape[0]:
            yield _error(
                subject,
                weight,
                "packed zero points",
                "zero points with one row for each row of the weight",
            )
        if family == FP8 and scheme.weight.granularity == "block":
            block = scheme.weight.block_of(*weight.shape)
            if _ends_inside(weight.shape, block):
                yield _error(
                    subject,
                    weight,
                    f"{weight.shape[0]} x {weight.shape[1]}",
                    f"multiples of the block, {block[0]} x {block[1]}, or less than one",
                )
        if family in (NVFP4, NVFP4_WEIGHT):
            yield from _about_global_scale(subject, weight)
        if packed and subject.facts.kinds.get(weight.module) == "embedding":
            yield _error(subject, weight, "a packed embedding", "an embedding in full precision")


def _ends_inside(shape: tuple[int, int], block: tuple[int, int]) -> bool:
    return any(size > step and size % step for size, step in zip(shape, block, strict=True))


def fp8_layers_load(subject: Subject) -> Iterator[Finding]:
    """The fp8 method reads `weight_scale_inv` of whole blocks, or one of the tensor."""
    if subject.engine.fuses or subject.method_name != "fp8":
        return
    for weight, scheme, _ in subject.quantized():
        assert scheme.weight is not None, "only quantized weights are asked about"
        found = expected = ""
        if not any(leaf.endswith("scale_inv") or leaf == "scale" for leaf in weight.leaves):
            found, expected = f"scales in {listed(weight.leaves)}", "a tensor `weight_scale_inv`"
        elif scheme.weight.granularity == "channel":
            found, expected = "one scale a row", "one scale a block, or one of the tensor"
        elif _ends_inside(weight.shape, scheme.weight.block_of(*weight.shape)):
            found = f"{weight.shape[0]} x {weight.shape[1]}, {scheme.weight.sharing}"
            expected = "whole blocks"
        if found:
            hint = "convert it with `--scheme FP8_DYNAMIC`"
            yield _error(subject, weight, found, expected, hint=hint)


def plain_heads_are_ignored(subject: Subject) -> Iterator[Finding]:
    """A head is a `Linear` there: one in full precision has to be in `ignore`."""
    if subject.engine.fuses or subject.method_name != "compressed-tensors":
        return
    config = parse_config(subject.quantization)
    for weight in subject.source.weights.values():
        is_head = subject.facts.kinds.get(weight.module) == "head"
        matched = config.match(weight.module, ("Linear",)) if is_head else None
        if matched is not None and matched[0].is_quantized and not weight.is_quantized:
            yield _error(
                subject,
                weight,
                f"a head in full precision, which `{matched[1]}` in `targets` names",
                f"`{weight.module}` in `ignore`",
                hint=f"add `{weight.module}` to `ignore` of the quantization config",
            )


def _about_global_scale(subject: Subject, weight: SourceWeight) -> Iterator[Finding]:
    name = weight.leaves.get("weight_global_scale")
    if name and not subject.source.checkpoint.tensors[name].shape:
        yield _error(subject, weight, "a global scale of no dimensions", "one of shape [1]")
    if subject.is_expert(weight):
        yield _error(
            subject,
            weight,
            "experts in NVFP4",
            "another scheme: their global scales are left out, values are wrong",
        )


def experts_load(subject: Subject) -> Iterator[Finding]:
    """Experts of W8A8, FP8 blocks and with zero points stop the conversion of weights."""
    if subject.engine.fuses or subject.method_name != "compressed-tensors":
        return
    for weight, scheme, family in subject.quantized():
        assert scheme.weight is not None, "only quantized weights are asked about"
        if subject.is_expert(weight) and (family == "int8-int8" or not scheme.weight.symmetric):
            yield _error(
                subject,
                weight,
                f"experts in {scheme}",
                "experts in W4A16, W8A16 or FP8_DYNAMIC",
                hint="convert it with one of these for `*.experts.`",
            )


def _error(
    subject: Subject, weight: SourceWeight, found: str, expected: str, hint: str = _WAY
) -> Finding:
    return Finding(
        rule="transformers-layer",
        level="error",
        layer=weight.module,
        found=found,
        expected=expected,
        hint=hint,
        source=subject.cite(_FILE),
    )


def config_is_parsed(subject: Subject) -> Iterator[Finding]:
    """Values at which the config class of transformers or compressed-tensors raises."""
    if subject.engine.fuses or subject.method is None:
        return
    for level, found, expected in _values(subject.method_name, subject.quantization):
        yield Finding(
            rule="config-value",
            level=level,
            found=found,
            expected=expected,
            source=subject.cite(subject.method.source),
        )


_Value = tuple[Level, str, str]


def _values(method: str, config: Mapping[str, Any]) -> Iterator[_Value]:
    if method == "compressed-tensors":
        yield from _values_of_groups(config)
    if method == "fp8":
        for found, expected, _ in inverse_scales(config):
            yield "error", found, expected
    size = config.get("group_size")
    if method == "auto-round" and (not isinstance(size, int) or size == 0 or size < -1):
        yield "error", f"group_size `{size}`", "a number above zero, or -1"
    if method == "gptq" and config.get("bits") not in (2, 3, 4, 8):
        yield "error", f"{config.get('bits')} bits", "2, 3, 4 or 8 bits"


def _values_of_groups(config: Mapping[str, Any]) -> Iterator[_Value]:
    groups = config.get("config_groups")
    for key, group in groups.items() if isinstance(groups, Mapping) else ():
        order = (group.get("weights") or {}).get("actorder") if group else None
        if order in ("group", "dynamic"):
            yield "error", f"actorder `{order}` in group `{key}`", "`static`, or none"
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("targets"):
        targets = listed(sparsity["targets"])
        yield "error", f"sparsity_config with targets {targets}", "no sparsity_config"
    if config.get("transform_config"):
        yield "error", "a `transform_config`", "none: rotations of inputs are not applied"


CONFIG_RULES = (config_is_parsed,)
RULES = (
    layers_load,
    fp8_layers_load,
    plain_heads_are_ignored,
    experts_load,
    *CONFIG_RULES,
)
__all__ = ["CONFIG_RULES", "RULES"]
