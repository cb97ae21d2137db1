"""Steps in CUDA graphs give the ids of eager ones, and of transformers, whatever the cache."""

import pytest
import torch
from tiny_architectures import tiny_config
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from quantload.api_bench import bench, synthetic
from quantload.layers.step_model import TransformersStepModel
from quantload.runtime.generate import Decoder, Rules

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
CAPTURED = ("llama", "qwen3", "gemma3_text", "mamba2", "deepseek_v3", "phi3", "gpt2")
NEW = 24


def tiny(model_type):
    torch.manual_seed(0)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
    return model_class(tiny_config(model_type, model_class)).eval().to(CUDA)


def prompts(lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 120, (n,), generator=generator).tolist() for n in lengths]


def by_transformers(model, rows):
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=CUDA)
    mask = torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in rows], device=CUDA)
    options = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    return model.generate(ids, attention_mask=mask, **options)[:, longest:].tolist()


@pytest.mark.parametrize("model_type", CAPTURED)
def test_captured_steps(model_type):
    model = tiny(model_type)
    decoder = Decoder(TransformersStepModel(model))
    for lengths in ((5, 9, 3), (7, 40, 21)):  # the second pass a sliding window
        rows = prompts(lengths)
        found = [row.ids for row in decoder.generate(rows, Rules(NEW))]
        assert found == by_transformers(model, rows)
        slot = decoder.slot(3, 41 + NEW)
        assert slot.is_captured, slot.why_eager


@pytest.mark.parametrize("model_type", ["jamba", "mixtral"])
def test_what_cannot_be_captured_runs_all_the_same(model_type):
    model, rows = tiny(model_type), prompts((5, 9, 3))
    found = [row.ids for row in Decoder(TransformersStepModel(model)).generate(rows, Rules(NEW))]
    assert found == by_transformers(model, rows)


def test_stops_and_draws_one_step_behind_the_device():
    model, rows = tiny("llama"), prompts((5, 9, 3, 4))
    decoder = Decoder(TransformersStepModel(model))
    whole = decoder.generate(rows, Rules(NEW))
    stop = whole[1].ids[4]
    found = decoder.generate(rows, Rules(NEW, stop_ids=[stop]))
    for row, long in zip(found, whole, strict=True):
        end = long.ids.index(stop) + 1 if stop in long.ids else NEW
        assert row.ids == long.ids[:end]

    def choose(ids, logits):
        assert logits.is_cuda
        return logits.topk(2).indices[:, 1]

    second = [row.ids for row in decoder.generate(rows, Rules(NEW, choose=choose))]
    eager = Decoder(TransformersStepModel(model), graphs=False)
    assert second == [row.ids for row in eager.generate(rows, Rules(NEW, choose=choose))]
    assert second != [row.ids for row in whole]


def test_a_step_that_depends_on_the_host_is_found_out():
    class HostCounts(TransformersStepModel):
        calls = 0

        def step(self, tokens, positions, cache):
            self.calls += 1
            return super().step(tokens, positions, cache) * (-1) ** (self.calls // 2)

    decoder = Decoder(HostCounts(tiny("llama")))
    slot = decoder.slot(1, 64)
    assert not slot.is_captured
    assert "gives other logits than the eager one" in slot.why_eager


def test_a_step_that_waits_for_the_device_runs_eagerly():
    class Waits(TransformersStepModel):
        def step(self, tokens, positions, cache):
            int(positions.max())
            return super().step(tokens, positions, cache)

    model, rows = tiny("llama"), prompts((5, 9))
    decoder = Decoder(Waits(model))
    found = [row.ids for row in decoder.generate(rows, Rules(NEW))]
    assert "the step cannot be captured" in decoder.slot(2, 64).why_eager
    assert found == by_transformers(model, rows)


@pytest.mark.parametrize("fused", [False, None])
def test_bench_is_held_against_the_cards_read_rate(fused):
    model = synthetic("tiny", "W4A16:g32", device="cuda")
    report = bench(model, batches=[1, 3], prompt_tokens=20, new_tokens=8, fused=fused)
    assert report.read_rate > 1e11
    for times in report.batches:
        assert 0 < report.limit_share(times) < 1
        assert times.captured, times.why_eager
