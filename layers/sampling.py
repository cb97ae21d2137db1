"""Choosing the next tokens as transformers does: its own logits processors, then argmax or a draw.

Which processors there are is decided by transformers from the generation config of the model and
the options, so that a repetition penalty in generation_config.json counts here too. A draw is what
`torch.multinomial` makes of one sample, without its look at the values, which would wait for the
device: after `torch.manual_seed(s)`, transformers' `generate` draws the same tokens on the CPU as
with the seed `s` here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from quantload.arguments import check_type, plain
from quantload.errors import ConfigError
from quantload.runtime.generate import Chooser

_TAKEN = frozenset(
    {
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "decoder_start_token_id",
        "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty",
        "eos_token_id",
        "epsilon_cutoff",
        "eta_cutoff",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "guidance_scale",
        "min_length",
        "min_new_tokens",
        "min_p",
        "no_repeat_ngram_size",
        "pad_token_id",
        "remove_invalid_values",
        "renormalize_logits",
        "repetition_penalty",
        "sequence_bias",
        "suppress_tokens",
        "temperature",
        "top_h",
        "top_k",
        "top_p",
        "typical_p",
        "watermarking_config",
    }
)  # what logits processors and the ends of texts are made of
_CHANGES_NOTHING = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True}
_OWN_NAMES = {
    "do_sample": "`sample`",
    "max_length": "`max_new_tokens`",
    "stop_strings": "`stop`",
}  # of what the decoding loop does in its own way


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; None leaves a setting to the model's generation config.

    Args:
        sample: Draw; False takes the most likely token, after what the config does to logits.
        temperature: Divides logits; above 0.
        top_k: Draw from that many of the most likely tokens.
        top_p: Draw from the most likely tokens that have this probability together.
        min_p: Draw from tokens that have at least this share of the highest probability.
        repetition_penalty: Above 1 makes tokens that were there less likely.
        seed: Of the draws; None takes another each time.
        more: Other settings of transformers' `GenerationConfig`, for example `min_new_tokens`.
    """

    sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        for name, share in (("top_p", self.top_p), ("min_p", self.min_p)):
            if isinstance(share, int | float) and not 0 <= share <= 1:
                raise ConfigError(f"`{name}` is {share}, expected a share between 0 and 1")
        if isinstance(self.seed, int) and not -(2**63) <= self.seed < 2**64:
            raise ConfigError(f"`seed` is {self.seed}, expected at most 64 bits")

    def settings(self) -> dict[str, Any]:
        """Return what differs from the model's generation config.

        Raises:
            ConfigError: A setting of draws is given, and nothing is drawn.
        """
        of_draws = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
        }
        given = {name: value for name, value in of_draws.items() if value is not None}
        if given and not self.sample:
            raise ConfigError(
                f"`{'`, `'.join(given)}` without `sample=True`: the most likely token is taken, "
                "whatever they are"
            )
        if self.repetition_penalty is not None:
            given["repetition_penalty"] = self.repetition_penalty
        return {"do_sample": self.sample, **given, **self.more}

    def without_effect(self) -> list[str]:
        """Return settings of transformers that the decoding loop would not heed."""
        neutral = {**_CHANGES_NOTHING, "do_sample": self.sample}
        known = vars(GenerationConfig()).keys() - _TAKEN  # type: ignore[no-untyped-call]
        return sorted(
            name
            for name, value in self.more.items()
            if name in known and value is not None and value != neutral.get(name, False)
        )


def check_sampling(sampling: object, *, own_loop: bool) -> None:
    """Refuse what is no `Sampling`, and settings that the decoding loop would not heed.

    Args:
        sampling: A `Sampling` or None.
        own_loop: False where transformers' own `generate` runs, which heeds all of them.

    Raises:
        WrongType: It is something else.
        ConfigError: There are such settings.
    """
    check_type("sampling", sampling, (Sampling, type(None)), expected="a `Sampling` or None")
    names = sampling.without_effect() if isinstance(sampling, Sampling) and own_loop else []
    if names:
        own = [f"{_OWN_NAMES[name]} for `{name}`" for name in names if name in _OWN_NAMES]
        raise ConfigError(
            f"`{'`, `'.join(names)}` would change nothing here"
            + (f", expected {', '.join(own)}" if own else ""),
            hint="the model's own `generate` knows all settings of transformers",
        )


def generation_config(
    model: PreTrainedModel, sampling: Sampling, *, prompt_length: int, max_new_tokens: int
) -> GenerationConfig:
    """Return the model's generation config with the settings of a call; beams are never used.

    Raises:
        ConfigError: transformers refuses the settings, or they run the model more than once a step.
    """
    settings = {**sampling.settings(), "max_new_tokens": max_new_tokens, "num_beams": 1}
    prepare: Callable[..., Any] = model._prepare_generation_config  # type: ignore[assignment]
    try:
        config, unused = prepare(None, **settings)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"transformers refuses these settings: {error}") from error
    if unused:
        raise ConfigError(f"`{'`, `'.join(unused)}` are no settings of transformers' generation")
    if config.guidance_scale not in (None, 1):
        raise ConfigError(
            f"`guidance_scale` is `{config.guidance_scale}`, which runs the model twice a step, "
            "expected none"
        )
    config.max_length = prompt_length + max_new_tokens
    model._prepare_special_tokens(config, True, device=model.device)  # type: ignore[operator]
    return config  # type: ignore[no-any-return]


def chooser(
    model: PreTrainedModel, config: GenerationConfig, sampling: Sampling, *, prompt_length: int
) -> Chooser | None:
    """Return what chooses tokens, see `Rules`; None if the most likely ones are taken as they are.

    Args:
        model: For the processors that its generation config asks for.
        config: From `generation_config`.
        sampling: How tokens are chosen.
        prompt_length: Tokens of the longest prompt.

    Raises:
        ConfigError: transformers refuses a setting.
    """
    make: Callable[..., Any] = model._get_logits_processor  # type: ignore[assignment]
    try:
        processors = make(config, input_ids_seq_length=prompt_length, device=model.device)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"transformers refuses these settings: {error}") from error
    if not processors and not sampling.sample:
        return None
    return _Chooser(processors, model.device, sampling)


class _Chooser:
    def __init__(
        self, processors: LogitsProcessorList, device: torch.device, sampling: Sampling
    ) -> None:
        self._processors, self._draws = processors, sampling.sample
        self._generator = torch.Generator(device)
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Return the next tokens [B] of rows ids [B, T] with logits [B, V]."""
        scores: Tensor = self._processors(ids, logits)  # type: ignore[arg-type]
        if not self._draws:
            return scores.argmax(-1)
        probabilities = scores.softmax(-1)
        noise = torch.empty_like(probabilities).exponential_(1, generator=self._generator)
        return (probabilities / noise).argmax(-1)


def stop_ids(config: GenerationConfig) -> frozenset[int]:
    """Return the ids that end a text."""
    found = config.eos_token_id
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)


def pad_id(config: GenerationConfig) -> int:
    """Return the id that stands where rows have no token."""
    found = getattr(config, "_pad_token_tensor", None)
    return 0 if found is None else int(found)


__all__ = ["Sampling", "check_sampling", "chooser", "generation_config", "pad_id", "stop_ids"]
