"""The decoding loop, over a model that only counts."""

import pytest
import torch

from quantload.errors import ConfigError, ModelError
from quantload.runtime.generate import Decoder, Rules, generate
from quantload.runtime.step_graphs import rows_of_slot

VOCAB = 11


class Counting:
    """The next token is the sum of all tokens of the row, plus its length, modulo V."""

    device = torch.device("cpu")
    vocab_size = VOCAB
    why_not_captured = ""
    captures_prompts = False

    def __init__(self):
        self.caches = []

    def new_cache(self, batch, length, dtype=None, *, scales=None):
        self.caches.append(CountingCache(batch, length))
        return self.caches[-1]

    def prefill(self, ids, lengths, cache):
        assert not cache.sums.any(), "an empty cache"
        seen = torch.arange(ids.shape[1]) < lengths[:, None]
        cache.sums += (ids * seen).sum(1)
        return self._logits(cache, lengths)

    def step(self, tokens, positions, cache):
        assert int(positions.max()) < cache.length
        cache.sums += tokens
        cache.steps += 1
        return self._logits(cache, positions + 1)

    def _logits(self, cache, lengths):
        return torch.nn.functional.one_hot((cache.sums + lengths) % VOCAB, VOCAB).float()


class CountingCache:
    def __init__(self, batch, length):
        self.batch, self.length = batch, length
        self.sums, self.steps = torch.zeros(batch, dtype=torch.int64), 0

    num_bytes = 0

    def bytes_read(self, keys):
        return 0

    def reset(self):
        self.sums.zero_()


def expected(prompt, count):
    row = list(prompt)
    for _ in range(count):
        row.append((sum(row) + len(row)) % VOCAB)
    return row[len(prompt) :]


PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 1, 2], [3, 3], [10]]


def test_rows_of_unequal_prompts():
    found = generate(Counting(), PROMPTS, Rules(9))
    assert [row.ids for row in found] == [expected(prompt, 9) for prompt in PROMPTS]
    assert {row.reason for row in found} == {"length"}


def test_a_row_ends_with_its_stop_id_and_the_others_go_on():
    whole = [expected(prompt, 20) for prompt in PROMPTS]
    stop = whole[0][2]
    model = Counting()
    found = generate(model, PROMPTS, Rules(20, stop_ids=[stop]))
    for row, ids in zip(found, whole, strict=True):
        count = ids.index(stop) + 1 if stop in ids else 20
        assert row.ids == ids[:count]
        assert row.reason == ("stop" if stop in ids else "length")
    assert found[0].reason == "stop"


def test_no_step_is_run_for_rows_that_are_done():
    model = Counting()
    generate(model, [[1, 2]], Rules(20, stop=lambda row, ids: len(ids) == 3))
    assert model.caches[0].steps == 2


def test_stop_sees_the_new_ids_of_each_row():
    seen = {}

    def stop(row, ids):
        seen[row] = list(ids)
        return row == 1 and len(ids) == 2

    found = generate(Counting(), PROMPTS[:3], Rules(5, stop=stop))
    assert [len(row.ids) for row in found] == [5, 2, 5]
    assert seen == {number: row.ids for number, row in enumerate(found)}


def test_a_chooser_is_given_rows_padded_on_the_left():
    asked = []

    def choose(ids, logits):
        asked.append(ids.clone())
        assert logits.dtype == torch.float32
        return (logits.argmax(-1) + 1) % VOCAB

    found = generate(Counting(), [[1, 2, 3], [4]], Rules(4, choose=choose, pad_id=9))
    row = [1, 2, 3]
    for _ in range(4):
        row.append((sum(row) + len(row) + 1) % VOCAB)
    assert found[0].ids == row[3:]
    assert asked[0].tolist() == [[1, 2, 3], [9, 9, 4]]
    assert asked[3].tolist()[1] == [9, 9, 4, *found[1].ids[:3]]


def test_more_prompts_than_rows_run_one_batch_after_the_other():
    decoder = Decoder(Counting(), max_batch=2)
    found = decoder.generate(PROMPTS, Rules(3))
    assert [row.ids for row in found] == [expected(prompt, 3) for prompt in PROMPTS]


def test_a_stream_yields_tokens_step_by_step():
    tokens = list(Decoder(Counting()).stream(PROMPTS[:2], Rules(2)))
    assert [(token.row, token.reason) for token in tokens] == [
        *((0, ""), (1, "")),
        *((0, "length"), (1, "length")),
    ]


def test_a_stream_leaves_the_grad_mode_alone():
    stream = Decoder(Counting()).stream([[1, 2]], Rules(3))
    assert [torch.is_grad_enabled() for _ in stream] == [True] * 3


def test_caches_are_kept_for_requests_that_fit():
    model = Counting()
    decoder = Decoder(model)
    for prompt in (PROMPTS[0], PROMPTS[2]):
        assert decoder.generate([prompt], Rules(5))[0].ids == expected(prompt, 5)
    assert len(model.caches) == 1
    decoder.generate([[1] * 300], Rules(5))
    assert [cache.length for cache in model.caches] == [128, 384]


def test_a_cache_in_which_a_prompt_failed_is_not_kept():
    model, decoder = Counting(), None

    def fails(ids, lengths, cache):
        raise RuntimeError("out of memory")

    decoder = Decoder(model)
    model.prefill = fails
    with pytest.raises(RuntimeError, match="out of memory"):
        decoder.generate([[1]], Rules(10**6))
    del model.prefill
    assert decoder.generate([[1]], Rules(3))[0].ids == expected([1], 3)
    assert [cache.length for cache in model.caches] == [10**6 + 64, 128]


@pytest.mark.parametrize("where", ["new_cache", "prefill"])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 TiB\nmore"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
def test_too_little_memory_is_told_with_what_was_asked_for(where, error):
    model = Counting()

    def fails(*given, **named):
        raise error

    decoder = Decoder(model)
    setattr(model, where, fails)
    with pytest.raises(ModelError, match="a cache of 2 x 1000003 tokens") as caught:
        decoder.generate([[1], [1, 2, 3]], Rules(10**6))
    assert "fewer new tokens" in str(caught.value)
    assert "more" not in str(caught.value)
    delattr(model, where)
    assert decoder.generate([[1]], Rules(3))[0].ids == expected([1], 3)


def test_one_stream_at_a_time():
    decoder = Decoder(Counting())
    stream = decoder.stream([[1]], Rules(3))
    next(stream)
    with pytest.raises(ModelError, match="another stream of this decoder is not finished"):
        decoder.generate([[1]], Rules(3))
    stream.close()
    assert decoder.generate([[1]], Rules(3))[0].ids == expected([1], 3)


@pytest.mark.parametrize(
    ("prompts", "rules", "message"),
    [
        ([[1], []], Rules(3), "prompt 1 has no tokens, expected at least 1"),
        ([[VOCAB]], Rules(3), "prompt 0 has the id `11`, expected ids from 0 to 10"),
        ([[-1]], Rules(3), "prompt 0 has the id `-1`"),
        ([[1]], Rules(0), "`max_new_tokens` is `0`, expected at least 1"),
    ],
)
def test_refusals(prompts, rules, message):
    with pytest.raises(ConfigError, match=message):
        generate(Counting(), prompts, rules)


def test_slots_have_a_few_sizes():
    assert [rows_of_slot(batch) for batch in (1, 3, 9, 17, 33, 64, 65)] == [
        *(1, 4, 16, 24, 48, 64, 65),
    ]
