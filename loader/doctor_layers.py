"""Rules of `doctor` about single layers: families, kernels, tensors, head, embedding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from quantload.errors import listed
from quantload.loader.doctor_config import parsed_groups
from quantload.loader.doctor_parallel import part_of
from quantload.loader.doctor_subject import Finding, Subject
from quantload.loader.engine_facts import (
    FP8,
    FP8_WEIGHT,
    INT,
    INT4_FP8,
    INT8,
    MXFP4,
    MXFP8,
    NVFP4,
    NVFP4_WEIGHT,
    Kernel,
    unlike,
)
from quantload.loader.formats.matching import matches_regex
from quantload.loader.source import SourceWeight
from quantload.quant.scheme import Scheme

_RECODE = "convert it with `quantload convert`, for example to W4A16 or FP8_DYNAMIC"


def schemes_are_supported(subject: Subject) -> Iterator[Finding]:
    """The engine has to have code for what each layer is quantized to, in this method."""
    method = subject.method
    if method is None or method.families is None:
        return
    for weight, scheme, family in subject.quantized():
        families = method.families
        if subject.is_expert(weight) and method.expert_families is not None:
            families = method.expert_families
        found, expected = str(scheme), f"one of {listed(families, limit=12)}"
        if family in families:
            if family != INT:
                continue
            found, expected = unlike(
                scheme,
                symmetric=method.symmetric,
                asymmetric=method.asymmetric,
                group_sizes=method.group_sizes,
            )
        if found:
            yield Finding(
                rule="scheme",
                level="error",
                layer=weight.module,
                found=found,
                expected=expected,
                hint=_RECODE,
                source=subject.cite(method.source),
            )


def kernels_exist(subject: Subject) -> Iterator[Finding]:
    """A kernel has to take the part of each layer that one device holds."""
    method = subject.method
    if method is None or method.families is None or not subject.engine.kernels:
        return
    for weight, scheme, family in subject.quantized():
        if family not in method.families and family not in (method.expert_families or ()):
            continue
        kernels = _kernels_for(subject, weight, family)
        refusals = {k: _refusal(subject, k, weight, scheme) for k in kernels}
        usable = [kernel for kernel, refusal in refusals.items() if not refusal]
        if any(not kernel.package and not kernel.note for kernel in usable):
            continue
        yield _about_kernels(subject, weight, scheme, usable, refusals)


def _kernels_for(subject: Subject, weight: SourceWeight, family: str) -> tuple[Kernel, ...]:
    table = subject.engine.kernels
    if subject.is_expert(weight) and (subject.device, f"experts {family}") in table:
        return table[subject.device, f"experts {family}"]
    return table.get((subject.device, family), ())


def _about_kernels(
    subject: Subject,
    weight: SourceWeight,
    scheme: Scheme,
    usable: list[Kernel],
    refusals: Mapping[Kernel, str],
) -> Finding:
    if usable:
        needs = " or ".join(kernel.package or kernel.note for kernel in usable)
        return Finding(
            rule="kernel",
            level="warning",
            layer=weight.module,
            found=str(scheme),
            expected=f"{needs}: only {listed(k.name for k in usable)} runs it",
            source=subject.cite(usable[0].source),
        )
    reasons = "; ".join(f"{kernel.name} wants {why}" for kernel, why in refusals.items())
    source = next(iter(refusals)).source if refusals else subject.engine.methods_source
    return Finding(
        rule="kernel",
        level="error",
        layer=weight.module,
        found=f"{scheme}, {_size_text(subject, weight)}",
        expected=reasons or f"a kernel for {subject.device}: there is none",
        hint=_RECODE,
        source=subject.cite(source),
    )


def _size_text(subject: Subject, weight: SourceWeight) -> str:
    rows, columns = part_of(subject, weight)
    text = f"{rows} x {columns}"
    return f"{text} on each of {subject.parts} devices" if subject.parts > 1 else text


def _refusal(subject: Subject, kernel: Kernel, weight: SourceWeight, scheme: Scheme) -> str:
    """Say what a kernel wants that a layer does not have; "" if it takes the layer."""
    assert scheme.weight is not None, "only quantized layers need kernels of this kind"
    if kernel.methods is not None and subject.method_name not in kernel.methods:
        return f"method {listed(kernel.methods)}"
    if kernel.sharing is not None and scheme.weight.granularity not in kernel.sharing:
        return f"one scale a {' or '.join(sorted(kernel.sharing))}"
    block = scheme.weight.block
    if kernel.block_columns and block is not None and block[1] != kernel.block_columns:
        return f"blocks of {kernel.block_columns} columns"
    if kernel.dynamic_inputs and scheme.input is not None and not scheme.input.dynamic:
        return "input scales that are computed while it runs"
    if scheme.weight.grid.is_integer:
        _, expected = unlike(
            scheme,
            symmetric=kernel.symmetric,
            asymmetric=kernel.asymmetric,
            group_sizes=kernel.group_sizes,
        )
        if expected:
            return expected
    rows, columns = part_of(subject, weight)
    if rows % kernel.rows:
        return f"rows in multiples of {kernel.rows}"
    return f"columns in multiples of {kernel.columns}" if columns % kernel.columns else ""


# -- tensors of compressed-tensors -----------------------------------------------------------------

_FLOATS = frozenset({torch.bfloat16, torch.float16, torch.float32})
_INT32, _INT8 = frozenset({torch.int32}), frozenset({torch.int8})
_E4M3, _UINT8 = frozenset({torch.float8_e4m3fn}), frozenset({torch.uint8})
_E8M0 = frozenset({torch.uint8, torch.float8_e8m0fnu})


@dataclass(frozen=True)
class _Sizes:
    """Numbers from which the shapes of the tensors of a layer follow.

    Args:
        rows: N.
        columns: K.
        bits: Of one code.
        groups: (rows, columns) of the scales.
    """

    rows: int
    columns: int
    bits: int
    groups: tuple[int, int]


_Shape = Callable[[_Sizes], tuple[int, ...]]
_Leaf = tuple[frozenset[torch.dtype], _Shape]


def _words(codes: int, bits: int) -> int:
    return math.ceil(codes * bits / 32)


def _codes(sizes: _Sizes) -> tuple[int, ...]:
    return sizes.rows, sizes.columns


def _scales(sizes: _Sizes) -> tuple[int, ...]:
    return sizes.groups


_PACKED_INT: Mapping[str, _Leaf] = {
    "weight_packed": (_INT32, lambda s: (s.rows, _words(s.columns, s.bits))),
    "weight_scale": (_FLOATS, _scales),
    "weight_zero_point": (_INT32, lambda s: (_words(s.rows, s.bits), s.groups[1])),
}
_CODES_INT: Mapping[str, _Leaf] = {"weight": (_INT8, _codes), "weight_scale": (_FLOATS, _scales)}
_CODES_FP8: Mapping[str, _Leaf] = {"weight": (_E4M3, _codes), "weight_scale": (_FLOATS, _scales)}
_CODES_NVFP4: Mapping[str, _Leaf] = {
    "weight_packed": (_UINT8, lambda s: (s.rows, s.columns // 2)),
    "weight_scale": (_E4M3, _scales),
}
# What vLLM and SGLang allocate for a layer, by family; leaves with a size of one are not in here.
_TENSORS: Mapping[str, Mapping[str, _Leaf]] = {
    INT: _PACKED_INT,
    INT4_FP8: _PACKED_INT,
    INT8: _CODES_INT,
    FP8: _CODES_FP8,
    FP8_WEIGHT: _CODES_FP8,
    NVFP4: _CODES_NVFP4,
    NVFP4_WEIGHT: _CODES_NVFP4,
    MXFP4: {
        "weight_packed": (_UINT8, lambda s: (s.rows, s.columns // 2)),
        "weight_scale": (_E8M0, _scales),
    },
    MXFP8: {"weight": (_E4M3, _codes), "weight_scale": (_E8M0, _scales)},
}


def tensors_fit(subject: Subject) -> Iterator[Finding]:
    """Tensors have to have the dtypes and shapes for which the engine has made room."""
    if subject.method_name != "compressed-tensors" or not subject.engine.fuses:
        return
    for weight, scheme, family in subject.quantized():
        sizes = _sizes_of(weight, scheme)
        for leaf, (dtypes, shape) in _TENSORS.get(family, {}).items():
            if leaf in weight.leaves:
                yield from _about_tensor(subject, weight, leaf, dtypes, shape(sizes))
        if "weight_g_idx" in weight.leaves and subject.engine.name == "vllm":
            yield _tensor_finding(subject, weight, "a tensor `weight_g_idx`", "no such tensor")


def _sizes_of(weight: SourceWeight, scheme: Scheme) -> _Sizes:
    assert scheme.weight is not None, "only quantized layers have scales"
    rows, columns = weight.shape
    block = scheme.weight.block_of(rows, columns)
    groups = math.ceil(rows / block[0]), math.ceil(columns / block[1])
    return _Sizes(rows, columns, scheme.weight.grid.bits, groups)


def _about_tensor(
    subject: Subject,
    weight: SourceWeight,
    leaf: str,
    dtypes: frozenset[torch.dtype],
    shape: tuple[int, ...],
) -> Iterator[Finding]:
    entry = subject.source.checkpoint.tensors[weight.leaves[leaf]]
    if entry.dtype not in dtypes:
        names = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        found = str(entry.dtype).removeprefix("torch.")
        yield _tensor_finding(subject, weight, f"`{leaf}` in {found}", listed(names))
    is_scalar = math.prod(shape) == 1 and math.prod(entry.shape) == 1 and len(entry.shape) < 2
    if entry.shape != shape and not is_scalar and not weight.experts:
        yield _tensor_finding(
            subject, weight, f"`{leaf}` of shape {list(entry.shape)}", f"{list(shape)}"
        )


def _tensor_finding(subject: Subject, weight: SourceWeight, found: str, expected: str) -> Finding:
    return Finding(
        rule="tensor",
        level="error",
        layer=weight.module,
        found=found,
        expected=expected,
        hint="convert it with `--scheme same`, which writes the layout of today",
        source=subject.source_of("tensor"),
    )


# -- head and embedding ----------------------------------------------------------------------------

# Methods whose quantized output head vLLM and SGLang read, without a word in the config.
_HEADS = {"modelopt", "modelopt-fp4", "modelopt-mixed", "modelopt-mxfp8", "torchao", "auto-round"}


def head_is_named(subject: Subject) -> Iterator[Finding]:
    """Engines make a head of its own class: a class name in `targets` does not reach it."""
    heads = {name for name, kind in subject.facts.kinds.items() if kind == "head"}
    for weight, _, _ in subject.quantized():
        if not subject.engine.fuses or subject.method is None or weight.module not in heads:
            continue
        expected = _head_wants(subject, weight.module)
        if expected:
            yield Finding(
                rule="head",
                level="error",
                layer=weight.module,
                found=f"a quantized head, {weight.encoding}",
                expected=expected,
                hint=f"convert it with `--rule {weight.module}=dense`",
                source=subject.cite(subject.method.source),
            )


def _head_wants(subject: Subject, module: str) -> str:
    method, config = subject.method_name, subject.quantization
    if method in _HEADS:
        return ""
    if method in ("gptq", "awq"):
        return "" if config.get("lm_head") else "`lm_head: true` in the quantization config"
    if method != "compressed-tensors":
        return "a head in full precision, with this method"
    for group in parsed_groups(config):
        if any(_names(target, module) for target in group.targets):
            return ""
    return "a target that names it, or a pattern: a class name such as `Linear` is not for heads"


def _names(target: str, module: str) -> bool:
    return matches_regex(target, module) if target.startswith("re:") else target == module


def embedding_is_plain(subject: Subject) -> Iterator[Finding]:
    """Only vLLM reads quantized embeddings, and only packed integers."""
    if not subject.engine.fuses or subject.method is None:
        return
    for weight, _, family in subject.quantized():
        if subject.facts.kinds.get(weight.module) != "embedding":
            continue
        is_packed = family == INT and subject.method_name == "compressed-tensors"
        if is_packed and subject.engine.name == "vllm":
            continue
        integers = subject.engine.name == "vllm" and subject.method_name == "compressed-tensors"
        yield Finding(
            rule="embedding",
            level="error",
            layer=weight.module,
            found=f"a quantized embedding, {weight.encoding}",
            expected="full precision" + (", or packed integers" if integers else ""),
            hint=f"convert it with `--rule {weight.module}=dense`",
            source=subject.cite(subject.method.source),
        )


# How `decided_by` of a weight begins where the config says that it is in full precision.
_LEAVING_OUT = (
    *("exclude_modules: ", "ignore: ", "ignored_layers: ", "modules_to_not_convert: "),
    "exclude: ",
)
_NOT_NAMED = "the headers (the config leaves it out)"  # of compressed-tensors, after a group


def config_names_what_is_quantized(subject: Subject) -> Iterator[Finding]:
    """Engines believe the config: a layer that it leaves out has no room for scales."""
    for weight, _, _ in subject.quantized():
        by = weight.decided_by
        is_left_out = by.startswith(_LEAVING_OUT) or by.endswith(_NOT_NAMED)
        if subject.method is not None and is_left_out:
            yield Finding(
                rule="left-out",
                level="error",
                layer=weight.module,
                found=f"quantized tensors, {weight.encoding}, by {by}",
                expected="a config that says so, or a weight in full precision",
                hint="convert it with `--scheme same`, which writes a config that fits",
                source=subject.cite(subject.method.source),
            )


def reading_tells_nothing(subject: Subject) -> Iterator[Finding]:
    """What quantload warns of while it opens a checkpoint is worth a look in any engine."""
    for warning in subject.source.warnings:
        yield Finding(
            rule="reading",
            level="warning",
            found=warning,
            expected="nothing to tell",
            source="quantload, reading the checkpoint",
        )


RULES = (
    config_names_what_is_quantized,
    reading_tells_nothing,
    schemes_are_supported,
    kernels_exist,
    tensors_fit,
    head_is_named,
    embedding_is_plain,
)
__all__ = ["RULES"]
