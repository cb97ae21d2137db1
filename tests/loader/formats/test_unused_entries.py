"""Entries of a quantization config that match no module are told, in every format that has them."""

import json

import pytest
from truth import CHECKPOINTS

from quantload.loader.formats import open_source
from quantload.loader.open import open_checkpoint

pytestmark = pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="no shared checkpoints")

# tool: (method, key of the list)
LISTS = {
    "amd-quark-*": ("quark", "exclude"),
    "bitsandbytes-*": ("bitsandbytes", "llm_int8_skip_modules"),
    "hqq-*": ("hqq", "skip_modules"),
    "torchao-*": ("torchao", "modules_to_not_convert"),
    "transformers-*": ("mxfp4", "modules_to_not_convert"),
}


def _opened(folder):
    return open_source(open_checkpoint(folder)).warnings


def _with_entries(method, tool, key, tmp_path, entries):
    """Link the first checkpoint of a method, with more entries in its list."""
    for file in sorted(CHECKPOINTS.glob(f"{tool}/*/config.json")):
        config = json.loads(file.read_text())
        found = config.get("quantization_config") or {}
        if found.get("quant_method") == method and not (tmp_path / "config.json").exists():
            found[key] = [*(found.get(key) or ()), *entries]
            (tmp_path / "config.json").write_text(json.dumps(config))
            for other in file.parent.iterdir():
                if other.name != "config.json":
                    (tmp_path / other.name).symlink_to(other)
    return tmp_path


@pytest.mark.parametrize("tool", LISTS)
def test_misspelled_entry_is_told(tmp_path, tool):
    method, key = LISTS[tool]
    folder = _with_entries(method, tool, key, tmp_path, ["self_atn.q_proj", "down_projection"])
    if not (folder / "config.json").exists():
        pytest.skip(f"no checkpoint of {method}")
    (told,) = [text for text in _opened(folder) if "match no module" in text]
    assert told.startswith(f"2 entries of the quantization config match no module: `{key}: ")
    assert "self_atn.q_proj" in told
    assert "down_projection" in told
