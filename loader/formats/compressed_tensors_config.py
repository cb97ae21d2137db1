"""The `quantization_config` of compressed-tensors: parse it, match modules, generate it.

    config_groups   {name: {targets, weights, input_activations, output_activations, format}}
    ignore          names, `re:` patterns or class names that are left out; beats targets
    format          of all groups, or "mixed-precision": look at each group

A target is an exact module name, `re:` and a regular expression (`re.match`), or a class name; exact
names beat regular expressions, which beat class names.

Source: compressed-tensors 0.20.1, `quantization/quant_config.py`, `quant_args.py`, `utils/match.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantload.errors import FormatMismatch, UnsupportedVariant
from quantload.loader.formats.matching import matches_class, matches_exact, matches_regex
from quantload.quant.grid import E4M3, Grid, int_grid
from quantload.quant.scheme import PRESETS, InputScheme, Scheme, WeightScheme

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
        for test in (
            lambda target: matches_exact(target, name),
            lambda target: matches_regex(target, name),
            lambda target: matches_class(target, class_names),
        ):
            for group in self.groups:
                for target in group.targets:
                    if test(target):
                        return group, target
        return None

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
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise FormatMismatch(f"`config_groups` is `{type(groups).__name__}`, expected an object")
    parsed = tuple(
        group
        for name, entry in groups.items()
        if (group := _parse_group(str(name), entry, str(config.get("format", ""))))
    )
    ignore = tuple(str(entry) for entry in config.get("ignore") or ())
    return CompressedTensorsConfig(parsed, ignore)


def _is_set(value: Any) -> bool:  # noqa: ANN401 - JSON
    if isinstance(value, Mapping):
        inner = value.get("config_groups", value)
        return bool(inner) and value.get("format") != "dense"
    return bool(value)


def _parse_group(name: str, entry: Any, global_format: str) -> Group | None:  # noqa: ANN401 - JSON
    if isinstance(entry, Sequence) and not isinstance(entry, str):  # {"W4A16": ["Linear"]}
        if name.upper() not in PRESETS:
            raise UnsupportedVariant(f"preset `{name}` of the quantization config is not read")
        return Group(name, tuple(map(str, entry)), PRESETS[name.upper()], global_format)
    if not isinstance(entry, Mapping):
        raise FormatMismatch(f"config group `{name}` is not an object: `{entry}`")
    weights = entry.get("weights")
    if weights is None:  # a group for the key/value cache only
        return None
    layout = str(entry.get("format") or global_format)
    if layout not in READ_FORMATS:
        raise UnsupportedVariant(
            f"compressed-tensors format `{layout}` is not read, in config group `{name}`; expected "
            f"one of {', '.join(READ_FORMATS)}"
        )
    scheme = Scheme(
        name=name,
        weight=_weight_scheme(weights, name),
        input=_input_scheme(entry.get("input_activations"), name),
    )
    return Group(name, tuple(map(str, entry.get("targets") or ())), _named(scheme), layout)


def _named(scheme: Scheme) -> Scheme:
    """Give the scheme its preset's name, if it is one or differs in the group size only."""
    for preset in PRESETS.values():
        if preset.weight is None or scheme.weight is None or preset.input != scheme.input:
            continue
        same = (scheme.weight.grid, scheme.weight.symmetric) == (
            preset.weight.grid,
            preset.weight.symmetric,
        )
        kinds = {scheme.weight.granularity, preset.weight.granularity}
        if same and (len(kinds) == 1 or kinds == {"group", "channel"} and preset.input is None):
            return Scheme(name=preset.name, weight=scheme.weight, input=scheme.input)
    return scheme


def _grid(arguments: Mapping[str, Any], where: str) -> Grid:
    bits, kind = int(arguments.get("num_bits", 8)), arguments.get("type", "int")
    if kind == "float" and bits == 8:
        return E4M3
    if kind == "int" and 2 <= bits <= 8:
        return int_grid(bits)
    raise UnsupportedVariant(f"{bits}-bit `{kind}` values are not read, in config group `{where}`")


def _weight_scheme(arguments: Mapping[str, Any], where: str) -> WeightScheme:
    group_size = arguments.get("group_size")
    strategy = arguments.get("strategy")
    if strategy is None:
        strategy = "tensor" if group_size is None else "group" if group_size > 0 else "channel"
    if strategy not in ("tensor", "channel", "group", "block"):
        raise UnsupportedVariant(f"weight strategy `{strategy}` is not read, in group `{where}`")
    block = arguments.get("block_structure")
    if isinstance(block, str):
        block = [int(size) for size in block.split("x")]
    if strategy == "block" and not block:
        raise FormatMismatch(f"config group `{where}` has strategy `block` and no `block_structure`")
    return WeightScheme(
        grid=_grid(arguments, where),
        granularity=strategy,
        symmetric=bool(arguments.get("symmetric", True)),
        group_size=int(group_size) if strategy == "group" else None,
        block=(int(block[0]), int(block[1])) if strategy == "block" else None,
    )


def _input_scheme(arguments: Mapping[str, Any] | None, where: str) -> InputScheme | None:
    if arguments is None:
        return None
    strategy = arguments.get("strategy") or "tensor"
    if strategy not in ("tensor", "token", "group"):
        raise UnsupportedVariant(f"input strategy `{strategy}` is not read, in group `{where}`")
    dynamic = arguments.get("dynamic", False)
    return InputScheme(
        grid=_grid(arguments, where),
        granularity=strategy,
        group_size=int(arguments["group_size"]) if strategy == "group" else None,
        dynamic=bool(dynamic),
        symmetric=bool(arguments.get("symmetric", True)),
    )


# -- generating ------------------------------------------------------------------------------------


def written_format(scheme: Scheme) -> str:
    """Return the layout in which a scheme is written."""
    assert scheme.weight is not None, "full precision has no layout"
    if scheme.weight.grid == E4M3:
        return FLOAT
    return PACKED if scheme.input is None else INT


def build_config(schemes: Mapping[str, Scheme], kept: Iterable[str]) -> dict[str, Any]:
    """Generate the `quantization_config` of what was written.

    Args:
        schemes: Scheme of each quantized module, by checkpoint name.
        kept: Linear modules in full precision.

    Returns:
        One group with `targets: ["Linear"]` where all schemes are equal, else groups of exact names.
    """
    distinct = sorted(set(schemes.values()), key=str)
    formats = sorted({written_format(scheme) for scheme in distinct})
    groups = {}
    for number, scheme in enumerate(distinct):
        names = [module for module, other in schemes.items() if other == scheme]
        targets = ["Linear"] if len(distinct) == 1 else names
        groups[f"group_{number}"] = {
            "targets": targets,
            "weights": _weight_arguments(scheme),
            "input_activations": _input_arguments(scheme.input),
            "output_activations": None,
            "format": written_format(scheme),
        }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats[0] if len(formats) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": list(kept),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


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
    from compressed_tensors.quantization import QuantizationConfig  # imports transformers: seconds

    try:
        QuantizationConfig.model_validate(config)
    except (pydantic.ValidationError, ValueError, NotImplementedError) as error:
        raise FormatMismatch(f"compressed-tensors refuses the generated config: {error}") from error


