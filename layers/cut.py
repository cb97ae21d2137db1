"""What one of several processes holds of a linear layer, and which schemes a layer is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import TypeAlias

from quantload.arguments import check_type
from quantload.errors import ConfigError
from quantload.quant.region import WHOLE, Region
from quantload.quant.scheme import DENSE, Scheme
from quantload.runtime.parallel import Parallel

# One scheme, one for each member, or what is said of each dotted path; a path not named is dense.
Schemes: TypeAlias = Scheme | Sequence[Scheme] | Mapping[str, Scheme | Sequence[Scheme]]


def scheme_at(schemes: Schemes, prefix: str) -> Scheme | Sequence[Scheme]:
    """Return the scheme of a module, or those of its members.

    Raises:
        WrongType: It is something else, as the name of a scheme.
    """
    found: object = schemes.get(prefix, DENSE) if isinstance(schemes, Mapping) else schemes
    for scheme in found if isinstance(found, list | tuple) else (found,):
        check_type(
            "scheme",
            scheme,
            Scheme,
            expected="a `Scheme`, or one for each member",
            hint="`quantload.quant.scheme.parse_scheme` makes one from a name such as `W4A16:g64`",
        )
    return found  # type: ignore[return-value]  # checked above


def as_parallel(parallel: Parallel | None) -> Parallel:
    """Return what shares a layer or a model; None is one process.

    Raises:
        WrongType: It is something else, as a number of GPUs.
    """
    given: object = parallel
    is_count = isinstance(given, int) and not isinstance(given, bool) and given > 1
    number = given if is_count else "N"
    check_type(
        "parallel",
        given,
        (Parallel, NoneType),
        expected="a `quantload.Parallel`, or None for one process",
        hint=f"`Parallel.from_environment(tp={number})`, in a script that `torchrun "
        f"--nproc-per-node {number}` starts",
    )
    return parallel or Parallel()


@dataclass(frozen=True)
class Cut:
    """What a rank holds of a layer that is larger; tensors are counted as the checkpoint has them.

    Args:
        in_features: K of the whole layer.
        sizes: N of each tensor of the whole layer.
        regions: What this rank holds of each; None if it is all another rank's.
    """

    in_features: int
    sizes: tuple[int, ...]
    regions: tuple[Region | None, ...]


def kv_heads_of(parallel: Parallel, total: int, prefix: str) -> tuple[tuple[int, int], int]:
    """Return (start, stop) of the heads of k and v that a process holds, and how many hold each.

    Raises:
        ConfigError: Neither of `total` and T is a multiple of the other.
    """
    size = parallel.tp_size
    if total % size == 0:
        return parallel.share_of(total, f"the {total} key-value heads of `{prefix}`"), 1
    if size % total:
        raise ConfigError(
            f"the {total} key-value heads of `{prefix}` cannot be shared by {size} processes: "
            "expected one number to be a multiple of the other",
            hint="take fewer processes for tensor parallelism, or a replicated layer",
        )
    copies = size // total
    head = parallel.tp_rank // copies
    return (head, head + 1), copies


def times(part: tuple[int, int], size: int) -> tuple[int, int]:
    """Return (start, stop) in features of what is (start, stop) in heads of a size."""
    return part[0] * size, part[1] * size


def rows_held(parallel: Parallel, *runs: tuple[int, int]) -> Region:
    """Return the region of some runs of rows; of one process it is all."""
    return WHOLE if parallel.tp_size == 1 else Region(rows=runs)


def merged_cut(
    in_features: int,
    sizes: Sequence[int],
    shares: Sequence[tuple[int, int]],
    parallel: Parallel,
    *,
    is_fused: bool,
) -> Cut:
    """Return what a process holds of the members, or of one tensor that has them all in it."""
    if not is_fused:
        regions = tuple(rows_held(parallel, share) for share in shares)
        return Cut(in_features, tuple(sizes), regions)
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    runs = [
        (first + start, first + stop) for first, (start, stop) in zip(starts, shares, strict=True)
    ]
    return Cut(in_features, (sum(sizes),), (rows_held(parallel, *runs),))


__all__ = ["Cut", "Schemes", "kv_heads_of", "merged_cut", "rows_held", "scheme_at", "times"]
