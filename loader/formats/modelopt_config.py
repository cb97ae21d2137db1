"""ModelOpt: what its quantization config says of each module.

Two spellings of the same facts, each in either of two files:

    nested   {"producer": {"name": "modelopt"}, "quantization": {quant_algo, kv_cache_quant_algo,
              group_size, exclude_modules, quantized_layers}}        hf_quant_config.json
    flat     {"quant_method": "modelopt", quant_algo, ignore, kv_cache_scheme, quantized_layers,
              config_groups: {name: {weights, input_activations, targets}}}     config.json

`quant_algo` is read in any case. `MIXED_PRECISION` has an algorithm per entry of
`quantized_layers`; an entry is a module, or a module above it (`<block>.experts`). Modules that it
does not name are in full precision. Any other algorithm holds for all modules but the excluded
ones: an entry is a module's name, or a glob whose `*` crosses dots. Both lists are compared with
every name that a module has, see `names_of`.

Source: `export/convert_hf_config.py` and `export/quant_utils.py` of ModelOpt 0.47.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from quantload.errors import FormatMismatch, UnsupportedVariant, listed
from quantload.loader.formats.agreement import ConfigSays
from quantload.loader.formats.matching import names_of
from quantload.loader.formats.patterns import Patterns
from quantload.quant.grid import E2M1, E4M3, INT8
from quantload.quant.scheme import InputScheme

Layout = Literal["e4m3", "e4m3 blocks", "mxfp8", "int8", "int4", "nvfp4", "mxfp4"]

_FP8_TENSOR = InputScheme(grid=E4M3, granularity="tensor", dynamic=False)
_FP8_TOKEN = InputScheme(grid=E4M3, granularity="token")
_INT8_TENSOR = InputScheme(grid=INT8, granularity="tensor", dynamic=False)
_NVFP4 = InputScheme(grid=E2M1, granularity="group", group_size=16, scale="e4m3")
_MXFP8 = InputScheme(grid=E4M3, granularity="group", group_size=32, scale="e8m0")
_FP8_GROUP = InputScheme(grid=E4M3, granularity="group", group_size=128)


@dataclass(frozen=True)
class Algorithm:
    """One `quant_algo`.

    Args:
        name: As ModelOpt writes it.
        layout: How the weight is stored, see `modelopt.py`.
        input: How the input is quantized; None leaves it in full precision.
        group_sizes: Columns that may share one scale; () for any number.
        group_size: What the config says of it; None if nothing.
    """

    name: str
    layout: Layout
    input: InputScheme | None = None
    group_sizes: tuple[int, ...] = ()
    group_size: int | None = None


ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("FP8", "e4m3", _FP8_TENSOR),
        Algorithm("FP8_PER_CHANNEL_PER_TOKEN", "e4m3", _FP8_TOKEN),
        Algorithm("FP8_PB_WO", "e4m3 blocks", None, (128,)),
        Algorithm("FP8_BLOCK_SCALES", "e4m3 blocks", _FP8_GROUP, (128,)),
        Algorithm("MXFP8", "mxfp8", _MXFP8, (32,)),
        Algorithm("W8A8_SQ_PER_CHANNEL", "int8", _INT8_TENSOR),
        Algorithm("W8A16", "int8"),
        Algorithm("W4A16_AWQ", "int4"),
        Algorithm("W4A8_AWQ", "int4", _FP8_TENSOR),
        Algorithm("NVFP4", "nvfp4", _NVFP4, (16,)),
        Algorithm("NVFP4_AWQ", "nvfp4", _NVFP4, (16,)),
        Algorithm("NVFP4_SVD", "nvfp4", _NVFP4, (16,)),
        Algorithm("W4A16_NVFP4", "nvfp4", None, (16,)),
        Algorithm("W4A8_NVFP4_FP8", "nvfp4", _FP8_TENSOR, (16, 32)),
        Algorithm("W4A8_MXFP4_FP8", "mxfp4", _FP8_TENSOR, (32,)),
        Algorithm("MXFP4", "mxfp4", None, (32,)),
    )
}
MIXED = "MIXED_PRECISION"
_CACHE: dict[str, dict[str, Any]] = {
    "FP8": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "INT8": {"num_bits": 8, "type": "int", "strategy": "tensor"},
    "NVFP4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
}


@dataclass(frozen=True)
class ModelOptConfig:
    """A parsed config.

    Args:
        default: Algorithm of all modules that no list names; None if that is full precision.
        layers: Algorithm by module, or by a module above it.
        excluded: Names and globs of modules in full precision.
        cache_scheme: How keys and values are cached, in compressed-tensors' words.
        is_mixed: True if `layers` says everything.
    """

    default: Algorithm | None
    layers: Mapping[str, Algorithm]
    excluded: Patterns
    cache_scheme: Mapping[str, Any] | None
    is_mixed: bool

    def of_module(self, module: str) -> tuple[ConfigSays, Algorithm | None]:
        """Return what the config says of a module, and the algorithm that it has if it is stored.

        The algorithm of an excluded module is that of all others.
        """
        names = names_of(module)
        entry = self.excluded.first(names)
        if entry is not None:
            return ConfigSays(False, f"exclude_modules: {entry}"), self.fallback()
        if self.is_mixed:
            return self._listed(names)
        says = ConfigSays(self.default is not None, "quant_algo")
        return says, self.default

    def entries(self) -> list[str]:
        """Return everything that names modules, as "<list>: <entry>"."""
        excluded = [f"exclude_modules: {entry}" for entry in self.excluded.entries]
        return [*excluded, *(f"quantized_layers: {name}" for name in self.layers)]

    def _listed(self, names: Sequence[str]) -> tuple[ConfigSays, Algorithm | None]:
        for name in names:
            above = name
            while above:
                if above in self.layers:
                    entry = f"quantized_layers: {above}"
                    return ConfigSays(True, entry, above == name), self.layers[above]
                above = above.rpartition(".")[0]
        return ConfigSays(False, "quantized_layers names it not"), self.fallback()

    def fallback(self) -> Algorithm | None:
        """The algorithm of modules that are stored quantized although the config leaves them out.

        None if there are several.
        """
        if not self.is_mixed:
            return self.default
        distinct = set(self.layers.values())
        return distinct.pop() if len(distinct) == 1 else None


def matches_any_name(entry: str) -> Callable[[str], bool]:
    """Return the test whether an entry matches a module, or a module above it."""
    patterns = Patterns((entry,))

    def matches(module: str) -> bool:
        names = names_of(module)
        above = any(name.startswith(f"{entry}.") for name in names)
        return above or patterns.first(names) is not None

    return matches


def details_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object that holds `quant_algo`: the config itself, or its `quantization`."""
    nested = config.get("quantization")
    return config if nested is None else _object(nested, "quantization")


def needs_side_file(config: Mapping[str, Any]) -> bool:
    """True if the config leaves out what `hf_quant_config.json` may say: layers or a group size."""
    return _lacks_layers(config) or _lacks_group_size(config)


def _lacks_layers(config: Mapping[str, Any]) -> bool:
    details = details_of(config)
    is_mixed = _name(details.get("quant_algo"), "quant_algo") == MIXED
    return is_mixed and not details.get("quantized_layers")


def _lacks_group_size(config: Mapping[str, Any]) -> bool:
    details = details_of(config)
    algorithm = ALGORITHMS.get(_name(details.get("quant_algo"), "quant_algo"))
    has_groups = algorithm is not None and algorithm.layout in ("int4", "nvfp4")
    return has_groups and _group_size(details) is None


def parse_config(
    config: Mapping[str, Any], side_file: Mapping[str, Any] | None = None
) -> ModelOptConfig:
    """Parse a quantization config of either spelling.

    Args:
        config: The one that counts.
        side_file: Content of `hf_quant_config.json`, if there is one beside it; read where the
            config leaves something out.

    Raises:
        UnsupportedVariant: It names an algorithm that quantload does not read.
        FormatMismatch: It is malformed.
    """
    details = details_of(config)
    if not {"quant_algo", "kv_cache_quant_algo", "kv_cache_scheme"} & details.keys():
        raise FormatMismatch(
            "the ModelOpt quantization config has no `quant_algo`, found "
            f"{listed(details) or 'nothing'}"
        )
    algorithm = _name(details.get("quant_algo"), "quant_algo")
    is_mixed = algorithm == MIXED
    layers = details.get("quantized_layers")
    if _lacks_layers(config) and side_file is not None:
        layers = details_of(side_file).get("quantized_layers")
    if is_mixed and not layers:
        raise FormatMismatch(
            f"`quant_algo` is `{MIXED}`, but neither the quantization config nor "
            "`hf_quant_config.json` has `quantized_layers`"
        )
    default = None
    if algorithm and not is_mixed:
        group_size = _group_size(details)
        if side_file is not None and _lacks_group_size(config):
            group_size = _group_size_beside(side_file, algorithm)
        default = _algorithm(algorithm, group_size, "quant_algo")
        default = _weight_only(default, details)
    return ModelOptConfig(
        default=default,
        layers=_layers(layers) if is_mixed else {},
        excluded=Patterns(_excluded(details)),
        cache_scheme=_cache_scheme(details),
        is_mixed=is_mixed,
    )


def _object(value: Any, key: str) -> Mapping[str, Any]:  # noqa: ANN401 - JSON
    """Check an object; null is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise FormatMismatch(
            f"`{key}` of the ModelOpt quantization config is `{value!r}`, expected an object"
        )
    return value


def _name(value: Any, key: str) -> str:  # noqa: ANN401 - JSON
    """Upper case; "" for nothing."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise FormatMismatch(
            f"`{key}` of the ModelOpt quantization config is `{value!r}`, expected a name"
        )
    return "" if value.upper() == "NONE" else value.upper()


def _algorithm(name: str, group_size: int | None, where: str) -> Algorithm:
    found = ALGORITHMS.get(name)
    if found is None:
        raise UnsupportedVariant(
            f"ModelOpt algorithm `{name}` is not read, found in `{where}`; expected one of "
            f"{listed(ALGORITHMS, limit=20)}"
        )
    if group_size is not None and found.group_sizes and group_size not in found.group_sizes:
        raise FormatMismatch(
            f"`group_size` of the ModelOpt quantization config is `{group_size}`, expected "
            f"{listed(found.group_sizes)} for `{name}`, found in `{where}`"
        )
    return replace(found, group_size=group_size)


def _layers(value: Any) -> dict[str, Algorithm]:  # noqa: ANN401 - JSON
    layers = {}
    for module, entry in _object(value, "quantized_layers").items():
        where = f"quantized_layers: {module}"
        entry = _object(entry, where)
        name = _name(entry.get("quant_algo"), where)
        if name:
            layers[module] = _algorithm(name, _number(entry.get("group_size"), where), where)
    return layers


def _number(value: Any, where: str) -> int | None:  # noqa: ANN401 - JSON
    """A group size; exporters write 0 where there is none."""
    if value is None or (value == 0 and value is not False):
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise FormatMismatch(
            f"`group_size` of the ModelOpt quantization config is `{value!r}`, expected a positive "
            f"number, found in `{where}`"
        )
    return value


def _groups(details: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = _object(details.get("config_groups"), "config_groups")
    return [_object(group, f"config_groups: {name}") for name, group in groups.items()]


def _group_size(details: Mapping[str, Any]) -> int | None:
    stated = _number(details.get("group_size"), "group_size")
    if stated is not None:
        return stated
    found = set()
    for group in _groups(details):
        weights = _object(group.get("weights"), "weights")
        found.add(_number(weights.get("group_size"), "config_groups"))
    return found.pop() if len(found) == 1 else None


def _group_size_beside(side_file: Mapping[str, Any], algorithm: str) -> int | None:
    details = details_of(side_file)
    stated = _name(details.get("quant_algo"), "quant_algo")
    if stated != algorithm:
        raise FormatMismatch(
            f"`quant_algo` is `{algorithm}` in `config.json`, but `{stated}` in "
            "`hf_quant_config.json`"
        )
    return _group_size(details)


def _weight_only(algorithm: Algorithm, details: Mapping[str, Any]) -> Algorithm:
    """NVFP4 whose groups quantize no input is W4A16_NVFP4."""
    groups = _groups(details)
    if algorithm.name != "NVFP4" or not groups or any(g.get("input_activations") for g in groups):
        return algorithm
    return replace(algorithm, name="W4A16_NVFP4", input=None)


def _excluded(details: Mapping[str, Any]) -> tuple[str, ...]:
    entries: list[str] = []
    for key in ("exclude_modules", "ignore"):
        value = details.get(key)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise FormatMismatch(
                f"`{key}` of the ModelOpt quantization config is `{value!r}`, expected a list of "
                "names"
            )
        entries += value
    return tuple(dict.fromkeys(entries))


def _cache_scheme(details: Mapping[str, Any]) -> Mapping[str, Any] | None:
    stated = details.get("kv_cache_quant_algo")
    stated = details.get("kv_cache_scheme") if stated is None else stated
    if isinstance(stated, Mapping) and stated:
        bits, kind = stated.get("num_bits"), stated.get("type")
        names = [n for n, s in _CACHE.items() if (s["num_bits"], s["type"]) == (bits, kind)]
        name = names[0] if names else f"{bits}-bit {kind}"
    else:
        name = _name(None if stated == {} else stated, "kv_cache_quant_algo")
    if not name:
        return None
    if name not in _CACHE:
        raise UnsupportedVariant(
            f"ModelOpt cache algorithm `{name}` is not read; expected one of {listed(_CACHE)}"
        )
    return {**_CACHE[name], "dynamic": False, "symmetric": True}
