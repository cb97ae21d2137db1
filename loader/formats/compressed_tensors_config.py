"""The `quantization_config` of compressed-tensors: parse it, match modules, generate it.

    config_groups   {name: {targets, weights, input_activations, output_activations, format}}
    ignore          names, `re:` patterns or class names that are left out; beats targets
    format          of all groups, or "mixed-precision": look at each group

A target is an exact module name, `re:` and a regular expression (`re.match`), or a class name.
Exact names beat regular expressions, which beat class names. Of two that match, the first in
alphabetical order decides; of two groups with one target, the later.

Source: compressed-tensors 0.20.1, `quantization/quant_config.py`, `quant_args.py`,
`utils/match.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from quantload.errors import FormatMismatch, UnsupportedVariant
from quantload.loader.formats.matching import matches_class, matches_exact, matches_regex
from quantload.quant.grid import E4M3, Grid, int_grid
from quantload.quant.scheme import (
    PRESETS,
    Granularity,
    InputGranularity,
    InputScheme,
    Scheme,
    WeightScheme,
    scheme_of,
)

PACKED, INT, FLOAT, NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
READ_FORMATS = (PACKED, INT, FLOAT, NAIVE)


@dataclass(frozen=True)
class Group:
    """One config group.

    Args:
        name: Its key in the config.
        targets: Names, patterns and classes.
        scheme: What its modules are quantized to.
        format: Layout of its tensors.
    """

    name: str
    targets: tuple[str, ...]
    scheme: Scheme
    format: str


@dataclass(frozen=True)
class CompressedTensorsConfig:
    """A parsed config.

    Args:
        groups: In the order of the config.
        ignore: Names, patterns and classes that are left out.
    """

    groups: tuple[Group, ...]
    ignore: tuple[str, ...]

    def match(self, name: str, class_names: Sequence[str]) -> tuple[Group, str] | None:
        """Return the group of a module and the target that decided; None if it has none."""
        if any(_target_matches(entry, name, class_names) for entry in self.ignore):
            return None
        groups = {target: group for group in self.groups for target in group.targets}
        targets = sorted(groups)  # NOTE: the library's order, not that of the config
        ranked = [
            *(target for target in targets if matches_exact(target, name)),
            *(target for target in targets if matches_regex(target, name)),
            *(target for target in targets if matches_class(target, class_names)),
        ]
        return (groups[ranked[0]], ranked[0]) if ranked else None

    def fallback(self) -> Group | None:
        """The group of modules that are packed although no target names them: the only one."""
        return self.groups[0] if len(self.groups) == 1 else None


def _target_matches(target: str, name: str, class_names: Sequence[str]) -> bool:
    return (
        matches_exact(target, name)
        or matches_regex(target, name)
        or matches_class(target, class_names)
    )


def parse_config(config: Mapping[str, Any]) -> CompressedTensorsConfig:
    """Parse a `quantization_config`.

    Raises:
        UnsupportedVariant: It needs something that quantload does not read.
        FormatMismatch: It is malformed.
    """
    for key in ("transform_config", "sparsity_config"):
        if _is_set(config.get(key)):
            raise UnsupportedVariant(
                f"compressed-tensors checkpoints with a `{key}` are not read",
                hint="convert the model again without transforms or sparsity",
            )
    groups = _object(config.get("config_groups") or {}, "`config_groups`")
    parsed = tuple(
        group
        for name, entry in groups.items()
        if (group := _parse_group(str(name), entry, str(config.get("format", ""))))
    )
    return CompressedTensorsConfig(parsed, _patterns(config.get("ignore"), "`ignore`"))


def _object(value: Any, what: str) -> Mapping[str, Any]:  # noqa: ANN401 - JSON
    if not isinstance(value, Mapping):
        raise FormatMismatch(f"{what} of the quantization config is `{value}`, expected an object")
    return value


def _patterns(value: Any, what: str) -> tuple[str, ...]:  # noqa: ANN401 - JSON
    """Check a list of names, classes and `re:` patterns."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise FormatMismatch(
            f"{what} of the quantization config is `{value}`, expected a list of strings"
        )
    for entry in value:
        if entry.startswith("re:"):
            try:
                re.compile(entry[3:])
            except re.error as error:
                raise FormatMismatch(
                    f"`{entry}` in {what} of the quantization config is not a regular expression: "
                    f"{error}"
                ) from error
    return tuple(value)


def _is_set(value: Any) -> bool:  # noqa: ANN401 - JSON
    if isinstance(value, Mapping):
        inner = value.get("config_groups", value)
        return bool(inner) and value.get("format") != "dense"
    return bool(value)


def _parse_group(name: str, entry: Any, global_format: str) -> Group | None:  # noqa: ANN401 - JSON
    if isinstance(entry, list):  # {"W4A16": ["Linear"]}
        preset = PRESETS.get(name.upper())
        if preset is None or preset.weight is None:
            raise UnsupportedVariant(f"preset `{name}` of the quantization config is not read")
        targets = _patterns(entry, f"preset `{name}`")
        return Group(name, targets, preset, _read_format(global_format, name))
    entry = _object(entry, f"group `{name}`")
    if entry.get("weights") is None:  # a group for the key/value cache only
        return None
    layout = _read_format(str(entry.get("format") or global_format), name)
    inputs = entry.get("input_activations")
    scheme = scheme_of(
        _weight_scheme(_object(entry["weights"], f"`weights` in group `{name}`"), name),
        None
        if inputs is None
        else _input_scheme(_object(inputs, f"`input_activations` in group `{name}`"), name),
        name=name,
    )
    return Group(
        name=name,
        targets=_patterns(entry.get("targets"), f"`targets` in group `{name}`"),
        scheme=scheme,
        format=layout,
    )


def _read_format(layout: str, where: str) -> str:
    if layout not in READ_FORMATS:
        raise UnsupportedVariant(
            f"compressed-tensors format `{layout}` is not read, in config group `{where}`; "
            f"expected one of {', '.join(READ_FORMATS)}"
        )
    return layout


def _grid(arguments: Mapping[str, Any], where: str) -> Grid:
    bits, kind = arguments.get("num_bits", 8), arguments.get("type", "int")
    if isinstance(bits, int):
        if kind == "float" and bits == 8:
            return E4M3
        if kind == "int" and 2 <= bits <= 8:
            return int_grid(bits)
    raise UnsupportedVariant(f"{bits}-bit `{kind}` values are not read, in config group `{where}`")


def _flag(arguments: Mapping[str, Any], key: str, where: str, *, default: bool) -> bool:
    value = arguments.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise FormatMismatch(
            f"`{key}` is `{value!r}`, expected true or false, in config group `{where}`"
        )
    return value


def _weight_scheme(arguments: Mapping[str, Any], where: str) -> WeightScheme:
    strategy: Granularity | None = arguments.get("strategy")
    if strategy is None:
        strategy = _inferred_strategy(arguments.get("group_size"))
    if strategy not in get_args(Granularity):
        raise UnsupportedVariant(f"weight strategy `{strategy}` is not read, in group `{where}`")
    return WeightScheme(
        grid=_grid(arguments, where),
        granularity=strategy,
        symmetric=_flag(arguments, "symmetric", where, default=True),
        group_size=_group_size(arguments, where) if strategy == "group" else None,
        block=_block(arguments.get("block_structure"), where) if strategy == "block" else None,
    )


def _inferred_strategy(group_size: Any) -> Granularity:  # noqa: ANN401 - JSON
    """As the library does where `strategy` is left out."""
    if group_size is None:
        return "tensor"
    return "channel" if group_size == -1 else "group"


def _input_scheme(arguments: Mapping[str, Any], where: str) -> InputScheme:
    strategy: InputGranularity = arguments.get("strategy") or "tensor"
    if strategy not in get_args(InputGranularity):
        raise UnsupportedVariant(f"input strategy `{strategy}` is not read, in group `{where}`")
    return InputScheme(
        grid=_grid(arguments, where),
        granularity=strategy,
        group_size=_group_size(arguments, where) if strategy == "group" else None,
        dynamic=arguments.get("dynamic") == "local"
        or _flag(arguments, "dynamic", where, default=False),
        symmetric=_flag(arguments, "symmetric", where, default=True),
    )


def _group_size(arguments: Mapping[str, Any], where: str) -> int:
    size = arguments.get("group_size")
    if not isinstance(size, int) or size < 1:
        raise FormatMismatch(
            f"`group_size` is `{size}`, expected a positive number, in config group `{where}`"
        )
    return size


def _block(value: Any, where: str) -> tuple[int, int]:  # noqa: ANN401 - JSON
    """Read [128, 128] or "128x128"."""
    match = re.fullmatch(r"(\d+)x(\d+)", value) if isinstance(value, str) else None
    sizes = [int(match[1]), int(match[2])] if match else value
    if (
        not isinstance(sizes, list)
        or len(sizes) != 2
        or not all(isinstance(size, int) and size > 0 for size in sizes)
    ):
        raise FormatMismatch(
            f"`block_structure` is `{value}`, expected [rows, columns], in config group `{where}`"
        )
    return sizes[0], sizes[1]


# -- generating ------------------------------------------------------------------------------------


def written_format(scheme: Scheme) -> str:
    """Return the layout in which a scheme is written."""
    assert scheme.weight is not None, "full precision has no layout"
    if scheme.weight.grid == E4M3:
        return FLOAT
    return PACKED if scheme.input is None else INT


def build_config(
    schemes: Mapping[str, Scheme],
    kept: Iterable[str],
    *,
    named: Collection[str] = (),
    cache_scheme: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Generate the `quantization_config` of what was written.

    Args:
        schemes: Scheme of each quantized module, by checkpoint name.
        kept: Linear modules in full precision.
        named: Modules that engines find by name only: embeddings are not of class `Linear`, and
            serving engines have a class of their own for the head.
        cache_scheme: `kv_cache_scheme` of the source, whose scales are copied.

    Returns:
        One group with `targets: ["Linear"]` where all schemes are equal, else exact names.
    """
    distinct = sorted(set(schemes.values()), key=str)
    formats = sorted({written_format(scheme) for scheme in distinct})
    groups = {}
    for number, scheme in enumerate(distinct):
        names = [module for module, other in schemes.items() if other == scheme]
        if len(distinct) == 1:
            names = ["Linear", *(module for module in names if module in named)]
        groups[f"group_{number}"] = {
            "targets": names,
            "weights": _weight_arguments(scheme),
            "input_activations": _input_arguments(scheme.input),
            "output_activations": None,
            "format": written_format(scheme),
        }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": _format_of_all(formats),
        "config_groups": groups,
        "ignore": list(kept),
        "kv_cache_scheme": cache_scheme,
        "global_compression_ratio": None,
    }


def _format_of_all(formats: Sequence[str]) -> str:
    if not formats:
        return "dense"  # a scheme for the cache only
    return formats[0] if len(formats) == 1 else "mixed-precision"


def _number_arguments(grid: Grid) -> dict[str, Any]:
    return {"num_bits": grid.bits, "type": "int" if grid.is_integer else "float"}


def _weight_arguments(scheme: Scheme) -> dict[str, Any]:
    weight = scheme.weight
    assert weight is not None, "full precision has no arguments"
    return {
        **_number_arguments(weight.grid),
        "symmetric": weight.symmetric,
        "strategy": weight.granularity,
        "group_size": weight.group_size,
        "block_structure": list(weight.block) if weight.block else None,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }


def _input_arguments(scheme: InputScheme | None) -> dict[str, Any] | None:
    if scheme is None:
        return None
    return {
        **_number_arguments(scheme.grid),
        "symmetric": scheme.symmetric,
        "strategy": scheme.granularity,
        "group_size": scheme.group_size,
        "block_structure": None,
        "dynamic": scheme.dynamic,
        "actorder": None,
        "observer": None,
        "observer_kwargs": {},
    }


def validate_config(config: Mapping[str, Any]) -> None:
    """Have the compressed-tensors library itself check a generated config.

    Raises:
        FormatMismatch: The library refuses it.
    """
    import pydantic
    from compressed_tensors.quantization import (  # type: ignore[import-untyped]
        QuantizationConfig,  # imports transformers: seconds
    )

    try:
        QuantizationConfig.model_validate(config)
    except (pydantic.ValidationError, ValueError, NotImplementedError) as error:
        raise FormatMismatch(f"compressed-tensors refuses the generated config: {error}") from error
