"""The formats that quantload reads, and which one a checkpoint is in.

To add a format: one file in this folder with a `Reader`, and one row in `FORMATS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quantload.errors import FormatMismatch, UnknownFormat, listed
from quantload.loader.checkpoint import Checkpoint
from quantload.loader.formats.auto_round import open_auto_round
from quantload.loader.formats.awq import AwqReader
from quantload.loader.formats.bitsandbytes import BitsAndBytesReader
from quantload.loader.formats.cache_scales import about_cache_scales
from quantload.loader.formats.compressed_tensors import CompressedTensorsReader
from quantload.loader.formats.dense import DenseReader, quantized_names
from quantload.loader.formats.detect import REFUSED, method_of
from quantload.loader.formats.fp8 import Fp8Reader
from quantload.loader.formats.gguf import GgufReader
from quantload.loader.formats.gguf_in_safetensors import GgufInSafetensorsReader
from quantload.loader.formats.gptq import GptqReader
from quantload.loader.formats.hqq import HqqReader
from quantload.loader.formats.modelopt import ModelOptReader
from quantload.loader.formats.module_leaves import require_input_scales
from quantload.loader.formats.mxfp4 import Mxfp4Reader
from quantload.loader.formats.quanto import QuantoReader
from quantload.loader.formats.quark import QuarkReader
from quantload.loader.formats.torchao import TorchaoReader
from quantload.loader.joined_experts import join_experts
from quantload.loader.source import Reader, Source, SourceWeight
from quantload.loader.stray_dtypes import warn_of_stray_dtypes


@dataclass(frozen=True)
class FormatRow:
    """One format.

    Args:
        name: Name of the format.
        title: For people.
        reader: Builds the reader of a checkpoint in this format.
        methods: `quant_method`s of the configs that say so, in lower case.
        leaf: Regular expression for the end of tensor names that no other format has, and that
            tell all there is to know: such a checkpoint needs no quantization config.
    """

    name: str
    title: str
    reader: Callable[[Checkpoint], Reader]
    methods: tuple[str, ...] = ()
    leaf: str = ""


FORMATS = (
    FormatRow("dense", "safetensors in full precision", DenseReader),
    FormatRow(
        "compressed-tensors",
        "compressed-tensors (int, fp8, fp6, fp4)",
        CompressedTensorsReader,
        ("compressed-tensors", "compressed_tensors"),
    ),
    FormatRow(
        "modelopt",
        "ModelOpt (fp8, int8, int4, NVFP4, MX)",
        ModelOptReader,
        ("modelopt", "modelopt_fp8", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"),
    ),
    FormatRow("quark", "AMD Quark (fp8, int8, int4, MXFP4, MXFP6, NVFP4)", QuarkReader, ("quark",)),
    FormatRow(
        "bitsandbytes",
        "bitsandbytes (nf4, fp4, int8)",
        BitsAndBytesReader,
        ("bitsandbytes",),
        leaf=r"\.(quant_state\.bitsandbytes__\w+|SCB)",
    ),
    FormatRow("gptq", "GPTQ", GptqReader, ("gptq",)),
    FormatRow("awq", "AWQ", AwqReader, ("awq",)),
    FormatRow(
        "gptqmodel-gguf",
        "GGUF blocks in safetensors (GPTQModel)",
        GgufInSafetensorsReader,
        ("gguf",),
    ),
    FormatRow(
        "fp8",
        "FP8 (fp8, fbgemm_fp8, mxfp8)",
        Fp8Reader,
        ("fp8", "fbgemm_fp8", "mxfp8"),
    ),
    FormatRow(
        "auto-round",
        "AutoRound (all packings)",
        open_auto_round,
        ("auto-round", "intel/auto-round", "inc"),
    ),
    FormatRow("mxfp4", "MXFP4 experts (gpt-oss)", Mxfp4Reader, ("mxfp4",)),
    FormatRow("torchao", "torchao (int8, int4, intx, fp8)", TorchaoReader, ("torchao",)),
    FormatRow("hqq", "HQQ (1 to 8 bits)", HqqReader, ("hqq",), leaf=r"\.W_q"),
    FormatRow("quanto", "optimum-quanto (int8, float8, int4, int2)", QuantoReader, ("quanto",)),
    FormatRow("gguf", "GGUF", GgufReader),
)
_WAY_OUT = "dequantize it with its own tool first, or start from the full-precision model"
_BY_NAME = {row.name: row for row in FORMATS}
_BY_METHOD = {method: row for row in FORMATS for method in row.methods}


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
    tensors = reader.checkpoint.tensors
    require_input_scales(reader.checkpoint, weights)
    reader.warnings += warn_of_stray_dtypes(tensors, weights)
    reader.warnings += about_cache_scales(reader.checkpoint, reader.cache_scheme)
    reader.warnings += _about_nothing_quantized(row, reader, weights)
    return join_experts(
        Source(
            checkpoint=reader.checkpoint,
            format_name=row.name,
            reader=reader,
            weights=weights,
            plain={name: entry for name, entry in tensors.items() if name not in consumed},
        )
    )


def _about_nothing_quantized(
    row: FormatRow, reader: Reader, weights: Mapping[str, SourceWeight]
) -> list[str]:
    """Warn of a quantization config beside weights that are all in full precision."""
    if not row.methods or reader.cache_scheme or any(w.is_quantized for w in weights.values()):
        return []
    return [
        f"the quantization config says `{row.name}`, but no weight is quantized: all are read in "
        f"full precision, in `{reader.checkpoint.name}`"
    ]


def _detect(checkpoint: Checkpoint) -> FormatRow:
    if checkpoint.gguf_file is not None:
        return _BY_NAME["gguf"]
    config = checkpoint.quantization_config
    evidence = quantized_names(checkpoint.tensors.values())
    if config is not None and checkpoint.quantization_config_file != "config.json" and not evidence:
        config = None  # a side file of another export; the tensors are in full precision
    if config is None:
        if evidence:
            row = _by_leaf(checkpoint)
            if row is not None:
                return row
            raise FormatMismatch(
                f"no quantization config in `{checkpoint.name}`, but its tensors are quantized: "
                f"{listed(evidence)}",
                hint="the config is incomplete, or the format is one that quantload does not read",
            )
        return _BY_NAME["dense"]
    method = method_of(checkpoint)
    row = _BY_METHOD.get(method or "")
    if row is None:
        raise _unknown(checkpoint, method)
    return row


def _by_leaf(checkpoint: Checkpoint) -> FormatRow | None:
    """Return the one format whose own tensors are there, if there is one."""
    rows = [row for row in FORMATS if row.leaf]
    endings = [(row, re.compile(rf"(?:{row.leaf})$")) for row in rows]
    found = {
        row.name: row
        for name in checkpoint.tensors
        for row, ending in endings
        if ending.search(name)
    }
    return next(iter(found.values())) if len(found) == 1 else None


def _unknown(checkpoint: Checkpoint, method: str | None) -> UnknownFormat:
    title, way_out = REFUSED.get(method or "", ("", _WAY_OUT))
    known = [row.name for row in FORMATS if row.methods]
    return UnknownFormat(
        f"quantization format `{method}`{title and f' ({title})'} is not read, found in "
        f"`{checkpoint.quantization_config_file}` of `{checkpoint.name}`; expected {listed(known)}",
        hint=way_out,
    )
