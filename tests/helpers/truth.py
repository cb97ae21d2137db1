"""Real checkpoints with the truth beside them: `expected.safetensors` and `MANIFEST.json`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from quantload.loader.source import Source, as_parameter
from quantload.quant.qtensor import QuantTensor

CHECKPOINTS = Path(__file__).parents[3] / "shared" / "checkpoints"
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Truth:
    """What is known of one checkpoint.

    Args:
        folder: Holds the checkpoint.
    """

    folder: Path

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return json.loads((self.folder / "MANIFEST.json").read_text())

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return load_file(self.folder / "expected.safetensors")

    @property
    def is_rounded(self) -> bool:
        """True if float32 values were rounded to bfloat16 to save space."""
        return "ROUNDED" in str(self.manifest.get("expected_storage", "")).upper()

    @property
    def weights(self) -> dict[str, Tensor]:
        """Expected values by parameter name; of some only rows, see `difference`."""
        others = ("logits", "input_ids", "last_hidden", "pixel", "image", "token_type", "mm_token")
        return {key: t for key, t in self.tensors.items() if not key.startswith(others)}

    def difference(self, key: str, found: Tensor, *, ulps: int = 0) -> str:
        """Say how a dequantized weight differs from the expected one; "" if it does not.

        Args:
            key: As in `weights`: a parameter name, with "@rows" if only rows are kept.
            found: The whole weight, in the dtype in which it is evaluated.
            ulps: Units in the last place of the expected dtype that may differ.
        """
        name, _, has_rows = key.partition("@")
        expected = self.weights[key]
        full = self.manifest.get("expected_full_sha256", {}).get(name)
        dtype = _DTYPES[full[0]] if full else expected.dtype
        found = found.to(dtype).contiguous()
        if has_rows:
            rows = torch.tensor(self.manifest["expected_rows"][name])
            part = found.index_select(-2, rows)
        else:
            part = found
        if tuple(part.shape) != tuple(expected.shape):
            return f"shape {tuple(part.shape)}, expected {tuple(expected.shape)}"
        part = part.to(expected.dtype) if self.is_rounded else part
        if ulps and _within(part.to(expected.dtype), expected, ulps):
            return ""
        if not torch.equal(part.double(), expected.double()):
            count = int((part.double() != expected.double()).sum())
            worst = float((part.double() - expected.double()).abs().max())
            return f"{count} of {part.numel()} values differ by up to {worst:.3g}"
        if full and not self.is_rounded and _digest(found) != full[2]:
            return f"sha256 of the whole tensor differs (shape {tuple(found.shape)} {found.dtype})"
        return ""


def _within(found: Tensor, expected: Tensor, ulps: int) -> bool:
    """True if values of one 16-bit float dtype are at most so many steps apart."""
    steps = [t.view(torch.int16).to(torch.int32) for t in (found, expected)]
    lines = [torch.where(s < 0, -32768 - s, s) for s in steps]  # one line from -max to max
    return bool(((lines[0] - lines[1]).abs() <= ulps).all())


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()


def read_named(source: Source, parameter: str) -> Tensor:
    """Read what a parameter of the model in full precision would be, without factors of inputs."""
    if parameter in source.plain:
        return source.read_plain(parameter)
    module = next(m for m, w in source.weights.items() if w.parameter_name == parameter)
    weight = source.read_weight(module)
    if "svdquant_lora_a" in source.weights[module].leaves:  # expected is W of W + B A
        weight = source.reader.quantized_part(source.weights[module])
    if isinstance(weight, QuantTensor):
        weight = replace(weight, inner=None).dequantize()
    if not source.weights[module].experts:  # expected is [N, K], also where the parameter is not
        return weight
    return as_parameter(weight, source.weights[module])


def truths(pattern: str = "*/*") -> list[Truth]:
    """Return the checkpoints of some tools that have expected values."""
    found = sorted(path.parent for path in CHECKPOINTS.glob(f"{pattern}/expected.safetensors"))
    return [Truth(folder) for folder in found]
