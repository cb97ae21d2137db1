"""What a baseline keeps of a quantization config: engines read weights as it says.

    method, formats   how the tensors of a module are laid out; told where these are called as they
                      were, since a checkpoint in another file format is no change
    tensors           what those tensors are called
    kv_cache          how keys and values are cached
    left_out          modules that are quantized in the files, and that the config leaves out: an
                      engine takes their codes for values, or does not find them
    left_plain        modules in full precision that the config covers by a rule for many

Schemes are kept for each layer, and say all else. So lists of names and patterns are compared by
the modules that they select.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from quantload.errors import counted, listed
from quantload.loader.formats.agreement import EntryCounts
from quantload.loader.source import Source

# How tensors are laid out, and what engines take where it is not said.
_FORMATS = {
    "format": None,
    "quantization_status": "compressed",
    "checkpoint_format": "gptq",
    "packing_format": None,
}
_OF_OBSERVERS = ("observer", "observer_kwargs", "block_structure", "actorder")
_OF_EVERY_CACHE = ("num_bits", "type")
_KEYS = ("method", "formats", "tensors", "kv_cache", "left_out", "left_plain")


def quantization_facts(source: Source) -> dict[str, Any]:
    """Return what a baseline keeps, as JSON holds it; {} of a checkpoint in full precision."""
    config = source.checkpoint.quantization_config or {}
    quantized = [weight for weight in source.weights.values() if weight.is_quantized]
    cache = source.reader.cache_scheme
    if not quantized and not cache:
        return {}
    entries = source.reader.entries
    counts = entries if isinstance(entries, EntryCounts) else EntryCounts({})
    facts = {
        "method": config.get("quant_method") or source.format_name,
        "formats": _formats(config),
        "tensors": sorted({leaf.rpartition(".")[2] for w in quantized for leaf in w.leaves}),
        "kv_cache": _cache(cache),
        "left_out": sorted(counts.left_out),
        "left_plain": sorted(counts.left_plain),
    }
    kept: dict[str, Any] = json.loads(json.dumps(facts, default=str), parse_constant=str)
    return kept


def _formats(config: Mapping[str, Any]) -> dict[str, Any]:
    found = {k: config[k] for k, usual in _FORMATS.items() if config.get(k) not in (None, usual)}
    if config.get("quant_method") == "awq":
        found["version"] = config.get("version") or "gemm"
    groups = config.get("config_groups")
    of_groups = groups.values() if isinstance(groups, Mapping) else ()
    formats = {
        str(group.get("format") or config.get("format"))
        for group in of_groups
        if isinstance(group, Mapping) and group.get("weights") is not None
    }
    return found | ({"config_groups": sorted(formats)} if formats else {})


def _cache(scheme: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what a scheme of the cache computes, without how its scales were found."""
    kept = (scheme or {}).items()
    return {k: v for k, v in sorted(kept) if v is not None and k not in _OF_OBSERVERS}


def checked_facts(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a baseline file holds of a quantization config.

    Raises:
        ValueError: It is damaged.
    """
    if not content:
        return content
    if content.keys() != set(_KEYS):
        raise ValueError(f"`quantization` has {listed(content)}, expected {listed(_KEYS)}")
    for key, kind in (("formats", Mapping), ("kv_cache", Mapping), ("tensors", list)):
        if not isinstance(content[key], kind):
            raise ValueError(f"`{key}` of `quantization` is no {kind.__name__}")
    for key in ("left_out", "left_plain"):
        names = content[key]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"`{key}` of `quantization` is expected to be a list of names")
    return content


def changed_quantization(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line for everything that an engine reads in another way.

    Args:
        before: From `quantization_facts`; {} where nothing was quantized.
        now: The same of what is judged.
    """
    if before == now:
        return []
    if not before or not now:
        what = [facts.get("method") for facts in (before, now)]
        return list(_values({"quant_method": what[0]}, {"quant_method": what[1]}))
    return list(_changes(before, now))


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    is_same_layout = before["tensors"] == now["tensors"]
    is_same_method = before["method"] == now["method"]
    if is_same_layout:
        yield from _values({"quant_method": before["method"]}, {"quant_method": now["method"]})
        yield from _values(before["formats"], now["formats"])
    caches = [facts["kv_cache"] for facts in (before, now)]
    if not is_same_method:  # each format has words of its own for the rest
        caches = [{k: v for k, v in one.items() if k in _OF_EVERY_CACHE} for one in caches]
    if caches[0] != caches[1]:
        yield from _values({"kv_cache_scheme": caches[0]}, {"kv_cache_scheme": caches[1]})
    if out := sorted(set(now["left_out"]) - set(before["left_out"])):
        yield (
            f"config: the quantization config leaves out {counted(len(out), 'quantized module')}: "
            f"{listed(out)}; in the baseline it did not"
        )
    covered = sorted(set(now["left_plain"]) - set(before["left_plain"]))
    covered = [module for module in covered if ".experts." not in module]  # these lie in two ways
    if is_same_method and covered:
        yield (
            f"config: the quantization config covers {counted(len(covered), 'module')} in full "
            f"precision: {listed(covered)}; in the baseline it did not"
        )


def _values(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted(before.keys() | now.keys()):
        one, other = (facts.get(key, _FORMATS.get(key)) for facts in (before, now))
        if one != other:
            yield (
                f"config: `quantization_config.{key}` is `{_shown(other)}`, expected "
                f"`{_shown(one)}`"
            )


def _shown(value: object) -> str:
    return "absent" if value in (None, {}) else json.dumps(value).replace('"', "'")


__all__ = ["changed_quantization", "checked_facts", "quantization_facts"]
