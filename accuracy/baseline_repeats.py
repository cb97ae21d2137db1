"""How far repeats of one candidate lie apart, statistic by statistic.

A repeat runs the same tokens in other arithmetic, or is another candidate that the same tool made
of the same reference with the same settings. Differences are taken from what was measured first, in
dB, beyond what the arithmetic of a dtype is known to add (`ARITHMETIC`); sigma is their root mean
square, so that a shift of all repeats counts too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from quantload.accuracy.baseline import Baseline, LayerBaseline
from quantload.accuracy.baseline_tolerances import Repeats
from quantload.accuracy.baseline_verdict import ARITHMETIC, added_by, beyond, change_db

_SQUARES = ("noise",)  # statistics that go with the square of an error
_Number = Callable[[LayerBaseline], float | None]
_STATISTICS: dict[str, _Number] = {
    "weight": lambda layer: layer.weight,
    "steps": lambda layer: layer.steps,
    "noise": lambda layer: layer.block,
    "output": lambda layer: layer.output,
    "output_median": lambda layer: layer.output_median,
}
_WITH_MEAN = ("weight", "output")


def repeats_of(first: Baseline, kinds: Sequence[tuple[str, Sequence[Baseline]]]) -> Repeats:
    """Measure how far repeats lie from what was measured first.

    Args:
        first: The baseline.
        kinds: For people what a kind of repeat changes, and what was measured of each. Of every
            statistic the noisiest kind counts.
    """
    found = [_of_kind(first, repeats) for _, repeats in kinds if repeats]
    sigma: dict[str, float] = {}
    layers: dict[str, dict[str, float]] = {}
    for one in found:
        _keep_larger(sigma, one.sigma_db)
        for name, own in one.layers.items():
            _keep_larger(layers.setdefault(name, {}), own)
    return Repeats(
        runs=tuple(f"{len(repeats)} x {what}" for what, repeats in kinds if repeats),
        sigma_db=sigma,
        sigma_top1=max((one.sigma_top1 for one in found), default=0.0),
        layers=layers,
    )


def _keep_larger(found: dict[str, float], others: Mapping[str, float]) -> None:
    for key, value in others.items():
        found[key] = max(found.get(key, 0.0), value)


def _of_kind(first: Baseline, repeats: Sequence[Baseline]) -> Repeats:
    sigma: dict[str, float] = {}
    own: dict[str, dict[str, float]] = {}
    for statistic in _STATISTICS:
        changes = {
            name: found
            for name in first.layers
            if (found := _changes(statistic, first, name, repeats))
        }
        if not changes:
            continue
        sigma[statistic] = _rms(change for found in changes.values() for change in found)
        for name, found in changes.items():
            own.setdefault(name, {})[statistic] = _rms(found)
        if statistic in _WITH_MEAN:
            sigma[f"{statistic}_mean"] = _rms(
                sum(found[place] for found in changes.values()) / len(changes)
                for place in range(len(repeats))
            )
    sigma |= _of_model(first, repeats)
    top1 = [one.end["top1"][0] - first.end["top1"][0] for one in repeats if "top1" in first.end]
    return Repeats(runs=(), sigma_db=sigma, sigma_top1=_rms(top1), layers=own)


def _changes(
    statistic: str, first: Baseline, name: str, repeats: Sequence[Baseline]
) -> list[float]:
    """Return by how many dB each repeat differs; nothing for a layer without that statistic.

    Errors that are none, or as small as float32 arithmetic makes them, have no dB to speak of.
    """
    number = _STATISTICS[statistic]
    before = number(first.layers[name])
    found = []
    for one in repeats:
        now = number(one.layers[name]) if name in one.layers else None
        if before is None or now is None or min(before, now) <= ARITHMETIC["float32"].output:
            return []
        more = added_by(first, one.dtype).output if "output" in statistic else 0.0
        found.append((0.5 if statistic in _SQUARES else 1.0) * beyond(before, now, more))
    return found


def _of_model(first: Baseline, repeats: Sequence[Baseline]) -> dict[str, float]:
    """Return sigma of the hidden states after blocks, and of the mean KL."""
    found: dict[str, float] = {}
    blocks = [
        beyond(before, one.blocks[path], added_by(first, one.dtype).block)
        for one in repeats
        for path, before in first.blocks.items()
        if path in one.blocks and before > ARITHMETIC["float32"].block
    ]
    if blocks:
        found["block_median"] = _rms(blocks)
    kl = first.end.get("kl_mean", (0.0, 0.0))[0]
    if kl > ARITHMETIC["float32"].kl:
        found["kl"] = _rms(
            max(0.5 * change_db(kl + added_by(first, one.dtype).kl, now), 0.0)
            or min(0.5 * change_db(kl, now), 0.0)
            for one in repeats
            if (now := one.end["kl_mean"][0])
        )
    return found


def _rms(values: Iterable[float]) -> float:
    squares = [value**2 for value in values]
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0


__all__ = ["repeats_of"]
