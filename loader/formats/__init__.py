"""The formats that quantload reads, and which one a checkpoint is in.

To add a format: one file in this folder with a `Reader`, and one row in `FORMATS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quantload.errors import FormatMismatch, UnknownFormat, listed
from quantload.loader.checkpoint import Checkpoint
from quantload.loader.formats.compressed_tensors import CompressedTensorsReader
from quantload.loader.formats.dense import DenseReader, quantized_names
from quantload.loader.formats.gguf import GgufReader
from quantload.loader.source import Reader, Source


@dataclass(frozen=True)
class FormatRow:
    """One format.

    Args:
        name: As in `quant_method` of a config, if `has_config`.
        title: For people.
        reader: Builds the reader of a checkpoint in this format.
        has_config: True if a quantization config says that a checkpoint is in this format.
    """

    name: str
    title: str
    reader: Callable[[Checkpoint], Reader]
    has_config: bool = True


FORMATS = (
    FormatRow("dense", "safetensors in full precision", DenseReader, has_config=False),
    FormatRow("compressed-tensors", "compressed-tensors (int and fp8)", CompressedTensorsReader),
    FormatRow("gguf", "GGUF (llama family)", GgufReader, has_config=False),
)
_BY_NAME = {row.name: row for row in FORMATS}


def open_source(checkpoint: Checkpoint) -> Source:
    """Detect the format of a checkpoint from its config and its headers, and describe its weights.

    Raises:
        UnknownFormat: The config names a format that quantload does not read.
        FormatMismatch: Config and headers contradict each other.
    """
    row = _detect(checkpoint)
    reader = row.reader(checkpoint)
    weights = reader.weights()
    consumed = {name for weight in weights.values() for name in weight.leaves.values()}
    return Source(
        checkpoint=checkpoint,
        format_name=row.name,
        reader=reader,
        weights=weights,
        plain={n: entry for n, entry in checkpoint.tensors.items() if n not in consumed},
    )


def _detect(checkpoint: Checkpoint) -> FormatRow:
    if checkpoint.gguf_file is not None:
        return _BY_NAME["gguf"]
    config = checkpoint.quantization_config
    evidence = quantized_names(checkpoint.tensors.values())
    if config is not None and checkpoint.quantization_config_file != "config.json" and not evidence:
        config = None  # a side file of another export; the tensors are in full precision
    if config is None:
        if evidence:
            raise FormatMismatch(
                f"no quantization config in `{checkpoint.name}`, but its tensors are quantized: "
                f"{listed(evidence)}",
                hint="the config is incomplete, or the format is one that quantload does not read",
            )
        return _BY_NAME["dense"]
    method = config.get("quant_method")
    row = _BY_NAME.get(method) if isinstance(method, str) else None
    if row is not None and row.has_config:
        return row
    known = [row.name for row in FORMATS if row.has_config]
    raise UnknownFormat(
        f"quantization format `{method}` is not read, found in "
        f"`{checkpoint.quantization_config_file}` of `{checkpoint.name}`; expected {listed(known)}",
        hint="dequantize it with its own tool first, or start from the full-precision model",
    )
