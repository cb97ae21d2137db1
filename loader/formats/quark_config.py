"""AMD Quark: what its quantization config says of each module.

    {"quant_method": "quark",
     "export": {"pack_method": "order" | "reorder", "kv_cache_group": [patterns], ...},
     "global_quant_config": CONFIG, "layer_type_quant_config": {class: CONFIG},
     "layer_quant_config": {pattern: CONFIG}, "exclude": [entries], "algo_config": [...], ...}

    CONFIG = {"weight": SPEC or list, "input_tensors": SPEC or list, "output_tensors", "bias"}

The first pattern of `layer_quant_config` that matches decides, else the module's class, else the
global config. A pattern, and an entry of `exclude`, is a name or a glob whose `*` crosses dots; an
entry may also read `re:...` and matches at the start (`re.match`). Each is compared with every name
that a module has, see `names_of`.

SPEC                       dtype         qscheme                          scale_format
    e4m3, e5m2             fp8_e4m3/5m2  per_tensor, per_channel,         any, or e8m0
                                         per_group, per_block
    int4, uint4, int8, uint8  the same   per_tensor, per_channel, per_group
    e2m1, e2m3, e3m2       fp4, fp6_...  per_group                        any, or e8m0
    NVFP4                  [fp4 per_group, fp8_e4m3 per_tensor]: the second quantizes the scales

`output_tensors` of the modules of `kv_cache_group` quantize keys and values; of others they are
refused, as is a quantized bias. Rotations of activations while the model runs are refused too.

Source: AMD Quark 0.13, `QConfig`; vLLM 0.33.0, `quantization/quark`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

from quantload.errors import FormatMismatch, UnsupportedVariant, listed
from quantload.loader.formats.agreement import ConfigSays
from quantload.loader.formats.matching import names_of
from quantload.loader.formats.patterns import Patterns
from quantload.loader.formats.quark_spec import Spec, parse_input, parse_weight
from quantload.quant.scheme import InputScheme

_PACK_METHODS = ("order", "reorder")
_CACHE_TYPES = {"fp8_e4m3": "float", "int8": "int"}
_ROTATIONS = ("rotation", "quarot")
_ONLINE = ("r3", "r4", "online_r1_rotation")


@dataclass(frozen=True)
class LayerConfig:
    """How the layers of one entry are quantized.

    Args:
        weight: How their weights are stored; None if in full precision.
        input: How their inputs are quantized; None if not.
    """

    weight: Spec | None
    input: InputScheme | None


@dataclass(frozen=True)
class QuarkConfig:
    """A parsed config.

    Args:
        everything: Config of the layers that nothing else names.
        by_class: Config by name of a class.
        by_pattern: Config by entry of `patterns`.
        patterns: Keys of `layer_quant_config`, in its order.
        exclude: Modules in full precision.
        is_reordered: True if eight fields of a word lie in AWQ's order.
        cache_scheme: How keys and values are cached, in compressed-tensors' words.
    """

    everything: LayerConfig
    by_class: Mapping[str, LayerConfig]
    by_pattern: Mapping[str, LayerConfig]
    patterns: Patterns
    exclude: Patterns
    is_reordered: bool
    cache_scheme: Mapping[str, Any] | None

    def entries(self) -> list[str]:
        """Return everything that names modules, as "<list>: <entry>"."""
        named = [f"layer_quant_config: {entry}" for entry in self.patterns.entries]
        return [*(f"exclude: {entry}" for entry in self.exclude.entries), *named]

    def of_module(self, module: str) -> tuple[ConfigSays, LayerConfig]:
        """Return what the config says of a module, and how it is quantized if it is.

        The config of an excluded module is the one that it would have otherwise.
        """
        names = names_of(module)
        entry, layer, is_exact = self._config_of(module, names)
        excluded = self.exclude.first(names)
        if excluded is not None:
            return ConfigSays(False, f"exclude: {excluded}"), layer
        return ConfigSays(layer.weight is not None, entry, is_exact), layer

    def _config_of(self, module: str, names: Sequence[str]) -> tuple[str, LayerConfig, bool]:
        pattern = self.patterns.first(names)
        if pattern is not None:
            entry = f"layer_quant_config: {pattern}"
            return entry, self.by_pattern[pattern], pattern in names
        name = "Embedding" if "embed" in module.rpartition(".")[2] else "Linear"
        if name in self.by_class:
            return f"layer_type_quant_config: {name}", self.by_class[name], False
        return "global_quant_config", self.everything, False


def matches_entry(entry: str) -> Callable[[str], object]:
    """Return the test whether an entry names a module."""
    pattern = Patterns((entry,), with_regexes=True)
    return lambda module: pattern.first(names_of(module))


def parse_config(config: Mapping[str, Any]) -> QuarkConfig:
    """Parse a quantization config.

    Raises:
        UnsupportedVariant: It needs something that quantload does not read.
        FormatMismatch: It is malformed.
    """
    _refuse_rotations(config.get("algo_config"))
    export = _object(config.get("export"), "export")
    pack_method = export.get("pack_method", "reorder")
    if pack_method not in _PACK_METHODS:
        raise UnsupportedVariant(
            f"Quark `pack_method` `{pack_method!r}` is not read; expected {listed(_PACK_METHODS)}"
        )
    group = _strings(export.get("kv_cache_group"), "export.kv_cache_group")
    cached = _object(config.get("kv_cache_quant_config"), "kv_cache_quant_config")
    layers = _object(config.get("layer_quant_config"), "layer_quant_config")
    classes = _object(config.get("layer_type_quant_config"), "layer_type_quant_config")
    caching = {name for name in layers if _is_of_cache(name, group, cached)}
    return QuarkConfig(
        everything=_layer(config.get("global_quant_config"), "global_quant_config"),
        by_class={
            _class_name(name): _layer(entry, f"layer_type_quant_config: {name}")
            for name, entry in classes.items()
        },
        by_pattern={
            name: _layer(entry, f"layer_quant_config: {name}", is_cached=name in caching)
            for name, entry in layers.items()
        },
        patterns=Patterns(tuple(layers)),
        exclude=Patterns(_strings(config.get("exclude"), "exclude"), with_regexes=True),
        is_reordered=pack_method == "reorder",
        cache_scheme=_cache_scheme(layers, cached, caching, group),
    )


def _object(value: Any, key: str) -> Mapping[str, Any]:  # noqa: ANN401 - JSON
    """Check an object; null is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise FormatMismatch(
            f"`{key}` of the Quark quantization config is `{value!r}`, expected an object"
        )
    return value


def _strings(value: Any, key: str) -> tuple[str, ...]:  # noqa: ANN401 - JSON
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise FormatMismatch(
            f"`{key}` of the Quark quantization config is `{value!r}`, expected a list of names"
        )
    return tuple(value)


def _layer(entry: Any, where: str, *, is_cached: bool = False) -> LayerConfig:  # noqa: ANN401 - JSON
    entry = _object(entry, where)
    unread = ["bias"] if is_cached else ["bias", "output_tensors"]
    for key in unread:
        if entry.get(key) is not None:
            raise UnsupportedVariant(
                f"Quark checkpoints with quantized `{key}` are not read, found in `{where}`"
            )
    return LayerConfig(
        weight=parse_weight(entry.get("weight"), f"{where}, weight"),
        input=parse_input(entry.get("input_tensors"), f"{where}, input_tensors"),
    )


def _class_name(name: str) -> str:
    """Return "Linear" for `<class 'torch.nn.modules.linear.Linear'>`, `nn.Linear` and `Linear`."""
    return re.sub(r"\W+$", "", name).rpartition(".")[2]


def _is_of_cache(name: str, group: Sequence[str], cached: Mapping[str, Any]) -> bool:
    """True if the outputs of these modules are keys, values or queries in the cache's format."""
    if name in cached or any(re.match(translate(pattern), name) for pattern in group):
        return True
    return bool(group or cached) and name.endswith("q_proj")


def _cache_scheme(
    layers: Mapping[str, Any],
    cached: Mapping[str, Any],
    caching: set[str],
    group: Sequence[str],
) -> Mapping[str, Any] | None:
    entries = {**{name: layers[name] for name in layers if name in caching}, **cached}
    entries = {name: entry for name, entry in entries.items() if not name.endswith("q_proj")}
    outputs = [_object(entry, name).get("output_tensors") for name, entry in entries.items()]
    specs = [_object(spec, "output_tensors") for spec in outputs if spec is not None]
    if not specs:
        if group:
            raise FormatMismatch(
                f"`kv_cache_group` of the Quark quantization config is {listed(group)}, but no "
                "entry of `layer_quant_config` quantizes their outputs"
            )
        return None
    kinds = {(str(spec.get("dtype")), str(spec.get("qscheme"))) for spec in specs}
    dtype, qscheme = next(iter(kinds))
    if len(kinds) > 1 or dtype not in _CACHE_TYPES or qscheme != "per_tensor":
        raise UnsupportedVariant(
            f"a key-value cache in {listed(f'{d} {q}' for d, q in kinds)} is not read; expected "
            "one of `fp8_e4m3` and `int8`, `per_tensor`"
        )
    return {
        "num_bits": 8,
        "type": _CACHE_TYPES[dtype],
        "strategy": "tensor",
        "dynamic": False,
        "symmetric": True,
    }


def _refuse_rotations(algorithms: Any) -> None:  # noqa: ANN401 - JSON
    entries = algorithms if isinstance(algorithms, list) else [algorithms] if algorithms else []
    for entry in entries:
        entry = _object(entry, "algo_config")
        if entry.get("name") not in _ROTATIONS:
            continue
        online = _object(entry.get("online_config"), "algo_config.online_config")
        found = [key for key in _ONLINE if entry.get(key)]
        if online.get("online_rotation_layers"):
            found.append("online_rotation_layers")
        if found:
            raise UnsupportedVariant(
                "Quark checkpoints whose activations are rotated while the model runs are not "
                f"read: {listed(found)} in `algo_config`"
            )
