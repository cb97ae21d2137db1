"""What `quantload inspect --model` shows: how ranks would share the model, module by module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from quantload.cli_output import console, make_table, named_rows, print_json, shape_text, size
from quantload.errors import ConfigError

if TYPE_CHECKING:
    from quantload.layers.model_shares import ModuleShare
    from quantload.loader.source import Source


def check_sizes(tp: int, pp: int) -> None:
    """Refuse numbers of ranks that are none.

    Raises:
        ConfigError: One is less than 1.
    """
    for name, count in (("--tp", tp), ("--pp", pp)):
        if count < 1:
            raise ConfigError(f"`{name}` is {count}, expected at least 1")


def show_model(
    source: Source, shares: Sequence[ModuleShare], *, tp: int, pp: int, every: bool, as_json: bool
) -> None:
    """Print what the first rank of each stage would hold.

    Args:
        source: The checkpoint.
        shares: From `model_shares`.
        tp: Ranks that share layers.
        pp: Stages.
        every: A row for each module, instead of one for layers that are alike.
        as_json: For machines.
    """
    if as_json:
        print_json(_as_json(source, shares, tp, pp))
        return
    out = console()
    for stage in range(pp):
        here = [share for share in shares if share.stage == stage]
        out.print(_table(source, here, tp=tp, pp=pp, stage=stage, every=every))
    for stage, num_bytes in enumerate(_by_stage(shares, pp)):
        where = f"stage {stage}" if pp > 1 else "the model"
        of_rank = "of a rank " if tp > 1 else ""
        out.print(f"{num_bytes} bytes ({size(num_bytes)}) {of_rank}of {where}, as stored")
    for reason, modules in _reasons(shares).items():
        out.print(f"replicated: {len(modules)} modules, {modules[0]} ...: {reason}")


def _table(
    source: Source, shares: Sequence[ModuleShare], *, tp: int, pp: int, stage: int, every: bool
) -> Any:  # noqa: ANN401 - a table of rich
    names = source.checkpoint.config.get("architectures")
    model = ", ".join(map(str, names)) if isinstance(names, list) and names else "?"
    ranks = f"rank 0 of {tp}" + (f", stage {stage} of {pp}" if pp > 1 else "")
    table = make_table(
        f"{source.checkpoint.name}: {model}, {ranks}",
        [
            *[("module", False), ("n", True), ("class", False), ("shared by", False)],
            *[("shape", False), ("held", False), ("scheme", False), ("bytes each", True)],
            ("fused into", False),
        ],
    )
    rows = [
        (
            share.module,
            (
                share.kind,
                share.style,
                shape_text(share.shape),
                shape_text(share.held),
                share.scheme,
                str(share.num_bytes),
                share.fused_into.rpartition(".")[2],
            ),
        )
        for share in shares
    ]
    for cells in named_rows(rows, every):
        table.add_row(*cells)
    return table


def _as_json(source: Source, shares: Sequence[ModuleShare], tp: int, pp: int) -> dict[str, Any]:
    return {
        "quantload_model": 1,
        "source": source.checkpoint.name,
        "tp": tp,
        "pp": pp,
        "bytes_per_rank": _by_stage(shares, pp),
        "modules": [asdict(share) for share in shares],
    }


def _by_stage(shares: Sequence[ModuleShare], pp: int) -> list[int]:
    return [sum(s.num_bytes for s in shares if s.stage == stage) for stage in range(pp)]


def _reasons(shares: Sequence[ModuleShare]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for share in shares:
        if share.reason:
            found.setdefault(share.reason, []).append(share.module)
    return found


__all__ = ["check_sizes", "show_model"]
