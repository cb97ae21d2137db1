"""What is known about the modules of a model, in the names of its checkpoint.

The facts come from a probe of the transformers model (built without memory), or, where the model
cannot be built, from a table of names. Everything that decides by kind or by fused group asks
these facts, and the plan prints where they come from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["linear", "embedding", "head", "convolution", "other"]


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts about the modules of one checkpoint.

    Args:
        kinds: Kind of each module that owns a weight, by checkpoint name.
        groups: Fused groups: checkpoint names of linear layers that read the same input (q/k/v,
            gate/up), in the order in which they are stacked.
        tied: Modules whose weight is another module's: {"lm_head": "model.embed_tokens"}.
        aliases: Other names of a module, for example the one in the transformers model.
        origin: "model probe" or "name table".
    """

    kinds: Mapping[str, Kind]
    groups: tuple[tuple[str, ...], ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    origin: str = "model probe"

    def names_of(self, module: str) -> tuple[str, ...]:
        """Return the checkpoint name of a module and its aliases."""
        return (module, *self.aliases.get(module, ()))


# Components of fused groups, for architectures that cannot be probed. Order is stacking order.
_STACKED_NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
_STACKED_BY_FIRST = {names[0]: names for names in _STACKED_NAMES}
_TOKEN_EMBEDDINGS = {
    "embed_tokens",
    "embed_in",
    "embeddings",
    "tok_embeddings",
    "word_embeddings",
    "wte",
}
_OTHER_EMBEDDINGS = {
    "embed_positions",
    "embed_tokens_per_layer",
    "position_embedding",
    "position_embeddings",
    "token_type_embeddings",
    "vision_embed_tokens",
    "wpe",
}
_HEADS = {"lm_head", "embed_out", "output_layer"}
# Layers that keep their weight as [K, N]: `Conv1D` of transformers 5.24, by `model_type`.
_INPUT_FIRST_MODELS = {"clvp_decoder", "decision_transformer", "gpt2", "imagegpt", "openai-gpt"}
_INPUT_FIRST_NAMES = {"c_attn", "c_fc", "c_proj", "q_attn"}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# Models whose config counts what is run, not what is stored: attention and MLP blocks that lie
# together in some files (dory), layers that run several times (hrm_text).
_COUNT_RUNS = {"dory", "hrm_text"}
_PREDICTION_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "n_predict")
_EXPERT = re.compile(r"(?P<block>.*\.experts)\.\d+\.(?P<projection>[^.]+)")


def facts_from_names(modules: Iterable[str], *, tied_head: bool) -> ModelFacts:
    """Guess kinds and fused groups from the names of modules with a two-dimensional weight.

    Args:
        modules: Checkpoint names of modules with a 2-D weight.
        tied_head: True if the config ties the head to the input embedding.
    """
    names = sorted(modules)
    kinds: dict[str, Kind] = {name: _kind_by_name(name) for name in names}
    embedding = next((name for name in names if _last(name) in _TOKEN_EMBEDDINGS), None)
    has_head = any(kind == "head" for kind in kinds.values())
    tied = {"lm_head": embedding} if tied_head and embedding and not has_head else {}
    groups = with_expert_groups(groups_from_names(names), names)
    return ModelFacts(kinds=kinds, groups=groups, tied=tied, origin="name table")


def groups_from_names(modules: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Return the fused groups that the usual names of siblings suggest, where all members exist."""
    names = {name: name for name in modules}
    groups = []
    for name in sorted(name for name in names if _last(name) in _STACKED_BY_FIRST):
        parent, _, last = name.rpartition(".")
        spelled = (f"{parent}.{part}" if parent else part for part in _STACKED_BY_FIRST[last])
        members = [names.get(member) for member in spelled]  # not a second text for each name
        if None not in members:
            groups.append(tuple(member for member in members if member is not None))
    return tuple(groups)


def keeps_input_first(config: Mapping[str, object], module: str) -> bool:
    """True if the model of a config keeps the weight of a linear layer as [K, N], as GPT-2 does."""
    is_such_model = str(config.get("model_type")) in _INPUT_FIRST_MODELS
    return is_such_model and _last(module) in _INPUT_FIRST_NAMES


def missing_layers(config: Mapping[str, object], tensor_names: Iterable[str]) -> str:
    """Say that the config counts more decoder layers than the files hold; "" if it does not.

    Only names of the form `layers.N.` are counted; files without such names say nothing.
    """
    text = config.get("text_config")
    holder = text if isinstance(text, Mapping) else config
    expected = holder.get("num_hidden_layers")
    if str(holder.get("model_type")) in _COUNT_RUNS:
        return ""
    numbers = [int(m[1]) for name in tensor_names if (m := _LAYER.search(name))]
    if not isinstance(expected, int) or not numbers or max(numbers) + 1 >= expected:
        return ""
    return f"the config counts {expected} layers, the files hold {max(numbers) + 1}"


def extra_layers(config: Mapping[str, object], tensor_names: Iterable[str]) -> str:
    """Say that the files hold more decoder layers than the config counts; "" if they do not.

    Layers of a multi-token prediction head come after the others; the config counts them apart.
    """
    text = config.get("text_config")
    holder = text if isinstance(text, Mapping) else config
    expected = holder.get("num_hidden_layers")
    numbers = [int(m[1]) for name in tensor_names if (m := _LAYER.match(_decoder_name(name)))]
    if not isinstance(expected, int) or not numbers:
        return ""
    extra = [holder.get(key) for key in _PREDICTION_LAYERS]
    allowed = expected + max((count for count in extra if isinstance(count, int)), default=0)
    if max(numbers) + 1 <= allowed:
        return ""
    return f"the config counts {expected} layers, the files hold {max(numbers) + 1}"


def _decoder_name(name: str) -> str:
    """Return the name of a tensor from its first `layers` on, unless that is of another tower."""
    head, found, rest = name.partition("layers.")
    is_decoder = head in ("", "model.", "language_model.model.", "model.language_model.")
    return found + rest if is_decoder else ""


def with_expert_groups(
    groups: Iterable[tuple[str, ...]], modules: Iterable[str]
) -> tuple[tuple[str, ...], ...]:
    """Add gate and up of each expert, which engines stack.

    Args:
        groups: Groups that are known already.
        modules: Checkpoint names of modules with a 2-D weight.
    """
    known = tuple(groups)
    grouped = {name for group in known for name in group}
    pairs = groups_from_names(
        name for name in modules if "experts." in name and _EXPERT.fullmatch(name)
    )
    return (*known, *(pair for pair in pairs if not grouped.intersection(pair)))


def expert_blocks(modules: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Return the experts of each block: engines run all their projections in one scheme.

    Args:
        modules: Checkpoint names of modules with a 2-D weight.
    """
    blocks: dict[str, list[str]] = {}
    for name in modules:
        match = _EXPERT.fullmatch(name) if "experts." in name else None
        if match:
            blocks.setdefault(match["block"], []).append(name)
    return tuple(tuple(members) for members in blocks.values())


def _kind_by_name(name: str) -> Kind:
    last = _last(name)
    if last in _TOKEN_EMBEDDINGS or last in _OTHER_EMBEDDINGS:
        return "embedding"
    if last in _HEADS:
        return "head"
    return "linear"


def _last(name: str) -> str:
    return name.rpartition(".")[2]
