"""The baseline file: what every layer of a checkpoint lost, kept in a repository.

    {
     "quantload_baseline": 2,
     "metric": "relative_l2/1",
     "sha256": "...",
     "reference": {"name": "qwen-bf16", "digest": "sha256:..."},
     "candidate": {"name": "qwen-w4", "digest": "sha256:...", "bits_per_weight": 4.16},
     "reference_config": {"model_type": "qwen3", "rms_norm_eps": 1e-06, ...},
     "candidate_config": {...},
     "quantization": {"method": "compressed-tensors", "kv_cache": {}, "left_out": [], ...},
     "tokens": {"sha256": "...", "count": 2048, "ids": [[1, 2, ...], ...]},
     "made_on": {"device": "cpu", "dtype": "float32", "torch": "2.13.0", ...},
     "tolerances": {"weight_db": 0.02, ..., "layers": {"*.k_proj": {"weight_db": 0.1}}},
     "repeats": {"runs": ["bfloat16", "1 thread"], "sigma_db": {"output_median": 0.02, ...}, ...},
     "sketch": {"file": "qwen-w4.sketch.safetensors", "sha256": "...", "sigma_db": 0.22},
     "end": {"kl_mean": [0.0312, 0.0009], "top1": [0.936, 0.005]},
     "blocks": {"model.layers.0": 0.0213, ...},
     "layers": {
      "model.layers.0.mlp.down_proj": {"candidate": "9f3c...", "encoding": "W4A16", ...},
      ...
     }
    }

A line a layer, sorted, numbers of 6 significant digits: a change reads well in a diff. Digests are
of values, not of files: a checkpoint that is packed in another way is the same. `made_on` is shown
when a check fails and never compared; its dtype says what arithmetic adds to errors of outputs. The
token ids are in the file, so that it means the same everywhere. Of config.json the keys are kept
that change what a model computes, and of its quantization config what engines read by, see
`baseline_quantization.py`. `sha256` is of all but itself and the tolerances, which may be
edited: see `baseline_tolerances.py`; sketches of the reference: `baseline_sketch.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from quantload.accuracy.baseline_tolerances import Repeats, Tolerances, tolerances_json
from quantload.errors import BaselineError

VERSION, METRIC = 2, "relative_l2/1"
ABSENT = "absent"  # the digest of what a side has not, or has no relative error
_OPTIONAL = ("repeats", "sketch", "blocks")
_DIGITS = 6


@dataclass(frozen=True, kw_only=True)
class LayerBaseline:
    """What is kept of one layer, or of another float tensor.

    Args:
        candidate: Digest of its values in the candidate, 16 hexadecimal digits.
        reference: The same of the reference.
        encoding: How the candidate holds it.
        weight: Relative L2 error of the weight.
        steps: Largest error in steps; None where there are none.
        block: Largest noise of a block in units of its rounding; None likewise.
        output: Relative L2 error of the isolated output over all tokens; None without tokens.
        output_median: Median over tokens of the relative error of each; None likewise.
        tokens: Tokens that reached it; None likewise.
        input: The fixed scale of its input, and zero point; None where there is none.
        estimate_db: Standard error of `weight` where it is an estimate from a sketch; None where it
            was measured. Never in a baseline.
    """

    candidate: str
    reference: str
    encoding: str
    weight: float
    steps: float | None = None
    block: float | None = None
    output: float | None = None
    output_median: float | None = None
    tokens: int | None = None
    input: str | None = None
    estimate_db: float | None = None


@dataclass(frozen=True, kw_only=True)
class KeptSketch:
    """The sketch of the reference that lies beside a baseline.

    Args:
        file: Its name.
        sha256: Of its bytes.
        sigma_db: Root mean square error of its estimates, as measured on the candidate.
    """

    file: str
    sha256: str
    sigma_db: float


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The tokens that were run.

    Args:
        sha256: Of the ids, see `ids_digest`.
        count: How many.
        ids: The sequences.
    """

    sha256: str
    count: int
    ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A baseline; see the top of this file.

    Args:
        reference: Name of the reference.
        candidate: Name of the candidate.
        bits_per_weight: Of the candidate's weights, scales included.
        layers: One entry a weight, then one for each other float tensor, by checkpoint name.
        tokens: None if only weights were compared.
        end: Mean and standard error at the output, by metric ("kl_mean", "top1").
        blocks: Median over tokens of the error of the candidate's hidden states after each block.
        tolerances: What a check allows.
        repeats: What was measured of repeats; None if nothing was.
        sketch: The sketch of the reference; None if none was kept.
        made_on: Where it was made, for people.
        reference_config: What the reference's config.json says of the model, see `kept_facts`.
        candidate_config: The same of the candidate.
        quantization: What the candidate's quantization config says, see `quantization_facts`; None
            in files of before it was kept.
    """

    reference: str
    candidate: str
    bits_per_weight: float
    layers: Mapping[str, LayerBaseline]
    tokens: Tokens | None = None
    end: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    blocks: Mapping[str, float] = field(default_factory=dict)
    tolerances: Tolerances = field(default_factory=Tolerances)
    repeats: Repeats | None = None
    sketch: KeptSketch | None = None
    made_on: Mapping[str, str] = field(default_factory=dict)
    reference_config: Mapping[str, Any] = field(default_factory=dict)
    candidate_config: Mapping[str, Any] = field(default_factory=dict)
    quantization: Mapping[str, Any] | None = None

    @property
    def dtype(self) -> str:
        """The dtype in which both sides ran."""
        return self.made_on.get("dtype", "float32")

    def digest(self, side: str) -> str:
        """Return one digest of all layers of a side, "reference" or "candidate"."""
        lines = [f"{name} {getattr(layer, side)}" for name, layer in sorted(self.layers.items())]
        return "sha256:" + hashlib.sha256("\n".join(lines).encode()).hexdigest()


# -- writing ---------------------------------------------------------------------------------------


def baseline_text(baseline: Baseline) -> str:
    """Return the file's text; equal baselines have equal text.

    Raises:
        BaselineError: A number is not finite.
    """
    head: dict[str, Any] = {
        "quantload_baseline": VERSION,
        "metric": METRIC,
        "sha256": "",
        "reference": {"name": baseline.reference, "digest": baseline.digest("reference")},
        "candidate": {
            "name": baseline.candidate,
            "digest": baseline.digest("candidate"),
            "bits_per_weight": _rounded(baseline.bits_per_weight),
        },
        "reference_config": dict(sorted(baseline.reference_config.items())),
        "candidate_config": dict(sorted(baseline.candidate_config.items())),
        "quantization": baseline.quantization,
        "tokens": None if baseline.tokens is None else asdict(baseline.tokens),
        "made_on": dict(sorted(baseline.made_on.items())),
        "tolerances": tolerances_json(baseline.tolerances),
        "repeats": None if baseline.repeats is None else _repeats_json(baseline.repeats),
        "sketch": None if baseline.sketch is None else _rounded(asdict(baseline.sketch)),
        "end": _rounded(dict(sorted(baseline.end.items()))),
        "blocks": _rounded(dict(baseline.blocks)),
    }
    head = {key: value for key, value in head.items() if value or key not in _OPTIONAL}
    if baseline.quantization is None:
        del head["quantization"]
    layers = {name: _layer_json(layer) for name, layer in sorted(baseline.layers.items())}
    head["sha256"] = content_digest({**head, "layers": layers})
    lines = [f" {json.dumps(key)}: {_compact(key, value)}," for key, value in head.items()]
    shown = [f"  {json.dumps(name)}: {_compact(name, layer)}" for name, layer in layers.items()]
    return "\n".join(["{", *lines, ' "layers": {', ",\n".join(shown), " }", "}", ""])


def content_digest(content: Mapping[str, Any]) -> str:
    """Return the sha256 of all that a baseline file holds, but for this and its tolerances."""
    kept = {k: v for k, v in content.items() if k not in ("sha256", "tolerances")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _compact(what: str, value: object) -> str:
    try:
        return json.dumps(value, separators=(", ", ": "), allow_nan=False)
    except ValueError as error:
        raise BaselineError(f"`{what}` is not finite: `{value}`") from error


def _layer_json(layer: LayerBaseline) -> dict[str, Any]:
    return {k: _rounded(v) for k, v in sorted(asdict(layer).items()) if v is not None}


def _repeats_json(repeats: Repeats) -> dict[str, Any]:
    content: dict[str, Any] = _rounded(asdict(repeats))
    del content["layers"]  # their tolerances are kept
    return content


def _rounded(value: Any) -> Any:  # noqa: ANN401 - what JSON holds
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(held) for key, held in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, (tuple, list)) else value


__all__ = [
    "ABSENT",
    "METRIC",
    "VERSION",
    "Baseline",
    "KeptSketch",
    "LayerBaseline",
    "Tokens",
    "baseline_text",
    "content_digest",
]
