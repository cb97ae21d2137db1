"""Real checkpoints in full precision, with every oddity: as transformers itself loads them."""

import hashlib
import json
import logging

import pytest
import torch
import transformers
from truth import CHECKPOINTS, truths

import quantload
from quantload.loader.formats import open_source
from quantload.loader.open import open_checkpoint
from quantload.loader.plan import PlanOptions

TRUTHS = truths("transformers-5.24.0/*")
RELATIVE = 1e-4
pytestmark = [
    pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="no folder shared/checkpoints"),
    pytest.mark.filterwarnings("ignore"),
]
each_checkpoint = pytest.mark.parametrize("truth", TRUTHS, ids=lambda truth: truth.folder.name)


def inputs(truth):
    """Everything that the recorded run was given: ids, images, token types."""
    names = (n for n in truth.tensors if "." not in n and not n.startswith("logits"))
    return {name: truth.tensors[name] for name in names}


@torch.no_grad()
def error_of_logits(model, truth):
    expected = truth.tensors["logits_fp32"]
    found = model(**inputs(truth)).logits
    return float((found - expected).norm() / expected.norm())


@each_checkpoint
def test_logits(truth):
    model = quantload.load(truth.folder, device="cpu", dtype=torch.float32)
    assert error_of_logits(model, truth) <= RELATIVE


@each_checkpoint
def test_state_dict_is_that_of_transformers(truth):
    expected = truth.manifest["state_dict_after_peer_load_dtype_shape_sha256"]
    model = quantload.load(truth.folder, device="cpu", fuse=False)
    found = {name: tensor for name, tensor in model.state_dict().items() if name in expected}
    assert set(expected) == set(found)
    for name, (dtype, shape, digest) in expected.items():
        tensor = found[name].contiguous()
        assert str(tensor.dtype) == f"torch.{dtype}", name
        assert list(tensor.shape) == shape, name
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert hashlib.sha256(raw).hexdigest()[: len(digest)] == digest, name


@each_checkpoint
def test_a_dense_copy_is_loaded_by_transformers(truth, tmp_path):
    folder = tmp_path / "copy"
    options = PlanOptions(dtype=torch.float32)
    done = quantload.convert(truth.folder, folder, "dense", options=options)
    assert done.report is not None
    source, copy = (open_source(open_checkpoint(f)) for f in (truth.folder, folder))
    assert set(copy.checkpoint.tensors) == set(source.checkpoint.tensors)
    for name, entry in source.checkpoint.tensors.items():
        values = source.checkpoint.read(name)
        expected = values.float() if entry.dtype.is_floating_point else values
        assert torch.equal(copy.checkpoint.read(name), expected)
    transformers.utils.logging.disable_progress_bar()
    config = json.loads((folder / "config.json").read_text())
    class_name = (config.get("architectures") or ["AutoModelForCausalLM"])[0]
    model_class = getattr(transformers, class_name)
    model = model_class.from_pretrained(folder, dtype=torch.float32).eval()
    assert error_of_logits(model, truth) <= RELATIVE


def test_what_is_no_weight_is_left_out_with_a_warning(caplog):
    truth = next(t for t in TRUTHS if "model.unexpected_scalar" in _names(t))
    with caplog.at_level(logging.WARNING, logger="quantload"):
        quantload.load(truth.folder, device="cpu")
    for name, reason in (
        ("model.layers.0.extra_int", "1-D integers"),
        ("model.unexpected_empty", "it has no elements"),
        ("model.unexpected_scalar", "a single number"),
    ):
        assert f"tensor `{name}` has no place in the model, left out: {reason}" in caplog.text


def _names(truth):
    return open_checkpoint(truth.folder).tensors
