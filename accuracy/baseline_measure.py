"""Measure a whole baseline: layers, what running both sides shows, repeats, the sketch."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quantload.accuracy.baseline import Baseline, KeptSketch, Tokens
from quantload.accuracy.baseline_check import (
    Measuring,
    block_medians,
    end_numbers,
    measured_layers,
    with_output_errors,
)
from quantload.accuracy.baseline_config import kept_facts
from quantload.accuracy.baseline_quantization import quantization_facts
from quantload.accuracy.baseline_repeats import repeats_of
from quantload.accuracy.baseline_sketch import SKETCH_SUFFIX, sketch_place
from quantload.accuracy.baseline_tolerances import Repeats
from quantload.accuracy.baseline_verdict import change_db
from quantload.errors import ConfigError, NotComparable, OutputError, counted
from quantload.loader.source import Source
from quantload.progress import Progress

if TYPE_CHECKING:
    from quantload.accuracy.compare_outputs import OutputComparison

MOST_REPEATS = 4


@dataclass(frozen=True)
class Setting:
    """Where and how both sides run.

    Args:
        device: The device.
        dtype: dtype of the arithmetic.
        progress: Draws progress.
    """

    device: torch.device
    dtype: torch.dtype
    progress: Progress

    @property
    def made_on(self) -> dict[str, str]:
        """What is noted of it in a baseline."""
        return {
            "device": self.device.type,
            "dtype": dtype_name(self.dtype),
            "machine": platform.machine(),
            "torch": torch.__version__,
        }


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")


def measured_baseline(
    reference: Source,
    candidate: Source,
    tokens: Tokens | None,
    setting: Setting,
    how: Measuring | None = None,
) -> Baseline:
    """Measure every layer of a candidate, and run both sides if there are tokens.

    Raises:
        NotComparable: The checkpoints are not of one model.
    """
    made = Baseline(
        reference=name_of(reference),
        candidate=name_of(candidate),
        bits_per_weight=bits_per_weight(candidate),
        layers=measured_layers(reference, candidate, setting.progress, how),
        tokens=tokens,
        made_on=setting.made_on,
        reference_config=kept_facts(reference.checkpoint.config),
        candidate_config=kept_facts(candidate.checkpoint.config),
        quantization=quantization_facts(candidate),
    )
    return made if tokens is None else _with_outputs(made, reference, candidate, setting)


def _with_outputs(
    made: Baseline, reference: Source, candidate: Source, setting: Setting
) -> Baseline:
    assert made.tokens is not None, "there are tokens to run"
    outputs = run_both(reference, candidate, made.tokens, setting)
    return replace(
        made,
        layers=with_output_errors(made.layers, outputs, of=set(made.layers)),
        end=end_numbers(outputs.end),
        blocks=block_medians(outputs),
        made_on=setting.made_on,
    )


def run_both(
    reference: Source, candidate: Source, tokens: Tokens, setting: Setting
) -> OutputComparison:
    """Run the tokens of a baseline through both sides."""
    from quantload.accuracy.compare_outputs import compare_running  # transformers: seconds

    return compare_running(
        reference,
        candidate,
        tokens.ids,
        setting.progress,
        device=setting.device,
        dtype=setting.dtype,
    )


def name_of(source: Source) -> str:
    """Return the last part of a checkpoint's name."""
    return Path(source.checkpoint.name).name


def bits_per_weight(source: Source) -> float:
    """Bits of the stored weights of layers for each of their elements, scales included."""
    tensors = source.checkpoint.tensors
    names = {name for weight in source.weights.values() for name in weight.leaves.values()}
    elements = sum(
        weight.shape[0] * weight.shape[1] * max(weight.experts, 1)
        for weight in source.weights.values()
    )
    return 8 * sum(tensors[name].num_bytes for name in names) / max(elements, 1)


# -- repeats ---------------------------------------------------------------------------------------


def check_repeats(count: int, tokens: Tokens | None) -> None:
    """Refuse repeats that show nothing.

    Raises:
        ConfigError: There are no tokens, or more repeats than arithmetic can differ in.
    """
    if not 0 <= count <= MOST_REPEATS:
        raise ConfigError(f"{count} repeats, expected 0 to {MOST_REPEATS}")
    if count and tokens is None:
        raise ConfigError(
            "repeats in other arithmetic need tokens to run: errors of weights do not change",
            hint="give `--data`, `--token-ids` or `--generated`",
        )


def measured_noise(
    first: Baseline,
    reference: Source,
    candidate: Source,
    setting: Setting,
    *,
    repeats: int = 0,
    remade: Sequence[Source] = (),
) -> Repeats:
    """Measure how far repeats lie from a baseline.

    Args:
        first: The baseline, without tolerances of its own.
        reference: As for `first`.
        candidate: As for `first`.
        setting: As for `first`.
        repeats: How many runs in other arithmetic.
        remade: Other candidates, by the same tool from the same reference.

    Raises:
        NotComparable: A candidate that was made again has other layers or schemes.
    """
    kinds: dict[str, list[Baseline]] = {}
    for dtype, threads in _variations(setting.dtype)[:repeats]:
        what = f"{dtype_name(dtype)} arithmetic"
        with _threads(threads):
            run = _with_outputs(first, reference, candidate, replace(setting, dtype=dtype))
        kinds.setdefault(what, []).append(run)
    for source in remade:
        made = measured_baseline(reference, source, first.tokens, setting)
        _check_made_again(first, made)
        kinds.setdefault("made again", []).append(made)
    return repeats_of(first, list(kinds.items()))


def _variations(dtype: torch.dtype) -> list[tuple[torch.dtype, int]]:
    """Return dtype and threads of each repeat: what differs most from the first run comes first."""
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    threads = torch.get_num_threads()
    few = 1 if threads > 1 else 2
    return [(other, threads), (dtype, few), (other, few), (dtype, max(threads // 2, 1))]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_made_again(first: Baseline, made: Baseline) -> None:
    if made.layers.keys() != first.layers.keys():
        raise NotComparable(
            f"`{made.candidate}` is no repeat of `{first.candidate}`: they have "
            f"{counted(len(made.layers.keys() ^ first.layers.keys()), 'layer')} not in common"
        )
    for name, layer in made.layers.items():
        if layer.encoding != first.layers[name].encoding:
            raise NotComparable(
                f"`{made.candidate}` is no repeat of `{first.candidate}`: `{name}` is "
                f"`{layer.encoding}` and `{first.layers[name].encoding}`"
            )


# -- the sketch ------------------------------------------------------------------------------------


def kept_sketch(how: Measuring, made: Baseline, file: Path) -> KeptSketch:
    """Write the sketch beside a baseline, and note how far its estimates are from the errors.

    Args:
        how: With the collected sketch, and its estimates of the candidate's errors.
        made: The baseline, with those errors.
        file: Of the baseline.

    Raises:
        OutputError: It cannot be written.
    """
    assert how.collects is not None, "a sketch was collected"
    place = sketch_place(file, file.name.removesuffix(".json") + SKETCH_SUFFIX)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write `{place}`: {error.strerror or error}") from error
    off = [
        change_db(made.layers[name].weight, estimate) ** 2
        for name, estimate in how.estimates.items()
        if made.layers[name].weight and estimate
    ]
    sigma = math.sqrt(sum(off) / len(off)) if off else 0.0
    return KeptSketch(file=place.name, sha256=how.collects.write(place), sigma_db=sigma)


__all__ = [
    "MOST_REPEATS",
    "Setting",
    "bits_per_weight",
    "check_repeats",
    "dtype_name",
    "kept_sketch",
    "measured_baseline",
    "measured_noise",
    "name_of",
    "run_both",
]
