"""Names of cache scales, and the five spellings of a public case."""

import json
import re
from pathlib import Path

import pytest
import torch
from faults import mutations
from truth import CHECKPOINTS

from quantload.loader.checkpoint import Checkpoint, TensorEntry
from quantload.loader.formats import open_source
from quantload.loader.formats.cache_scales import (
    about_cache_scales,
    usual_cache_name,
    with_usual_cache_names,
)
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


ATTENTION = "model.layers.{}.self_attn"
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def _with_scales(*left_out):
    names = ["vision.layers.0.attn.k_proj.weight"]
    for layer in range(2):
        attention = ATTENTION.format(layer)
        names += [f"{attention}.k_proj.weight", f"{attention}.k_scale", f"{attention}.v_scale"]
    return _checkpoint(name for name in names if not name.endswith(left_out or ("!",)))


def _checkpoint(names):
    tensors = {n: TensorEntry(n, torch.float32, (), Path("x"), 0, 4) for n in names}
    return Checkpoint("x", Path(), {}, tensors)


def test_all_scales_are_there():
    assert about_cache_scales(_with_scales(), STATIC) == []
    assert about_cache_scales(_with_scales("_scale"), None) == []
    assert about_cache_scales(_with_scales("_scale"), {**STATIC, "dynamic": True}) == []


@pytest.mark.parametrize(
    ("left_out", "expected"),
    [
        (("1.self_attn.k_scale",), "1 scales .* `model.layers.1.self_attn.k_scale`, in `x`"),
        (("1.self_attn.k_scale", "1.self_attn.v_scale"), "2 scales .*k_scale`, .*1.*v_scale`, in"),
        (("v_scale",), "2 scales .* `model.layers.0.self_attn.v_scale`, .*1.self_attn.v_scale`"),
        (("_scale",), "cached with fixed scales, but there is none in `x`"),
    ],
)
def test_missing_scales_are_told(left_out, expected):
    (told,) = about_cache_scales(_with_scales(*left_out), STATIC)
    assert re.search(expected, told)
    assert told.endswith("engines take 1")


def test_deleted_scale_of_a_real_checkpoint_is_told(tmp_path):
    places = sorted(CHECKPOINTS.glob("*/nano-llama-FP8-kv"))
    if not places:
        pytest.skip("no shared checkpoints")
    for number, place in enumerate(places):
        names = open_checkpoint(place).tensors
        chosen = next(
            n for n in names if (usual_cache_name(n) or n).endswith("layers.0.self_attn.v_scale")
        )
        damaged = mutations(place, tmp_path / str(number), only={chosen})
        folder = next(copy for description, copy in damaged if description.startswith("delete"))
        assert not [w for w in open_source(open_checkpoint(place)).warnings if "cache" in w]
        told = [w for w in open_source(open_checkpoint(folder)).warnings if "key-value cache" in w]
        assert len(told) == 1
        assert "layers.0.self_attn.v_scale" in told[0]
