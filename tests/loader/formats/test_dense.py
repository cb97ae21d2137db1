"""Full precision: what is a weight, what is passed on, what cannot be full precision."""

import pytest
import tiny_checkpoints as tiny
import torch

from quantload.errors import QuantloadError
from quantload.loader.formats import open_source
from quantload.loader.formats.dense import quantized_names
from quantload.loader.open import open_checkpoint


def _open(folder, tensors):
    return open_source(open_checkpoint(tiny.write(folder, {}, tensors)))


def test_weights_and_plain_tensors(tmp_path):
    made = tiny.mixed(tiny.tensors(tiny.config(layers=1)))
    made |= {"a.conv.weight": torch.zeros(2, 3, 4), "a.A_log": torch.zeros(2, 3)}
    made |= {"a.positions": torch.arange(3), "a.bias": torch.zeros(3), "a.flag": torch.tensor(True)}
    source = _open(tmp_path, made)
    expected = {
        n.removesuffix(".weight") for n, t in made.items() if n.endswith(".weight") and t.ndim == 2
    }
    assert set(source.weights) == expected
    assert set(source.plain) == set(made) - {f"{module}.weight" for module in expected}
    assert source.weights["model.layers.0.mlp.up_proj"].encoding == "F16"
    assert source.weights["model.layers.0.self_attn.q_proj"].encoding == "BF16"
    assert not source.is_quantized
    for module in expected:
        assert torch.equal(source.read_dense(module), made[f"{module}.weight"])
    for name in source.plain:
        assert torch.equal(source.read_plain(name), made[name])


def test_read_in_another_dtype(tmp_path):
    source = _open(tmp_path, {"a.weight": torch.full((2, 2), 1 / 3)})
    assert source.read_dense("a", torch.bfloat16).dtype == torch.bfloat16


def test_empty_weights(tmp_path):
    source = _open(tmp_path, {"a.weight": torch.zeros(0, 4), "b.weight": torch.zeros(2, 0)})
    assert source.read_dense("a").shape == (0, 4)
    assert source.read_dense("b").shape == (2, 0)


QUANTIZED = [
    ("m.qweight", (4, 4), torch.int32),
    ("m.weight_packed", (4, 4), torch.int32),
    ("m.experts.gate_up_proj_packed", (2, 4, 4), torch.int32),
    ("m.experts.gate_up_proj_blocks", (2, 4, 4), torch.uint8),
    ("m.weight_scale_inv", (1, 1), torch.float32),
    ("m.SCB", (4,), torch.float32),
    ("m.W_q", (4, 4), torch.uint8),
    ("m.weight.absmax", (4,), torch.float32),
    ("m.weight._data", (4, 4), torch.int8),
    ("m.weight._data._data", (4, 4), torch.uint8),
    ("m.weight", (4, 4), torch.int8),
    ("m.weight", (4, 4), torch.uint32),
    ("m.weight", (4, 4), torch.float8_e4m3fn),
    ("m.anything", (4,), torch.float8_e5m2),
]


@pytest.mark.parametrize(("name", "shape", "dtype"), QUANTIZED)
def test_quantized_tensors_without_a_config(tmp_path, name, shape, dtype):
    made = {"a.weight": torch.zeros(2, 2), name: torch.zeros(shape).to(dtype)}
    # HQQ and bitsandbytes are known by their tensors alone, and miss their other ones
    with pytest.raises(QuantloadError, match=rf"no quantization config in .*`{name}`|is missing"):
        _open(tmp_path, made)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("transformer.h.0.attn.bias", torch.ones(1, 1, 4, 4, dtype=torch.bool)),
        ("transformer.h.0.attn.bias", torch.ones(1, 1, 4, 4, dtype=torch.uint8)),
        ("embeddings.position_ids", torch.arange(4).reshape(1, 4)),
        ("layers.0.ffn.tid2eid", torch.zeros(8, 2, dtype=torch.int64)),
        ("layers.0.self_attn.k_scale", torch.ones(1)),
        ("bn.num_batches_tracked", torch.tensor(3)),
        ("layers.0.layer_scale.weight", torch.ones(4)),
    ],
)
def test_tensors_that_full_precision_models_hold(tmp_path, name, tensor):
    source = _open(tmp_path, {"a.weight": torch.zeros(2, 2), name: tensor})
    assert name in source.plain
    assert quantized_names(source.checkpoint.tensors.values()) == []
