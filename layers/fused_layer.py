"""A decoder layer as a decode step runs it: four products and four small kernels.

    hidden, x = hidden + delta, norm(hidden + delta)        delta: what the layer before adds
    q, k, v   = project(x)                                  one product
    a         = attention of q over the cache               with norms, rotary, write: one kernel
    hidden, x = hidden + output(a), norm(...)
    delta     = down(act(gate(x)) * up(x))                  or any other module that maps rows

The sum behind the MLP is left to the next layer, whose first norm reads it. Each small kernel
fetches weights of the product behind it. Layers of transformers models are taken apart into this by
`fused_recognition.py`, and held against their own forward by `fused_proof.py`.

Letters: B rows, H width of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quantload.layers.fast_glu import GluFormula
from quantload.layers.stack import LinearStack

if TYPE_CHECKING:
    from quantload.runtime.kernels.add_norm import NormWeight
    from quantload.runtime.kernels.decode_attention import HeadRule


@dataclass(frozen=True)
class KeptHeads:
    """Keys and values of one layer, and where its rotary tables are.

    Args:
        keys: [B, KV, L, D].
        values: [B, KV, L, D].
        scales: Multipliers of their codes; 1 where they are no codes.
        rotary: Cosines and sines [L, R].
        locks: See `decode_attention`.
    """

    keys: Tensor
    values: Tensor
    scales: tuple[float, float]
    rotary: tuple[Tensor, Tensor]
    locks: Tensor


@dataclass(frozen=True)
class Flow:
    """What goes from layer to layer.

    Args:
        hidden: [B, H], the residual stream before `delta`.
        delta: [B, H] to be added, None at first.
        post: Norm of `delta` before it is added.
    """

    hidden: Tensor
    delta: Tensor | None = None
    post: NormWeight | None = None


@dataclass(frozen=True)
class Projection:
    """What makes q, k and v of rows.

    Args:
        members: One stack of the three, one layer whose features are the three side by side, or
            three layers.
        sizes: Features of q, k and v.
    """

    members: Sequence[nn.Module]
    sizes: tuple[int, int, int]

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """Return q, k and v [B, N_i] of x [B, H]."""
        if len(self.members) == 1:
            return torch.split(self.members[0](x), list(self.sizes), dim=-1)
        return [member(x) for member in self.members]


@dataclass(frozen=True)
class GatedMlp:
    """A recognised gated linear unit.

    Args:
        module: The unit.
        formula: What it computes.
    """

    module: nn.Module
    formula: GluFormula

    def __call__(self, x: Tensor) -> Tensor:
        """Map [B, H] to [B, H]."""
        from quantload.runtime.kernels.glu import glu

        gate, up = self.formula.factors(self.module, x)
        down = self.module._modules[self.formula.down]
        assert down is not None, "a recognised unit has its layers"
        product = glu(gate, up, self.formula.known, ahead=weight_of(down))
        return down(product)  # type: ignore[no-any-return]

    @property
    def first(self) -> nn.Module | None:
        """What reads x first."""
        gate = self.module._modules[self.formula.gate]
        return None if gate is None else gate.__dict__.get("stack", gate)


@dataclass(frozen=True)
class OwnMlp:
    """Any module that maps rows, run as it is: experts with their router.

    Args:
        module: Takes [B, T, H], returns [B, T, H], or a tuple that starts with it.
    """

    module: nn.Module

    def __call__(self, x: Tensor) -> Tensor:
        """Map [B, H] to [B, H]."""
        result = self.module(x[:, None])
        result = result[0] if isinstance(result, tuple) else result
        return result.reshape(x.shape)  # type: ignore[no-any-return]

    @property
    def first(self) -> nn.Module | None:
        """Nothing is known of what reads x first."""
        return None


@dataclass(frozen=True)
class FusedLayer:
    """A decoder layer, taken apart.

    Args:
        before_heads: Norm of what the projection reads; None has none.
        projection: Makes q, k and v.
        rule: What is done with the heads.
        output: Maps [B, heads * D] to [B, H].
        after_heads: Norm of what attention adds; None has none.
        before_mlp: Norm of what the MLP reads; None has none.
        mlp: The MLP.
        after_mlp: Norm of what the MLP adds; None has none.
    """

    before_heads: NormWeight | None
    projection: Projection
    rule: HeadRule
    output: nn.Module
    after_heads: NormWeight | None
    before_mlp: NormWeight | None
    mlp: GatedMlp | OwnMlp
    after_mlp: NormWeight | None

    def step(self, flow: Flow, positions: Tensor, kept: KeptHeads) -> Flow:
        """Run one token of each row; its key and value are written to `kept`."""
        hidden, x = self._heads(flow, positions, kept)
        return Flow(hidden, self.mlp(x), self.after_mlp)

    def _heads(self, flow: Flow, positions: Tensor, kept: KeptHeads) -> tuple[Tensor, Tensor]:
        """Return the residual stream after attention, and what the MLP reads."""
        from quantload.runtime.kernels.add_norm import add_norm
        from quantload.runtime.kernels.decode_attention import decode_attention

        ahead = weight_of(self.projection.members[0])
        hidden, x = add_norm(
            flow.hidden, flow.delta, self.before_heads, post=flow.post, ahead=ahead
        )
        q, k, v = self.projection(x)
        attended = decode_attention(
            q,
            k,
            v,
            self.rule,
            rotary=kept.rotary,
            cache=(kept.keys, kept.values),
            positions=positions,
            locks=kept.locks,
            scales=kept.scales,
            ahead=weight_of(self.output),
        )
        return add_norm(
            hidden,
            self.output(attended),
            self.before_mlp,
            post=self.after_heads,
            ahead=weight_of(self.mlp.first),
        )


def weight_of(module: nn.Module | None) -> Tensor | None:
    """Return the largest tensor of what multiplies in a linear layer: its codes, or its weight."""
    if module is None or (isinstance(module, LinearStack) and module.separate is not None):
        return None
    gemm = getattr(module, "gemm", module)
    tensors = [*gemm.parameters(), *gemm.buffers()]
    return max(tensors, key=lambda t: t.numel() * t.element_size(), default=None)


__all__ = ["Flow", "FusedLayer", "GatedMlp", "KeptHeads", "OwnMlp", "Projection", "weight_of"]
