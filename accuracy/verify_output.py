"""Verify an output by what its own manifest says of it: which layers it has, how it was rounded."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from quantload.accuracy.verify import VerifyReport, verify_sources
from quantload.errors import CheckpointError, QuantloadError
from quantload.loader.layer_selection import select_layers
from quantload.loader.manifest import MANIFEST, check_files, read_manifest
from quantload.loader.source import Source
from quantload.loader.workers import Resources
from quantload.progress import Progress


def verify_output(
    output: Source, source: Source, progress: Progress, *, nearest: bool = False
) -> VerifyReport:
    """Compare every tensor of `output` with `source`.

    Where the manifest of `convert` says that only some layers were written, these are compared; and
    where it says that weights were rounded to nearest, they are held to it. The notes of the report
    say so. Every file is held against its sha256 too.

    Args:
        output: What was written, opened like any checkpoint.
        source: What it was made from, with all of its layers.
        progress: Advances by bytes of the output.
        nearest: Hold every weight to its rounding step whatever made it.
    """
    notes, problems = [], []
    folder = output.checkpoint.folder
    is_ours = output.checkpoint.gguf_file is None and (folder / MANIFEST).is_file()
    try:
        options = _options(folder) if is_ours else {}
    except CheckpointError as error:  # the weights can be compared nevertheless
        is_ours, options, problems = False, {}, [error.message]
    if layers := str(options.get("layers") or ""):
        notes.append(f"`{MANIFEST}` says: only layers {layers} of the source were written")
        source = select_layers(source, layers)
    if not nearest and options.get("observer") == "minmax":
        notes.append(
            f"`{MANIFEST}` says: rounded to nearest, every weight is held to its rounding step"
        )
        nearest = True
    report = verify_sources(output, source, progress, nearest=nearest)
    if is_ours:
        files = check_files(folder, threads=Resources().threads(), progress=progress)
        problems += files.problems
    return replace(report, problems=(*report.problems, *problems), notes=tuple(notes))


def has_manifest(output: object) -> bool:
    """True if a path is that of a folder which `convert` wrote, sound or not."""
    return (
        isinstance(output, str | os.PathLike)
        and (Path(os.fspath(output)).expanduser() / MANIFEST).is_file()
    )


def unreadable(error: QuantloadError) -> VerifyReport:
    """Return the report of an output that cannot be read, and so fails."""
    hint = f" ({error.hint})" if error.hint else ""
    return VerifyReport(
        layers=(),
        problems=(f"{error.message}{hint}",),
        notes=("the output cannot be read: nothing was compared",),
    )


def _options(folder: Path) -> dict[str, object]:
    """Return the options of the conversion that wrote an output.

    Raises:
        CheckpointError: The manifest does not hold them.
    """
    decisions = read_manifest(folder).get("decisions")
    options = decisions.get("options") if isinstance(decisions, dict) else None
    if not isinstance(options, dict):
        raise CheckpointError(
            f"`{folder / MANIFEST}` holds no `decisions` with `options`",
            hint="it was changed since `convert` wrote it",
        )
    return options
