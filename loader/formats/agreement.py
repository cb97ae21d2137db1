"""Whether a module is quantized: what the config says of it, against what the files hold.

config                             files       decision
quantized, by a rule for many      plain       full precision: exporters list too much
quantized, by the module's name    plain       refused: the files are not those of the config
left out                           quantized   quantized, with a warning: codes are no values
else they agree
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from quantload.errors import FormatMismatch, listed
from quantload.loader.checkpoint import Checkpoint

_HEAD = "lm_head"
_MOST_TRIES = 200_000  # of a pattern with a module


@dataclass(frozen=True)
class ConfigSays:
    """What a quantization config says of one module.

    Args:
        is_quantized: Its decision.
        entry: The entry of the config that decided, for people: "modules_to_not_convert: lm_head".
        is_exact: True if that entry is the module's own name.
    """

    is_quantized: bool
    entry: str
    is_exact: bool = False


def check_agreement(
    said: Mapping[str, ConfigSays], stored: Mapping[str, bool], checkpoint_name: str
) -> list[str]:
    """Compare the config with the files.

    Args:
        said: What the config says, by module.
        stored: Whether the files hold a quantized weight, by module; the same modules.
        checkpoint_name: For messages.

    Returns:
        Warnings for people.

    Raises:
        FormatMismatch: The config names a module as quantized that is not.
    """
    plain = [m for m, is_stored in stored.items() if said[m].is_quantized and not is_stored]
    wrong = [module for module in plain if said[module].is_exact]
    if wrong:
        raise FormatMismatch(
            f"the quantization config names modules that are not quantized in the files: "
            f"{listed(wrong)}, in `{checkpoint_name}`",
            hint="these files are not the ones that the config was written for",
        )
    extra = [m for m, is_stored in stored.items() if is_stored and not said[m].is_quantized]
    if not extra:
        return []
    return [
        f"{len(extra)} modules are quantized in the files although the config leaves them out; "
        f"they are read as quantized: {listed(extra)}"
    ]


class EntryCounts(dict[str, int]):
    """How many modules each entry of a config decides on, by entry.

    Attributes:
        left_plain: Modules that the config quantizes, by a rule for many, and the files do not.
        left_out: Modules that are quantized in the files although the config leaves them out.
    """

    def __init__(
        self,
        counts: Mapping[str, int],
        left_plain: Iterable[str] = (),
        left_out: Iterable[str] = (),
    ) -> None:
        super().__init__(counts)
        self.left_plain, self.left_out = tuple(left_plain), tuple(left_out)


def count_entries(said: Mapping[str, ConfigSays], stored: Mapping[str, bool]) -> EntryCounts:
    """Return how many modules each entry of a config decides on, by entry.

    Args:
        said: What the config says, by module.
        stored: Whether the files hold a quantized weight; where they decide, no entry does.
    """
    agreed = (says for module, says in said.items() if says.is_quantized == stored[module])
    plain = (m for m, says in said.items() if says.is_quantized and not stored[m])
    left_out = (m for m, says in said.items() if stored[m] and not says.is_quantized)
    return EntryCounts(Counter(says.entry for says in agreed), plain, left_out)


def about_unused_entries(
    entries: Iterable[str],
    counts: Mapping[str, int],
    checkpoint: Checkpoint,
    matcher: Callable[[str], Callable[[str], object] | None],
) -> list[str]:
    """Warn of entries that match no module: names of another model, or misspelled.

    A name may stand beside another that differs in its start only and does match: configs list
    modules under the names of the files, and under those of the transformers model.

    Of an entry for an output head nothing is said where there is none in the files: it is tied.

    Args:
        entries: "<key>: <pattern>", as `counts` and `ConfigSays.entry` have them.
        counts: From `count_entries`; an entry that decides on nothing may still match something.
        checkpoint: Whose tensors tell the modules.
        matcher: Takes a pattern, and returns the test whether it matches a module; None for a whole
            name. So many patterns are tried that it takes no noticeable time.
    """
    every = list(dict.fromkeys(entries))
    candidates = [entry for entry in every if not counts.get(entry)]
    if not candidates:
        return []
    modules = dict.fromkeys(name.rpartition(".")[0] for name in checkpoint.tensors)
    if not any(_HEAD in module for module in modules):
        candidates = [entry for entry in candidates if _HEAD not in entry]
    patterns = (entry.partition(": ")[2] for entry in every)
    endings = {_ending(pattern) for pattern in patterns if pattern in modules}
    unused, left = [], _MOST_TRIES
    for entry in candidates:
        pattern = entry.partition(": ")[2]
        matches = matcher(pattern)
        if pattern in modules or (matches is not None and left < len(modules)):
            continue
        if matches is None and _ending(pattern) in endings:
            continue
        left -= len(modules) if matches is not None else 0
        if matches is None or not any(matches(module) for module in modules):
            unused.append(entry)
    if not unused:
        return []
    return [
        f"{len(unused)} entries of the quantization config match no module: {listed(unused)}, in "
        f"`{checkpoint.name}`"
    ]


def _ending(name: str) -> str:
    """Return a name from its last number on, with what is numbered; else its last component."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[max(numbers[-1] - 1, 0) :] if numbers else parts[-1:])
