"""By how much a layer may be worse than in its baseline, and how far repeats lie apart.

The tolerances stand in the baseline file's head, and can be edited there:

    "tolerances": {"weight_db": 0.02, ..., "layers": {"*.down_proj": {"weight_db": 0.1}}}

Patterns under "layers" are globs of layer names, as the shell writes them; of those that match a
layer the last one decides, key by key.

Measured ones come from repeats, which differ from what was measured first in nothing that counts:
other arithmetic, or the same tool run again. With sigma the root mean square of their differences,

    one layer      4 sigma: one false alarm in 150 checks of 210 layers, were the noise normal
    a mean         2.8 sigma of the mean itself, or of a layer / sqrt(layers) if that is more

A layer that is noisier than the others by itself gets a pattern of its own.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any

from quantload.errors import BaselineError, listed

OF_LAYERS = ("weight_db", "output_median_db", "steps_db", "noise_db")
LAYER_SIGMAS, MEAN_SIGMAS = 4.0, 2.8


@dataclass(frozen=True, kw_only=True)
class Tolerances:
    """By how much a statistic may be worse than in the baseline.

    Defaults are above the noise of repeats and far below the smallest fault, as measured on
    SmolLM2-135M in int4: weights move 0.002 dB from machine to machine and 0.36 dB by the smallest
    real change; medians over tokens move 0.2 dB by bfloat16 arithmetic.

    Args:
        weight_db: Relative error of one weight, in dB.
        weight_mean_db: The same, mean over the weights.
        steps_db: Largest error in steps (20 log10); 0.05 steps more always pass.
        noise_db: Noise of the worst block (10 log10: it is one of squares); 4 times that of
            rounding more always passes.
        output_median_db: Median over tokens of a layer's isolated output error.
        output_mean_db: Pooled isolated output error, mean over the layers.
        block_median_db: Median over tokens of the error of the hidden states after a block.
        kl_relative: Mean KL at the end, as a part of itself; or `standard_errors` of it.
        top1: Share of positions with the same first token; or `standard_errors` of it.
        standard_errors: Of the mean KL, and of top-1 agreement.
        layers: Tolerances of single layers by glob; keys as above, of those in `OF_LAYERS`.
    """

    weight_db: float = 0.02
    weight_mean_db: float = 0.005
    steps_db: float = 2.0
    noise_db: float = 3.0
    output_median_db: float = 0.5
    output_mean_db: float = 0.05
    block_median_db: float = 0.5
    kl_relative: float = 0.1
    top1: float = 0.0
    standard_errors: float = 3.0
    layers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def of_layer(self, name: str) -> Tolerances:
        """Return what holds for one layer: later patterns beat earlier ones."""
        found: dict[str, float] = {}
        for pattern, values in self.layers.items():
            if fnmatchcase(name, pattern):
                found |= values
        return replace(self, **found) if found else self  # type: ignore[arg-type]

    def check_patterns(self, names: Iterable[str], file: object) -> None:
        """Refuse a pattern that matches no layer: it would do nothing.

        Raises:
            BaselineError: One does not.
        """
        known = list(names)
        unused = [p for p in self.layers if not any(fnmatchcase(name, p) for name in known)]
        if unused:
            raise BaselineError(
                f"tolerances of `{file}` are for {listed(unused)}, which matches none of its "
                f"layers: {listed(known)}"
            )


def tolerances_of(content: Mapping[str, Any]) -> Tolerances:
    """Read the tolerances of a baseline file.

    Raises:
        ValueError: A key is unknown, or a value is no number that an error can grow by.
    """
    values = {key: value for key, value in content.items() if key != "layers"}
    _check_values("tolerances", values, [f.name for f in fields(Tolerances) if f.name != "layers"])
    of_layers = content.get("layers", {})
    if not isinstance(of_layers, Mapping):
        raise ValueError(f"`layers` of the tolerances is `{of_layers}`")
    for pattern, own in of_layers.items():
        if not isinstance(own, Mapping):
            raise ValueError(f"the tolerances of `{pattern}` are `{own}`")
        _check_values(f"tolerances of `{pattern}`", own, OF_LAYERS)
    return Tolerances(**values, layers={pattern: dict(own) for pattern, own in of_layers.items()})


def overridden(tolerances: Tolerances, values: Mapping[str, Any]) -> Tolerances:
    """Return tolerances with some of them replaced.

    Args:
        tolerances: Of a baseline.
        values: Numbers by name, or mappings of such by glob of layers.

    Raises:
        BaselineError: A name is unknown, or a value is no number.
    """
    content = tolerances_json(tolerances)
    patterns = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    content |= {key: value for key, value in values.items() if key not in patterns}
    content["layers"] = {**content.get("layers", {}), **patterns}
    try:
        return tolerances_of(content)
    except ValueError as error:
        raise BaselineError(str(error)) from error


def tolerances_json(tolerances: Tolerances) -> dict[str, Any]:
    """Return what the file holds; patterns keep their order, since the last one decides."""
    content = asdict(tolerances)
    if not content["layers"]:
        del content["layers"]
    return content


def _check_values(what: str, values: Mapping[str, Any], known: Sequence[str]) -> None:
    for key, value in values.items():
        if key not in known:
            raise ValueError(f"the {what} have `{key}`, expected {listed(known, limit=20)}")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not value >= 0 or math.isinf(value):
            raise ValueError(f"`{key}` of the {what} is `{value}`, expected a number of 0 or more")


# -- measured from repeats -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """How far repeats lie from what was measured first.

    Args:
        runs: What each repeat changed, for people.
        sigma_db: Root mean square of the differences in dB, by statistic: "weight", "steps",
            "noise", "output_median" of layers; "weight_mean", "output_mean" of their means;
            "block_median" of blocks; "kl" of the mean KL (10 log10, as KL goes with squares).
        sigma_top1: That of top-1 agreement, as a share.
        layers: sigma_db of single layers, by name and statistic; not in the file, where a layer
            that is noisier than the rest has tolerances of its own.
    """

    runs: tuple[str, ...]
    sigma_db: Mapping[str, float]
    sigma_top1: float = 0.0
    layers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def widened(defaults: Tolerances, repeats: Repeats, *, num_layers: int) -> Tolerances:
    """Return tolerances that repeats stay below, none of them tighter than it was.

    Args:
        defaults: What holds where repeats lie close together.
        repeats: From `repeats_of`.
        num_layers: L, layers that the means are over.
    """
    sigma = repeats.sigma_db
    found: dict[str, float] = {}
    for key in (*OF_LAYERS, "block_median_db"):
        found[key] = max(
            getattr(defaults, key), LAYER_SIGMAS * sigma.get(key.removesuffix("_db"), 0.0)
        )
    for mean, single in (("weight_mean", "weight"), ("output_mean", "output")):
        of_mean = max(sigma.get(mean, 0.0), sigma.get(single, 0.0) / math.sqrt(max(num_layers, 1)))
        found[f"{mean}_db"] = max(getattr(defaults, f"{mean}_db"), MEAN_SIGMAS * of_mean)
    grown = 10 ** (LAYER_SIGMAS * sigma.get("kl", 0.0) / 10) - 1
    found["kl_relative"] = max(defaults.kl_relative, grown)
    found["top1"] = max(defaults.top1, LAYER_SIGMAS * repeats.sigma_top1)
    own: dict[str, dict[str, float]] = {}
    for name, of_layer in repeats.layers.items():
        for statistic, value in of_layer.items():
            key = f"{statistic}_db"
            if key in OF_LAYERS and LAYER_SIGMAS * value > found[key]:
                own.setdefault(glob.escape(name), {})[key] = _shown(LAYER_SIGMAS * value)
    shown = {key: _shown(value) for key, value in found.items()}
    return replace(defaults, **shown, layers={**own, **defaults.layers})


def _shown(value: float) -> float:
    """Round up to 3 digits: the file is read by people, and a limit may not get tighter."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.3g}")


__all__ = [
    "OF_LAYERS",
    "Repeats",
    "Tolerances",
    "overridden",
    "tolerances_json",
    "tolerances_of",
    "widened",
]
