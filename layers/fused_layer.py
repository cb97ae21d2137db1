"""A decoder layer as a decode step runs it: four products and four small kernels.

    hidden, x = hidden + delta, norm(hidden + delta)        delta: what the layer before adds
    q, k, v   = project(x)                                  one product
    a         = attention of q over the cache               with norms, rotary, write: one kernel
    hidden, x = hidden + output(a), norm(...)
    delta     = down(act(gate(x)) * up(x))                  or any other module that maps rows

The sum behind the MLP is left to the next layer, whose first norm reads it. A norm or gated unit
quantizes what it hands on where the product behind it wants codes. Layers of transformers models
are taken apart into this by `fused_recognition.py`, and held against their own forward by
`fused_proof.py`.

Letters: B rows, H width of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quantload.layers.fast_glu import GluFormula
from quantload.layers.linear import QuantLinear
from quantload.layers.stack import LinearStack
from quantload.quant.scheme import InputScheme

if TYPE_CHECKING:
    from quantload.runtime.kernels.add_norm import Codes, NormWeight
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
        norms: Of q and k, over all their heads at once (OLMo 2); None has none.
    """

    members: Sequence[nn.Module]
    sizes: tuple[int, int, int]
    norms: tuple[NormWeight, NormWeight] | None = None

    @property
    def codes(self) -> InputScheme | None:
        """How what it reads is to be quantized; None takes it as it is."""
        return codes_for(self.members[0]) if len(self.members) == 1 else None

    def __call__(self, x: Tensor | Codes) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v [B, N_i] of x [B, H]."""
        if len(self.members) == 1:
            q, k, v = torch.split(multiply(self.members[0], x), list(self.sizes), dim=-1)
        else:
            q, k, v = (multiply(member, x) for member in self.members)
        if self.norms is not None:
            q, k = _normed(q, self.norms[0]), _normed(k, self.norms[1])
        return q, k, v


def _normed(x: Tensor, norm: NormWeight) -> Tensor:
    from quantload.runtime.kernels.add_norm import add_norm

    normed = add_norm(x, None, norm)[1]
    assert isinstance(normed, Tensor), "no codes were asked for"
    return normed


@dataclass(frozen=True)
class GatedMlp:
    """A recognised gated linear unit.

    Args:
        module: The unit.
        formula: What it computes.
    """

    module: nn.Module
    formula: GluFormula

    def __call__(self, x: Tensor | Codes) -> Tensor:
        """Map [B, H] to [B, H]."""
        from quantload.runtime.kernels.glu import WIDEST, glu, glu_codes

        gate, up = self._factors(x)
        down = self.module._modules[self.formula.down]
        assert down is not None, "a recognised unit has its layers"
        scheme, act = codes_for(down), self.formula.known
        if scheme is None or gate.shape[-1] > WIDEST:
            return multiply(down, glu(gate, up, act))
        return multiply(down, glu_codes(gate, up, act, scheme))

    def _factors(self, x: Tensor | Codes) -> tuple[Tensor, Tensor]:
        """Return gate and up [B, I]."""
        if isinstance(x, Tensor):
            return self.formula.factors(self.module, x)
        both = multiply(self.first, x)
        gate, up = (self.module._modules[name] for name in (self.formula.gate, self.formula.up))
        assert gate is not None, "a recognised unit has its layers"
        assert up is not None, "a recognised unit has its layers"
        if gate is up:
            one, two = both.chunk(2, dim=-1)
            return (one, two) if self.formula.gate_first else (two, one)
        parts = torch.split(both, self.first.part_sizes, dim=-1)  # type: ignore[arg-type]
        return parts[gate.slot], parts[up.slot]  # type: ignore[index]

    @property
    def first(self) -> nn.Module:
        """What reads x first: a stack of gate and up, one layer for both, or that of the gate."""
        gate = self.module._modules[self.formula.gate]
        assert gate is not None, "a recognised unit has its layers"
        stack: nn.Module = gate.__dict__.get("stack", gate)
        return stack

    @property
    def codes(self) -> InputScheme | None:
        """How what it reads is to be quantized; None takes it as it is."""
        formula, up = self.formula, self.module._modules[self.formula.up]
        alone = formula.gate != formula.up and getattr(up, "stack", None) is not self.first
        if alone or (isinstance(self.first, LinearStack) and len(self.first.part_sizes) > 2):
            return None
        return codes_for(self.first)


@dataclass(frozen=True)
class OwnMlp:
    """Any module that maps rows, run as it is: experts with their router.

    Args:
        module: Takes [B, T, H], returns [B, T, H], or a tuple that starts with it.
    """

    module: nn.Module

    def __call__(self, x: Tensor | Codes) -> Tensor:
        """Map [B, H] to [B, H]."""
        assert isinstance(x, Tensor), "it did not ask for codes"
        result = self.module(x[:, None])
        result = result[0] if isinstance(result, tuple) else result
        return result.reshape(x.shape)  # type: ignore[no-any-return]

    @property
    def codes(self) -> InputScheme | None:
        """It takes x as it is."""
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

    def _heads(
        self, flow: Flow, positions: Tensor, kept: KeptHeads
    ) -> tuple[Tensor, Tensor | Codes]:
        """Return the residual stream after attention, and what the MLP reads."""
        from quantload.runtime.kernels.add_norm import add_norm
        from quantload.runtime.kernels.decode_attention import decode_attention

        hidden, x = add_norm(
            flow.hidden,
            flow.delta,
            self.before_heads,
            post=flow.post,
            codes=self.projection.codes if self.before_heads else None,
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
        )
        return add_norm(
            hidden,
            self.output(attended),
            self.before_mlp,
            post=self.after_heads,
            codes=self.mlp.codes if self.before_mlp else None,
        )


def codes_for(module: nn.Module) -> InputScheme | None:
    """Return how a kernel is to quantize what a layer reads; None where the layer does that."""
    from quantload.runtime.kernels.add_norm import writes_codes

    if not isinstance(module, QuantLinear) or isinstance(module.gemm, nn.Identity):
        return None
    as_is = type(module).forward in (QuantLinear.forward, LinearStack.forward)
    gemm, separate = module.gemm, getattr(module, "separate", None) is not None
    takes_codes = hasattr(gemm, "forward_rounded") and getattr(gemm, "exchange_max", None) is None
    if separate or not (as_is and takes_codes):
        return None
    scheme = getattr(gemm, "input", None)
    known = isinstance(scheme, InputScheme) and writes_codes(scheme, module.in_features)
    return scheme if known else None


def multiply(module: nn.Module, x: Tensor | Codes) -> Tensor:
    """Run a linear layer on rows, or on their codes where `codes_for` asked for them."""
    if isinstance(x, Tensor):
        y: Tensor = module(x)
        return y
    y = module.gemm.forward_rounded(x.codes, x.scales, module.bias)  # type: ignore[operator, union-attr]
    return y


__all__ = [
    "Flow",
    "FusedLayer",
    "GatedMlp",
    "KeptHeads",
    "OwnMlp",
    "Projection",
    "codes_for",
    "multiply",
]
