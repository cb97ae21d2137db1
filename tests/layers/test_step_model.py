"""Greedy ids of decoding are those of transformers' own `generate`, whatever the architecture."""

import pytest
import torch
from fake_source import quantized_model
from tiny_architectures import tiny_config
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from quantload.api import load_model
from quantload.errors import ConfigError, ModelError
from quantload.layers.sampling import Sampling, chooser, generation_config
from quantload.layers.step_model import TransformersStepModel, check_length, why_not_decodable
from quantload.runtime.generate import Decoder, Rules
from quantload.runtime.step_model import CacheScales

STATIC = ("llama", "qwen3", "gemma3_text", "mixtral", "mamba", "jamba", "deepseek_v3", "phi3")
LENGTHS = (5, 9, 3)
NEW = 10


def tiny(model_type):
    torch.manual_seed(0)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
    return model_class(tiny_config(model_type, model_class)).eval()


def prompts(vocabulary=120, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def by_transformers(model, rows, **settings):
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    options = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    made = model.generate(ids, attention_mask=mask, **{**options, **settings})
    return made[:, longest:].tolist()


def decoded(model, rows, rules=None):
    step = TransformersStepModel(model)
    return [row.ids for row in Decoder(step).generate(rows, rules or Rules(NEW))]


@pytest.mark.parametrize("model_type", [*STATIC, "gpt2"])
def test_ids_are_those_of_transformers(model_type):
    model, rows = tiny(model_type), prompts()
    assert decoded(model, rows) == by_transformers(model, rows)
    assert TransformersStepModel(model).why_not_captured == ""


def test_sliding_windows_are_passed():
    model, rows = tiny("gemma3_text"), prompts(lengths=(40, 21))
    window = model.config.sliding_window
    assert window < 40, "the prompt is longer"
    assert decoded(model, rows) == by_transformers(model, rows)


def test_a_cache_that_grows_where_transformers_has_no_static_one():
    model, rows = tiny("gpt_neo"), prompts()
    assert "with a static cache" in TransformersStepModel(model).why_not_captured
    assert decoded(model, rows) == by_transformers(model, rows)


def test_a_cache_serves_again():
    model = tiny("jamba")
    decoder, rows = Decoder(TransformersStepModel(model)), prompts()
    first = decoder.generate(rows, Rules(NEW))
    decoder.generate(prompts(lengths=(7, 2, 8)), Rules(NEW))
    assert decoder.generate(rows, Rules(NEW)) == first


def test_models_with_our_layers():
    fake = quantized_model("qwen3", "W4A16:g32")
    model = load_model(fake.source, device=torch.device("cpu"))
    assert decoded(model, prompts()) == by_transformers(fake.model, prompts())


def test_padding_that_would_show_is_refused():
    step = TransformersStepModel(tiny("glm_moe_dsa"))
    with pytest.raises(ModelError, match="see padding"):
        Decoder(step).generate(prompts(), Rules(NEW))
    rows = prompts(lengths=(5, 5, 5))  # a row of its slot has no prompt
    assert decoded(step.model, rows) == by_transformers(step.model, rows)


def test_what_host_code_decides_is_not_captured():
    model = tiny("llama")
    model.model.rotary_emb.rope_type = "dynamic"
    assert "chooses frequencies on the host" in TransformersStepModel(model).why_not_captured


def test_other_models_are_refused():
    assert "is no decoder of text" in why_not_decodable(tiny("llama").model)
    assert "is not a model of transformers" in why_not_decodable(torch.nn.Linear(2, 2))
    with pytest.raises(ModelError, match="takes other arguments"):
        TransformersStepModel(tiny("xlm"))


def test_a_quantized_cache_is_refused():
    step = TransformersStepModel(tiny("llama"))
    scales = CacheScales(torch.ones(2), torch.ones(2))
    for options in ({"dtype": torch.float8_e4m3fn}, {"scales": scales}):
        with pytest.raises(ConfigError, match="is not built for `LlamaForCausalLM`"):
            step.new_cache(1, 32, **options)


def test_bytes_that_a_step_reads():
    model = tiny("llama")
    step = TransformersStepModel(model)
    cache = step.new_cache(2, 64)
    assert cache.num_bytes == 0
    step.prefill(torch.ones(2, 5, dtype=torch.int64), torch.tensor([5, 3]), cache)
    config = model.config
    one = config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * 4
    assert cache.bytes_read(10) == 2 * 10 * one
    assert cache.num_bytes == 2 * 64 * one


def test_learned_positions_end():
    model = tiny("gpt2")
    room = model.config.n_positions
    check_length(model, room)
    with pytest.raises(ConfigError, match=f"expected at most `{room}`: the positions of"):
        check_length(model, room + 1)


# -- choosing --------------------------------------------------------------------------------------


def chosen(model, rows, sampling):
    length = max(map(len, rows))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    config = generation_config(model, sampling, prompt_length=length, max_new_tokens=NEW)
    choose = chooser(model, config, sampling, prompt_length=length)
    return decoded(model, rows, Rules(NEW, choose=choose))


def test_positions_of_pictures_are_no_limit():
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    text = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text))
    assert check_length(model, 100) is None


def test_draws_are_those_of_transformers():
    model, rows = tiny("llama"), prompts()
    settings = {"temperature": 2.0, "top_k": 50, "top_p": 0.95, "min_p": 0.001}
    found = chosen(model, rows, Sampling(True, seed=5, **settings))
    torch.manual_seed(5)
    assert found == by_transformers(model, rows, do_sample=True, **settings)
    assert found != by_transformers(model, rows)
    assert found == chosen(model, rows, Sampling(True, seed=5, **settings))
    assert found != chosen(model, rows, Sampling(True, seed=6, **settings))


def test_a_penalty_of_the_models_own_config_counts():
    model, rows = tiny("llama"), prompts()
    plain = by_transformers(model, rows)
    model.generation_config.repetition_penalty = 3.0
    found = chosen(model, rows, Sampling())
    assert found == by_transformers(model, rows) != plain


def test_greedy_without_processors_asks_nobody():
    model = tiny("llama")
    config = generation_config(model, Sampling(), prompt_length=3, max_new_tokens=2)
    assert chooser(model, config, Sampling(), prompt_length=3) is None


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(top_k=3), "`top_k` without `sample=True`"),
        (Sampling(True, temperature=-1.0), "transformers refuses these settings"),
        (Sampling(more={"colour": 3}), "`colour` are no settings"),
        (Sampling(more={"guidance_scale": 2.0}), "runs the model twice a step"),
    ],
)
def test_settings_that_mean_nothing(sampling, message):
    with pytest.raises(ConfigError, match=message):
        chosen(tiny("llama"), [[3, 4, 5]], sampling)
