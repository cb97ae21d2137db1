"""What serving engines demand of a checkpoint, as data: methods, kinds of weights, kernels.

A quantized layer is of one *family*, which its scheme tells (`family_of`). For every quantization
method of a config an engine runs some families; each family needs a kernel, and kernels ask for
bit widths, group sizes and widths of the part of a layer that one device holds.

Facts were read from the sources of the versions named in `loader/engine_vllm.py` and its siblings;
paths in `source` are relative to the package of the engine. What holds for one version need not
hold for the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from quantload.quant.scheme import InputScheme, Scheme, WeightScheme

Device = Literal["cuda", "cpu"]
PER_ROW = 0  # as a group size: one scale a row

INT = "int"
INT8 = "int8-int8"
INT4_INT8 = "int4-int8"
INT4_FP8 = "int4-fp8"
FP8 = "fp8-fp8"
FP8_WEIGHT = "fp8"
NVFP4 = "nvfp4-nvfp4"
NVFP4_WEIGHT = "nvfp4"
MXFP4 = "mxfp4"
MXFP6 = "mxfp6"
MXFP8 = "mxfp8"
OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class Method:
    """What an engine makes of one `quant_method`.

    Args:
        families: Families that it runs; None if only the engine's own package can tell.
        expert_families: Those that it runs in experts; None is `families`.
        symmetric: Bit widths without zero points, of integer weights; None is any.
        asymmetric: Bit widths with zero points; None is any.
        group_sizes: Group sizes of integer weights; None is any.
        package: What has to be installed beside the engine.
        refused: Why the engine refuses it although it knows the name.
        source: File that says so.
    """

    families: frozenset[str] | None = None
    expert_families: frozenset[str] | None = None
    symmetric: frozenset[int] | None = None
    asymmetric: frozenset[int] | None = None
    group_sizes: frozenset[int] | None = None
    package: str = ""
    refused: str = ""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What a kernel asks of the part of a layer that one device holds.

    Args:
        name: Its name.
        symmetric: Bit widths without zero points; None is any.
        asymmetric: Bit widths with zero points; None is any.
        group_sizes: Group sizes; None is any.
        rows: N of the part must be a multiple of this.
        columns: K of the part must be a multiple of this.
        methods: Methods whose layers it runs; None is any.
        sharing: Granularities of the weight; None is any.
        block_columns: Columns of a block, where weights are scaled by blocks; 0 is any.
        dynamic_inputs: True if it takes no fixed input scales.
        package: What has to be installed beside the engine.
        note: What else it needs, for a warning: an instruction set.
        source: File that says so.
    """

    name: str
    symmetric: frozenset[int] | None = None
    asymmetric: frozenset[int] | None = None
    group_sizes: frozenset[int] | None = None
    rows: int = 1
    columns: int = 1
    methods: frozenset[str] | None = None
    sharing: frozenset[str] | None = None
    block_columns: int = 0
    dynamic_inputs: bool = False
    package: str = ""
    note: str = ""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine in one version.

    Args:
        name: As the user says it: "vllm".
        title: As it is written: "vLLM".
        version: Version whose sources were read.
        methods: By `quant_method` of the config, in lower case.
        kernels: By device and family; a family without an entry has no kernel.
        fuses: True if q/k/v, gate/up and experts run as one layer each.
        largest_global_scale: True if fused NVFP4 members share the largest of their global scales.
        methods_source: File of the table of methods.
        sources: File that says so, by rule.
    """

    name: str
    title: str
    version: str
    methods: Mapping[str, Method]
    kernels: Mapping[tuple[Device, str], tuple[Kernel, ...]]
    fuses: bool
    largest_global_scale: bool = False
    methods_source: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices whose kernels are known."""
        return tuple(sorted({device for device, _ in self.kernels}, reverse=True))


def family_of(scheme: Scheme) -> str:
    """Return the family of a scheme that quantizes weights."""
    assert scheme.weight is not None, "a layer in full precision has no family"
    weight, inputs = _weight_kind(scheme.weight), _input_kind(scheme.input)
    if weight in (MXFP4, MXFP6, MXFP8):
        return weight
    if weight in (NVFP4_WEIGHT, FP8_WEIGHT):
        pairs = {(NVFP4_WEIGHT, "nvfp4"): NVFP4, (FP8_WEIGHT, "fp8"): FP8}
        return weight if inputs == "" else pairs.get((weight, inputs), OTHER)
    if weight != INT:
        return OTHER
    if inputs == "" and scheme.weight.granularity not in ("channel", "group"):
        return OTHER
    bits = scheme.weight.grid.bits
    pairs_of_int = {(8, "int8"): INT8, (4, "int8"): INT4_INT8, (4, "fp8"): INT4_FP8}
    return INT if inputs == "" else pairs_of_int.get((bits, inputs), OTHER)


def _weight_kind(weight: WeightScheme) -> str:
    name = weight.grid.name
    if name == "e2m1":
        kinds = {("e4m3", 16): NVFP4_WEIGHT, ("e8m0", 32): MXFP4}
        return kinds.get((weight.scale, weight.group_size or 0), OTHER)
    if name == "e4m3":
        return MXFP8 if weight.scale == "e8m0" and weight.group_size == 32 else FP8_WEIGHT
    if name in ("e2m3", "e3m2") and weight.scale == "e8m0":
        return MXFP6
    return INT if weight.grid.is_integer else OTHER


def _input_kind(inputs: InputScheme | None) -> str:
    if inputs is None:
        return ""
    if inputs.grid.name == "e2m1":
        return "nvfp4" if inputs.scale == "e4m3" else "mxfp4"
    if inputs.grid.name == "e4m3":
        return "fp8"
    return "int8" if inputs.grid.name in ("int8", "uint8") else inputs.grid.name


def group_size_of(weight: WeightScheme) -> int:
    """Return columns per scale, `PER_ROW` for one scale a row or for the tensor."""
    return weight.group_size or PER_ROW


def unlike(
    scheme: Scheme,
    *,
    symmetric: frozenset[int] | None,
    asymmetric: frozenset[int] | None,
    group_sizes: frozenset[int] | None,
) -> tuple[str, str]:
    """Return (found, expected) where integer weights are not as a method or kernel wants them.

    Args:
        scheme: Scheme of integer weights.
        symmetric: Bit widths without zero points; None is any.
        asymmetric: Bit widths with zero points; None is any.
        group_sizes: Group sizes; None is any.

    Returns:
        ("", "") if they are.
    """
    weight = scheme.weight
    assert weight is not None, "a layer in full precision needs no kernel of this kind"
    widths = symmetric if weight.symmetric else asymmetric
    zeros = "without" if weight.symmetric else "with"
    if widths is not None and weight.grid.bits not in widths:
        wanted = numbers(widths) if widths else "none"
        return f"{weight.grid.bits} bits {zeros} zero points", f"{wanted} bits {zeros} zero points"
    size = group_size_of(weight)
    if group_sizes is not None and size not in group_sizes:
        return _sharing(size), f"groups of {numbers(group_sizes - {PER_ROW})}, or one scale a row"
    return "", ""


def _sharing(size: int) -> str:
    return "one scale a row" if size == PER_ROW else f"groups of {size}"


def numbers(values: frozenset[int]) -> str:
    """Return numbers in order: "32, 64, 128"."""
    return ", ".join(map(str, sorted(values)))


# -- shared by the tables of engines ---------------------------------------------------------------

Kernels = dict[tuple[Device, str], tuple[Kernel, ...]]
MARLIN_GROUPS = frozenset({PER_ROW, 32, 64, 128})
FOUR, FOUR_OR_EIGHT, NO_WIDTH = frozenset({4}), frozenset({4, 8}), frozenset[int]()
MODELOPT = frozenset({FP8, FP8_WEIGHT, NVFP4, NVFP4_WEIGHT, MXFP8})


def plain(name: str, source: str, *, columns: int = 1) -> tuple[Kernel, ...]:
    """A kernel that asks for nothing but a multiple of columns."""
    return (Kernel(name=name, columns=columns, source=source),)


def int8(name: str, source: str) -> tuple[Kernel, ...]:
    """Weights of 8 bits with quantized inputs: a row or the tensor has one scale, no zero point."""
    return (
        Kernel(
            name=name,
            symmetric=frozenset({8}),
            asymmetric=NO_WIDTH,
            sharing=frozenset({"tensor", "channel"}),
            source=source,
        ),
    )


__all__ = ["Device", "Engine", "Kernel", "Method", "family_of", "int8", "plain", "unlike"]
