"""Which files go along with the weights."""

import tiny_checkpoints as tiny

from quantload.loader.open import open_checkpoint
from quantload.loader.side_files import copy_side_files, side_files

TAKEN = [
    ".gitattributes",
    "LICENSE",
    "README.md",
    "additional_chat_templates/tool_use.jinja",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "modeling_tiny.py",
    "tokenizer.json",
    "tokenizer.model",
]
LEFT = [
    ".cache/huggingface/x.lock",
    ".env",
    ".eval_results/results.yaml",
    ".git/config",
    "sub/.gitattributes",
    "__pycache__/modeling_tiny.pyc",
    "adapter_config.json",
    "hf_quant_config.json",
    "model.gguf",
    "onnx/model.onnx_data",
    "original/params.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "quantize_config.json",
    "speech-lora/adapter_config.json",
    "tf_model.h5",
    "training_args.bin",
]


def test_what_is_copied(tmp_path):
    folder = tiny.llama(tmp_path / "source", layers=1)
    for number, name in enumerate([*TAKEN, *LEFT]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"[{number}]" if "config" not in name else "{}")
    assert [file.relative_to(folder).as_posix() for file in side_files(folder)] == TAKEN
    target = tmp_path / "target"
    target.mkdir()
    assert copy_side_files(open_checkpoint(folder), target) == TAKEN
    found = {
        f.relative_to(target).as_posix(): f.read_bytes() for f in target.rglob("*") if f.is_file()
    }
    assert found == {name: (folder / name).read_bytes() for name in TAKEN}


def test_links_are_copied_as_files(tmp_path):
    folder = tiny.llama(tmp_path / "source", layers=1)
    (tmp_path / "blob").write_text("{}")
    (folder / "tokenizer.json").symlink_to(tmp_path / "blob")
    target = tmp_path / "target"
    target.mkdir()
    assert copy_side_files(open_checkpoint(folder), target) == ["tokenizer.json"]
    assert not (target / "tokenizer.json").is_symlink()
