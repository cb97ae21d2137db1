"""Detection: config and headers decide together; what is not read is refused by name."""

import json
from pathlib import Path

import pytest
import tiny_checkpoints as tiny
import torch

from quantload.errors import FormatMismatch, UnknownFormat
from quantload.loader.formats import FORMATS, open_source
from quantload.loader.open import open_checkpoint

CONFIG = tiny.config(layers=1)
SHARED = Path(__file__).parents[4] / "shared" / "checkpoints"
OTHERS = [  # folders that are read although their producer's format is not one of ours
    "auto-round-0.16.1/nano-llama-llmc-FP8_STATIC",
    "auto-round-0.16.1/nano-llama-llmc-FPW8A16",
    "auto-round-0.16.1/nano-llama-llmc-W4A16",
    "auto-round-0.16.1/nano-llama-llmc-W4A16-asym",
    "auto-round-0.16.1/nano-llama-llmc-W8A16-asym",
    "auto-round-0.16.1/odd-llama-llmc-FP8_BLOCK",
]


def _method(folder):
    file = folder / "config.json"
    content = json.loads(file.read_text()) if file.exists() else {}
    return content.get("quantization_config", {}).get("quant_method")


_READ = {method for row in FORMATS for method in row.methods}
FOREIGN = [
    folder for folder in sorted(SHARED.glob("*/*/")) if _method(folder) not in {None, *_READ}
]


@pytest.mark.parametrize(
    "method",
    ["eetq", "vptq", "dense", "", 4, ["x"]],
)
def test_other_formats_are_refused_by_name(tmp_path, method):
    content = {**CONFIG, "quantization_config": {"quant_method": method, "bits": 4}}
    tiny.write(tmp_path, content, {"a.qweight": torch.zeros(2, 2, dtype=torch.int32)})
    with pytest.raises(UnknownFormat) as caught:
        open_source(open_checkpoint(tmp_path))
    assert f"quantization format `{method}`" in str(caught.value)
    assert "is not read, found in `config.json`" in str(caught.value)
    assert "; expected `" in str(caught.value)
    assert "hint: " in str(caught.value)


def test_a_stale_side_file_beside_full_precision(tmp_path):
    folder = tiny.write(tmp_path, CONFIG, tiny.tensors(CONFIG))
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert open_source(open_checkpoint(folder)).format_name == "dense"


def test_a_side_file_that_belongs_to_the_tensors(tmp_path):
    made = {"a.qweight": torch.zeros(2, 2, dtype=torch.int32)}
    folder = tiny.write(tmp_path, CONFIG, made)
    (folder / "quantize_config.json").write_text('{"quant_method": "eetq"}')
    with pytest.raises(UnknownFormat, match=r"`eetq` .*is not read, found in `quantize_config"):
        open_source(open_checkpoint(folder))


def test_quantized_tensors_and_no_config(tmp_path):
    folder = tiny.write(tmp_path, CONFIG, {"a.qweight": torch.zeros(2, 2, dtype=torch.int32)})
    with pytest.raises(FormatMismatch, match=r"no quantization config .*`a\.qweight`\n\nhint:"):
        open_source(open_checkpoint(folder))


def test_every_tensor_is_in_a_weight_or_plain(tmp_path):
    source = open_source(open_checkpoint(tiny.write(tmp_path, CONFIG, tiny.tensors(CONFIG))))
    leaves = [name for weight in source.weights.values() for name in weight.leaves.values()]
    assert sorted([*leaves, *source.plain]) == sorted(source.checkpoint.tensors)


def test_rows_have_different_names():
    names = [row.name for row in FORMATS]
    assert len(set(names)) == len(names)


@pytest.mark.skipif(not FOREIGN, reason="no shared checkpoints beside the repository")
@pytest.mark.parametrize(
    "folder", FOREIGN, ids=lambda folder: f"{folder.parent.name}/{folder.name}"
)
def test_foreign_checkpoints_are_refused(folder):
    with pytest.raises(UnknownFormat, match=f"`{_method(folder)}`") as caught:
        open_source(open_checkpoint(folder))
    assert caught.value.hint


@pytest.mark.skipif(not FOREIGN, reason="no shared checkpoints beside the repository")
@pytest.mark.parametrize("name", OTHERS)
def test_exports_to_another_tools_format(name):
    assert open_source(open_checkpoint(SHARED / name)).format_name == "compressed-tensors"
