"""How a loaded model runs: for each layer the kernel, its bytes, and what to expect of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from quantload.arguments import as_counts, check_type, plain
from quantload.errors import counted, listed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quantload.layers.kernel_facts import Call
    from quantload.layers.surgery import LinearReport


_LOAD = "`quantload.load` loads one; `quantload inspect` says what a checkpoint holds"


class Explanation(list["LinearReport"]):
    """Reports of the linear layers of a model, in its order; `print` shows a table.

    In the table layers that run alike are one line, and each reason why a kernel did not serve is
    told once.
    """

    def __str__(self) -> str:
        """Return the table."""
        return "\n".join([*_aligned(self.table()), *self.reasons()])

    def table(self, *, every: bool = False) -> list[tuple[str, ...]]:
        """Return the cells of the table; the first line is its head.

        Args:
            every: A line for each layer.
        """
        tokens = sorted({call.tokens for report in self for call in report.calls})
        head = ["layers", "n", "shape", "scheme", "kernel", "layout", "MiB"]
        for m in tokens:
            head += [f"limit us, M={m}", "share", "launches"]
        rows = [tuple(head)]
        for reports in [[report] for report in self] if every else _alike(self):
            first = reports[0]
            cells = [
                _names(report.module for report in reports),
                str(len(reports)),
                _shape(first),
                first.scheme,
                first.kernel,
                first.layout or "-",
                f"{first.weight_bytes / 2**20:.2f}" if first.weight_bytes else "-",
            ]
            calls = {call.tokens: call for call in first.calls}
            for m in tokens:
                cells += _call_cells(calls.get(m))
            rows.append(tuple(cells))
        return rows

    def reasons(self) -> list[str]:
        """Return a line for each reason of a kernel not to serve, and for each note."""
        said: dict[str, list[str]] = {}
        for report in self:
            for kernel, reason in report.refused:
                said.setdefault(f"not `{kernel}`: {reason}", []).append(report.module)
            if report.note:
                said.setdefault(f"note: {report.note}", []).append(report.module)
        return [
            f"{line} ({counted(len(modules), 'layer')}: {listed(modules, limit=2)})"
            for line, modules in said.items()
        ]


def explain(model: PreTrainedModel, *, tokens: int | Sequence[int] = ()) -> Explanation:
    """Return how each linear layer of a loaded model runs.

    A report says scheme, kernel, the stack that the layer is part of, the kernels that were
    preferred but refused and why, the layout and the bytes of the weight. For each number of
    `tokens` it also says which device functions a call launches, the time that the card needs to
    read the weight or to compute, and the expected share of that limit, where such a call was
    measured when the kernel was tuned on a card of this kind.
    `print(explain(model, tokens=[1, 16]))` shows a table.

    Args:
        model: From `load`.
        tokens: How many tokens a call has; several are told one after the other.

    Raises:
        ConfigError: A number of tokens is not positive.
    """
    from torch import nn

    from quantload.layers.surgery import explain as explain_layers  # transformers: seconds

    asked = as_token_counts(tokens)
    check_type("model", model, nn.Module, expected="a loaded model", hint=_LOAD)
    return Explanation(explain_layers(model, asked))


def as_token_counts(tokens: int | Sequence[int]) -> list[int]:
    """Return the numbers of tokens that a user asks about, one or several.

    Raises:
        ConfigError: One is not positive.
        WrongType: They are no whole numbers.
    """
    given: Any = plain(tokens)  # whatever is passed
    alone = isinstance(given, str | bytes) or not isinstance(given, Iterable)
    several = [given] if alone else given
    return as_counts("tokens", several, least=1, expected="numbers of tokens")


def _alike(reports: Iterable[LinearReport]) -> list[list[LinearReport]]:
    """Put reports together that differ in the layer's name alone, or in the stack they are in."""
    groups: dict[object, list[LinearReport]] = {}
    for report in reports:
        leaf = report.module.rpartition(".")[2]
        key = tuple(
            leaf if name == "module" else bool(value) if name == "fused_into" else value
            for name, value in vars(report).items()
        )
        groups.setdefault(key, []).append(report)
    return list(groups.values())


def _names(modules: Iterable[str]) -> str:
    """Return the one name, or what all names share, with * in the place of what differs."""
    names = [module.split(".") for module in modules]
    if len({len(parts) for parts in names}) > 1:
        return f"*.{names[0][-1]}"
    return ".".join(parts[0] if len(set(parts)) == 1 else "*" for parts in zip(*names, strict=True))


def _shape(report: LinearReport) -> str:
    if not report.shape:
        return f"{report.experts} experts"
    return "x".join(map(str, report.shape)) + (", stack" if report.fused_into else "")


def _call_cells(call: Call | None) -> list[str]:
    if call is None:
        return ["-", "-", "-"]
    limit = "-" if call.limit_us is None else f"{call.limit_us:.2f}"
    share = "-" if call.expected_share is None else f"{call.expected_share:.0%}"
    return [limit, share, ", ".join(call.kernels) or "-"]


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


__all__ = ["Explanation", "explain"]
