"""A reference kept as a sketch: enough to estimate how far a changed weight is from it.

    S = L W R / ||W||        L [64, N] and R [K, 16] of +1 and -1, W [N, K] the reference's weight

Of a candidate's weight W', the sum of the squares of L W' R - L W R, divided by 64 * 16, has
||W' - W||^2 as its expectation (signs are independent), and every element of W takes part. Sides
that are no longer than 64 or 16 stay as they are. The signs follow from the layer's name, so that
a file `<baseline>.sketch.safetensors` needs only

    sketch.<layer>   float16 [64, 16] or less: S
    norms            float64 [layers]: ||W||, layers in the order of their names

about 2 KB a layer. An estimate is uncertain by some tenths of a dB (`sigma_db`, measured on the
candidate that the baseline is of, whose errors are known): it shows a broken layer, and a slip of
all layers in their mean; not damage to a few elements, which only the reference shows.

Source: random projections, Johnson and Lindenstrauss (1984); signs in place of Gaussians,
Achlioptas, "Database-friendly random projections" (2003).
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quantload.accuracy.statistics_file import write_tensors
from quantload.errors import BaselineError, QuantloadError
from quantload.loader.checkpoint import read_entry
from quantload.loader.safetensors_header import read_header

ROWS, COLUMNS = 64, 16
SKETCH_SUFFIX = ".sketch.safetensors"
_CHUNK = 1 << 22  # elements that are in float32 at a time
_FLOOR = 2.0**-10  # relative errors that float16 hides in `S`: 4 times its own, 2^-11 / sqrt(3) rms


class Sketch:
    """Sketches of weights by layer.

    Args:
        parts: S of each layer, float16.
        norms: ||W|| of each layer.
    """

    def __init__(
        self, parts: Mapping[str, Tensor] | None = None, norms: Mapping[str, float] | None = None
    ) -> None:
        self.parts, self.norms = dict(parts or {}), dict(norms or {})

    def add(self, name: str, reference: Tensor) -> None:
        """Add the reference's values of a layer: a weight [N, K], or a tensor of any shape."""
        norm = math.sqrt(sum(float(part.double().square().sum()) for part in _chunks(reference)))
        self.norms[name] = norm
        self.parts[name] = (_projected(name, reference) / (norm or 1.0)).to(torch.float16)

    def relative_error(self, name: str, candidate: Tensor) -> float:
        """Estimate ||candidate - reference|| / ||reference||; 0 for what float16 cannot tell.

        Raises:
            BaselineError: The candidate's values have another shape than the reference's.
        """
        norm, kept = self.norms[name], self.parts[name]
        found = _projected(name, candidate)
        if found.shape != kept.shape:
            raise BaselineError(f"`{name}` has another shape than the sketch of the reference")
        if not norm:
            return math.inf if bool(found.any()) else 0.0
        height, width = _sides(candidate)
        mixed = (ROWS if height > ROWS else 1) * (COLUMNS if width > COLUMNS else 1)
        noise = float((found / norm - kept.double()).square().sum()) / mixed
        relative = math.sqrt(noise)
        return 0.0 if relative < _FLOOR else relative

    def write(self, file: Path) -> str:
        """Write the sketch, replacing the file, or what a link leads to; returns its sha256.

        Raises:
            OutputError: It cannot be written.
        """
        file = Path(os.path.realpath(file))
        names = sorted(self.parts)
        tensors = {f"sketch.{name}": self.parts[name] for name in names}
        tensors["norms"] = torch.tensor([self.norms[name] for name in names], dtype=torch.float64)
        write_tensors(file, tensors, {"format": "quantload sketch", "version": "1"}, overwrite=True)
        return file_digest(file)


def read_sketch(file: Path, sha256: str) -> Sketch:
    """Read a sketch.

    Args:
        file: From `Sketch.write`.
        sha256: Which that returned.

    Raises:
        BaselineError: It is not there, cannot be read, or is another.
    """
    if not file.is_file():
        raise BaselineError(
            f"there is no `{file}`, the sketch of the reference that the baseline names",
            hint="it belongs beside the baseline, in the repository; or give `--ref`",
        )
    if file_digest(file) != sha256:
        raise BaselineError(
            f"`{file}` is not the sketch that the baseline was written with: its sha256 is not "
            f"`{sha256}`",
            hint="commit both files together; or give `--ref`",
        )
    try:
        tensors = {name: read_entry(entry) for name, entry in read_header(file).items()}
    except QuantloadError as error:
        raise BaselineError(f"cannot read the sketch `{file}`: {error.message}") from error
    norms = tensors.pop("norms", torch.empty(0, dtype=torch.float64)).tolist()
    parts = {name.removeprefix("sketch."): tensor for name, tensor in sorted(tensors.items())}
    if len(norms) != len(parts):
        raise BaselineError(f"the sketch `{file}` has {len(parts)} layers and {len(norms)} norms")
    return Sketch(parts, dict(zip(parts, norms, strict=True)))


def sketch_place(baseline: Path, name: str) -> Path:
    """Return where the sketch of a baseline lies: beside it.

    Of a link it lies beside the file that this leads to, unless there is one beside the link.
    """
    beside = baseline.with_name(name)
    if not baseline.is_symlink() or beside.exists():
        return beside
    return Path(os.path.realpath(baseline)).with_name(name)


def file_digest(file: Path) -> str:
    """Return the sha256 of a file, 64 hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sides(values: Tensor) -> tuple[int, int]:
    """A vector is a column: its elements are mixed, not added up."""
    height = values.shape[0] if values.ndim else 1
    return height, values.numel() // max(height, 1)


def _chunks(values: Tensor) -> Iterator[Tensor]:
    height, width = _sides(values)
    matrix = values.reshape(height, width)
    return iter(torch.split(matrix, max(1, _CHUNK // max(width, 1))))


def _projected(name: str, values: Tensor) -> Tensor:
    """Return L W R, float64."""
    height, width = _sides(values)
    right = _signs(f"{name} right", width, COLUMNS)
    left = _signs(f"{name} left", height, ROWS)
    found = torch.zeros(
        ROWS if left is not None else height,
        COLUMNS if right is not None else width,
        dtype=torch.float64,
    )
    start = 0
    for rows in _chunks(values):
        part = rows.cpu().to(torch.float32)
        part = (part if right is None else part @ right).double()
        stop = start + rows.shape[0]
        if left is None:
            found[start:stop] = part
        else:
            found += left[:, start:stop].double() @ part
        start = stop
    return found


def _signs(seed: str, length: int, count: int) -> Tensor | None:
    """Return +1 and -1, [length, 16] or [64, length] float32; None for what is not mixed.

    They are bits of a generator whose stream numpy keeps the same for good.
    """
    if length <= count:
        return None
    bits = np.random.PCG64(int(hashlib.sha256(seed.encode()).hexdigest()[:16], 16))
    raw = np.atleast_1d(bits.random_raw(-(-length * count // 64))).astype("<u8").view(np.uint8)
    signs = torch.from_numpy(np.unpackbits(raw)[: length * count].astype(np.float32)) * 2 - 1
    return signs.reshape(length, count) if count == COLUMNS else signs.reshape(count, length)


__all__ = ["SKETCH_SUFFIX", "Sketch", "file_digest", "read_sketch", "sketch_place"]
