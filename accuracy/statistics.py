"""Statistics of the inputs of every layer: collected in one pass over a model, written to a file.

    stats.safetensors
        <module>.input_mean_square  float32 [K]: E[x^2] of each input feature over its tokens
        <module>.input_absmax       float32 [1]: the largest |x|
        <module>.input_min          float32 [K]: the smallest x of each input feature
        <module>.input_max          float32 [K]: the largest
        <module>.tokens             int64 [1]: how many tokens reached it; of an expert, how many
                                    were routed to it

`loader/stats.py` reads it for `convert --stats`. Modules have the names under which `convert` plans
them: experts that lie in one parameter are named one by one. What no token reached is not in the
file. Metadata say of which checkpoint and which tokens the numbers are.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantload import __version__
from quantload.accuracy.input_sums import InputSums
from quantload.accuracy.places import places_of
from quantload.accuracy.statistics_file import check_free, write_tensors
from quantload.errors import ModelError, counted, listed
from quantload.loader.checkpoint import files_kept_open
from quantload.loader.experts import Experts, split_experts
from quantload.loader.source import FLOAT_DTYPES, Source
from quantload.progress import Progress, Silent

if TYPE_CHECKING:
    from quantload.accuracy.input_watch import InputWatch
    from quantload.accuracy.streaming import StreamedModel

FORMAT, VERSION = "quantload statistics", "1"
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class InputStatisticsReport:
    """What was collected.

    Args:
        sums: Sums over the inputs of each module, by checkpoint name; only of those that a token
            reached.
        num_tokens: Tokens that were run.
        num_sequences: Sequences that they came in.
        unseen: Modules that no token reached.
        uncovered: Weights that are no linear layer's, or whose inputs cannot be watched; and
            tensors [E, N, K] of experts that stay whole.
        why_whole: Why the model was loaded as a whole; "" if it was run block by block.
        why_blind: Why experts cannot be watched, by path in the model.
        metadata: What the file says of itself.
        file: Where it was written; None if it was not.
    """

    sums: Mapping[str, InputSums]
    num_tokens: int
    num_sequences: int
    unseen: tuple[str, ...] = ()
    uncovered: tuple[str, ...] = ()
    why_whole: str = ""
    why_blind: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    file: Path | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know."""
        found = []
        experts = [name for name in self.unseen if _EXPERT.search(name)]
        others = [name for name in self.unseen if not _EXPERT.search(name)]
        if experts:
            found.append(
                f"no token reached {counted(len(experts), 'module')} of experts, which the file "
                f"leaves out: {listed(experts)}; more tokens, or others, may reach them"
            )
        if others:
            found.append(
                f"{counted(len(others), 'module was', 'modules were')} never called, and the file "
                f"leaves {'it' if len(others) == 1 else 'them'} out: {listed(others)}"
            )
        if self.why_blind:
            path, reason = next(iter(self.why_blind.items()))
            found.append(
                f"the experts of {counted(len(self.why_blind), 'block')} have no statistics, "
                f"`{path}` for one: {reason}"
            )
        if self.why_whole:
            found.append(f"the model was in memory as a whole: {self.why_whole}")
        return tuple(found)


@files_kept_open()
def collect_statistics(
    source: Source,
    sequences: Sequence[Sequence[int]],
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    batch_tokens: int = 2048,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
) -> InputStatisticsReport:
    """Run token sequences through a model and sum up the inputs of all its layers.

    Every token of every sequence counts once; sequences are never padded. Sums are in float64, so
    that the numbers do not depend on how sequences are put together.

    Args:
        source: An open checkpoint, quantized or not; inputs are not rounded.
        sequences: Token ids.
        device: Where the model runs.
        dtype: dtype in which it runs.
        batch_tokens: Tokens that go through a block at a time, at most (or one sequence).
        progress: Advances by blocks.
        trust_remote_code: Run modelling code that comes with the checkpoint.

    Raises:
        ConfigError: Sequences are not of this model.
        ModelError: transformers cannot build or run the model, or an input is not finite.
    """
    from quantload.accuracy.input_watch import InputWatch  # transformers: seconds to import
    from quantload.accuracy.streaming import open_streamed

    streamed = open_streamed(
        source, device=device, dtype=dtype, trust_remote_code=trust_remote_code
    )
    watch = InputWatch()
    streamed.run(sequences, watch.watching, progress or Silent(), batch_tokens=batch_tokens)
    _check_finite(watch)
    named = _Named(streamed, watch, split_experts(source, unserved=True))
    sums = {module: found for module in named.modules if (found := named.sums_of(module))}
    return InputStatisticsReport(
        sums=sums,
        num_tokens=sum(map(len, sequences)),
        num_sequences=sum(1 for ids in sequences if len(ids)),
        unseen=tuple(m for m in named.modules if m not in sums and named.is_watched(m)),
        uncovered=(*(m for m in named.modules if not named.is_watched(m)), *named.whole_experts()),
        why_whole=streamed.why_whole,
        why_blind=streamed.blind,
        metadata=_metadata(source, sequences, dtype=dtype),
    )


def _check_finite(watch: InputWatch) -> None:
    wrong = [path for (path, _, _), sums in watch.sums.items() if not sums.is_finite]
    if wrong:
        raise ModelError(
            f"inputs of `{wrong[0]}` are not finite, and those of {len(wrong) - 1} others",
            hint="run the model in another dtype, for example float32",
        )


class _Named:
    """Sums by the names that modules have in the checkpoint, its experts one by one.

    Args:
        streamed: The model, after it has run.
        watch: What was seen.
        experts: The checkpoint with experts that lie in one parameter taken apart.
    """

    def __init__(self, streamed: StreamedModel, watch: InputWatch, experts: Experts) -> None:
        self._mapper, self._watch, self._experts = streamed.mapper, watch, experts
        self.modules = list(experts.source.weights)

    def is_watched(self, module: str) -> bool:
        """True if the inputs of a module could be seen."""
        return any(
            place in self._watch.places for place in places_of(module, self._mapper, self._experts)
        )

    def sums_of(self, module: str) -> InputSums | None:
        """Return the sums of a module; None if no token reached it, or it is not watched.

        Rows of one weight may serve several layers of the model: mostly these see one input.
        """
        total: InputSums | None = None
        for place in places_of(module, self._mapper, self._experts):
            sums = self._watch.sums.get(place)
            if sums is None or (total is not None and total.equals(sums)):
                continue
            total = sums if total is None else total + sums
        rows, columns = self._experts.source.weights[module].shape
        if any(
            path in self._watch.transposed
            for path, _, _ in places_of(module, self._mapper, self._experts)
        ):
            columns = rows  # the file has it as the layer stores it
        if total is not None and total.squares.shape[0] != columns:
            raise ModelError(
                f"the layer of `{module}` was handed {total.squares.shape[0]} features, expected "
                f"{columns}, the columns of its weight"
            )
        return total

    def whole_experts(self) -> list[str]:
        """Return the tensors [E, N, K] of all experts of a block that stay whole."""
        return [
            name
            for name, entry in self._experts.source.plain.items()
            if len(entry.shape) == 3 and entry.dtype in FLOAT_DTYPES and "conv" not in name
        ]


# -- the file --------------------------------------------------------------------------------------


def write_statistics(
    report: InputStatisticsReport, file: Path, *, overwrite: bool = False
) -> InputStatisticsReport:
    """Write what was collected; the file appears only when it is complete.

    Args:
        report: From `collect_statistics`.
        file: Where it goes.
        overwrite: Replace what is there.

    Returns:
        The report, which knows the file.

    Raises:
        OutputError: The place is taken, or cannot be written.
    """
    check_free(file, overwrite=overwrite)
    tensors: dict[str, Tensor] = {}
    for module, sums in report.sums.items():
        tensors[f"{module}.input_mean_square"] = sums.mean_square.float()
        tensors[f"{module}.input_absmax"] = torch.tensor([sums.absmax], dtype=torch.float32)
        tensors[f"{module}.input_min"] = sums.low
        tensors[f"{module}.input_max"] = sums.high
        tensors[f"{module}.tokens"] = torch.tensor([sums.count], dtype=torch.int64)
    write_tensors(file, tensors, report.metadata, overwrite=overwrite)
    return InputStatisticsReport(**{**vars(report), "file": file})


def _metadata(
    source: Source, sequences: Sequence[Sequence[int]], *, dtype: torch.dtype
) -> dict[str, str]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "source": Path(source.checkpoint.name).name,
        "source_sha256": source_digest(source),
        "token_ids_sha256": ids_digest(sequences),
        "num_tokens": str(sum(map(len, sequences))),
        "num_sequences": str(sum(1 for ids in sequences if len(ids))),
        "dtype": str(dtype).removeprefix("torch."),
        "quantload": __version__,
        "torch": metadata.version("torch"),
        "transformers": metadata.version("transformers"),
    }


def source_digest(source: Source) -> str:
    """Return the sha256 of a checkpoint's config and headers: names, dtypes, shapes."""
    tensors = source.checkpoint.tensors
    headers = [(name, str(tensors[name].dtype), list(tensors[name].shape)) for name in tensors]
    return _sha256_of([dict(source.checkpoint.config), sorted(headers)])


def ids_digest(sequences: Sequence[Sequence[int]]) -> str:
    """Return the sha256 of token ids, as JSON without spaces: `[[1,2],[3]]`."""
    return _sha256_of([[int(i) for i in ids] for ids in sequences])


def _sha256_of(content: object) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


__all__ = [
    "InputStatisticsReport",
    "collect_statistics",
    "ids_digest",
    "source_digest",
    "write_statistics",
]
