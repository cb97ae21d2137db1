"""docs/architectures.md: made from the sweep, and read again to be held to it."""

from __future__ import annotations

import logging
import multiprocessing
import re
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import transformers
from architecture_sweep import LIMIT, SCHEMES, Row, sweep
from tiny_architectures import CAUSAL, architectures

PAGE = Path(__file__).parent.parent.parent / "docs" / "architectures.md"
_LINE = re.compile(r"\| `(?P<type>[^`]+)` \|.*\|")

INTRODUCTION = """# Architectures

Every causal language model that transformers {version} knows, and the models of its image-text
mapping with a text as their only input, each built as a tiny random model, saved, loaded by
`quantload.load` and compared with transformers on the same weights. Norms, biases and buffers are
random as well, so that a lost tensor shows. This page is written by `scripts/architectures.py`;
`tests/architectures/` holds it to what is measured.

{summary}

| column | meaning |
|---|---|
| linears | linear layers of the tiny model, beside experts that lie in parameters |
| groups | sets of linear layers that read one tensor in a forward of transformers |
| fused | those that run as one product after loading in full precision |
| products | of linear layers in one forward: of transformers, then of quantload |
| full precision, W4A16, FP8_DYNAMIC | logits on the same weights, see below |

`equal`: logits in float32 are within 1e-5 (relative norm) of transformers on the same, dequantized
weights. For FP8_DYNAMIC that holds for the weights alone; beside it every linear layer is compared
with torch on one input that is rounded to FP8 on both sides. Layers of one row (gates) are never
fused, and not counted in groups.

"""


def outcome(error: float | str) -> str:
    if isinstance(error, str):
        return error.replace("|", "/") if error else "-"
    return "equal" if error <= LIMIT else f"differs by {error:.1g}"


def line_of(row: Row) -> str:
    """One line of the table: nothing in it changes from run to run."""
    fp8 = outcome(row.schemes.get("FP8_DYNAMIC", ""))
    if fp8 == "equal" and outcome(row.per_linear) != "equal":
        fp8 = f"a layer {outcome(row.per_linear)}"
    notes = [f"{names}: {reason}" for names, reason in row.unfused.items()]
    notes += [row.fallback] if row.fallback else []
    cells = (
        f"`{row.model_type}`",
        row.model_class,
        row.linears,
        row.groups,
        row.fused,
        f"{row.launches[0]} → {row.launches[1]}",
        outcome(row.dense),
        outcome(row.schemes.get("W4A16", "")),
        fp8,
        "; ".join(notes),
    )
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def failed_line(model_type: str, model_class: str, reason: str) -> str:
    return f"| `{model_type}` | {model_class} | not built | | | | | | | {reason} |"


def line_for(model_type: str) -> str:
    """Sweep one architecture."""
    cls = architectures()[model_type]
    with tempfile.TemporaryDirectory() as folder:
        try:
            return line_of(sweep(model_type, cls, Path(folder)))
        except Exception as error:  # noqa: BLE001 - of transformers' own model
            text = " ".join(str(error).split())[:160].replace("|", "/")
            return failed_line(model_type, cls.__name__, f"{type(error).__name__}: {text}")


def run_all(model_types: Iterable[str] = (), *, processes: int) -> dict[str, str]:
    chosen = list(model_types) or list(architectures())
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, initializer=_quiet) as pool:
        lines = pool.imap(line_for, chosen, chunksize=4)
        return dict(zip(chosen, lines, strict=True))


def _quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)


def read_page(page: Path) -> dict[str, str]:
    lines = page.read_text().splitlines() if page.exists() else []
    return {m["type"]: line for line in lines if (m := _LINE.fullmatch(line))}


def written_for(page: Path) -> str:
    """The version of transformers that a page was made with."""
    found = re.search(r"transformers (\d+\.\d+\.\d+)", page.read_text())
    assert found is not None
    return found[1]


def page_of(lines: Mapping[str, str]) -> str:
    table = (
        "| type | class | linears | groups | fused | products | full precision | W4A16 "
        "| FP8_DYNAMIC | notes |\n|---|---|---|---|---|---|---|---|---|---|\n"
    )
    ordered = [t for t in architectures() if t in lines]
    texts = [lines[t] for t in ordered if t in CAUSAL]
    images = [lines[t] for t in ordered if t not in CAUSAL]
    start = INTRODUCTION.format(version=transformers.__version__, summary=summary(lines.values()))
    return (
        start
        + "## Causal language models\n\n"
        + table
        + "\n".join(texts)
        + "\n\n## Image and text\n\n"
        + table
        + "\n".join(images)
        + "\n"
    )


def summary(lines: Iterable[str]) -> str:
    """What the table says, counted."""
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    built = [c for c in cells if c[2] != "not built"]
    with_groups = [c for c in built if int(c[3])]
    whole = [c for c in with_groups if c[3] == c[4] and c[6] == "equal"]
    before = sum(int(c[5].split(" → ")[0]) for c in built)
    after = sum(int(c[5].split(" → ")[1]) for c in built)
    equal = [sum(c[i] == "equal" for c in built) for i in (6, 7, 8)]
    share = 100 * len(whole) / max(len(with_groups), 1)
    names = ("full precision", *SCHEMES)
    told = ", ".join(f"{n} {name}" for n, name in zip(equal, names, strict=True))
    return (
        f"Of {len(cells)} model classes {len(built)} can be built and run from text alone. "
        f"Logits are equal in: {told}. {len(with_groups)} have sibling linear layers; in "
        f"{len(whole)} of them ({share:.0f} %) every group is fused in full precision. One "
        f"forward of each takes {before} products of linear layers in transformers, {after} in "
        f"quantload."
    )
