"""Names of cache scales, and the five spellings of a public case."""

import json

import pytest
from truth import CHECKPOINTS

from quantload.loader.formats.cache_scales import usual_cache_name, with_usual_cache_names
from quantload.loader.open import open_checkpoint

CASE = CHECKPOINTS.parent / "cases" / "BR069-kv-scale-names"
A = "model.layers.3.self_attn"


@pytest.mark.parametrize(
    ("stored", "usual"),
    [
        (f"{A}.k_proj.k_scale", f"{A}.k_scale"),
        (f"{A}.v_proj.v_scale", f"{A}.v_scale"),
        (f"{A}.qkv_proj.v_scale", f"{A}.v_scale"),
        (f"{A}.attn.k_scale", f"{A}.k_scale"),
        (f"{A}.attn.v_zero_point", f"{A}.v_zero_point"),
        (f"{A}.q_proj.output_scale", f"{A}.q_scale"),
        (f"{A}.k_proj.output_zero_point", f"{A}.k_zero_point"),
        (f"{A}.k_cache.scale", f"{A}.k_scale"),
        ("model.layers.3.mixer.attn.k_scale", "model.layers.3.mixer.k_scale"),
        (f"{A}.k_scale", None),
        ("model.layers.3.attn.k_scale", None),
        (f"{A}.o_proj.output_scale", None),
        (f"{A}.k_proj.weight_scale", None),
        (f"{A}.k_proj.k_scale.x", None),
    ],
)
def test_names(stored, usual):
    assert usual_cache_name(stored) == usual


@pytest.mark.skipif(not CASE.is_dir(), reason="no shared cases beside the repository")
def test_five_spellings_of_one_scale():
    expected = json.loads((CASE / "expected.json").read_text())
    for name in expected["inputs"]:
        checkpoint = with_usual_cache_names(open_checkpoint(CASE / name))
        for layer, scales in expected["kv_scales"].items():
            for kind, value in scales.items():
                assert checkpoint.read(f"{layer}.self_attn.{kind}").item() == value, name
