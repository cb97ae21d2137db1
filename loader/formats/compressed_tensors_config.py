"""The `quantization_config` of compressed-tensors: parse it, match modules, generate it.

    config_groups   {name: {targets, weights, input_activations, output_activations, format}},
                    or {preset: targets}
    ignore          names, `re:` patterns or class names that are left out; beats targets
    format          of all groups that have none, or "mixed-precision": each group has its own
    version         of compressed-tensors

A target is an exact module name, `re:` and a regular expression (`re.match`), or a class name.
Exact names beat regular expressions, which beat class names. Of two that match, the first in
alphabetical order decides; of two groups with one target, the later. A fused module matches what
any of its members matches.

Groups without weights and those of format "dense" leave their modules in full precision.

Source: compressed-tensors 0.20.1, `quantization/quant_config.py`, `utils/match.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from quantload.errors import FormatMismatch, UnsupportedVariant
from quantload.loader.formats.compressed_tensors_arguments import (
    DENSE,
    FLOAT,
    INT,
    MXFP4,
    MXFP6,
    MXFP8,
    NAIVE,
    NVFP4,
    PACKED,
    READ_FORMATS,
    infer_format,
    input_arguments,
    parse_input,
    parse_weight,
    weight_arguments,
    written_format,
)
from quantload.loader.formats.compressed_tensors_presets import NAMED_SCHEMES
from quantload.loader.formats.matching import matches_regex
from quantload.quant.scheme import DENSE as FULL_PRECISION
from quantload.quant.scheme import Scheme, scheme_of

WRITTEN_VERSION = "0.20.1"  # whose layouts are written
FusedNames = Mapping[str, Sequence[str]]


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

    @property
    def is_quantized(self) -> bool:
        """False if its modules are in full precision."""
        return self.scheme.weight is not None


class Patterns:
    """Names, classes and `re:` patterns, ready for many modules.

    Args:
        entries: As the config lists them.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        ordered = sorted(set(entries))  # NOTE: the library's order, not that of the config
        self._names = frozenset(e for e in ordered if not e.startswith("re:"))
        self._regexes = [e for e in ordered if e.startswith("re:")]

    def first(
        self, name: str, class_names: Sequence[str], fused: FusedNames | None = None
    ) -> str | None:
        """Return the entry that decides for a module, None if none matches.

        Args:
            name: Dotted name.
            class_names: Names of its classes.
            fused: Members by the last component of a fused module: {"qkv_proj": ["q_proj", ...]}.
        """
        members = _members(name, fused)
        exact = [member for member in members if member in self._names]
        if exact:
            return min(exact)
        for entry in self._regexes:
            if any(matches_regex(entry, member) for member in members):
                return entry
        return min((c for c in class_names if c in self._names), default=None)


def _members(name: str, fused: FusedNames | None) -> list[str]:
    for suffix, members in (fused or {}).items():
        if name.endswith(suffix):
            return [name.removesuffix(suffix) + member for member in members]
    return [name]


@dataclass(frozen=True)
class CompressedTensorsConfig:
    """A parsed config.

    Args:
        groups: In the order of the config.
        ignore: Names, patterns and classes that are left out.
        version: Version of compressed-tensors as numbers; None if the config has none.
    """

    groups: tuple[Group, ...]
    ignore: tuple[str, ...]
    version: tuple[int, ...] | None = None

    def match(
        self, name: str, class_names: Sequence[str], fused: FusedNames | None = None
    ) -> tuple[Group, str] | None:
        """Return the group of a module and the target that decided; None if it has none.

        Args:
            name: Dotted name.
            class_names: Names of its classes.
            fused: Members by the last component of a fused module.
        """
        if self.ignored_by(name, class_names, fused) is not None:
            return None
        target = self._target_patterns.first(name, class_names, fused)
        return None if target is None else (self._by_target[target], target)

    def ignored_by(
        self, name: str, class_names: Sequence[str], fused: FusedNames | None = None
    ) -> str | None:
        """Return the entry of `ignore` that a module matches; None if there is none."""
        return self._ignore_patterns.first(name, class_names, fused)

    def entries(self) -> list[str]:
        """Return everything that names modules, as "<list>: <entry>"; classes name none."""
        listed = [("ignore", entry) for entry in self.ignore]
        listed += [(group.name, target) for group in self.groups for target in group.targets]
        return [f"{key}: {entry}" for key, entry in listed if not _is_class(entry)]

    @cached_property
    def _by_target(self) -> dict[str, Group]:
        return {target: group for group in self.groups for target in group.targets}

    @cached_property
    def _target_patterns(self) -> Patterns:
        return Patterns(self._by_target)

    @cached_property
    def _ignore_patterns(self) -> Patterns:
        return Patterns(self.ignore)


def regex_test(entry: str) -> Callable[[str], bool] | None:
    """Return the test whether a `re:` pattern matches a module; None for a name."""
    return partial(matches_regex, entry) if entry.startswith("re:") else None


def _is_class(entry: str) -> bool:
    return not entry.startswith("re:") and "." not in entry and entry[:1].isupper()


# -- parsing ---------------------------------------------------------------------------------------


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
    default = config.get("format")
    return CompressedTensorsConfig(
        groups=tuple(_parse_group(str(name), entry, default) for name, entry in groups.items()),
        ignore=_patterns(config.get("ignore"), "`ignore`"),
        version=_version(config.get("version")),
    )


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


def _version(value: Any) -> tuple[int, ...] | None:  # noqa: ANN401 - JSON
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", value) if isinstance(value, str) else None
    return tuple(int(number or 0) for number in match.groups()) if match else None


def _parse_group(name: str, entry: Any, default: Any) -> Group:  # noqa: ANN401 - JSON
    if isinstance(entry, list):  # {"W4A16": ["Linear"]}
        scheme = NAMED_SCHEMES.get(name.upper())
        if scheme is None:
            raise UnsupportedVariant(f"preset `{name}` of the quantization config is not read")
        entry = {
            "targets": entry,
            "weights": None if scheme.weight is None else weight_arguments(scheme.weight),
            "input_activations": input_arguments(scheme.input),
        }
    entry = _object(entry, f"group `{name}`")
    targets = _patterns(entry.get("targets"), f"`targets` in group `{name}`")
    if entry.get("weights") is None:  # inputs, outputs or the key/value cache only
        return Group(name, targets, FULL_PRECISION, DENSE)
    weights = _object(entry["weights"], f"`weights` in group `{name}`")
    inputs = entry.get("input_activations")
    layout = _read_format(entry.get("format") or default, weights, inputs is not None, name)
    if layout == DENSE:
        return Group(name, targets, FULL_PRECISION, DENSE)
    return Group(
        name=name,
        targets=targets,
        scheme=scheme_of(
            parse_weight(weights, layout, name),
            None
            if inputs is None
            else parse_input(_object(inputs, f"`input_activations` in group `{name}`"), name),
        ),
        format=layout,
    )


def _read_format(
    layout: Any,  # noqa: ANN401 - JSON
    weights: Mapping[str, Any],
    has_inputs: bool,
    where: str,
) -> str:
    if layout is None or layout == "mixed-precision":
        return infer_format(weights, has_inputs=has_inputs)
    if layout not in READ_FORMATS:
        raise UnsupportedVariant(
            f"compressed-tensors format `{layout}` is not read, in config group `{where}`; "
            f"expected one of {', '.join(READ_FORMATS)}"
        )
    return str(layout)


# -- generating ------------------------------------------------------------------------------------


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
    distinct = sorted(set(schemes.values()), key=repr)
    formats = sorted({written_format(scheme) for scheme in distinct})
    groups = {}
    for number, scheme in enumerate(distinct):
        assert scheme.weight is not None, "modules in full precision are in no group"
        names = [module for module, other in schemes.items() if other == scheme]
        if len(distinct) == 1:
            names = ["Linear", *(module for module in names if module in named)]
        groups[f"group_{number}"] = {
            "targets": names,
            "weights": weight_arguments(scheme.weight),
            "input_activations": input_arguments(scheme.input),
            "output_activations": None,
            "format": written_format(scheme),
        }
    return {
        "quant_method": "compressed-tensors",
        "version": WRITTEN_VERSION,
        "quantization_status": "compressed",
        "format": _format_of_all(formats),
        "config_groups": groups,
        "ignore": list(kept),
        "kv_cache_scheme": cache_scheme,
        "global_compression_ratio": None,
    }


def _format_of_all(formats: Sequence[str]) -> str:
    if not formats:
        return DENSE  # a scheme for the cache only
    return formats[0] if len(formats) == 1 else "mixed-precision"


def import_library() -> None:
    """Import compressed-tensors, which imports transformers: seconds."""
    import compressed_tensors.quantization  # type: ignore[import-untyped]  # noqa: F401


def validate_config(config: Mapping[str, Any]) -> None:
    """Have the compressed-tensors library itself check a generated config.

    Raises:
        FormatMismatch: The library refuses it.
    """
    import pydantic
    from compressed_tensors.quantization import QuantizationConfig

    try:
        QuantizationConfig.model_validate(config)
    except (pydantic.ValidationError, ValueError, NotImplementedError) as error:
        raise FormatMismatch(f"compressed-tensors refuses the generated config: {error}") from error


__all__ = [
    "DENSE",
    "FLOAT",
    "INT",
    "MXFP4",
    "MXFP6",
    "MXFP8",
    "NAIVE",
    "NVFP4",
    "PACKED",
    "CompressedTensorsConfig",
    "Group",
    "Patterns",
    "build_config",
    "import_library",
    "parse_config",
    "validate_config",
    "written_format",
]
