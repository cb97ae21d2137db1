"""Reduce a checkpoint to some of its decoder layers, numbered anew from 0.

What lies in no decoder layer (embeddings, norms, heads, towers) stays. The result is a valid model:
small enough to try a scheme or a kernel on real weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from quantload.errors import ConfigError, listed
from quantload.loader.layer_config import layer_count, reduced_config
from quantload.loader.source import Source
from quantload.loader.source_view import SeenWeight, renamed_weight, view_of
from quantload.mappers.default_keeps import is_beside_the_decoder

_LAYER = re.compile(r"(?P<stack>(?:.*?\.)?(?:layers|layer|blocks|block|h))\.(?P<number>\d+)\.")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def parse_layers(text: str) -> tuple[int, ...]:
    """Return the numbers that a text such as "0-1" or "0,5-7" names, ascending.

    Raises:
        ConfigError: It is not of this form, or names a layer twice.
    """
    numbers: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first = int(match[1]) if match else 1
        last = int(match[2] or first) if match else 0
        if last < first:
            raise ConfigError(
                f"no layers: `{text}`, expected numbers and ranges, for example `0-1` or `0,5-7`"
            )
        numbers += range(first, last + 1)
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"layers named twice: `{text}`")
    return tuple(sorted(numbers))


@dataclass(frozen=True)
class _Stack:
    """The decoder layers of a checkpoint.

    Args:
        name: What stands before their numbers.
        new_number: Number in the output, by number in the source.
    """

    name: str
    new_number: Mapping[int, int]

    def renamed(self, name: str) -> str | None:
        """Return a name in the output; None if it lies in a layer that is left out."""
        match = _LAYER.match(name)
        if match is None or match["stack"] != self.name:
            return name
        number = self.new_number.get(int(match["number"]))
        rest = name[match.end() :]
        return None if number is None else f"{self.name}.{number}.{rest}"


def select_layers(source: Source, layers: str) -> Source:
    """Return a checkpoint with only these of its decoder layers.

    Args:
        source: A whole checkpoint, or one that was reduced to the same layers.
        layers: For example "0-1" or "0,5-7"; "" for all.

    Raises:
        ConfigError: There is no such layer, or the architecture has no numbered decoder layers.
    """
    if layers == source.layers:
        return source
    if source.layers:
        raise ConfigError(f"`{source.checkpoint.name}` was reduced to layers `{source.layers}`")
    kept = parse_layers(layers)
    config = source.checkpoint.config
    count = layer_count(config)
    if count is None or config.get("is_encoder_decoder"):
        why = "has an encoder and a decoder" if count else "does not count decoder layers"
        raise ConfigError(f"`--layers {layers}`: the model of `{source.checkpoint.name}` {why}")
    absent = [number for number in kept if number >= count]
    if absent:
        raise ConfigError(
            f"`--layers {layers}`: there is no layer {absent[0]}, the config counts {count}",
            hint=f"layers are 0 to {count - 1}",
        )
    stack = _Stack(
        _decoder(source.checkpoint.tensors, count, source.checkpoint.name),
        {old: new for new, old in enumerate(kept)},
    )
    reduced = _reduced(source, stack)
    checkpoint = replace(
        reduced.checkpoint,
        config=reduced_config(config, kept, count),
        warnings=(
            *reduced.checkpoint.warnings,
            f"only layers {layers} of {count} are converted: the output is a part of the model",
        ),
    )
    dropped = _bytes(source) - sum(e.num_bytes for e in checkpoint.tensors.values())
    return replace(
        reduced,
        checkpoint=checkpoint,
        dropped={**source.dropped, f"--layers {layers}": dropped},
        layers=layers,
    )


def _decoder(names: Iterable[str], count: int, checkpoint_name: str) -> str:
    """Return what stands before the numbers of the decoder layers."""
    highest: dict[str, int] = {}
    for name in names:
        match = _LAYER.match(name)
        if match and not is_beside_the_decoder(match["stack"]):
            number = int(match["number"])
            highest[match["stack"]] = max(number, highest.get(match["stack"], 0))
    found = [stack for stack, number in highest.items() if number + 1 >= count]
    if len(found) != 1:
        raise ConfigError(
            f"cannot tell the decoder layers of `{checkpoint_name}`: {listed(highest) or 'none'}, "
            f"expected one list of {count} layers"
        )
    return found[0]


def _reduced(source: Source, stack: _Stack) -> Source:
    names = {name: stack.renamed(name) for name in source.checkpoint.tensors}
    new_names = {old: new for old, new in names.items() if new is not None}
    tensors = {
        new: replace(source.checkpoint.tensors[old], name=new) for old, new in new_names.items()
    }
    seen = {}
    for module, weight in source.weights.items():
        new = stack.renamed(f"{module}.")
        if new is not None:
            name = new.removesuffix(".")
            seen[name] = SeenWeight(weight=renamed_weight(weight, name, new_names), original=weight)
    return view_of(source, tensors, seen)


def _bytes(source: Source) -> int:
    return sum(entry.num_bytes for entry in source.checkpoint.tensors.values())
