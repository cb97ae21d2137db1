"""Weights of a view are those of its files: experts decoded alone, and all of them together."""

from dataclasses import replace

import pytest
import torch
from converting import opened
from modelopt_encoder import encoded, flat, write
from truth import CHECKPOINTS

from quantload.loader.source_view import Piece, SeenWeight, ViewReader, rows_of, slice_of
from quantload.quant.qtensor import QuantTensor

needs_checkpoints = pytest.mark.skipif(
    not CHECKPOINTS.is_dir(), reason="no folder shared/checkpoints"
)


NAME = "model.layers.0.mlp.experts.down_proj"


def stacked(algorithm, rows, columns, *, is_transposed, count=3):
    """The tensors of experts in one parameter, by full name."""
    made = [encoded(algorithm, rows, columns, seed=number).leaves for number in range(count)]
    tensors = {}
    for leaf in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
        if leaf in made[0]:
            parts = torch.stack([expert[leaf].reshape(-1).view(torch.uint8) for expert in made])
            parts = parts.view(made[0][leaf].dtype).reshape(count, *made[0][leaf].shape)
            if is_transposed and parts.ndim == 3:
                parts = parts.transpose(1, 2).contiguous()
            tensors[NAME if leaf == "weight" else f"{NAME}_{leaf}"] = parts
    return tensors


def _dense(value):
    return value.dequantize() if isinstance(value, QuantTensor) else value


def check_pieces(source, parameter):
    """Decode every expert of a parameter as two pieces, and compare with all of them at once."""
    original = source.weights[parameter]
    rows = original.shape[0]
    whole = source.read_dense(parameter).reshape(original.experts, *original.shape)
    seen = {}
    for expert in range(original.experts):
        for start, stop in ((0, rows // 2), (rows // 2, rows)):
            module = f"{expert}.{start}"
            weight = replace(original, module=module, experts=0, shape=(stop - start, rows))
            piece = Piece(expert=expert, start=start, stop=stop)
            seen[module] = SeenWeight(weight=weight, original=original, piece=piece)
    reader = ViewReader(source.reader, source.checkpoint, seen)
    for module, one in reader.weights().items():
        piece = seen[module].piece
        found = _dense(reader.decode(one))
        assert torch.equal(found, whole[piece.expert, piece.start : piece.stop]), module


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(
    ("algorithm", "columns"),
    [("NVFP4", 48), ("W4A8_NVFP4_FP8", 32), ("FP8", 10), ("FP8_PER_CHANNEL_PER_TOKEN", 10)],
)
def test_experts_of_modelopt(algorithm, columns, is_transposed, tmp_path):
    if algorithm == "FP8" and is_transposed:
        pytest.skip("one scale for an expert does not tell rows from columns")
    tensors = stacked(algorithm, 6, columns, is_transposed=is_transposed)
    source = opened(write(tmp_path / "source", {}, flat(algorithm), plain=tensors))
    assert source.reader.has_experts_apart
    check_pieces(source, NAME)
    source.reader.has_experts_apart = False
    check_pieces(source, NAME)


@needs_checkpoints
@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_experts_of_gpt_oss(name):
    source = opened(CHECKPOINTS / "transformers-quant-5.24.0/tiny-gpt-oss-mxfp4")
    assert source.reader.has_experts_apart
    check_pieces(source, f"model.layers.0.mlp.experts.{name}")


def test_one_expert_alone_is_read(tmp_path, monkeypatch):
    tensors = stacked("NVFP4", 6, 48, is_transposed=False)
    source = opened(write(tmp_path / "source", {}, flat("NVFP4"), plain=tensors))
    sizes = []
    checkpoint = type(source.checkpoint)
    read = checkpoint.read

    def noted(self, name):
        sizes.append(self.tensors[name].num_bytes)
        return read(self, name)

    monkeypatch.setattr(checkpoint, "read", noted)
    check_pieces(source, NAME)
    biggest = tensors[NAME].nbytes
    assert sizes.count(biggest) == 1  # by `check_pieces` itself
    assert sizes.count(biggest // 3) == 6


def test_slices_and_rows_of_a_tensor(tmp_path):
    tensors = stacked("FP8", 6, 10, is_transposed=False)
    source = opened(write(tmp_path / "source", {}, flat("FP8"), plain=tensors))
    entry = source.checkpoint.tensors[NAME]
    raw = entry.file.read_bytes()
    one = slice_of(entry, 2)
    assert one.shape == (1, 6, 10)
    stored = tensors[NAME].view(torch.uint8)
    assert raw[one.start : one.start + one.num_bytes] == stored[2].numpy().tobytes()
    some = rows_of(entry, 7, 11, name="a")
    assert (some.name, some.shape) == ("a", (4, 10))
    assert (
        raw[some.start : some.start + some.num_bytes]
        == stored.reshape(18, 10)[7:11].numpy().tobytes()
    )
    loaded = replace(entry, loaded=stored)
    assert torch.equal(slice_of(loaded, 1).loaded, stored[1:2])
    assert torch.equal(rows_of(loaded, 1, 3, name="b").loaded, stored.reshape(18, 10)[1:3])
