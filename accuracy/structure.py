"""What two checkpoints are made of, layer by layer, from their headers and scales alone.

    names       which tensors hold a layer, on either side; layers of one side only
    bits        stored for each element of a weight, with its scales, zero points and padding
    skipped     layers that the candidate's quantization config covers, whose like are quantized in
                the other blocks, and that are in full precision: whoever wrote the files forgot
                them, and an engine that believes the config cannot load them
    uncovered   layers that are quantized and that the candidate's config leaves out: an engine
                takes their codes for values, or does not find them
    scales      that are not finite, or negative or zero where no scale can be
    extra       layers of blocks that the reference does not have; a head of its own beside tied
                embeddings is none

Scales that lie inside blocks of codes (GGUF) or are quantized themselves (bitsandbytes) are not
looked at.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from quantload.accuracy.input_scales import InputScales, compare_input_scales
from quantload.accuracy.one_model import apart_alike
from quantload.errors import counted, listed
from quantload.loader.checkpoint import files_kept_open
from quantload.loader.doctor_scales import holds_numbers, scale_problem
from quantload.loader.formats.agreement import EntryCounts
from quantload.loader.source import Source, SourceWeight
from quantload.progress import Progress

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, kw_only=True)
class LayerStructure:
    """How one layer is held on both sides.

    Args:
        module: Checkpoint name.
        shape: Shape of its weight in full precision.
        reference: What the reference holds; "" if it lacks the layer.
        candidate: The same of the candidate.
        reference_bits: Stored bits for each element of the reference's weight, with scales, zero
            points and padding; 0 if it lacks the layer.
        bits: The same of the candidate.
        reference_tensors: Names of the reference's tensors, by leaf.
        tensors: The same of the candidate.
        zero_scales: Scales of the candidate that are 0: everything that they scale is lost, or was
            zero.
        problem: What is wrong with the candidate's scales; "" if nothing is.
    """

    module: str
    shape: tuple[int, ...]
    reference: str
    candidate: str
    reference_bits: float
    bits: float
    reference_tensors: Mapping[str, str]
    tensors: Mapping[str, str]
    zero_scales: int = 0
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class StructureComparison:
    """How all layers are held.

    Args:
        layers: One entry a layer: those of the reference, then those of the candidate alone.
        reference_bits: Stored bits for each element of all weights of the reference.
        bits: The same of the candidate.
        quantized_bits: The same over the weights that the candidate quantizes; 0 if there are none.
        skipped: Layers that the candidate's config covers and that are in full precision, although
            their like in other blocks are quantized.
        input_scales: Static scales of the candidate's inputs.
        uncovered: Layers that are quantized and that the candidate's config leaves out.
        added: Weights of norms, and biases that are not zero, that only the candidate has.
    """

    layers: tuple[LayerStructure, ...]
    reference_bits: float
    bits: float
    quantized_bits: float
    skipped: tuple[str, ...] = ()
    input_scales: InputScales = field(default_factory=InputScales)
    uncovered: tuple[str, ...] = ()
    added: tuple[str, ...] = ()

    @property
    def extra(self) -> tuple[str, ...]:
        """Layers in numbered blocks that only the candidate has."""
        alone = (layer.module for layer in self.layers if not layer.reference)
        return tuple(module for module in alone if _NUMBER.search(module))

    @property
    def problems(self) -> tuple[str, ...]:
        """One line for everything that is wrong."""
        extra = (f"layers that the reference lacks: {listed(self.extra)}",) if self.extra else ()
        added = (f"tensors that the reference lacks: {listed(self.added)}",) if self.added else ()
        count = counted(len(self.uncovered), "quantized layer")
        uncovered = f"the quantization config leaves {count} out: {listed(self.uncovered)}"
        return (
            *extra,
            *added,
            *((uncovered,) if self.uncovered else ()),
            *(f"`{layer.module}`: {layer.problem}" for layer in self.layers if layer.problem),
            *(
                f"`{module}` is in full precision: the config covers it, and other layers of its "
                "kind are quantized"
                for module in self.skipped
            ),
        )


@files_kept_open()
def compare_structure(
    reference: Source, candidate: Source, progress: Progress
) -> StructureComparison:
    """Compare how two checkpoints hold their layers; reads headers, and the candidate's scales.

    Raises:
        NotComparable: They are of different models.
    """
    one, other = apart_alike(reference, candidate)
    modules = dict.fromkeys([*one.weights, *other.weights])
    progress.start("scales", total=len(modules), unit="layers")
    layers = []
    for module in modules:
        layers.append(_layer(one, other, module))
        progress.advance(1, note=module)
    progress.finish()
    quantized = [weight for weight in other.weights.values() if weight.is_quantized]
    return StructureComparison(
        layers=tuple(layers),
        reference_bits=_mean_bits(one, one.weights.values()),
        bits=_mean_bits(other, other.weights.values()),
        quantized_bits=_mean_bits(other, quantized),
        skipped=skipped_layers(candidate),
        input_scales=compare_input_scales(one, other),
        uncovered=uncovered_layers(candidate),
        added=tuple(name for name in other.plain if name not in one.plain and _counts(other, name)),
    )


def _counts(source: Source, name: str) -> bool:
    """True for a tensor that changes what a layer computes; some tools write biases of zeros."""
    if name.endswith(".bias"):
        return bool(source.read_plain(name).count_nonzero())
    return name.endswith(".weight")


def _layer(reference: Source, candidate: Source, module: str) -> LayerStructure:
    one, other = reference.weights.get(module), candidate.weights.get(module)
    described = other or one
    assert described is not None, "a module of neither side"
    zeros, problem = (0, "") if other is None else _scales(candidate, other)
    return LayerStructure(
        module=module,
        shape=described.parameter_shape,
        reference="" if one is None else one.encoding,
        candidate="" if other is None else other.encoding,
        reference_bits=0.0 if one is None else stored_bits(reference, one),
        bits=0.0 if other is None else stored_bits(candidate, other),
        reference_tensors={} if one is None else dict(one.leaves),
        tensors={} if other is None else dict(other.leaves),
        zero_scales=zeros,
        problem=problem,
    )


def _scales(source: Source, weight: SourceWeight) -> tuple[int, str]:
    """Count the zeros among the scales of a weight, and say what is wrong with them."""
    zeros, problems = 0, []
    if not weight.is_quantized:
        return 0, ""
    for leaf, name in weight.leaves.items():
        dtype = source.checkpoint.tensors[name].dtype
        if not _is_scale(leaf) or not holds_numbers(dtype):
            continue
        value = source.checkpoint.read(name)
        if problem := scale_problem(weight, leaf, value):
            problems.append(f"`{name}` with {problem}")
        if dtype.is_floating_point and dtype != torch.float8_e8m0fnu:
            zeros += int((value.to(torch.float32) == 0).sum())
    return zeros, "; ".join(problems)


def _is_scale(leaf: str) -> bool:
    return "scale" in leaf or leaf.endswith(("absmax", "SCB"))


def stored_bits(source: Source, weight: SourceWeight) -> float:
    """Return the stored bits for each element of a weight: codes, scales, zero points, padding."""
    return _stored_bits(source, weight) / max(1, math.prod(weight.parameter_shape))


def _stored_bits(source: Source, weight: SourceWeight) -> float:
    tensors = source.checkpoint.tensors
    num_bytes = sum(tensors[name].num_bytes for name in weight.leaves.values())
    return 8 * num_bytes / max(1, weight.sharers)


def _mean_bits(source: Source, weights: Iterable[SourceWeight]) -> float:
    bits = elements = 0.0
    for weight in weights:
        bits += _stored_bits(source, weight)
        elements += math.prod(weight.parameter_shape)
    return bits / max(1.0, elements)


def skipped_layers(source: Source) -> tuple[str, ...]:
    """Return the layers that were left out by accident, see the top of this file."""
    entries = source.reader.entries
    left_plain = entries.left_plain if isinstance(entries, EntryCounts) else ()
    quantized = {_kind(w.module) for w in source.weights.values() if w.is_quantized}
    return tuple(_of_quantized_kinds(left_plain, quantized))


def uncovered_layers(source: Source) -> tuple[str, ...]:
    """Return the layers that are quantized and that the config leaves out."""
    entries = source.reader.entries
    return entries.left_out if isinstance(entries, EntryCounts) else ()


def _of_quantized_kinds(modules: Iterable[str], quantized: set[str]) -> Iterator[str]:
    return (module for module in modules if _kind(module) in quantized)


def _kind(module: str) -> str:
    return _NUMBER.sub("#", module)


__all__ = [
    "LayerStructure",
    "StructureComparison",
    "compare_structure",
    "skipped_layers",
    "stored_bits",
    "uncovered_layers",
]
