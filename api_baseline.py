"""Baselines: what every layer of a checkpoint lost, written once and checked ever after."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quantload.accuracy.baseline import (
    Baseline,
    LayerBaseline,
    Tokens,
    baseline_text,
)
from quantload.accuracy.baseline_check import (
    Measuring,
    block_medians,
    end_numbers,
    measured_layers,
    with_output_errors,
)
from quantload.accuracy.baseline_config import changed_facts, kept_facts
from quantload.accuracy.baseline_file import read_baseline
from quantload.accuracy.baseline_measure import (
    Setting,
    bits_per_weight,
    check_repeats,
    dtype_name,
    kept_sketch,
    measured_baseline,
    measured_noise,
    name_of,
    run_both,
)
from quantload.accuracy.baseline_model_gates import about_blocks, about_end
from quantload.accuracy.baseline_quantization import changed_quantization, quantization_facts
from quantload.accuracy.baseline_sketch import Sketch, read_sketch, sketch_place
from quantload.accuracy.baseline_tokens import tokens_of
from quantload.accuracy.baseline_tolerances import Tolerances, widened
from quantload.accuracy.baseline_verdict import FEWEST_TOKENS, BaselineReport, judge
from quantload.api_load import parse_device
from quantload.api_plan import as_source
from quantload.arguments import as_path, check_counts, check_flags, check_progress
from quantload.errors import (
    BaselineError,
    ConfigError,
    NotComparable,
    OutputError,
    QuantloadError,
    counted,
)
from quantload.loader.model_dtype import own_dtype, parse_dtype
from quantload.loader.source import Source
from quantload.progress import Progress, Silent

if TYPE_CHECKING:
    from quantload.accuracy.compare_outputs import OutputComparison


def write_baseline(  # noqa: PLR0913 - a keyword for each choice of the user
    reference: str | Path,
    candidate: str | Path,
    file: str | Path,
    *,
    sequences: Sequence[Sequence[int]] | None = None,
    tolerances: Tolerances | None = None,
    repeats: int = 0,
    remade: Sequence[str | Path] = (),
    sketch: bool | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = torch.float32,
    overwrite: bool = False,
    inherit: bool = True,
    progress: Progress | None = None,
) -> Baseline:
    """Measure every layer of a checkpoint against its reference and write that to a file.

    A baseline that is replaced hands on its tokens, its tolerances and whether there is a sketch,
    unless others are given: so that accepting a candidate makes no check weaker.

    Args:
        reference: The checkpoint that is taken as right, in any format that is read.
        candidate: The checkpoint that the baseline is of.
        file: A JSON file, see `accuracy/baseline.py`.
        sequences: Token ids to run through both; without any, only weights are measured. Empty
            sequences beside others are left out.
        tolerances: What checks allow; by default those of `Tolerances`, or what repeats need.
        repeats: Runs in other arithmetic that tolerances are measured from, up to 4: the other of
            float32 and bfloat16, other numbers of threads.
        remade: What the same tool made of the same reference once more: tolerances are measured
            from how far these lie from `candidate`.
        sketch: Keep a sketch of the reference beside the file, for checks without it.
        device: Where both run; None takes CUDA where there is one.
        dtype: dtype in which both run; "auto" takes the reference's own.
        overwrite: Replace a file that is there.
        inherit: What is replaced hands on what is said above; False writes anew whatever is there.
        progress: Draws progress; silent by default.

    Raises:
        OutputError: The file is there, or cannot be written.
        NotComparable: The checkpoints are not of one model, or `remade` is of another scheme.
        BaselineError: The file that is to be replaced cannot be read.
        ConfigError: Repeats are asked for, and there are no tokens to run; or `sequences` are no
            lists of token ids.
    """
    check_flags(overwrite=overwrite, inherit=inherit)
    check_counts(0, repeats=repeats)
    place = as_path("file", file, expected="a JSON file")
    replaced = _replaced(place, overwrite=overwrite, inherit=inherit)
    tokens = None if replaced is None else replaced.tokens
    if sequences is not None:
        tokens = tokens_of(sequences)
    check_repeats(repeats, tokens)
    source, opened = (
        as_source("reference", reference, warns=True),
        as_source("candidate", candidate, warns=True),
    )
    setting = _setting(device, dtype, progress, own=source)
    keeps_sketch = sketch if sketch is not None else bool(replaced and replaced.sketch)
    how = Measuring(collects=Sketch() if keeps_sketch else None)
    made = measured_baseline(source, opened, tokens, setting, how)
    if repeats or remade:
        others = [as_source("remade", again) for again in remade]
        noise = measured_noise(made, source, opened, setting, repeats=repeats, remade=others)
        allowed = widened(tolerances or Tolerances(), noise, num_layers=len(opened.weights))
        made = replace(made, tolerances=allowed, repeats=noise)
    elif tolerances is not None:
        made = replace(made, tolerances=tolerances)
    elif replaced is not None:
        made = replace(made, tolerances=replaced.tolerances, repeats=replaced.repeats)
    made.tolerances.check_patterns(made.layers, place)
    if how.collects is not None:
        made = replace(made, sketch=kept_sketch(how, made, place))
    write_text(place, baseline_text(made))
    return made


def _replaced(place: Path, *, overwrite: bool, inherit: bool) -> Baseline | None:
    if not place.exists():
        return None
    if not overwrite:
        raise OutputError(
            f"`{place}` is there already",
            hint="`--overwrite` replaces it: what the candidate has lost by then is accepted",
        )
    try:
        return read_baseline(place) if inherit else None
    except BaselineError as error:
        raise BaselineError(
            error.message,
            hint="its tokens and tolerances cannot be kept: delete it, and write it with these "
            "given again",
        ) from error


def check_baseline(  # noqa: PLR0913 - a keyword for each choice of the user
    candidate: str | Path,
    file: str | Path,
    *,
    reference: str | Path | None = None,
    tolerances: Tolerances | None = None,
    only: str = "*",
    measure_all: bool = False,
    run: bool = True,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = torch.float32,
    progress: Progress | None = None,
) -> BaselineReport:
    """Hold a checkpoint to a baseline; an unchanged one passes without its reference.

    Args:
        candidate: The checkpoint that is judged.
        file: From `write_baseline`.
        reference: What the baseline was made with; needed if a layer has changed and there is no
            sketch of it.
        tolerances: In place of those in the file.
        only: Glob of the layers that are looked at.
        measure_all: Measure every layer, also those whose values are as they were; needs the
            reference.
        run: Run both if the baseline has tokens and a layer is measured; False looks at weights
            only, and notes that.
        device: Where both run.
        dtype: dtype in which both run.
        progress: Draws progress; silent by default.

    Raises:
        BaselineError: The file cannot be read or is damaged.
        NotComparable: The reference, an encoding or the model is another than the baseline's, or a
            layer has changed and nothing says what the reference has. A reference that is given is
            held to the baseline's digests even where nothing has changed.
        ConfigError: `measure_all` without a reference.
    """
    if measure_all and reference is None:
        raise ConfigError("all layers can be measured only against the reference", hint="`--ref`")
    check_flags(measure_all=measure_all, run=run)
    baseline = read_baseline(place := as_path("file", file, expected="a JSON file"))
    opened, source = as_source("candidate", candidate, warns=True), _reference(reference)
    setting = _setting(device, dtype, progress, own=source or opened)
    if source is not None:
        _check_reference_config(baseline, source)
    how = Measuring(known=baseline.layers, only=only, again=measure_all)
    if source is None and (kept := baseline.sketch) is not None:
        lazily = cache(lambda: read_sketch(sketch_place(place, kept.file), kept.sha256))
        how = replace(how, sketch=lazily, sigma_db=kept.sigma_db)
    now = measured_layers(source, opened, setting.progress, how)
    asked = {name: layer for name, layer in baseline.layers.items() if fnmatchcase(name, only)}
    if not asked and not now:
        raise BaselineError(f"`{only}` matches no layer of `{file}` or of `{name_of(opened)}`")
    held = replace(baseline, layers=asked, tolerances=tolerances or baseline.tolerances)
    made = replace(baseline, candidate=name_of(opened), bits_per_weight=bits_per_weight(opened))
    facts = kept_facts(opened.checkpoint.config)
    config = tuple(changed_facts(baseline.candidate_config, facts))
    measured = {name for name, layer in now.items() if layer is not baseline.layers.get(name)}
    outputs, notes = None, []
    if source is not None and run and held.tokens is not None and (measured or config):
        if now.keys() != asked.keys():
            notes.append("layers came or went, so the models were not run")
        else:
            outputs, why_not = _outputs(source, opened, held.tokens, setting, config)
            notes += [why_not] if why_not else []
    if outputs is not None:
        now = with_output_errors(now, outputs, of=measured)
        made = replace(
            made,
            end=end_numbers(outputs.end),
            blocks=block_medians(outputs),
            made_on=setting.made_on,
        )
    others = {name: layer for name, layer in baseline.layers.items() if name not in asked}
    said = quantization_facts(opened)
    made = replace(made, layers={**others, **now}, candidate_config=facts, quantization=said)
    if baseline.quantization is None:
        notes.append(
            "the baseline says nothing of the quantization config: write it again for that"
        )
    else:
        config += tuple(changed_quantization(baseline.quantization, said))
    report = _report(held, made, now, ran=outputs is not None, dtype=dtype_name(setting.dtype))
    return replace(report, config=config, notes=(*notes, *report.notes))


def _reference(reference: str | Path | None) -> Source | None:
    return None if reference is None else as_source("reference", reference, warns=True)


def _check_reference_config(baseline: Baseline, source: Source) -> None:
    facts = kept_facts(source.checkpoint.config)
    if changes := changed_facts(baseline.reference_config, facts):
        raise NotComparable(
            f"the reference is another than the baseline's: {'; '.join(changes)}",
            hint="check against the reference that the baseline was made with, or write it again",
        )


def _outputs(
    reference: Source, candidate: Source, tokens: Tokens, setting: Setting, config: tuple[str, ...]
) -> tuple[OutputComparison | None, str]:
    """Run both; of a changed config that no model can be built with it says why not."""
    try:
        return run_both(reference, candidate, tokens, setting), ""
    except QuantloadError as error:
        if not config:
            raise
        return None, f"the candidate cannot be run with this config: {error.message}"


def _report(
    held: Baseline, made: Baseline, now: dict[str, LayerBaseline], *, ran: bool, dtype: str
) -> BaselineReport:
    is_enough = held.tokens is None or held.tokens.count >= FEWEST_TOKENS or dtype == held.dtype
    report = judge(held, now, dtype=dtype, outputs=is_enough)
    gates = report.gates
    if ran and is_enough:
        gates += (
            *about_blocks(held, made.blocks, dtype=dtype),
            *about_end(held, made.end, dtype=dtype),
        )
    notes = tuple(_notes(report, held, ran=ran, dtype=dtype, is_enough=is_enough))
    return replace(report, gates=gates, notes=notes, now=made)


def _notes(
    report: BaselineReport, held: Baseline, *, ran: bool, dtype: str, is_enough: bool
) -> Iterator[str]:
    """Say what a check could not look at, and what it allowed for."""
    if report.estimated and held.sketch is not None:
        yield (
            f"{counted(len(report.estimated), 'error was', 'errors were')} estimated from the "
            f"sketch of the reference, give or take {held.sketch.sigma_db:.2f} dB: damage to a "
            "few elements does not show; `--ref` measures"
        )
    if report.layers and held.tokens is not None and not ran:
        yield "nothing was run: outputs of layers, hidden states and KL were not looked at"
    if ran and not is_enough and held.tokens is not None:
        yield (
            f"both ran in {dtype}, for the baseline in {held.dtype}, on "
            f"{counted(held.tokens.count, 'token')}: too few to judge outputs, hidden states and "
            f"KL by, {FEWEST_TOKENS} are needed"
        )
    elif ran and dtype != held.dtype:
        yield (
            f"both ran in {dtype}, for the baseline in {held.dtype}: what that adds to errors of "
            "outputs is allowed for"
        )


def _setting(
    device: str | torch.device | None,
    dtype: str | torch.dtype,
    progress: Progress | None,
    *,
    own: Source,
) -> Setting:
    check_progress(progress)
    kind = parse_dtype(dtype) or own_dtype(own)
    return Setting(parse_device(device), kind, progress or Silent())


def write_text(file: Path, text: str) -> None:
    """Write a file that appears only when it is complete.

    A link stays one: what it leads to is replaced. Pipes and devices are written to.

    Raises:
        OutputError: It cannot be written.
    """
    place = Path(os.path.realpath(file))
    partial = place.parent / f".{place.name}.partial"
    try:
        if place.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if file.exists() and not file.is_file():
            file.write_text(text, encoding="utf-8")  # a folder refuses that
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(place)
    except OSError as error:
        with suppress(OSError):  # its folder may be a file
            partial.unlink(missing_ok=True)
        raise OutputError(f"cannot write `{file}`: {error.strerror or error}") from error


__all__ = ["check_baseline", "write_baseline"]
