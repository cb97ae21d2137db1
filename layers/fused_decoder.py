"""Decoding of a transformers model with few launches a layer: a `StepModel` made of its parts.

A model is run once on four tokens, with notes taken. Its decoder's layers are taken apart
(`fused_recognition.py`), each is held against its own forward (`fused_proof.py`), and what comes
before the first and after the last of them is held against what the model itself did: embedding,
final norm, output head. If anything differs, there is a reason, and no fused decoder.

Prompts run through the model's own modules; their keys and values are copied into the static cache.
Padding stands on the right, where causal attention never looks. Hooks that somebody else puts on
the model's parts later see prompts, but not steps.

Letters: B rows, T tokens, H width of the model, V vocabulary, L length of a cache.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from quantload.errors import ConfigError
from quantload.layers.fused_cache import FusedCache, Rotary, new_fused_cache
from quantload.layers.fused_ends import Ends, ends_of
from quantload.layers.fused_layer import Flow, FusedLayer, OwnMlp
from quantload.layers.fused_proof import Given, cache_argument, kept_by, proven
from quantload.layers.fused_recognition import Unfit, listened_to, take_apart
from quantload.layers.fused_recording import Call, Recording, decoder_layers, recording
from quantload.layers.fused_row import SingleRow, proven_rows, single_row
from quantload.layers.meta_model import output_head
from quantload.runtime.step_model import CacheScales, StepCache

_PROMPT_TOKENS = 1 << 14  # of prompts that run together
_TRIED = 4  # tokens of the recorded forward
_PLACES = (5, 70)  # positions at which layers are tried
_TABLE = 80
_SINGLE_DTYPE = torch.bfloat16  # of the kernels for a single row


class FusedDecoder:
    """A model whose layers were taken apart and proven; see `StepModel`.

    Args:
        decoder: Runs prompts: ids to hidden states, with a cache.
        ends: What is before and after the layers.
        layers: In their order.
        rotary: What makes the tables of each layer.
        dtype: Of activations.
        vocab_size: V.

    `why_no_single` says why steps of a single row run as those of more rows do, "" if they have
    kernels of their own.
    """

    def __init__(
        self,
        decoder: nn.Module,
        ends: Ends,
        layers: Sequence[FusedLayer],
        rotary: Sequence[Rotary],
        dtype: torch.dtype,
        vocab_size: int,
    ) -> None:
        self._decoder, self._ends, self._layers, self._rotary = decoder, ends, layers, rotary
        self.dtype, self.vocab_size = dtype, vocab_size
        self.device = ends.norm.weight.device
        self.why_not_captured = _why_not_captured(layers, self.device, dtype)
        self.captures_prompts = True
        self._single, self.why_no_single = self._made_single()

    def _made_single(self) -> tuple[SingleRow | None, str]:
        """Return what runs a single row with fewer kernels, or why nothing does."""
        if self.dtype != _SINGLE_DTYPE:
            return None, f"activations are {self.dtype}, expected {_SINGLE_DTYPE}"
        found = single_row(self._layers, self._ends)
        if isinstance(found, str):
            return None, found
        made = {id(rotary): rotary.whole(_TABLE, self.device) for rotary in self._rotary}
        try:
            reason = proven_rows(found, self._layers, [made[id(r)] for r in self._rotary])
        except Exception as error:  # noqa: BLE001 - the other way is always there
            reason = f"it could not be tried: {type(error).__name__}: {error}"
        return (None, reason) if reason else (found, "")

    def new_cache(
        self,
        batch: int,
        length: int,
        dtype: torch.dtype | None = None,
        *,
        scales: CacheScales | None = None,
    ) -> FusedCache:
        """Return an empty cache; see `StepModel`."""
        dtype = dtype or self.dtype
        if dtype not in (self.dtype, torch.float8_e4m3fn):
            raise ConfigError(
                f"a cache of {dtype}, expected {self.dtype} or torch.float8_e4m3fn",
                hint="leave `dtype` out for a cache in the model's dtype",
            )
        if dtype == torch.float8_e4m3fn and self.device.type == "cuda":
            found = torch.cuda.get_device_capability(self.device)
            if found < (8, 9):
                raise ConfigError(
                    f"a cache of e4m3 codes needs compute capability 8.9, found {found}",
                    hint="leave `dtype` out for a cache in the model's dtype",
                )
        made: dict[int, tuple[Tensor, Tensor]] = {}
        for rotary in self._rotary:
            if id(rotary) not in made:
                made[id(rotary)] = rotary.whole(length, self.device)
        return new_fused_cache(
            [layer.rule for layer in self._layers],
            [made[id(rotary)] for rotary in self._rotary],
            batch,
            length,
            dtype=dtype,
            scales=self._scales(dtype, scales),
        )

    def _scales(
        self, dtype: torch.dtype, scales: CacheScales | None
    ) -> Sequence[tuple[float, float]]:
        count = len(self._layers)
        if dtype != torch.float8_e4m3fn:
            return [(1.0, 1.0)] * count
        if scales is None:
            raise ConfigError(
                "a cache of e4m3 codes without scales, expected one for the keys and one for the "
                "values of each layer",
                hint="give `CacheScales`; ones serve most models",
            )
        if len(scales.keys) != count or len(scales.values) != count:
            raise ConfigError(
                f"scales of {len(scales.keys)} and {len(scales.values)} layers, expected {count}"
            )
        return list(zip(scales.keys.tolist(), scales.values.tolist(), strict=True))

    def prefill(self, ids: Tensor, lengths: Tensor, cache: StepCache) -> Tensor:
        """Run prompts into an empty cache; see `StepModel`."""
        assert isinstance(cache, FusedCache), f"a cache of another model: {type(cache).__name__}"
        step = max(1, _PROMPT_TOKENS // max(1, ids.shape[1]))
        rows = [slice(start, start + step) for start in range(0, len(ids), step)]
        with torch.no_grad():
            return torch.cat([self._prefill(ids[r], lengths[r], cache, r) for r in rows])

    def _prefill(self, ids: Tensor, lengths: Tensor, cache: FusedCache, rows: slice) -> Tensor:
        own = DynamicCache()
        options: dict[str, Any] = {cache_argument(self._decoder.forward): own, "use_cache": True}
        hidden = _hidden(self._decoder(input_ids=ids, **options))
        for index in range(len(self._layers)):
            cache.write_prompts(index, rows, *kept_by(own, index))
        last = hidden[torch.arange(len(ids), device=ids.device), lengths.to(ids.device) - 1]
        return self._ends.logits(last)

    def step(self, tokens: Tensor, positions: Tensor, cache: StepCache) -> Tensor:
        """Run one token of each row; see `StepModel`."""
        assert isinstance(cache, FusedCache), f"a cache of another model: {type(cache).__name__}"
        with torch.no_grad():
            if self._single is not None and len(tokens) == 1:
                return self._single.step(tokens, positions, cache.layers)
            flow = Flow(self._ends.begin(tokens))
            for layer, kept in zip(self._layers, cache.layers, strict=True):
                flow = layer.step(flow, positions, kept)
            return self._ends.finish(flow)


def _hidden(output: Any) -> Tensor:  # noqa: ANN401 - of any model
    found: Tensor = output[0] if isinstance(output, tuple) else output.last_hidden_state
    return found


def _why_not_captured(
    layers: Sequence[FusedLayer], device: torch.device, dtype: torch.dtype
) -> str:
    """Say which module waits for the device, "" if none does; each kind of module is tried."""
    if device.type != "cuda":
        return "CUDA graphs need a CUDA device"
    seen: set[object] = set()
    for layer in layers:
        kind = type(layer.mlp), getattr(layer.mlp, "module", None).__class__
        if not isinstance(layer.mlp, OwnMlp) or kind in seen:
            continue
        seen.add(kind)
        if failure := _waits(layer.mlp, _width_of(layer), device, dtype):
            return f"`{type(layer.mlp.module).__name__}` waits for the device: {failure}"
    return ""


def _width_of(layer: FusedLayer) -> int:
    return int(layer.output.out_features)  # type: ignore[arg-type]


def _waits(mlp: OwnMlp, width: int, device: torch.device, dtype: torch.dtype) -> str:
    x = torch.randn(2, width, device=device).to(dtype)
    mode = torch.cuda.get_sync_debug_mode()
    try:
        with torch.no_grad():
            mlp(x)  # compiles
            torch.cuda.set_sync_debug_mode("error")
            mlp(x)
    except Exception as error:  # noqa: BLE001 - model code raises anything
        return f"{type(error).__name__}: {error}"
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    return ""


# -- making ----------------------------------------------------------------------------------------


def fused_decoder(model: nn.Module) -> FusedDecoder | str:
    """Return a model as a fused decoder; or why it cannot be one.

    Args:
        model: A loaded causal language model of transformers, on a CUDA device.
    """
    if not isinstance(model, PreTrainedModel):
        return f"`{type(model).__name__}` is no model of transformers"
    found = decoder_layers(model)
    if isinstance(found, str):
        return found
    decoder, layers = found
    head, embedding = output_head(model), model.get_input_embeddings()
    if head is None or embedding is None:
        return "it has no embedding, or no output head"
    if reason := _why_no_kernels(model):
        return reason
    was_training = model.training
    try:
        model.train(False)
        return _made(model, decoder, list(layers), embedding, head)
    except Unfit as unfit:
        return str(unfit)
    except Exception as error:  # noqa: BLE001 - model code raises anything
        return f"it could not be tried: {type(error).__name__}: {error}"
    finally:
        model.train(was_training)


def _why_no_kernels(model: PreTrainedModel) -> str:
    device = next(iter(model.parameters())).device
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        return f"its kernels run on CUDA, the model is on {device.type}"
    try:
        importlib.import_module("quantload.runtime.kernels.decode_attention")
    except ImportError as error:
        return f"its kernels cannot be imported: {error}"
    return ""


def _made(
    model: PreTrainedModel,
    decoder: nn.Module,
    layers: list[nn.Module],
    embedding: nn.Module,
    head: nn.Module,
) -> FusedDecoder:
    listened = [model, *decoder.children(), embedding, head]
    listened += [module for layer in layers for module in listened_to(layer)]
    distinct = list({id(m): m for m in listened if not isinstance(m, nn.ModuleList)}.values())
    ids = torch.arange(1, 1 + _TRIED, device=next(iter(model.parameters())).device)[None]
    with torch.no_grad(), recording(model, distinct) as record:
        model(input_ids=ids, use_cache=False)
    calls = [record.of(layer) for layer in layers]
    used = [call for call in calls if call is not None]
    if len(used) != len(layers):
        raise Unfit("not every layer is called once")
    _check_chain(used)
    ends = ends_of(model, record, used, embedding, head)
    hidden = used[0].x
    assert hidden is not None, "a layer is given hidden states"
    rotaries = _Rotaries(record.among(list(decoder.children())), hidden)
    fused, rotary = [], []
    for index, (layer, call) in enumerate(zip(layers, used, strict=True)):
        turn, given = rotaries.of(call)
        candidate = take_apart(layer, record)
        _check_kernels(candidate, hidden.dtype)
        done = proven(layer, candidate, given, index, _PLACES if index == 0 else _PLACES[:1])
        if isinstance(done, str):
            raise Unfit(f"layer {index}: {done}")
        fused.append(done[0])
        rotary.append(rotaries.doubled(turn) if done[1] else turn)
    return FusedDecoder(decoder, ends, fused, rotary, hidden.dtype, _vocabulary(record, head))


def _vocabulary(record: Recording, head: nn.Module) -> int:
    call = record.of(head)
    assert call is not None, "seen before"
    return int(call.output.shape[-1])


def _check_chain(calls: Sequence[Call]) -> None:
    """Each layer is given what the one before returned."""
    for index in range(1, len(calls)):
        if calls[index].x is not calls[index - 1].output:
            raise Unfit(f"layer {index} is given something else than layer {index - 1} returns")


def _check_kernels(layer: FusedLayer, dtype: torch.dtype) -> None:
    from quantload.runtime.kernels.decode_attention import why_not

    if reason := why_not(layer.rule, dtype):
        raise Unfit(reason)
    norms = (layer.before_heads, layer.after_heads, layer.before_mlp, layer.after_mlp)
    for norm in (*norms, layer.rule.q_norm, layer.rule.k_norm):
        if norm is not None and norm.weight.dtype != dtype:
            raise Unfit(f"a norm's weight is {norm.weight.dtype}, activations are {dtype}")


class _Rotaries:
    """The rotary embeddings that a forward made, each with its tables for the trials."""

    def __init__(self, calls: Sequence[Call], hidden: Tensor) -> None:
        self._calls, self._hidden = calls, hidden
        self._known: dict[int, tuple[Rotary, tuple[Tensor, Tensor]]] = {}
        self._doubled: dict[int, Rotary] = {}

    def doubled(self, rotary: Rotary) -> Rotary:
        """Return the one whose tables are twice as wide."""
        return self._doubled.setdefault(id(rotary), replace(rotary, doubled=True))

    def of(self, layer: Call) -> tuple[Rotary, Given]:
        """Return what turns the heads of a layer, and what the layer is called with."""
        pair = layer.kwargs.get("position_embeddings")
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise Unfit("its layers are not given cosines and sines")
        key = id(pair[0])
        if key not in self._known:
            self._known[key] = self._found(pair)
        rotary, tables = self._known[key]
        return rotary, Given({**layer.kwargs, "hidden": (self._hidden,)}, tables)

    def _found(self, pair: tuple[Tensor, Tensor]) -> tuple[Rotary, tuple[Tensor, Tensor]]:
        for call in self._calls:
            made = call.result
            if isinstance(made, tuple) and len(made) == 2 and made[0] is pair[0]:
                if getattr(call.module, "rope_type", "default") in ("dynamic", "longrope"):
                    raise Unfit("its rotary embedding changes with the length")
                rotary = Rotary(call.module, call.args, call.kwargs)
                tables = rotary.whole(_TABLE, self._hidden.device)
                same = (torch.equal(t[:_TRIED], p[0]) for t, p in zip(tables, pair, strict=True))
                if not all(same):
                    raise Unfit("its rotary embedding depends on more than the position")
                return rotary, tables
        raise Unfit("its cosines and sines come from nowhere that is known")


__all__ = ["FusedDecoder", "fused_decoder"]
