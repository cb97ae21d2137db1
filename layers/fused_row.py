"""A decode step of a single row, in five kernels a layer: products that do what follows them.

    q, k, v  = project(norm)        the norm's factor is applied behind the product
    a        = attention
    stream   = hidden + output(a)   with what the norm behind it needs
    x        = silu(gate) * up      one product
    stream   = stream + down(x)     with what the next layer's norm needs

Served are layers of the plain kind whose weights the kernels of `runtime/kernels/one_token.py`
read; each is held against `FusedLayer.step` before it is used. A norm sums a row in another order
then, and its factor multiplies what a product gives, not what it takes: results agree to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quantload.layers.fused_cache import new_fused_cache
from quantload.layers.fused_ends import Ends
from quantload.layers.fused_layer import Flow, FusedLayer, GatedMlp, KeptHeads
from quantload.layers.linear import QuantLinear
from quantload.layers.stack import LinearStack
from quantload.quant.scheme import InputScheme
from quantload.runtime.nibble_gemm import NibbleLinear
from quantload.runtime.rounded_gemm import RoundedLinear

if TYPE_CHECKING:
    from quantload.runtime.kernels.add_norm import NormWeight
    from quantload.runtime.kernels.one_token import Packed, Waiting

_TOLERANCE, _ROUNDED = 3e-2, 0.12  # as of `fused_proof.py`, in bfloat16
_LENGTH, _PLACE, _SIZE = 80, 70, 0.05


@dataclass(frozen=True)
class _Product:
    """A linear layer as the kernels read it.

    Args:
        weight: Its weight.
        bias: [N] or None.
        makes_codes: It takes codes, which it makes of values and their peaks.
        gemm: What has the weight.
    """

    weight: Packed
    bias: Tensor | None
    makes_codes: bool
    gemm: Any


@dataclass(frozen=True)
class _Row:
    """A layer's products.

    Args:
        layer: The layer.
        heads: Makes q, k and v.
        output: Behind attention.
        both: Gate and up.
        down: Behind them.
    """

    layer: FusedLayer
    heads: _Product
    output: _Product
    both: _Product
    down: _Product


class SingleRow:
    """Layers of a decoder, run for one row.

    Args:
        rows: The layers.
        ends: What is before and after them.
    """

    def __init__(self, rows: Sequence[_Row], ends: Ends) -> None:
        self._rows, self._ends = rows, ends

    def step(self, tokens: Tensor, positions: Tensor, layers: Sequence[KeptHeads]) -> Tensor:
        """Return logits [1, V] of tokens [1]; keys and values are written to `layers`."""
        stream: Tensor | Waiting = self._ends.begin(tokens)
        for index, kept in enumerate(layers):
            stream = self.layer(index, stream, positions, kept)
        assert not isinstance(stream, Tensor), "a model has layers"
        assert stream.hidden is not None, "a layer adds to the stream"
        return self._ends.finish(Flow(stream.hidden))

    def layer(
        self, index: int, stream: Tensor | Waiting, positions: Tensor, kept: KeptHeads
    ) -> Waiting:
        """Run a layer on the residual stream [1, H], or on what the layer before left of it."""
        from quantload.runtime.kernels.add_norm import add_norm
        from quantload.runtime.kernels.one_token import added_product, gated_product, product

        row = self._rows[index]
        layer = row.layer
        assert layer.before_heads is not None, "refused"
        assert layer.before_mlp is not None, "refused"
        if isinstance(stream, Tensor):
            hidden, rows = add_norm(stream, None, layer.before_heads, codes=_scheme(row.heads))
            qkv = product(row.heads.weight, rows, row.heads.bias)
        else:
            assert stream.hidden is not None, "a layer adds to the stream"
            hidden = stream.hidden
            qkv = product(row.heads.weight, stream, row.heads.bias)
        attended = self._attended(row, qkv, positions, kept)
        output, both, down = row.output, row.both, row.down
        stream = added_product(
            output.weight,
            attended,
            output.bias,
            hidden,
            layer.before_mlp,
            peaks=both.makes_codes,
        )
        assert stream.hidden is not None, "just added to"
        x = gated_product(both.weight, stream, both.bias, peaks=down.makes_codes)
        norm, peaks = self._after(index)
        return added_product(down.weight, x, down.bias, stream.hidden, norm, peaks=peaks)

    def _after(self, index: int) -> tuple[NormWeight, bool]:
        """Return the norm behind a layer, and whether what it gives becomes codes."""
        if index + 1 == len(self._rows):
            return self._ends.norm, False
        after = self._rows[index + 1]
        assert after.layer.before_heads is not None, "refused"
        return after.layer.before_heads, after.heads.makes_codes

    def _attended(self, row: _Row, qkv: Tensor, positions: Tensor, kept: KeptHeads) -> Any:  # noqa: ANN401 - values, or codes, or what waits
        from quantload.runtime.kernels.add_norm import Codes
        from quantload.runtime.kernels.decode_attention import decode_attention, writes_parts
        from quantload.runtime.kernels.one_token import Waiting

        q, k, v = torch.split(qkv, list(row.layer.projection.sizes), dim=-1)
        rule, cache, peaks, sums = row.layer.rule, (kept.keys, kept.values), None, None
        if writes_parts(q, rule, kept.rotary, cache):
            if row.output.makes_codes:
                peaks = torch.empty(rule.kv_heads, dtype=torch.float32, device=q.device)
            else:
                sums = torch.empty(q.shape[1] // 16, dtype=torch.float32, device=q.device)
        attended = decode_attention(
            q,
            k,
            v,
            rule,
            rotary=kept.rotary,
            cache=cache,
            positions=positions,
            locks=kept.locks,
            scales=kept.scales,
            peaks=peaks,
            sums=sums,
        )
        if row.output.makes_codes and peaks is None:
            return Codes(*row.output.gemm.round_input(attended))
        return Waiting(attended, peaks, sums)


def _scheme(product: _Product) -> InputScheme | None:
    if not product.makes_codes:
        return None
    scheme: InputScheme = product.gemm.input
    return scheme


# -- making ----------------------------------------------------------------------------------------


def single_row(layers: Sequence[FusedLayer], ends: Ends) -> SingleRow | str:
    """Return layers as they are run for a single row, or why they cannot be.

    Args:
        layers: Of a decoder, proven.
        ends: What is before and after them.
    """
    rows = []
    for index, layer in enumerate(layers):
        found = _row(layer)
        if isinstance(found, str):
            return f"layer {index}: {found}"
        rows.append(found)
    return SingleRow(rows, ends)


def _row(layer: FusedLayer) -> _Row | str:
    if layer.before_heads is None or layer.before_mlp is None:
        return "it has no norm before its heads or its MLP"
    if layer.after_heads is not None or layer.after_mlp is not None:
        return "it has norms behind its heads or its MLP"
    if len(layer.projection.members) != 1 or layer.projection.norms is not None:
        return "q, k and v are no one product"
    reason = _why_not_mlp(layer.mlp)
    if reason or not isinstance(layer.mlp, GatedMlp):
        return reason
    down = layer.mlp.module._modules[layer.mlp.formula.down]
    assert down is not None, "a recognised unit has its layers"
    made = []
    for module in (layer.projection.members[0], layer.output, layer.mlp.first, down):
        found = _product(module)
        if isinstance(found, str):
            return found
        made.append(found)
    return _Row(layer, *made)


def _why_not_mlp(mlp: object) -> str:
    """Say why an MLP is not one product whose halves are gate and up, behind them another."""
    if not isinstance(mlp, GatedMlp):
        return "its MLP is no gated unit"
    formula = mlp.formula
    if formula.known != "silu":
        return f"its gate goes through {formula.act}, expected silu"
    if formula.gate == formula.up:
        return "" if formula.gate_first else "its gate is the second half"
    gate, up = (mlp.module._modules[name] for name in (formula.gate, formula.up))
    sizes = getattr(mlp.first, "part_sizes", [])
    slots = getattr(gate, "slot", None), getattr(up, "slot", None)
    if len(sizes) != 2 or sizes[0] != sizes[1] or slots != (0, 1):
        return "gate and up are no one product"
    return ""


def _product(module: nn.Module) -> _Product | str:
    from quantload.runtime.kernels.one_token import why_not

    if not isinstance(module, QuantLinear) or isinstance(module.gemm, nn.Identity):
        return f"`{type(module).__name__}` is not quantized"
    as_is = type(module).forward in (QuantLinear.forward, LinearStack.forward)
    if not as_is or getattr(module, "separate", None) is not None:
        return f"`{type(module).__name__}` is more than a product"
    gemm, bias = module.gemm, module.bias
    if bias is not None and bias.dtype != torch.bfloat16:
        return f"its bias is {bias.dtype}"
    if isinstance(gemm, NibbleLinear) and gemm.input is None:
        return why_not(gemm.packed) or _Product(gemm.packed, bias, False, gemm)
    if isinstance(gemm, RoundedLinear) and gemm.exchange_max is None and _is_plain(gemm.input):
        return why_not(gemm.packed) or _Product(gemm.packed, bias, True, gemm)
    return f"`{type(gemm).__name__}` multiplies with it"


def _is_plain(scheme: InputScheme) -> bool:
    """True if codes are e4m3 with a scale of each token."""
    kept = scheme.grid.name, scheme.scale, scheme.granularity
    return kept == ("e4m3", "float", "token") and scheme.dynamic and scheme.symmetric


def proven_rows(
    found: SingleRow, layers: Sequence[FusedLayer], rotary: Sequence[tuple[Tensor, Tensor]]
) -> str:
    """Say which layer differs from its own step for a single row, "" if none does.

    Args:
        found: What is to be proven.
        layers: The layers.
        rotary: Cosines and sines of each, of 80 positions or more.
    """
    for index, (layer, tables) in enumerate(zip(layers, rotary, strict=True)):
        error = _difference(found, layer, tables, index)
        limit = _ROUNDED if _makes_codes(found, index) else _TOLERANCE
        if not error <= limit:  # NaN is none
            return f"layer {index} differs by {error:.1e} for a single row, at most {limit:.0e}"
    return ""


def _makes_codes(found: SingleRow, index: int) -> bool:
    row = found._rows[index]
    return any(part.makes_codes for part in (row.heads, row.output, row.both, row.down))


def _difference(
    found: SingleRow, layer: FusedLayer, tables: tuple[Tensor, Tensor], index: int
) -> float:
    """Return how far what both add to a random row is apart, over a cache with random content."""
    from quantload.runtime.kernels.add_norm import add_norm

    assert layer.before_heads is not None, "refused"
    weight = layer.before_heads.weight
    seed = torch.Generator().manual_seed(index)
    x = (torch.randn(1, len(weight), generator=seed) * _SIZE).to(weight)
    cache = new_fused_cache([layer.rule], [tables], 1, _LENGTH, dtype=x.dtype, scales=[(1.0, 1.0)])
    kept = cache.layers[0]
    for part in (kept.keys, kept.values):
        part.copy_(torch.randn(part.shape, generator=seed))
    places = torch.full((1,), _PLACE, device=x.device)
    with torch.no_grad():
        flow = layer.step(Flow(x), places, kept)
        expected = add_norm(flow.hidden, flow.delta, None, post=flow.post)[0] - x
        errors = []
        for start in (x, _waiting(x, layer)):
            hidden = found.layer(index, start, places, kept).hidden
            assert hidden is not None, "a layer adds to the stream"
            errors.append((hidden - x - expected).float().norm() / expected.float().norm())
    return float(torch.stack(errors).max())  # NaN if one is


def _waiting(x: Tensor, layer: FusedLayer) -> Waiting:
    """Return a row as the layer before would leave it."""
    from quantload.runtime.kernels.one_token import Waiting

    norm = layer.before_heads
    assert norm is not None, "refused"
    weight = norm.weight.float() + norm.offset
    values = (x.float() * weight).to(x.dtype)
    peaks = values.float().abs().reshape(-1, 16).amax(1)
    squares = x.float().reshape(-1, 16).square().sum(1)
    sums = values.float().reshape(-1, 16).sum(1)
    return Waiting(values, peaks, sums, x, squares, norm.eps)


__all__ = ["SingleRow", "proven_rows", "single_row"]
