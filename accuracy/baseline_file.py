"""Read baseline files: what is damaged is refused, whatever a merge or an editor made of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from quantload.accuracy.baseline import (
    METRIC,
    VERSION,
    Baseline,
    KeptSketch,
    LayerBaseline,
    Tokens,
    content_digest,
)
from quantload.accuracy.baseline_quantization import checked_facts
from quantload.accuracy.baseline_tolerances import Repeats, tolerances_of
from quantload.accuracy.statistics import ids_digest
from quantload.errors import BaselineError

_MORE_THAN_ANY = 1e30  # errors, bits, standard errors and tokens are all below
_EDITED = "it was edited by hand, or merged: only its tolerances may be; write it again"


def read_baseline(file: Path) -> Baseline:
    """Read a baseline file.

    Raises:
        BaselineError: It cannot be read, is of another version, or is damaged.
    """
    content = _content(file)
    version = content.get("quantload_baseline") if isinstance(content, dict) else None
    if version != VERSION or isinstance(version, bool):
        raise BaselineError(
            f"`{file}` is of version `{json.dumps(version)}`, expected `{VERSION}`",
            hint="write it again with this version of quantload" if version == 1 else "",
        )
    if content.get("metric") != METRIC:
        raise BaselineError(f"`{file}` holds `{content.get('metric')}`, expected `{METRIC}`")
    try:
        found = _baseline_of(content)
    except ValueError as error:
        raise BaselineError(f"the baseline `{file}` is damaged: {error}") from error
    found.tolerances.check_patterns(found.layers, file)
    for side in ("reference", "candidate"):
        if content[side].get("digest") != found.digest(side):
            raise BaselineError(
                f"the baseline `{file}` is damaged: digests of the {side}'s layers do not give "
                f"`{content[side].get('digest')}`",
                hint=_EDITED,
            )
    if content.get("sha256") != content_digest(content):
        raise BaselineError(
            f"the baseline `{file}` is damaged: its content does not have the sha256 "
            f"`{content.get('sha256')}`",
            hint=_EDITED,
        )
    return found


def _content(file: Path) -> Any:  # noqa: ANN401 - JSON
    try:
        return json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse)
    except FileNotFoundError as error:
        raise BaselineError(
            f"there is no baseline `{file}`", hint="`quantload baseline write` makes one"
        ) from error
    except RecursionError as error:
        raise BaselineError(f"the baseline `{file}` is damaged: it is nested too deep") from error
    except (OSError, ValueError) as error:
        raise BaselineError(f"cannot read the baseline `{file}`: {error}") from error


def _refuse(number: str) -> NoReturn:
    raise ValueError(f"it is damaged: it holds `{number}`, expected finite numbers")


def _baseline_of(content: Mapping[str, Any]) -> Baseline:
    reference, candidate = (_object(content, side) for side in ("reference", "candidate"))
    end = _object(content, "end")
    layers = _object(content, "layers")
    if not layers:
        raise ValueError("it has no layers")
    return Baseline(
        reference=_text(reference, "name"),
        candidate=_text(candidate, "name"),
        bits_per_weight=_number(candidate, "bits_per_weight"),
        layers={name: _layer_of(name, layers) for name in layers},
        tokens=None if _get(content, "tokens") is None else _tokens_of(_object(content, "tokens")),
        end={name: _mean_and_error(name, pair) for name, pair in end.items()},
        blocks=_numbers(content, "blocks") if "blocks" in content else {},
        tolerances=tolerances_of(_object(content, "tolerances")),
        repeats=_repeats_of(_object(content, "repeats")) if "repeats" in content else None,
        sketch=_sketch_of(_object(content, "sketch")) if "sketch" in content else None,
        made_on={k: str(v) for k, v in _object(content, "made_on").items()},
        reference_config=_object(content, "reference_config"),
        candidate_config=_object(content, "candidate_config"),
        quantization=checked_facts(_object(content, "quantization"))
        if "quantization" in content
        else None,
    )


def _sketch_of(content: Mapping[str, Any]) -> KeptSketch:
    kept = KeptSketch(
        file=_text(content, "file"),
        sha256=_text(content, "sha256"),
        sigma_db=_number(content, "sigma_db"),
    )
    if Path(kept.file).name != kept.file:
        raise ValueError(f"`file` of the sketch is `{kept.file}`, expected a name in its folder")
    return kept


def _repeats_of(content: Mapping[str, Any]) -> Repeats:
    return Repeats(
        runs=tuple(str(run) for run in _list(content, "runs")),
        sigma_db=_numbers(content, "sigma_db"),
        sigma_top1=_number(content, "sigma_top1"),
    )


def _layer_of(name: str, layers: Mapping[str, Any]) -> LayerBaseline:
    layer = _object(layers, name)
    known = {f.name for f in fields(LayerBaseline)} - {"estimate_db"}
    texts = ("candidate", "reference", "encoding", "input")
    required = ("candidate", "reference", "encoding", "weight")
    try:
        if missing := [key for key in required if key not in layer]:
            raise ValueError(f"there is no `{missing[0]}`")
        if unknown := sorted(layer.keys() - known):
            raise ValueError(f"`{unknown[0]}` is no part of it")
        values: dict[str, Any] = {
            key: (_text if key in texts else _number)(layer, key) for key in layer
        }
    except ValueError as error:
        raise ValueError(f"layer `{name}`: {error}") from error
    if "tokens" in values:
        values["tokens"] = int(values["tokens"])
    return LayerBaseline(**values)


def _tokens_of(content: Mapping[str, Any]) -> Tokens:
    ids = _list(content, "ids")
    for row in ids:
        if not isinstance(row, list) or not all(type(one) is int and one >= 0 for one in row):
            raise ValueError("`ids` of the tokens are expected to be lists of token ids")
    kept = Tokens(
        sha256=_text(content, "sha256"),
        count=int(_number(content, "count")),
        ids=tuple(tuple(row) for row in ids),
    )
    if (sum(map(len, ids)), ids_digest(ids)) != (kept.count, kept.sha256):
        raise ValueError(f"the token ids are not those of sha256 `{kept.sha256}`")
    return kept


def _mean_and_error(name: str, pair: object) -> tuple[float, float]:
    if not isinstance(pair, list) or len(pair) != 2 or not all(map(_is_finite, pair)):
        raise ValueError(f"`{name}` of `end` is `{pair}`, expected mean and standard error")
    return float(pair[0]), float(pair[1])


# -- values of JSON --------------------------------------------------------------------------------


def _get(content: Mapping[str, Any], key: str) -> Any:  # noqa: ANN401 - JSON
    if key not in content:
        raise ValueError(f"there is no `{key}`")
    return content[key]


def _object(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = _get(content, key)
    if not isinstance(value, Mapping):
        raise ValueError(f"`{key}` is `{_shown(value)}`, expected an object")
    return value


def _list(content: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = _get(content, key)
    if not isinstance(value, list):
        raise ValueError(f"`{key}` is `{_shown(value)}`, expected a list")
    return value


def _text(content: Mapping[str, Any], key: str) -> str:
    value = _get(content, key)
    if not isinstance(value, str):
        raise ValueError(f"`{key}` is `{_shown(value)}`, expected a text")
    return value


def _number(content: Mapping[str, Any], key: str) -> Any:  # noqa: ANN401 - int or float
    value = _get(content, key)
    if not _is_finite(value) or value < 0:
        raise ValueError(f"`{key}` is `{_shown(value)}`, expected a number of 0 or more")
    return value


def _numbers(content: Mapping[str, Any], key: str) -> dict[str, float]:
    values = _object(content, key)
    return {name: float(_number(values, name)) for name in values}


def _is_finite(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) < _MORE_THAN_ANY and math.isfinite(value)  # type: ignore[arg-type]


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


__all__ = ["read_baseline"]
