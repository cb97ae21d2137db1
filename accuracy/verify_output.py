"""Verify an output by what its own manifest says of it: which layers it has, how it was rounded."""

from __future__ import annotations

from dataclasses import replace

from quantload.accuracy.verify import VerifyReport, verify_sources
from quantload.loader.layer_selection import select_layers
from quantload.loader.manifest import MANIFEST, check_files, read_manifest
from quantload.loader.source import Source
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

    Raises:
        CheckpointError: There is a manifest, but no sound one.
    """
    notes = []
    options = _options(output)
    if layers := str(options.get("layers") or ""):
        notes.append(f"`{MANIFEST}` says: only layers {layers} of the source were written")
        source = select_layers(source, layers)
    if not nearest and options.get("observer") == "minmax":
        notes.append(
            f"`{MANIFEST}` says: rounded to nearest, every weight is held to its rounding step"
        )
        nearest = True
    report = verify_sources(output, source, progress, nearest=nearest)
    if options:
        files = check_files(output.checkpoint.folder, threads=2, progress=progress)
        report = replace(report, problems=(*report.problems, *files.problems))
    return replace(report, notes=tuple(notes))


def _options(output: Source) -> dict[str, object]:
    """Return the options of the conversion that wrote an output; empty if another tool did."""
    folder = output.checkpoint.folder
    if output.checkpoint.gguf_file is not None or not (folder / MANIFEST).is_file():
        return {}
    decisions = read_manifest(folder).get("decisions")
    options = decisions.get("options") if isinstance(decisions, dict) else None
    return options if isinstance(options, dict) else {}
