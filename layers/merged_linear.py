"""Column-parallel layers of several members in one weight: gate and up, or q, k and v.

Each process holds a part of each member, never a part of all of them side by side. The members may
be tensors of their own in the checkpoint, or one that has them all in it.

Letters: N output features, K input features, T processes, H heads, D size of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantload.arguments import as_counts, check_counts
from quantload.errors import ConfigError
from quantload.layers.cut import Schemes, as_parallel, kv_heads_of, merged_cut, scheme_at, times
from quantload.layers.stack import LinearStack
from quantload.quant.scheme import DENSE
from quantload.runtime.parallel import Parallel


class MergedColumnParallelLinear(LinearStack):
    """Members that read one input in one weight, each process a part of each member.

    Used by hand, `forward` returns the results of all members side by side, [..., sum of N_i / T];
    a transformers model sees `StackView`s, one for each member.

    Args:
        in_features: K.
        output_sizes: N_i of each member, multiples of T.
        bias: True if every member has a bias, False if none has.
        gather_output: Give every process all of the result, member after member.
        slots_on_disk: 1 if the members are one tensor in the checkpoint; None if each has its own.
        scheme: One scheme or one for each tensor of the checkpoint; or {path: either}, looked up
            by `prefix`. Members of unlike schemes are multiplied one by one.
        dtype: As in `ReplicatedLinear`.
        parallel: As in `ReplicatedLinear`.
        prefix: As in `ReplicatedLinear`.
        proven: See `LinearStack`.

    Raises:
        ConfigError: A size does not divide, or another number of slots.
    """

    def __init__(  # noqa: PLR0913 - a keyword for each decision
        self,
        in_features: int,
        output_sizes: Sequence[int],
        *,
        bias: bool = True,
        gather_output: bool = False,
        slots_on_disk: int | None = None,
        scheme: Schemes = DENSE,
        dtype: torch.dtype | None = None,
        parallel: Parallel | None = None,
        prefix: str = "",
        proven: bool = False,
    ) -> None:
        (in_features,) = check_counts(0, in_features=in_features)
        expected = "one size for each member"
        output_sizes = as_counts("output_sizes", output_sizes, least=0, expected=expected)
        parallel = as_parallel(parallel)
        shares = [
            parallel.share_of(size, f"the {size} rows of member {number} of `{prefix}`")
            for number, size in enumerate(output_sizes)
        ]
        self._build(
            in_features,
            output_sizes,
            shares,
            copies=[1] * len(shares),
            bias=bias,
            gather_output=gather_output,
            slots_on_disk=slots_on_disk,
            scheme=scheme,
            dtype=dtype,
            parallel=parallel,
            prefix=prefix,
            proven=proven,
        )

    def _build(  # noqa: PLR0913 - as the constructor
        self,
        in_features: int,
        output_sizes: Sequence[int],
        shares: Sequence[tuple[int, int]],
        *,
        copies: Sequence[int],
        bias: bool,
        gather_output: bool,
        slots_on_disk: int | None,
        scheme: Schemes,
        dtype: torch.dtype | None,
        parallel: Parallel,
        prefix: str,
        proven: bool,
    ) -> None:
        """Set up the layer, of each member rows (start, stop) that `copies` processes hold."""
        if slots_on_disk not in (None, 1, len(output_sizes)):
            raise ConfigError(
                f"`slots_on_disk` of `{prefix}` is {slots_on_disk}, expected 1 for one tensor, or "
                f"{len(output_sizes)}"
            )
        LinearStack.__init__(
            self,
            in_features,
            [stop - start for start, stop in shares],
            bias=bias,
            scheme=scheme_at(scheme, prefix),
            dtype=dtype or torch.get_default_dtype(),
            prefix=prefix,
            proven=proven,
            cut=merged_cut(
                in_features, output_sizes, shares, parallel, is_fused=slots_on_disk == 1
            ),
        )
        self.parallel, self.gather_output = parallel, gather_output
        self.output_sizes, self._copies = list(output_sizes), list(copies)

    @property
    def part_sizes(self) -> list[int]:
        """Features of the result of each member."""
        return self.output_sizes if self._gathers else self.sizes

    @property
    def _gathers(self) -> bool:
        return self.gather_output and self.parallel.tp_size > 1

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., K] to the results of all members, [..., sum of N_i / T] or all of them."""
        return torch.cat(self.parts(x), dim=-1) if self._gathers else super().forward(x)

    def parts(self, x: Tensor) -> list[Tensor]:
        """Return the results of all members, [..., N_i / T] or [..., N_i] each."""
        if not self._gathers:
            return super().parts(x)
        gathered = self.parallel.all_gather(super().forward(x).unsqueeze(-2), -2)
        parts = torch.split(gathered, self.sizes, dim=-1)
        return [self._joined(part, slot) for slot, part in enumerate(parts)]

    def part(self, x: Tensor, slot: int) -> Tensor:
        """Return the result of one member that runs on its own."""
        part = super().part(x, slot)
        if not self._gathers:
            return part
        return self._joined(self.parallel.all_gather(part.unsqueeze(-2), -2), slot)

    def _joined(self, parts: Tensor, slot: int) -> Tensor:
        """Join [..., T, N of the slot] to the whole result of a member."""
        return parts[..., :: self._copies[slot], :].flatten(-2)


class QKVParallelLinear(MergedColumnParallelLinear):
    """q, k and v in one weight, cut by heads; k and v are copied if there are too few for all.

    The result is [..., H / T * D + KV / T * D + KV / T * V], see `num_heads` and `num_kv_heads`,
    which are those of this process.

    Args:
        hidden_size: K.
        head_dim: D, size of a head of q and k.
        num_heads: H of the whole layer, a multiple of T.
        num_kv_heads: KV of the whole layer; None is H. One of KV and T is a multiple of the other.
        v_head_dim: V, size of a head of v; None is D.
        bias: As in `MergedColumnParallelLinear`.
        gather_output: As in `MergedColumnParallelLinear`.
        slots_on_disk: As in `MergedColumnParallelLinear`.
        scheme: As in `MergedColumnParallelLinear`.
        dtype: As in `ReplicatedLinear`.
        parallel: As in `ReplicatedLinear`.
        prefix: As in `ReplicatedLinear`.
        proven: See `LinearStack`.

    Raises:
        ConfigError: The heads cannot be shared by T processes.
    """

    def __init__(  # noqa: PLR0913 - a keyword for each decision
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        v_head_dim: int | None = None,
        bias: bool = True,
        gather_output: bool = False,
        slots_on_disk: int | None = None,
        scheme: Schemes = DENSE,
        dtype: torch.dtype | None = None,
        parallel: Parallel | None = None,
        prefix: str = "",
        proven: bool = False,
    ) -> None:
        hidden_size, head_dim, num_heads = check_counts(
            0, hidden_size=hidden_size, head_dim=head_dim, num_heads=num_heads
        )
        total, width = check_counts(
            0,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            v_head_dim=head_dim if v_head_dim is None else v_head_dim,
        )
        parallel = as_parallel(parallel)
        heads = parallel.share_of(num_heads, f"the {num_heads} heads of `{prefix}`")
        kv_heads, copies = kv_heads_of(parallel, total, prefix)
        self._build(
            hidden_size,
            [num_heads * head_dim, total * head_dim, total * width],
            [times(heads, head_dim), times(kv_heads, head_dim), times(kv_heads, width)],
            copies=[1, copies, copies],
            bias=bias,
            gather_output=gather_output,
            slots_on_disk=slots_on_disk,
            scheme=scheme,
            dtype=dtype,
            parallel=parallel,
            prefix=prefix,
            proven=proven,
        )
        self.head_dim, self.v_head_dim = head_dim, width
        self.num_heads = heads[1] - heads[0]
        self.num_kv_heads = kv_heads[1] - kv_heads[0]


__all__ = ["MergedColumnParallelLinear", "QKVParallelLinear"]
