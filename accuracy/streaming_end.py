"""What follows the layers of a model that runs block by block: last norm, output head, logits.

Logits [T, V] of a large vocabulary are too many for all tokens at once. The model's own forward
computes them for some tokens at a time: norms run on all tokens of a batch up to the head, then the
forward runs again for some of them, in which the head is handed what it was given for these. So
factors, caps and casts that the model applies to its logits stay its own code.

That this is the same is proven: what follows the head is run with random logits, of two tokens
together and one by one. A model of which it is not gets whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quantload.accuracy.streaming_step import DoneLayer, LayerStep
from quantload.errors import ModelError
from quantload.layers.meta_model import TransformersModel

LOGITS_BYTES = 1 << 27  # of one side at a time
_RTOL, _ATOL = 1e-5, 1e-6  # vectorized functions round their last elements otherwise


class OutputEnd:
    """Runs what follows the layers.

    Args:
        model: All of its layers are done.
        layer: The last of them: hidden states enter here.
        head: Path of the output head; "" for none that is known.
        forward: Runs the model on token ids [B, T]; returns its logits, or None.
        device: Where it runs.
    """

    def __init__(
        self,
        model: TransformersModel,
        layer: DoneLayer,
        head: str,
        forward: Callable[[Tensor], Tensor | None],
        device: torch.device,
    ) -> None:
        self._model, self._layer, self._path = model, layer, head
        self._forward, self._device = forward, device
        self._is_per_token: bool | None = None

    @property
    def head(self) -> nn.Module | None:
        """The output head, if it is a layer that is known."""
        return self._model.get_submodule(self._path) if self._path else None

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The head by path, if there is one."""
        head = self.head
        return {} if head is None else {self._path: head}

    @torch.no_grad()
    def head_inputs(self, ids: Tensor, state: Tensor) -> Tensor:
        """Return what enters the head, [B, T, H], of tokens [B, T] and what the last layer gave."""
        head = self.head
        assert head is not None, "asked of models with a head that is known"
        with LayerStep(self._layer, None, head, state, self._device) as step:
            self._forward(ids)
        if step.head_input is None:
            raise ModelError(f"a forward did not reach the head `{self._path}`")
        return step.head_input

    @torch.no_grad()
    def logits(self, ids: Tensor, given: Tensor) -> Tensor:
        """Return logits [B, T, V] of tokens [B, T] from what enters the head, [B, T, H]."""
        head = self.head
        assert head is not None, "as before"

        def give(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
            return ((given, *args[1:]), kwargs) if args else (args, dict.fromkeys(kwargs, given))

        handle = head.register_forward_pre_hook(give, with_kwargs=True)
        try:
            logits = self._forward(ids)
        finally:
            handle.remove()
        assert logits is not None, "a model with a head gives logits"
        return logits

    @torch.no_grad()
    def all_logits(self, ids: Tensor, state: Tensor) -> Tensor | None:
        """Return logits [B, T, V] at once, or None for a model without any."""
        with LayerStep(self._layer, None, None, state, self._device):
            return self._forward(ids)

    def parts(self, ids: Tensor) -> Iterator[tuple[slice, slice]]:
        """Yield (sequences, tokens) of [B, T] whose logits are computed at a time."""
        head = self.head
        size = getattr(head, "out_features", 1)
        most = max(1, LOGITS_BYTES // (int(size) * torch.float32.itemsize))
        count, length = ids.shape
        each = max(1, most // length)  # sequences, if they fit whole
        for first in range(0, count, each):
            rows = slice(first, min(count, first + each))
            for start in range(0, length, max(1, most)):
                yield rows, slice(start, min(length, start + most))

    def is_per_token(self, ids: Tensor) -> bool:
        """True if logits of a token are computed from what enters the head for it alone.

        Args:
            ids: [B, T] tokens of this model.
        """
        if self._is_per_token is None:
            self._is_per_token = self.head is not None and self._proven(ids[:1, :1])
        return self._is_per_token

    def _proven(self, token: Tensor) -> bool:
        """Run what follows the head with random logits of a token [1, 1], and of it twice."""
        size = getattr(self.head, "out_features", None)
        if not isinstance(size, int):
            return False
        random = torch.randn(1, 2, size, generator=torch.Generator().manual_seed(0)) * 10
        try:
            with self._given() as stand_in:
                together = self._of(stand_in, token.repeat(1, 2), random)
                apart = [self._of(stand_in, token, random[:, n : n + 1]) for n in range(2)]
        except Exception:  # noqa: BLE001 - code of models raises anything
            return False
        return torch.allclose(
            together, torch.cat(apart, dim=1), rtol=_RTOL, atol=_ATOL, equal_nan=True
        )

    @torch.no_grad()
    def _of(self, stand_in: _GivenLogits, ids: Tensor, logits: Tensor) -> Tensor:
        dtype = next((p.dtype for p in self._model.parameters() if p.is_floating_point()), None)
        stand_in.logits = logits.to(self._device, dtype or torch.get_default_dtype())
        found = self._forward(ids)
        if found is None:
            raise ModelError("a forward with a head gave no logits")
        return found

    @contextmanager
    def _given(self) -> Iterator[_GivenLogits]:
        """Put a module that returns given logits into the place of the head while this is open."""
        parent_path, _, name = self._path.rpartition(".")
        parent, head = self._model.get_submodule(parent_path), self.head
        stand_in = _GivenLogits(head)
        setattr(parent, name, stand_in)
        try:
            yield stand_in
        finally:
            setattr(parent, name, head)


class _GivenLogits(nn.Module):
    """Stands for a head whose logits are known.

    Args:
        head: The head; only its sizes are kept.
    """

    def __init__(self, head: nn.Module | None) -> None:
        super().__init__()
        self.in_features = getattr(head, "in_features", 0)
        self.out_features = getattr(head, "out_features", 0)
        self.logits = torch.empty(0)

    @property
    def weight(self) -> Tensor:
        """Nothing, in the dtype and on the device of the weight: what code of models asks for."""
        return self.logits[:0]

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits that are known, whatever x [..., K] is."""
        del x
        return self.logits


__all__ = ["LOGITS_BYTES", "OutputEnd"]
