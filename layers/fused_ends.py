"""What a model does before its first layer and after its last one: embedding, norm, output head.

Each is held against what a recorded forward of the model itself gave: the embedded rows have the
bits that the first layer was given, and norm and head of what the last layer returned are the
model's logits.

Letters: B rows, H width of the model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quantload.layers.fused_layer import Flow
from quantload.layers.fused_recognition import Unfit, norm_formula, norm_weight
from quantload.layers.fused_recording import Call, Recording

if TYPE_CHECKING:
    from quantload.runtime.kernels.add_norm import NormWeight

_CLOSE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Ends:
    """What comes before the first layer and after the last one.

    Args:
        embedding: Maps ids [B] to rows [B, H].
        factor: Of the embedded rows.
        norm: The final norm.
        head: Maps rows to logits [B, V].
        softcap: Bound of the logits; 0 is none.
    """

    embedding: nn.Module
    factor: float
    norm: NormWeight
    head: nn.Module
    softcap: float

    def begin(self, tokens: Tensor) -> Tensor:
        """Return the rows [B, H] of tokens [B]."""
        hidden: Tensor = self.embedding(tokens)
        return hidden if self.factor == 1.0 else hidden * _as_factor(self.factor, hidden)

    def finish(self, flow: Flow) -> Tensor:
        """Return logits [B, V]."""
        from quantload.runtime.kernels.add_norm import add_norm

        x = add_norm(flow.hidden, flow.delta, self.norm, post=flow.post)[1]
        assert isinstance(x, Tensor), "no codes were asked for"
        return self.logits(x)

    def logits(self, x: Tensor) -> Tensor:
        """Return logits [B, V] of rows [B, H] behind the final norm."""
        logits: Tensor = self.head(x)
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits


def _as_factor(factor: float, hidden: Tensor) -> Tensor:
    """Return a factor as models keep theirs: rounded to the dtype of what it multiplies."""
    return torch.full((), factor, dtype=hidden.dtype, device=hidden.device)


def ends_of(
    model: nn.Module,
    record: Recording,
    layers: Sequence[Call],
    embedding: nn.Module,
    head: nn.Module,
) -> Ends:
    """Return what is before and after the layers, as the recorded forward shows it."""
    embedded, final = record.of(embedding), record.of(head)
    first, last = layers[0].x, layers[-1].output
    whole = record.of(model)
    if embedded is None or final is None or whole is None or first is None:
        raise Unfit("its embedding or output head is not called once")
    norms = [c for c in record.calls if c.x is last and norm_formula(c.module) is not None]
    if len(norms) != 1:
        raise Unfit("what its layers return does not go into one norm")
    factor = _factor(embedded.output, first, model.config)
    logits = whole.result.logits[:, -1].float()
    softcap = float(getattr(model.config, "final_logit_softcapping", None) or 0.0)
    ends = Ends(embedding, factor, norm_weight(norms[0].module), head, softcap)
    with torch.no_grad():
        found = ends.finish(Flow(last[:, -1])).float()
    if not float((found - logits).norm() / logits.norm()) <= _CLOSE[first.dtype]:
        raise Unfit("its logits are not those of norm and output head")
    return ends


def _factor(embedded: Tensor, first: Tensor, config: Any) -> float:  # noqa: ANN401 - any config
    """Return what embedded rows are multiplied with before the first layer."""
    own = float(getattr(config, "embedding_multiplier", None) or 1.0)
    for factor in (1.0, first.shape[-1] ** 0.5, own):
        if torch.equal(embedded * _as_factor(factor, embedded), first):
            return factor
    raise Unfit("its first layer is given something else than embedded ids")


__all__ = ["Ends", "ends_of"]
