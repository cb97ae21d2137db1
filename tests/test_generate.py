"""generate and bench, from text to text and on the command line."""

import json

import pytest
import tiny_checkpoints as tiny
import torch
from click.testing import CliRunner
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

import quantload
from quantload import api_bench, api_cache, api_generate
from quantload.cli import main
from quantload.errors import ConfigError, ModelError, UnsupportedVariant, WrongType
from quantload.layers.synthetic import CONFIGS

VOCABULARY = 128
STOP = 7
SHAPES = ", ".join(f"`{name}`" for name in sorted(CONFIGS))


class Letters:
    """A tokenizer of single characters; tokens below 32 are special."""

    chat_template = None

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [1] * add_special_tokens + [ord(letter) for letter in text]}

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(i) for i in ids if i >= 32 or not skip_special_tokens)

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        assert not tokenize
        assert add_generation_prompt
        return f"<{messages[0]['content']}>"


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("model") / "source"
    return tiny.llama(place, vocabulary=VOCABULARY, dtype=torch.float32)


@pytest.fixture(scope="module")
def model(folder):
    return quantload.load(folder, device="cpu")


@pytest.fixture
def letters(monkeypatch):
    monkeypatch.setattr("quantload.api_generate.load_tokenizer", lambda source: Letters())


def by_transformers(model, ids, count, **settings):
    made = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        **settings,
    )
    return made[0, len(ids) :].tolist()


def test_texts_are_those_of_transformers(model):
    prompts = ["one", "a longer one", "x"]
    shown = {}

    def emit(row, text):
        shown[row] = shown.get(row, "") + text

    found = quantload.generate(model, prompts, tokenizer=Letters(), max_new_tokens=12, emit=emit)
    for row, (prompt, done) in enumerate(zip(prompts, found, strict=True)):
        ids = by_transformers(model, Letters()(prompt)["input_ids"], 12)
        assert done.ids == ids
        assert done.text == Letters().decode(ids, skip_special_tokens=True)
        assert str(done) == done.text == shown.get(row, "")
        assert done.prompt_tokens == len(prompt) + 1


def test_ids_need_no_tokenizer(model):
    (found,) = quantload.generate(model, [5, 6, 7], max_new_tokens=6)
    assert found.ids == by_transformers(model, [5, 6, 7], 6)
    assert found.text == ""


def test_the_end_of_the_config_stops(model):
    ids = by_transformers(model, [5, 6, 7], 12)
    end = next(i for n, i in enumerate(ids) if n > 1 and i not in ids[:n])
    (found,) = quantload.generate(model, [5, 6, 7], max_new_tokens=12, eos_token_id=end)
    assert found.ids == ids[: ids.index(end) + 1]
    assert found.reason == "stop"


def test_stop_strings_end_a_text(model):
    decoder = quantload.TextDecoder(model, Letters())
    (whole,) = decoder.generate("hello", max_new_tokens=16)
    stop = whole.text[2:4]
    place = whole.text.find(stop)
    (found,) = decoder.generate("hello", max_new_tokens=16, stop=[stop])
    assert found.text == whole.text[:place]
    assert found.reason == "stop"
    assert len(found.ids) < len(whole.ids)


def test_an_empty_stop_string_is_refused(model):
    with pytest.raises(ConfigError, match="`stop` has an empty text"):
        quantload.TextDecoder(model, Letters()).generate("ab", stop=["x", ""])


def test_what_may_begin_a_stop_string_comes_at_the_end(model):
    decoder = quantload.TextDecoder(model, Letters())
    (whole,) = decoder.generate("hello", max_new_tokens=16)
    assert whole.text, "the last of it may begin a stop string"
    (found,) = decoder.generate("hello", max_new_tokens=16, stop=[f"{whole.text[-1]}\x01"])
    assert (found.text, found.reason) == (whole.text, "length")


def test_a_stream_has_the_same_text(model):
    decoder = quantload.TextDecoder(model, Letters())
    pieces = list(decoder.stream(["ab", "c"], max_new_tokens=5))
    whole = decoder.generate(["ab", "c"], max_new_tokens=5)
    for row in range(2):
        assert "".join(p.text for p in pieces if p.row == row) == whole[row].text
        assert [p.token for p in pieces if p.row == row] == whole[row].ids
    assert [piece.reason for piece in pieces[-2:]] == ["length"] * 2


def test_chat(model, monkeypatch):
    decoder = quantload.TextDecoder(model, Letters())
    with pytest.raises(ModelError, match="no chat template"):
        decoder.generate("hi", chat=True)
    monkeypatch.setattr(Letters, "chat_template", "x")
    (found,) = decoder.generate("hi", chat=True, max_new_tokens=3)
    assert found.prompt_tokens == len("<hi>")


def test_a_path_brings_its_tokenizer(folder, letters):
    (found,) = quantload.generate(folder, "abc", max_new_tokens=2)
    assert found.prompt_tokens == 4


def test_models_of_other_kinds_run_through_transformers():
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(vocab_size=64, **sizes, decoder_start_token_id=0))
    decoder = quantload.TextDecoder(model.eval())
    assert "is no decoder of text" in decoder.why_not_fused
    (found,) = decoder.generate([5, 6, 7], max_new_tokens=6)
    made = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False)
    assert found.ids == made[0, 1:].tolist()
    assert found.reason in ("stop", "length")


def test_prompt_and_new_tokens_of_an_encoder_have_positions_of_their_own():
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    widths = {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    config = BartConfig(vocab_size=64, max_position_embeddings=12, **sizes, **heads, **widths)
    decoder = quantload.TextDecoder(BartForConditionalGeneration(config).eval())
    assert decoder.generate([5] * 10, max_new_tokens=8)[0].ids
    with pytest.raises(ConfigError, match="expected at most `12`"):
        decoder.generate([5] * 13, max_new_tokens=8)


def test_refusals(model):
    with pytest.raises(ModelError, match="a prompt is text and there is no tokenizer"):
        quantload.generate(model, "text")
    with pytest.raises(ConfigError, match="stop strings without a tokenizer"):
        quantload.generate(model, [1, 2], stop=["x"])
    with pytest.raises(ConfigError, match="`chat` with token ids"):
        quantload.generate(model, [1, 2], chat=True)
    with pytest.raises(ConfigError, match="`colours` are no settings"):
        quantload.generate(model, [1, 2], colours=3)
    with pytest.raises(ModelError, match="`Linear` is not a model of transformers"):
        quantload.TextDecoder(torch.nn.Linear(2, 2))
    with pytest.raises(ModelError, match="no fused decoding of"):
        quantload.TextDecoder(model, fused=True)
    with pytest.raises(WrongType, match=r"`sampling` is .*, expected a `Sampling` or None"):
        quantload.TextDecoder(model).generate([1, 2], sampling={"temperature": 1.0})
    with pytest.raises(WrongType, match="`chat` is `no` of type `str`"):
        quantload.TextDecoder(model, Letters()).stream("a", chat="no")
    with pytest.raises(ConfigError, match=r"no text: it has the half character `U\+DCFF`"):
        quantload.generate(model, "a\udcff", tokenizer=Letters())
    with pytest.raises(ConfigError, match=r"`seed` is .*, expected at most 64 bits"):
        quantload.generate(model, [1, 2], sample=True, seed=2**70)
    assert quantload.generate(model, []) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 4}, "`num_beams`"),
        ({"stop_strings": ["a"]}, "`stop_strings` .*`stop`"),
        ({"max_length": 9, "max_time": 1.0}, "`max_length`, `max_time`"),
        ({"do_sample": True}, "`do_sample` .*`sample`"),
        ({"num_return_sequences": 2}, "`num_return_sequences`"),
        ({"prompt_lookup_num_tokens": 3}, "`prompt_lookup_num_tokens`"),
        ({"cache_implementation": "quantized"}, "`cache_implementation`"),
        ({"return_dict_in_generate": True}, "`return_dict_in_generate`"),
    ],
)
def test_settings_that_would_change_nothing_are_refused(model, settings, message):
    with pytest.raises(ConfigError, match=message):
        quantload.generate(model, [1, 2], **settings)


# -- the command line ------------------------------------------------------------------------------


def test_generate_prints_text_as_it_comes(folder, letters, model):
    (found,) = quantload.generate(model, "abc", tokenizer=Letters(), max_new_tokens=9)
    done = run("generate", folder, "abc", "--max-new-tokens", 9, "--device", "cpu", "-q")
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{found.text}\n"


def test_generate_several_prompts_as_json(folder, letters, model):
    options = ("--max-new-tokens", 4, "--device", "cpu", "--json", "-q")
    done = run("generate", folder, "abc", "de", *options)
    assert done.exit_code == 0, done.output
    content = json.loads(done.stdout)
    found = quantload.generate(model, ["abc", "de"], tokenizer=Letters(), max_new_tokens=4)
    rows = content["completions"]
    assert [row["text"] for row in rows] == [one.text for one in found]
    assert [row["prompt"] for row in rows] == ["abc", "de"]
    assert rows[0]["ids"] == found[0].ids


def test_generate_draws_with_a_temperature(folder, letters, model):
    base = ("generate", folder, "abc", "--max-new-tokens", 12, "--device", "cpu", "-q")
    greedy = run(*base).stdout
    hot = [run(*base, "--temperature", 50, "--seed", seed).stdout for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]
    assert hot[0] != greedy
    assert run(*base, "--temperature", 0).stdout == greedy


@pytest.mark.parametrize("scheme", [None, "W4A16:g32"])
def test_bench_of_a_synthetic_model(scheme):
    sizes = ("--batch", "1,3", "--prompt-tokens", 9, "--new-tokens", 4, "--device", "cpu")
    options = () if scheme is None else ("--scheme", scheme)
    done = run("bench", "--synthetic", "tiny", *sizes, *options, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert [row["batch"] for row in report["batches"]] == [1, 3]
    assert report["read_rate"] is None
    assert report["step"] == "model"
    for row in report["batches"]:
        assert row["decode_tokens_per_second"] == pytest.approx(row["batch"] / row["step"])
        assert row["share_of_read_rate"] is None
        assert not row["captured"]
    table = run("bench", "--synthetic", "tiny", *sizes, *options)
    assert table.exit_code == 0, table.output
    assert "limit: not measured on the CPU" in table.stdout


def test_bench_of_a_checkpoint(folder):
    sizes = ("--batch", 2, "--prompt-tokens", 5, "--new-tokens", 3, "--device", "cpu", "-q")
    done = run("bench", folder, *sizes, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["model"] == str(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected MODEL or `--synthetic NAME`"),
        (("--synthetic", "tiny", "--batch", "a"), "`--batch` is `a`"),
        (("--synthetic", "tiny", "--batch", "0"), "expected at least 1"),
        (("--synthetic", "tiny", "--kv-cache", "fp8"), "is not built for"),
        (("--synthetic", "huge"), "no synthetic model `huge`"),
        (
            ("--synthetic", "huge"),
            "expected one of " + SHAPES,
        ),
        (("--synthetic", "tiny", "--layers", "-1"), "`layers` is -1, expected at least 1"),
        (("--synthetic", "tiny", "--layers", "0"), "`layers` is 0, expected at least 1"),
    ],
)
def test_bench_refuses(arguments, message):
    done = run("bench", *arguments, "--device", "cpu")
    assert done.exit_code == 2
    assert message in done.stderr


def test_the_step_is_timed_between_tokens():
    model = api_bench.synthetic("tiny", device="cpu", dtype=torch.float32)
    (times,) = api_bench.bench(model, batches=[2], prompt_tokens=5, new_tokens=6).batches
    assert 0 < times.step < 1
    assert times.prefill_rate == pytest.approx(10 / times.first_token)
    assert times.bytes_rate == pytest.approx((times.weight_bytes + times.cache_bytes) / times.step)
    assert api_generate.Piece._fields == ("row", "text", "token", "reason")


def test_scales_of_a_quantized_cache(tmp_path, folder, caplog):
    content = tiny.config(layers=2)
    names = {f"model.layers.{n}.self_attn.{w}_scale": n + 1.5 for n in range(2) for w in "kv"}
    extra = {name: torch.tensor([value]) for name, value in names.items()}
    place = tiny.write(tmp_path / "scaled", content, {**tiny.tensors(content), **extra})
    scales = api_cache.cache_scales(place, 2)
    assert scales.keys.tolist() == scales.values.tolist() == [1.5, 2.5]
    with pytest.raises(UnsupportedVariant, match="cache scales of 2 layers, expected 3"):
        api_cache.cache_scales(place, 3)
    assert api_cache.cache_scales(folder, 2).keys.tolist() == [1, 1]
    assert "has no scales for its key-value cache: taken as 1" in caplog.text
