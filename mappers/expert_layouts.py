"""How an architecture keeps the experts of a block in one parameter, and what engines call each.

    parameter             shape              rows of one expert
    gate_up_proj          [E, 2I, H]         gate_proj, then up_proj
    down_proj             [E, H, I]          down_proj
    input first           [E, K, N]          as Llama 4 has them
    either                                   Qwen3-VL: told by the width of the model

Serving engines and compressed-tensors read quantized experts one by one. The names are those of the
original checkpoints: `WeightConverter`s of transformers 5.24.0 (`conversion_mapping.py`) form the
parameter from them, and `ckpt_names` of vLLM 0.32.0 (`models/*`, `fused_moe/routed_experts.py`)
reads them. Where an engine reads no quantized experts one by one, there is no row, but a reason.

gpt-oss is one of these, but llm-compressor 0.14 writes its experts one by one (`modeling/moe/
gpt_oss.py`): `UNSERVED` has that layout. Its rows alternate in the parameter: gate, up, gate, up.
Lossless conversions write it, since compressed-tensors can hold gpt-oss in no other way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Orientation = Literal["output first", "input first", "either"]


@dataclass(frozen=True)
class ExpertLayout:
    """The experts of one architecture.

    Args:
        projections: Modules of one expert that each parameter of all experts holds, in the order of
            its rows: {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.
        orientation: Which features come first in the parameter.
        renames: Patterns and replacements that turn transformers' names of the block into those of
            original checkpoints.
        is_converted: True if transformers forms the parameter from single experts by itself.
        alternates: True if rows of the projections alternate in the parameter, instead of following
            each other; it then has input features first.
        has_biases: True if `<parameter>_bias` [E, rows] holds biases in the same order.
    """

    projections: Mapping[str, tuple[str, ...]]
    orientation: Orientation = "output first"
    renames: tuple[tuple[str, str], ...] = field(default=())
    is_converted: bool = True
    alternates: bool = False
    has_biases: bool = False

    def renamed(self, name: str) -> str:
        """Return a name of transformers as original checkpoints have it."""
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name

    def is_transposed(self, parameter: str, shape: tuple[int, ...], hidden: object) -> bool | None:
        """Say whether a parameter [E, a, b] has input features first; None if that is open.

        Args:
            parameter: Last part of its name.
            shape: Its shape.
            hidden: Width of the model; the projection that goes back to it has it as rows.
        """
        first, last = shape[1:] if parameter != "down_proj" else shape[:0:-1]
        fits = {"output first": last == hidden, "input first": first == hidden}
        if self.orientation != "either":
            return self.orientation == "input first" if fits[self.orientation] else None
        return fits["input first"] if first != last and any(fits.values()) else None


_GATE_UP_DOWN = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_NUMBERED = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
_IN_SPARSE_MOE = (r"\.mlp\.(experts|gate)\.", r".block_sparse_moe.\1.")
_PLAIN = ExpertLayout(_GATE_UP_DOWN)
_ROUTER_BIAS = (r"\.mlp\.(e_score_correction_bias)$", r".block_sparse_moe.\1")

# By `model_type` of the text config.
LAYOUTS: dict[str, ExpertLayout] = {
    **dict.fromkeys(
        (
            *("afmoe", "axk1", "bailing_hybrid", "cohere2_moe", "deepseek_v2", "deepseek_v3"),
            *("deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe"),
            *("glm4_moe_lite", "glm4v_moe_text", "glm_moe_dsa", "hunyuan_v1_moe", "jamba"),
            *("laguna", "longcat_flash", "mellum", "mimo_v2_flash", "olmoe", "qwen2_moe"),
            *("qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen3_omni_moe_text"),
        ),
        _PLAIN,
    ),
    "lfm2_moe": ExpertLayout(_NUMBERED),
    "mixtral": ExpertLayout(_NUMBERED, renames=(_IN_SPARSE_MOE,)),
    "minimax_m2": ExpertLayout(_NUMBERED, renames=(_ROUTER_BIAS, _IN_SPARSE_MOE)),
    "phimoe": ExpertLayout(
        _NUMBERED, renames=((r"\.mlp\.router\.", ".block_sparse_moe.gate."), _IN_SPARSE_MOE)
    ),
    "nemotron_h": ExpertLayout({"up_proj": ("up_proj",), "down_proj": ("down_proj",)}),
    "llama4_text": ExpertLayout(_GATE_UP_DOWN, orientation="input first", is_converted=False),
    "qwen3_vl_moe_text": ExpertLayout(_GATE_UP_DOWN, orientation="either", is_converted=False),
}
# Of configs without a text config of their own.
_SAME_AS = {"llama4": "llama4_text", "qwen3_5_moe": "qwen3_5_moe_text"}
# What llm-compressor writes although no engine reads it.
UNSERVED = {
    "gpt_oss": ExpertLayout(
        _GATE_UP_DOWN,
        orientation="input first",
        is_converted=False,
        alternates=True,
        has_biases=True,
    ),
}
_NOT_SERVED = {
    "gpt_oss": "vLLM 0.32 leaves out the tensors of its single experts without a word",
    "dbrx": "vLLM 0.32 reads its experts only in one parameter",
    "granitemoe": "vLLM 0.32 reads its experts only in one parameter",
    "granitemoeshared": "vLLM 0.32 reads its experts only in one parameter",
}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config that describes the language model."""
    inner = config.get("text_config")
    if inner is None and isinstance(config.get("thinker_config"), Mapping):
        return text_config(config["thinker_config"])
    return inner if isinstance(inner, Mapping) else config


def layout_of(config: Mapping[str, Any]) -> ExpertLayout | None:
    """Return how the architecture of a config keeps its experts; None if that is not known."""
    kind = _kind(config)
    return LAYOUTS.get(_SAME_AS.get(kind, kind))


def unserved_layout_of(config: Mapping[str, Any]) -> ExpertLayout | None:
    """Return the layout of single experts that no engine reads, but tools write; None without."""
    return UNSERVED.get(_kind(config))


def _kind(config: Mapping[str, Any]) -> str:
    return str(text_config(config).get("model_type", config.get("model_type")))


def why_no_layout(config: Mapping[str, Any]) -> str:
    """Say why the experts of an architecture stay in one parameter."""
    kind = _kind(config)
    return _NOT_SERVED.get(
        kind, f"no layout of single experts is known that an engine reads for `{kind}`"
    )
