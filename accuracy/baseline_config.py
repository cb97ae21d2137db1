"""What a baseline keeps of config.json: the model's weights say nothing without it.

The present config is held to it as `config_defaults.py` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quantload.accuracy.config_check import model_facts
from quantload.accuracy.config_defaults import config_differences


def kept_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a baseline keeps of a config.json, as JSON holds it."""
    text = json.dumps(model_facts(config), default=str)
    kept: dict[str, Any] = json.loads(text, parse_constant=str)  # infinities are no JSON
    return kept


def changed_facts(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line for each key of a config that changes what the model computes.

    Args:
        before: From `kept_facts`.
        now: The same of what is judged.
    """
    if before == now:
        return []
    return config_differences(now, before, own_head=False, one_checkpoint=True)


__all__ = ["changed_facts", "kept_facts"]
