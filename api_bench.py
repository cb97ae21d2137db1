"""How fast a model decodes: what `quantload bench` reports."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING

import torch
from torch import nn

from quantload.api_load import parse_device
from quantload.arguments import as_counts, check_counts, check_type
from quantload.errors import ConfigError
from quantload.loader.model_dtype import parse_dtype
from quantload.loader.peak_memory import peak_rss
from quantload.quant.scheme import parse_scheme
from quantload.runtime.generate import Decoder, Rules
from quantload.runtime.prompt_graphs import MOST_TOKENS
from quantload.runtime.step_model import CacheScales

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOAD = "`quantload.load` or `synthetic` makes one"
_WARM_UP = 3  # the second run of short prompts captures them


@dataclass(frozen=True, kw_only=True)
class BatchTimes:
    """What was measured for one batch size. Times are seconds, of the whole loop on the host.

    Args:
        batch: Prompts.
        prompt_tokens: Tokens of each prompt.
        new_tokens: Tokens that each got.
        first_token: Time from the prompts to their first new tokens.
        step: Time of each further token.
        weight_bytes: Fewest bytes of weights that a step reads.
        cache_bytes: Fewest bytes of the cache that a step reads, at half of the new tokens.
        captured: True if a step is one CUDA graph.
        why_eager: Why it is not, "" if it is.
    """

    batch: int
    prompt_tokens: int
    new_tokens: int
    first_token: float
    step: float
    weight_bytes: int
    cache_bytes: int
    captured: bool
    why_eager: str

    @property
    def prefill_rate(self) -> float:
        """Tokens of prompts a second."""
        return self.batch * self.prompt_tokens / self.first_token

    @property
    def decode_rate(self) -> float:
        """New tokens a second, of all rows."""
        return self.batch / self.step

    @property
    def bytes_rate(self) -> float:
        """Bytes a second that a step reads at least, of weights and cache."""
        return (self.weight_bytes + self.cache_bytes) / self.step


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """How fast a model decodes.

    Args:
        model: Name.
        device: Of the card, or of the CPU.
        dtype: dtype of activations.
        cache_dtype: dtype of keys and values.
        step: What runs a step: "fused", or "model" for the model's own forward.
        why_not_fused: Why it is not fused, "" if it is.
        kernels: How many linear layers run with each kernel.
        read_rate: Bytes a second that the card reads, measured in this run; None on the CPU.
        peak_bytes: The most memory that was taken, of the device; on the CPU of the process.
        batches: What was measured.
    """

    model: str
    device: str
    dtype: str
    cache_dtype: str
    step: str
    why_not_fused: str
    kernels: dict[str, int]
    read_rate: float | None
    peak_bytes: int
    batches: tuple[BatchTimes, ...]

    def limit_share(self, times: BatchTimes) -> float | None:
        """Return which share of the card's read rate a step reaches; None on the CPU."""
        return None if self.read_rate is None else times.bytes_rate / self.read_rate


def synthetic(
    name: str,
    scheme: str | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    layers: int | None = None,
) -> PreTrainedModel:
    """Build a model of a named shape with random weights, on the device.

    Args:
        name: Such as "llama-8b"; a wrong one lists them all.
        scheme: Scheme of the linear layers of its blocks; None is full precision.
        device: Where it is built; None takes CUDA where there is one.
        dtype: dtype of activations and full-precision parameters; None is bfloat16.
        layers: Number of blocks; None is that of the shape.

    Raises:
        ConfigError: There is no such shape or scheme, or they do not fit.
    """
    from quantload.layers.synthetic import build_synthetic  # transformers: seconds to import

    check_type("scheme", scheme, (str, NoneType), expected="the name of a scheme")
    if layers is not None:
        (layers,) = check_counts(1, layers=layers)
    chosen = parse_scheme(scheme or "dense")
    kind = parse_dtype(dtype) or torch.bfloat16
    return build_synthetic(name, chosen, device=parse_device(device), dtype=kind, layers=layers)


def bench(  # noqa: PLR0913 - a keyword for each choice of the user
    model: PreTrainedModel,
    *,
    name: str = "",
    batches: Sequence[int] = (1, 16, 64),
    prompt_tokens: int = 512,
    new_tokens: int = 128,
    cache_dtype: torch.dtype | None = None,
    scales: CacheScales | None = None,
    graphs: bool = True,
    fused: bool | None = None,
) -> BenchReport:
    """Measure how fast a loaded model prefills and decodes; prompts are random ids.

    Each batch runs a few times: kernels are compiled, and prompts and steps captured, before the
    run that is timed.

    Args:
        model: From `load` or `synthetic`.
        name: Of the model, for the report.
        batches: Numbers of prompts.
        prompt_tokens: Tokens of each prompt.
        new_tokens: Tokens that each gets, at least 2.
        cache_dtype: dtype of keys and values, see `StepModel.new_cache`.
        scales: Scales of a quantized cache.
        graphs: Capture steps in CUDA graphs where that is possible.
        fused: See `layers/decoding.py`.

    Raises:
        ConfigError: Sizes are none.
        ModelError: The model cannot be decoded so.
    """
    from quantload.layers.decoding import step_model  # transformers: seconds to import
    from quantload.layers.surgery import explain

    check_type("model", model, nn.Module, expected="a loaded model", hint=_LOAD)
    batches = as_counts("batches", batches, least=1, expected="numbers of prompts")
    (prompt_tokens,) = check_counts(1, prompt_tokens=prompt_tokens)
    (new_tokens,) = check_counts(2, new_tokens=new_tokens)
    if not batches:
        raise ConfigError("`batches` is empty, expected numbers of prompts")
    step, why = step_model(model, fused=fused)
    is_cuda = step.device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(step.device)
    decoder = Decoder(
        step, graphs=graphs, cache_dtype=cache_dtype, scales=scales, max_batch=max(batches)
    )
    found = tuple(
        _timed(decoder, model, batch, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
        for batch in batches
    )
    peak = torch.cuda.max_memory_allocated(step.device) if is_cuda else peak_rss()
    return BenchReport(
        model=name or type(model).__name__,
        device=torch.cuda.get_device_name(step.device) if is_cuda else "cpu",
        dtype=str(model.dtype).removeprefix("torch."),
        cache_dtype=str(cache_dtype or model.dtype).removeprefix("torch."),
        step="model" if why else "fused",
        why_not_fused=why,
        kernels=dict(Counter(report.kernel for report in explain(model))),
        read_rate=_read_rate(step.device) if is_cuda else None,
        peak_bytes=peak,
        batches=found,
    )


def _timed(
    decoder: Decoder, model: PreTrainedModel, batch: int, *, prompt_tokens: int, new_tokens: int
) -> BatchTimes:
    from quantload.layers.step_bytes import weight_bytes  # transformers: seconds to import

    generator = torch.Generator().manual_seed(batch)
    shape = batch, prompt_tokens
    prompts = torch.randint(decoder.model.vocab_size, shape, generator=generator).tolist()
    rules = Rules(max_new_tokens=new_tokens)
    slot = decoder.slot(batch, prompt_tokens + new_tokens)
    is_short = batch * prompt_tokens <= MOST_TOKENS
    for _ in range(_WARM_UP if is_short else 1):
        decoder.generate(prompts, Rules(max_new_tokens=2))
    times = []
    started = time.perf_counter()
    for token in decoder.stream(prompts, rules):
        if token.row == batch - 1:
            times.append(time.perf_counter() - started)
    return BatchTimes(
        batch=batch,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        first_token=times[0],
        step=(times[-1] - times[0]) / (len(times) - 1),
        weight_bytes=weight_bytes(model, batch),
        cache_bytes=slot.cache.bytes_read(prompt_tokens + new_tokens // 2),
        captured=slot.is_captured,
        why_eager=slot.why_eager,
    )


def _read_rate(device: torch.device) -> float:
    from quantload.runtime.kernels.read_rate import read_rate

    return read_rate(device)


__all__ = ["BatchTimes", "BenchReport", "bench", "synthetic"]
