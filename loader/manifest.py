"""`quantload-manifest.json`: every file of an output with its sha256, and what it was made from.

The same conversion writes the same manifest, whoever runs it and wherever: it holds no times, hosts
or paths of a machine. Engines do not read it; hidden files, which tools and hubs add, do not count,
but for the `.gitattributes` that came from the source.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any

from quantload import __version__
from quantload.errors import CheckpointError, OutputError
from quantload.loader.plan import Plan
from quantload.loader.recipe import command_line, decisions, source_description
from quantload.loader.tally import USES, tally
from quantload.progress import Progress, Silent

MANIFEST = "quantload-manifest.json"
GIT_ATTRIBUTES = ".gitattributes"
_READ_BYTES = 1 << 23
_VERSION = 1


@dataclass(frozen=True)
class FileCheck:
    """The check of a folder against its manifest.

    Args:
        num_files: Files that the manifest lists.
        num_bytes: Their bytes.
        problems: One line for each file that is missing, changed, or not in the manifest.
    """

    num_files: int
    num_bytes: int
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """True if every file is as it was written and none was added."""
        return not self.problems


def manifest(
    plan: Plan, folder: Path, *, known: Mapping[str, str] | None = None, threads: int = 1
) -> dict[str, Any]:
    """Describe a finished output: the content of its manifest.

    Args:
        plan: What was carried out.
        folder: Holds everything but the manifest.
        known: sha256 of files that were hashed while they were written.
        threads: Files that are hashed at a time.

    Returns:
        The same for the same source and options.

    Raises:
        OutputError: A file cannot be read back.
    """
    known = known or {}
    names = sorted(_files(folder) - {MANIFEST})
    others = [name for name in names if name not in known]
    try:
        digests = sha256_of([folder / name for name in others], threads=threads)
    except OSError as error:
        raise OutputError(
            f"cannot read `{error.filename}` back: {error.strerror or error}"
        ) from error
    found = dict(zip(others, digests, strict=True))
    found |= {name: ((folder / name).stat().st_size, digest) for name, digest in known.items()}
    files = {name: {"bytes": found[name][0], "sha256": found[name][1]} for name in names}
    return {**described(plan), "files": files}


def described(plan: Plan) -> dict[str, Any]:
    """Return the part of a manifest that is known before anything is written."""
    found = tally(plan)
    schemes = Counter(str(row.scheme or "full precision") for row in plan.rows)
    return {
        "quantload_manifest": _VERSION,
        "quantload": __version__,
        "source": source_description(plan),
        "decisions": decisions(plan),
        "target": plan.target.name,
        "command": command_line(plan),
        "source_bytes": {"total": found.total, **{use: found.of(use) for use in USES}},
        "modules": dict(sorted(schemes.items())),
    }


def describes(folder: Path, plan: Plan) -> bool:
    """True if a folder is the output of a plan, as its manifest says; no other file is read."""
    try:
        content = read_manifest(folder)
    except CheckpointError:
        return False
    expected: dict[str, Any] = json.loads(json.dumps(described(plan)))
    return {key: value for key, value in content.items() if key != "files"} == expected


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a folder.

    Raises:
        CheckpointError: There is none, or it is not of the expected form.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"no `{MANIFEST}` can be read in `{folder}`: {error.strerror or error}",
            hint="outputs of other tools, and of older versions, have none",
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"`{path}` is damaged: {error}") from error
    if not isinstance(content, dict) or content.get("quantload_manifest") != _VERSION:
        found = content.get("quantload_manifest") if isinstance(content, dict) else content
        raise CheckpointError(
            f"`{path}` has `quantload_manifest` = `{found}`, expected `{_VERSION}`",
            hint="a later version of quantload may read it",
        )
    files = content.get("files")
    if not isinstance(files, dict) or not files or not all(map(_is_entry, files.items())):
        raise CheckpointError(f"`{path}` lists no files with `bytes` and `sha256`")
    return content


def _is_entry(item: tuple[str, object]) -> bool:
    name, entry = item
    path = PurePosixPath(name)
    is_inside = bool(path.parts) and not path.is_absolute() and ".." not in path.parts
    if not is_inside or not isinstance(entry, Mapping):
        return False
    return isinstance(entry.get("bytes"), int) and isinstance(entry.get("sha256"), str)


def check_files(folder: Path, *, threads: int = 1, progress: Progress | None = None) -> FileCheck:
    """Hold every file of a folder against its manifest.

    Args:
        folder: With a manifest; one that is not sound is the only problem that is found.
        threads: Files that are hashed at a time.
        progress: Advances by bytes.

    Raises:
        CheckpointError: There is no manifest.
    """
    try:
        listed = read_manifest(folder)["files"]
    except CheckpointError as error:
        if not (folder / MANIFEST).is_file():
            raise
        return FileCheck(0, 0, (error.message,))
    present = _files(folder) - {MANIFEST}
    problems = [f"`{name}` is missing" for name in sorted(listed.keys() - present)]
    added = present - listed.keys() - {GIT_ATTRIBUTES}  # hubs add one
    problems += [f"`{name}` is not in the manifest" for name in sorted(added)]
    same_size = []
    for name in sorted(listed.keys() & present):
        size, expected = (folder / name).stat().st_size, listed[name]["bytes"]
        if size == expected:
            same_size.append(name)
        else:
            problems.append(f"`{name}` has {size} bytes, the manifest says {expected}")
    problems += _changed(folder, {n: listed[n] for n in same_size}, threads, progress)
    return FileCheck(len(listed), sum(entry["bytes"] for entry in listed.values()), tuple(problems))


def _changed(
    folder: Path,
    entries: Mapping[str, Mapping[str, Any]],
    threads: int,
    progress: Progress | None,
) -> list[str]:
    progress = progress or Silent()
    progress.start("sha256", total=sum(e["bytes"] for e in entries.values()), unit="B")
    try:
        digests = sha256_of(
            [folder / name for name in entries], threads=threads, advance=progress.advance
        )
    except OSError as error:
        return [f"`{error.filename}` cannot be read: {error.strerror or error}"]
    progress.finish()
    return [
        f"`{name}` has changed: its sha256 is `{digest}`, the manifest says `{entry['sha256']}`"
        for (name, entry), (_, digest) in zip(entries.items(), digests, strict=True)
        if digest != entry["sha256"]
    ]


def sha256_of(
    paths: Iterable[Path], *, threads: int = 1, advance: Callable[[int], None] | None = None
) -> list[tuple[int, str]]:
    """Return (bytes, sha256 in hexadecimal digits) of each file.

    Args:
        paths: Files.
        threads: Files that are read at a time; neither reading nor hashing holds the interpreter.
        advance: Called with every number of bytes that are done, by one thread at a time.
    """
    lock = Lock()

    def tell(amount: int) -> None:
        if advance is not None:
            with lock:
                advance(amount)

    with ThreadPoolExecutor(max_workers=max(1, threads)) as pool:
        return list(pool.map(lambda path: _sha256(path, tell), paths))


def _sha256(path: Path, tell: Callable[[int], None]) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("rb", buffering=0) as file:
            buffer = memoryview(bytearray(max(1, min(_READ_BYTES, path.stat().st_size))))
            while got := file.readinto(buffer):
                digest.update(buffer[:got])
                size += got
                tell(got)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    return size, digest.hexdigest()


def _files(folder: Path) -> set[str]:
    """Return the names of the files of an output, "/" between folders.

    Of hidden ones only .gitattributes, which `side_files` takes along, too.
    """
    found = set()
    for path in folder.rglob("*"):
        inside = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in inside.parts)
        if (not hidden or inside.as_posix() == GIT_ATTRIBUTES) and path.is_file():
            found.add(inside.as_posix())
    return found
