"""What ranks would hold, told without loading, is what they hold when they are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from fake_source import quantized_model
from shared_models import write_model
from thread_grid import grid
from tiny_architectures import architectures, tiny_model

from quantload import api
from quantload.cli import main
from quantload.errors import MissingTensor


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral") / "model"
    write_model("mixtral", folder)
    return folder


def held_bytes(model: torch.nn.Module) -> int:
    """Bytes of parameters and of what layers packed; tables of rotary angles are no part of it."""
    tensors = {
        id(tensor): tensor
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if "inv_freq" not in name
    }
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (4, 1), (2, 2)])
def test_bytes_are_those_of_the_loaded_ranks(dense, tp, pp):
    shares = api.model_shares(dense, tp=tp, pp=pp)
    for rank in grid(tp, pp):
        if rank.tp_rank == 0:
            told = sum(share.num_bytes for share in shares if share.stage == rank.pp_rank)
            assert told == held_bytes(api.load(dense, device="cpu", parallel=rank))


def test_rows_tell_class_style_shape_and_fusion(dense):
    shares = {share.module: share for share in api.model_shares(dense, tp=2)}
    query = shares["model.layers.0.self_attn.q_proj"]
    assert (query.kind, query.style) == ("LinearStack", "column")
    assert (query.shape, query.held) == ((128, 64), (64, 64))
    assert query.fused_into == "model.layers.0.self_attn.q_proj_k_proj_v_proj_stack"
    assert shares["model.layers.0.self_attn.o_proj"].held == (64, 64)
    assert shares["model.layers.0.mlp.experts"].held == (48, 64)
    assert shares["model.layers.0.mlp.experts"].style == "part of each expert"
    assert shares["model.embed_tokens"].held == (66, 64)  # of 131 rows


def test_what_cannot_be_shared_has_its_reason(dense):
    shares = {share.module: share for share in api.model_shares(dense, tp=3)}
    reason = shares["model.layers.0.self_attn.q_proj"].reason
    assert "8 heads cannot be shared by 3 ranks" in reason


def test_layers_of_unlike_schemes_are_told():
    fake = quantized_model("llama", {"q_proj": "W4A16:g32", "k_proj": "W4A16:g64"})
    shares = {share.module: share for share in api.model_shares(fake.source)}
    reason = shares["model.layers.0.self_attn.k_proj"].reason
    assert reason.startswith("not fused with q_proj, v_proj")


def test_an_incomplete_checkpoint_is_refused_without_reading(dense, tmp_path):
    source = api.inspect(dense)
    name = next(name for name in source.plain if "norm" in name)
    del source.plain[name]
    with pytest.raises(MissingTensor, match=name.replace(".", r"\.")):
        api.model_shares(source)


def test_the_command_prints_a_table_and_the_bytes(dense):
    done = CliRunner().invoke(main, ["inspect", str(dense), "--model", "--tp", "2", "--pp", "2"])
    assert done.exit_code == 0, done.output
    assert "stage 1 of 2" in done.output
    assert "RowParallelLinear" in done.output
    assert "of a rank of stage 0, as stored" in done.output


def test_ranks_without_the_model_are_a_usage_error(dense):
    done = CliRunner().invoke(main, ["inspect", str(dense), "--tp", "2"])
    assert done.exit_code == 2
    assert "go with `--model`" in done.output


def test_an_embedding_that_cannot_be_shared_is_told(tmp_path, caplog):
    model = tiny_model("muse_spark", architectures()["muse_spark"])
    model.save_pretrained(tmp_path / "model")
    shares = {share.module: share for share in api.model_shares(tmp_path / "model", tp=2)}
    embedding = shares["model.language_model.embed_tokens"]  # it norms its rows
    assert (embedding.style, embedding.held) == ("replicated", embedding.shape)
    assert "has `embed_norm` beside its weight" in embedding.reason
    assert "stays in full precision on every rank" in caplog.text
