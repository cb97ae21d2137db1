"""What causes the drift of a candidate: its layers exchanged in the reference, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from quantload.api_load import parse_device
from quantload.api_plan import as_source
from quantload.arguments import (
    as_sequences,
    check_choice,
    check_counts,
    check_flags,
    check_progress,
)
from quantload.errors import ConfigError
from quantload.loader.model_dtype import own_dtype, parse_dtype
from quantload.loader.source import Source
from quantload.progress import Progress, Silent

if TYPE_CHECKING:
    from quantload.accuracy.attribution_result import Attribution

_UNITS = ("layer", "group", "block")


def bisect(  # noqa: PLR0913 - a keyword for each choice of the user
    reference: str | Path | Source,
    candidate: str | Path | Source,
    *,
    sequences: Sequence[Sequence[int]],
    by: Literal["layer", "group", "block"] = "group",
    first_tokens: int = 256,
    top: int = 10,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = torch.float32,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
) -> Attribution:
    """Rank what causes the drift of a candidate; see `accuracy/attribution.py`.

    One block of each model is in memory at a time, and the hidden states of what was exchanged:
    tokens x hidden size x 4 bytes for each unit, at most 1 GiB in all.

    Args:
        reference: The checkpoint that is taken as right, in any format that is read.
        candidate: The checkpoint whose drift is explained.
        sequences: Token ids; every position counts.
        by: What is exchanged at once: single layers, groups that runtimes fuse, or whole blocks.
        first_tokens: Tokens on which every unit is tried.
        top: How many units are then looked at closer, on all tokens; 0 for none.
        device: Where the models run; None takes CUDA where there is one.
        dtype: dtype in which they run; None and "auto" take the reference's own.
        progress: Draws progress; silent by default.
        trust_remote_code: Run modelling code that comes with a checkpoint.

    Raises:
        ConfigError: There are no tokens, or they are not of this model.
        NotComparable: The checkpoints are not of one model, or outputs of the reference are not
            finite.
        ModelError: The model has no logits.
    """
    check_choice("by", by, _UNITS)
    check_counts(1, first_tokens=first_tokens)
    check_counts(0, top=top)
    check_flags(trust_remote_code=trust_remote_code)
    check_progress(progress)
    place, kind = parse_device(device), parse_dtype(dtype)
    sequences = as_sequences("sequences", sequences)
    if not any(sequences):
        raise ConfigError("no tokens", hint="give a text, prompts or token ids")
    from quantload.accuracy.attribution import Settings, attribute_drift  # transformers: seconds

    one, other = (
        as_source("reference", reference, warns=True),
        as_source("candidate", candidate, warns=True),
    )
    return attribute_drift(
        one,
        other,
        sequences,
        progress or Silent(),
        Settings(
            by=by,
            first_tokens=first_tokens,
            top=top,
            device=place,
            dtype=kind or own_dtype(one),
            trust_remote_code=trust_remote_code,
        ),
    )


__all__ = ["bisect"]
