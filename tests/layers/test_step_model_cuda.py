"""Steps in CUDA graphs give the ids of eager ones, and of transformers, whatever the cache."""

import pytest
import torch
from tiny_architectures import tiny_config
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from quantload.api_bench import bench, synthetic
from quantload.layers.decoding import step_model
from quantload.layers.step_model import TransformersStepModel
from quantload.runtime.generate import Decoder, Rules
from quantload.runtime.step_graphs import Slot

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
CAPTURED = {
    **{name: {} for name in ("llama", "qwen3", "gemma3_text", "mamba2", "phi3", "gpt2")},
    "deepseek_v3": {"first_k_dense_replace": 99},  # its experts in float32 wait for the device
}
NEW = 24


def tiny(model_type, **options):
    torch.manual_seed(0)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
    config = tiny_config(model_type, model_class)
    for name, value in options.items():
        setattr(config, name, value)
    return model_class(config).eval().to(CUDA)


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
    model = tiny(model_type, **CAPTURED[model_type])
    decoder = Decoder(TransformersStepModel(model))
    for lengths in ((5, 9, 3), (7, 40, 21)):  # the second pass a sliding window
        rows = prompts(lengths)
        found = [row.ids for row in decoder.generate(rows, Rules(NEW))]
        assert found == by_transformers(model, rows)
        slot = decoder.slot(3, 41 + NEW)
        assert slot.is_captured, slot.why_eager


@pytest.mark.parametrize("model_type", ["jamba", "mixtral", "deepseek_v3"])
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


class RightPadded(TransformersStepModel):
    """Prompts as a fused step runs them: padding on the right, no mask."""

    captures_prompts = True

    def prefill(self, ids, lengths, cache):
        self.calls = getattr(self, "calls", 0) + 1
        own = self.model.get_input_embeddings().weight[:200]
        hidden = own[ids.clamp(max=199)].float().cumsum(1)
        last = hidden[torch.arange(len(ids), device=ids.device), lengths - 1]
        return last @ own.float().t()


def test_prompts_that_come_again_are_captured():
    from quantload.runtime.prompt_graphs import PromptGraphs

    model = RightPadded(tiny("llama"))
    cache = model.new_cache(2, 128)
    graphs = PromptGraphs(model, cache, torch.cuda.graph_pool_handle())
    with torch.no_grad():
        for lengths in ((5, 9), (3, 20), (31, 7), (1, 2), (40, 50), (40, 41), (60, 33)):
            ids = torch.randint(3, 120, (2, max(lengths)), device=CUDA)
            held = torch.tensor(lengths, device=CUDA)
            expected = model.prefill(ids, held, cache)
            torch.testing.assert_close(graphs(ids, held), expected, rtol=1e-4, atol=1e-4)
    assert graphs.why_eager == ""
    assert sorted(graphs._captured) == [32, 64]


def test_prompts_whose_graph_differs_run_eagerly():
    from quantload.runtime.prompt_graphs import PromptGraphs

    class Counts(RightPadded):
        def prefill(self, ids, lengths, cache):
            return super().prefill(ids, lengths, cache) * (1 + self.__dict__.get("calls", 0))

    model = Counts(tiny("llama"))
    graphs = PromptGraphs(model, model.new_cache(1, 64), None)
    ids = torch.tensor([[3, 4, 5]], device=CUDA)
    with torch.no_grad():
        for _ in range(3):
            graphs(ids, torch.tensor([3], device=CUDA))
    assert "captured prompts give other logits" in graphs.why_eager


@pytest.mark.parametrize("scheme", ["W4A16", "FP8_DYNAMIC"])
def test_prompts_of_a_fused_model_are_captured(scheme):
    """Also where inputs are rounded, which makes of every other order of sums other codes."""
    model, _ = step_model(synthetic("tiny", scheme, device="cuda"), fused=True)
    slot = Slot(model, model.new_cache(1, 512), graphs=True)
    ids = torch.randint(3, 120, (1, 300), device=CUDA)
    lengths = torch.tensor([290], device=CUDA)
    for _ in range(3):
        slot.start(ids, lengths)
    assert slot._prefill.why_eager == ""
    assert len(slot._prefill._captured) == 1
