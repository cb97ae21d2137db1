"""Tables of launch settings: what is found, whose table wins, what a damaged one says."""

import json
from pathlib import Path

import pytest
import torch

from quantload.errors import ConfigError
from quantload.runtime import launch_settings
from quantload.runtime.launch_settings import CardLimits, Table, parse_table

CARD = "Some Card (80GB)"
CUDA = torch.device("cuda", 0)


@pytest.fixture
def own_table(tmp_path, monkeypatch):
    """Where the user's table of a card lies that this process believes to have."""
    monkeypatch.setenv("QUANTLOAD_CACHE", str(tmp_path))
    monkeypatch.setattr(launch_settings, "_card_of", lambda index: CARD)
    launch_settings.forget()
    path = launch_settings.user_table(CARD)
    path.parent.mkdir()
    yield path
    launch_settings.forget()


def table(entries, us=None, **more):
    found = {"card": CARD, "kernels": {"some kernel": {"64x128": entries}}, **more}
    if us is not None:
        found["us"] = {"some kernel": {"64x128": us}}
    return json.dumps(found)


def find(m, n=64, k=128, kernel="some kernel"):
    return launch_settings.find(kernel, CUDA, m=m, n=n, k=k)


def test_the_fewest_measured_tokens_that_hold_the_asked_for_ones_serve(own_table):
    own_table.write_text(table({"8": {"rows": 8}, "16": {"rows": 16}, "256": {"rows": 256}}))
    assert [find(m)["rows"] for m in (1, 3, 8, 9, 16, 128, 256)] == [8, 8, 8, 16, 16, 256, 256]
    assert find(17) is None, "settings for 256 tokens say nothing about 17"
    assert find(127) is None
    assert find(257) is None
    assert find(4, n=65) is None
    assert find(4, kernel="another") is None
    assert launch_settings.find("some kernel", torch.device("cpu"), m=4, n=64, k=128) is None


def test_where_the_rule_was_not_beaten_it_serves(own_table):
    own_table.write_text(table({"8": {"rows": 8}, "64": {"rows": 64}}, us={"4": 5.0, "32": 7.0}))
    assert [find(m) for m in (1, 4, 17, 32)] == [None] * 4, "settings of 8 or 64 tokens are no rule"
    assert [find(m)["rows"] for m in (5, 8, 33, 64)] == [8, 8, 64, 64]


def test_the_rule_may_win_over_packaged_settings():
    packaged = parse_table(table({"8": {"rows": 2}, "16": {"rows": 3}}), where="packaged")
    own = parse_table(table({}, us={"8": 5.0}), where="own")
    assert packaged.updated(own).kernels["some kernel"]["64x128"] == {16: {"rows": 3}}
    assert packaged.kernels["some kernel"]["64x128"][8] == {"rows": 2}, "it is left as it was"


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_finds_the_same(dynamic, own_table):
    """No cached function is traced: the compiler would warn of it, which is an error here."""
    own_table.write_text(table({"8": {"rows": 8}, "16": {"rows": 16}}))

    def rows(x):
        return x * (find(x.shape[0]) or {"rows": 5})["rows"]

    torch._dynamo.reset()
    compiled = torch.compile(rows, fullgraph=True, dynamic=dynamic, backend="eager")
    assert [int(compiled(torch.ones(m))[0]) for m in (2, 8, 9, 16, 17)] == [8, 8, 16, 16, 5]


def test_times_are_of_just_the_measured_tokens(own_table):
    own_table.write_text(table({"4": {"rows": 4}}, us={"4": 7.25}))
    measured = [
        launch_settings.measured_us("some kernel", CUDA, m=m, n=64, k=128) for m in (3, 4, 5)
    ]
    assert measured == [None, 7.25, None]


def test_the_users_table_wins_entry_by_entry(own_table, monkeypatch):
    packaged = parse_table(
        table(
            {"4": {"rows": 1}, "8": {"rows": 2}}, limits={"read_gb_s": 10, "tflops": {"bf16": 5}}
        ),
        where="packaged",
    )
    own = parse_table(table({"8": {"rows": 3}}), where="own")
    merged = packaged.updated(own)
    assert merged.kernels["some kernel"]["64x128"] == {4: {"rows": 1}, 8: {"rows": 3}}
    assert merged.limits == CardLimits(10.0, {"bf16": 5.0})
    assert packaged.kernels["some kernel"]["64x128"][8] == {"rows": 2}, "it is left as it was"


def test_a_card_without_tables_has_no_settings(own_table):
    assert find(1) is None
    assert launch_settings.card_limits(CUDA) is None
    assert launch_settings.card_limits(torch.device("cpu")) is None


def test_what_is_written_is_read_again():
    made = Table(CARD, CardLimits(4580.0, {"bf16": 802.0}))
    for tokens in (16, 1, 128):
        made.add("some kernel", "64x128", tokens, {"rows": tokens, "splits": 2}, us=tokens / 3)
    read = parse_table(made.as_text(), where="text")
    assert read.kernels == made.kernels
    assert read.us == {"some kernel": {"64x128": {16: 5.333, 1: 0.333, 128: 42.667}}}
    assert (read.card, read.limits) == (made.card, made.limits)
    assert json.loads(made.as_text())["torch"] == torch.__version__


def test_the_packaged_tables_can_be_read():
    folder = Path(launch_settings.__file__).parent / "tuned"
    tables = {path: parse_table(path.read_text(), where=path.name) for path in folder.iterdir()}
    for path, found in tables.items():
        assert path.stem == launch_settings._file_name(found.card)
        assert found.limits is not None
    assert [path.stem for path in tables] == ["NVIDIA_H200"]


def test_settings_are_tried_without_a_table(own_table):
    own_table.write_text(table({"4": {"rows": 4}}))
    with launch_settings.trying("some kernel", {"rows": 9}) as trial:
        assert find(4) == {"rows": 9}
        assert find(4, kernel="another") is None
        with launch_settings.trying("some kernel", None):
            assert find(4) is None, "the rule is tried"
        assert find(3) == {"rows": 9}
    assert trial.asked == [
        ("some kernel", 4, 64, 128),
        ("another", 4, 64, 128),
        ("some kernel", 3, 64, 128),
    ]
    assert find(4) == {"rows": 4}


def test_the_rule_takes_the_place_of_settings():
    made = Table(CARD)
    made.add("some kernel", "64x128", 4, {"rows": 4}, us=3.0)
    made.add("some kernel", "64x128", 4, None, us=2.0)
    assert made.kernels["some kernel"]["64x128"] == {}
    assert made.us["some kernel"]["64x128"] == {4: 2.0}
    assert parse_table(made.as_text(), where="text").us == made.us


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "it is no JSON"),
        ("[]", "found a list, expected an object"),
        ("{}", "`card` is `None`, expected the name of a card"),
        ('{"card": "c", "kernels": {"k": 3}}', "`kernels.k` is `3`, expected an object"),
        (
            '{"card": "c", "kernels": {"k": {"64": {}}}}',
            "`kernels.k.64` is no shape, expected `NxK`",
        ),
        ('{"card": "c", "kernels": {"k": {"6x4": {"one": {}}}}}', "has tokens `one`"),
        ('{"card": "c", "kernels": {"k": {"6x4": {"1": {"rows": "a"}}}}}', "`rows` is `a`"),
        ('{"card": "c", "us": {"k": {"6x4": {"1": -1}}}}', "`us.k.6x4` at 1 is `-1`"),
        ('{"card": "c", "limits": {"read_gb_s": 0}}', "expected positive `read_gb_s`"),
        ('{"card": "c", "limits": 3}', "`limits` is `3`"),
        ('{"card": "c", "limits": {"read_gb_s": Infinity}}', "expected positive `read_gb_s`"),
        ('{"card": "c", "us": {"k": {"6x4": {"1": NaN}}}}', "`us.k.6x4` at 1 is `nan`"),
        ('{"card": "c", "kernels": {"k": {"6x4": {"1": {"rows": true}}}}}', "`rows` is `True`"),
        ('{"card": "c", "kernels": {"k": {"6x4": {"1": {"rows": -8}}}}}', "`rows` is `-8`"),
        ('{"card": "c", "kernels": {"k": {"6x²": {}}}}', "`kernels.k.6x²` is no shape"),
        ('{"card": "c", "kernels": {"k": {"6x4": {"²": {}}}}}', "has tokens `²`"),
        ('{"card": "\xff"}', "can't decode byte 0xff"),
        ("[" * 100_000, "it is no JSON"),
    ],
)
def test_damaged_tables_are_told(text, message, own_table):
    latin = text.encode("latin-1" if "\xff" in text else "utf-8")
    own_table.write_bytes(latin)
    with pytest.raises(ConfigError) as caught:
        find(1)
    assert message in str(caught.value)
    assert f"file `{own_table}`" in str(caught.value)
    assert "quantload tune" in caught.value.hint


def test_the_folder_is_the_platforms(monkeypatch):
    monkeypatch.delenv("QUANTLOAD_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.setattr("sys.platform", "linux")
    path = launch_settings.user_table("NVIDIA A/B")
    assert path == Path("/somewhere/quantload/tuned/NVIDIA_A_B.json")
    monkeypatch.setattr("sys.platform", "darwin")
    assert launch_settings.user_table("c").parent == Path.home() / "Library/Caches/quantload/tuned"
