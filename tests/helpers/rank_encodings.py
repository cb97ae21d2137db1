"""Checkpoints of tiny models in each encoding, with sizes that ranks cut where it is hard.

    uneven  192, 384 and 416 features: blocks of 128 and groups of 32 and 16 end within what a rank
            has: 24, 48 and 52 of them where there are eight
    wide    256, 384 and 1024 features: of groups of 128 a rank has several, one, or one and a half

Eight query heads and two for keys and values (Jamba has four), 131 tokens.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from shared_models import write_model

from quantload import api
from quantload.loader.formats.targets import target_named
from quantload.loader.plan_options import PlanOptions

SIZES: dict[str, dict[str, Any]] = {
    "uneven": {"hidden_size": 192, "intermediate_size": 416},
    "wide": {"hidden_size": 256, "intermediate_size": 1024},
}
_HEADS = {size: {"head_dim": 48} for size in SIZES}
_OF_MODELS: dict[str, dict[str, dict[str, Any]]] = {
    **dict.fromkeys(("llama", "qwen3", "gemma3_text", "mixtral", "gpt_oss"), _HEADS),
    "deepseek_v3": {
        "uneven": {
            **{"q_lora_rank": 96, "kv_lora_rank": 96, "qk_rope_head_dim": 32},
            **{"qk_nope_head_dim": 16, "v_head_dim": 24, "moe_intermediate_size": 96},
        },
        "wide": {
            **{"q_lora_rank": 256, "kv_lora_rank": 128, "qk_rope_head_dim": 32},
            **{"qk_nope_head_dim": 32, "v_head_dim": 48, "moe_intermediate_size": 384},
        },
    },
    "jamba": {
        size: {"mamba_dt_rank": 16, "mamba_d_state": 8, "num_key_value_heads": 4} for size in SIZES
    },
}


@dataclass(frozen=True)
class Encoding:
    """How the weights of a checkpoint are stored.

    Args:
        scheme: As `convert` takes it; None leaves full precision.
        target: Name of the format that is written.
        act_order: Groups of columns lie in no order: in one for all layers that read one tensor, or
            in another for each; "" leaves them.
        sizes: See above.
        rules: As `convert` takes them.
    """

    scheme: str | None
    target: str = "compressed-tensors"
    act_order: Literal["", "shared", "own"] = ""
    sizes: str = "uneven"
    rules: tuple[str, ...] = ()


_HEAD = ("lm_head=W8A16",)  # 131 rows of codes
ENCODINGS = {
    "dense": Encoding(None),
    "W4A16:g32": Encoding("W4A16:g32", rules=_HEAD),
    "W4A16:g128": Encoding("W4A16:g128", sizes="wide"),
    "W4A16_ASYM:g128 awq": Encoding("W4A16_ASYM:g128", "awq", sizes="wide"),
    "W4A16:g32 gptq": Encoding("W4A16:g32", "gptq"),
    "W4A16:g32 act-order": Encoding("W4A16:g32", "gptq", act_order="shared"),
    "W4A16:g32 unlike act-orders": Encoding("W4A16:g32", "gptq", act_order="own"),
    "W4A16_ASYM:g128 act-order": Encoding(
        "W4A16_ASYM:g128", "gptq", act_order="shared", sizes="wide"
    ),
    "W4A16:g32 act-order, compressed-tensors": Encoding("W4A16:g32", act_order="shared"),
    "FP8_BLOCK": Encoding("FP8_BLOCK"),
    "FP8_BLOCK fp8": Encoding("FP8_BLOCK", "fp8"),
    "NVFP4": Encoding("NVFP4A16"),
    "NVFP4 modelopt": Encoding("NVFP4", "modelopt"),
    "FP8_DYNAMIC": Encoding("FP8_DYNAMIC", rules=_HEAD),
    "W8A8": Encoding("W8A8"),
}


def write_encoded(model_type: str, encoding: str, folder: Path) -> Path:
    """Write a checkpoint below `folder`; returns where."""
    wanted = ENCODINGS[encoding]
    sizes = SIZES[wanted.sizes] | _OF_MODELS.get(model_type, {}).get(wanted.sizes, {})
    write_model(model_type, folder / "dense", sizes)
    if wanted.scheme is None:
        return folder / "dense"
    written = folder / "codes"
    rules = () if model_type == "llama" else wanted.rules  # its head is its embedding
    _convert(folder / "dense", written, wanted.scheme, wanted.target, rules)
    if wanted.act_order:
        put_columns_in_no_order(written, is_shared=wanted.act_order == "shared")
    return written


def _convert(source: Path, output: Path, scheme: str, target: str, rules: tuple[str, ...]) -> None:
    options = PlanOptions(target=target_named(target))
    api.convert(source, output, scheme, verify_output=False, rules=rules, options=options)


def put_columns_in_no_order(folder: Path, *, is_shared: bool = True) -> None:
    """Make act-order of the groups of a checkpoint: columns change theirs.

    Args:
        folder: GPTQ, or compressed-tensors in groups; changed in place.
        is_shared: Layers of one parent have one order, as those have that read one tensor.
    """
    config = json.loads((folder / "config.json").read_text())
    stated = config["quantization_config"]
    groups = [group["weights"] for group in stated.get("config_groups", {}).values()]
    for weights in groups:
        weights["actorder"] = "group" if weights["strategy"] == "group" else None
    if not groups:
        stated["desc_act"] = True
    (folder / "config.json").write_text(json.dumps(config))
    changed = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            names = list(stored.keys())
            made = {name: stored.get_tensor(name) for name in names}
        for name in names:
            module, _, leaf = name.rpartition(".")
            seed = zlib.crc32((module.rpartition(".")[0] if is_shared else module).encode())
            order = torch.Generator().manual_seed(seed)
            if leaf == "g_idx":
                made[name] = made[name][torch.randperm(len(made[name]), generator=order)]
                changed += int(made[name].max()) > 0
            elif leaf == "weight_packed" and (scale := made[f"{module}.weight_scale"]).shape[1] > 1:
                columns = int(made[f"{module}.weight_shape"][1])
                groups_of = torch.arange(columns) // (columns // scale.shape[1])
                places = torch.randperm(columns, generator=order)
                made[f"{module}.weight_g_idx"] = groups_of[places].to(torch.int32)
                changed += 1
        save_file(made, file, metadata={"format": "pt"})
    assert changed, "no layer has several groups"


# Linear layers that every rank holds whole, whatever their number, with the reason.
NOT_IN_PLAN = "not in the tensor parallel plan of the model"
REPLICATED: Mapping[str, set[str]] = {
    "deepseek_v3": {"self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"},
    "jamba": {f"mamba.{name}_proj" for name in ("in", "x", "dt", "out")},
}
