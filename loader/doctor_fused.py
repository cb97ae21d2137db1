"""Rules of `doctor` about layers that an engine runs as one: q/k/v, gate/up, experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quantload.errors import listed
from quantload.loader.checkpoint import Checkpoint, files_kept_open
from quantload.loader.doctor_parallel import engine_groups
from quantload.loader.doctor_subject import Finding, Subject
from quantload.loader.engine_facts import NVFP4, NVFP4_WEIGHT, family_of
from quantload.loader.source import SourceWeight
from quantload.quant.scheme import Scheme

# The one number of an NVFP4 weight and of its input, by format.
_GLOBAL_SCALES = ("weight_global_scale", "weight_scale_2")
_INPUT_SCALES = ("input_global_scale", "input_scale", "activation_scale")


def members_are_alike(subject: Subject) -> Iterator[Finding]:
    """All members of a fused layer have to be quantized alike, or all be in full precision."""
    for group in engine_groups(subject):
        members = [subject.source.weights[m] for m in group if m in subject.source.weights]
        kinds: dict[str, list[str]] = {}
        for member in members:
            kinds.setdefault(_kind(member), []).append(member.module)
        if len(kinds) < 2:
            continue
        found = "; ".join(f"{kind}: {listed(names, limit=3)}" for kind, names in kinds.items())
        yield Finding(
            rule="fused-scheme",
            level="error",
            layer=members[0].module,
            found=found,
            expected=f"one scheme for {listed((m.module for m in members), limit=6)}, "
            "which run as one layer",
            hint="convert it with one rule for all of them, or `--on-split promote`",
            source=subject.source_of("fused-scheme"),
        )


def _kind(weight: SourceWeight) -> str:
    if weight.scheme is None or weight.scheme.weight is None:
        return "full precision"
    return f"{weight.scheme}, {_inner(weight.scheme)}"


def _inner(scheme: Scheme) -> str:
    assert scheme.weight is not None, "asked of quantized weights only"
    zeros = "" if scheme.weight.symmetric else ", zero points"
    inputs = "" if scheme.input is None or scheme.input.dynamic else ", fixed input scales"
    return f"{scheme.weight.grid.name} {scheme.weight.sharing}{zeros}{inputs}"


@files_kept_open()
def scales_are_shared(subject: Subject) -> Iterator[Finding]:
    """Numbers that one fused layer has only once have to be equal in all its members."""
    found: list[Finding] = []
    for group in engine_groups(subject):
        members = [subject.source.weights[m] for m in group if m in subject.source.weights]
        if len({_kind(member) for member in members}) != 1 or members[0].scheme is None:
            continue
        if members[0].scheme.weight is None:
            continue
        is_expert = ".experts." in members[0].module
        sets = _pairs_of_experts(members) if is_expert else [members]
        for alike in sets:
            found += _about_members(subject, alike)
    return iter(found)


def _pairs_of_experts(members: list[SourceWeight]) -> list[list[SourceWeight]]:
    """Gate and up of one expert share numbers; two experts do not."""
    by_expert: dict[str, list[SourceWeight]] = {}
    for member in members:
        by_expert.setdefault(member.module.rpartition(".")[0], []).append(member)
    return [alike for alike in by_expert.values() if len(alike) > 1]


def _about_members(subject: Subject, members: list[SourceWeight]) -> Iterator[Finding]:
    scheme = members[0].scheme
    assert scheme is not None
    assert scheme.weight is not None
    is_nvfp4 = family_of(scheme) in (NVFP4, NVFP4_WEIGHT)
    if is_nvfp4:
        yield from _unequal(subject, members, _GLOBAL_SCALES, "error", "wrong values")
    elif scheme.weight.granularity == "tensor" and scheme.weight.grid.is_float8:
        why = "it rounds weights again to the largest of them"
        yield from _unequal(subject, members, ("weight_scale", "weight_scale_inv"), "warning", why)
    if (scheme.input is not None and not scheme.input.dynamic) or is_nvfp4:
        why = "it takes one of them for all, so inputs are rounded otherwise"
        yield from _unequal(subject, members, _INPUT_SCALES, "warning", why)


def _unequal(
    subject: Subject, members: list[SourceWeight], leaves: tuple[str, ...], level: str, why: str
) -> Iterator[Finding]:
    for leaf in leaves:
        names = [member.leaves[leaf] for member in members if leaf in member.leaves]
        values = [_number(subject.source.checkpoint, name) for name in names]
        known = [value for value in values if value is not None]
        if len(known) < 2 or len(set(known)) == 1:
            continue
        shown = ", ".join(
            f"{m.module.rpartition('.')[2]} {value:g}"
            for m, value in zip(members, known, strict=False)
        )
        yield Finding(
            rule="fused-scale",
            level="error" if level == "error" else "warning",
            layer=members[0].module,
            found=f"`{leaf}` differs: {shown}",
            expected=f"one value in a fused layer; of several, {why}",
            hint="convert it with `--scheme same`, or quantize it again",
            source=subject.source_of("fused-scale"),
        )


def _number(checkpoint: Checkpoint, name: str) -> float | None:
    """Read a tensor of one element; None for others."""
    if checkpoint.tensors[name].num_elements != 1:
        return None
    return float(checkpoint.read(name).to(torch.float32).reshape(-1)[0])


RULES = (members_are_alike, scales_are_shared)
__all__ = ["RULES"]
