"""What causes a candidate's drift, against plain transformers with layers exchanged by hand."""

from __future__ import annotations

import json
import math
import random

import pytest
import tiny_checkpoints as tiny
import torch
from breaks import broken, zero_expert
from click.testing import CliRunner
from plants import plants_of
from safetensors.torch import load_file
from smollm2 import smollm2_file
from tiny_moe import tiny_moe
from transformers import AutoModelForCausalLM

from quantload import api, api_bisect
from quantload.accuracy import attribution, streaming
from quantload.accuracy.attribution_exchange import Exchange
from quantload.accuracy.attribution_result import KlMean, UnitDrift
from quantload.accuracy.attribution_runs import CANDIDATE, couples_tokens, run_variants
from quantload.accuracy.attribution_units import Site
from quantload.accuracy.compare_outputs import compare_running
from quantload.accuracy.end_metrics import standard_error
from quantload.accuracy.reference_output import ReferenceOutput
from quantload.accuracy.streaming import open_streamed
from quantload.accuracy.streaming_tokens import batches_of
from quantload.api_stats import generated_tokens
from quantload.cli import main
from quantload.errors import ConfigError, ModelError, NotComparable
from quantload.progress import Silent
from quantload.quant.metrics import kl_divergence

CPU = torch.device("cpu")
SEQUENCES = [[1, 5, 9, 2, 33, 8], [7, 7, 3], [60, 2, 41, 9, 9, 12]]
DOWN = "model.layers.1.mlp.down_proj"
QKV = "model.layers.0.self_attn.q_proj+k_proj+v_proj"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bisect")
    source = tiny.llama(folder / "source", layers=3)
    return source, api.convert(source, folder / "out", "W4A16:g32").folder


def bisect(one, other, sequences=SEQUENCES, **options):
    return api_bisect.bisect(one, other, sequences=sequences, device="cpu", **options)


def by_name(found):
    return {row.unit.name: row for row in found.units}


@pytest.fixture(scope="module")
def groups(folders):
    return bisect(*folders, top=20)


@pytest.fixture(scope="module")
def layers(folders):
    return bisect(*folders, top=0, by="layer")


def dense(folder, name):
    """Plain transformers with the dequantized weights."""
    place = folder.parent / name
    if not place.exists():
        api.convert(folder, place, "dense", options=api.PlanOptions(dtype=torch.float32))
    return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()


def put(model, other, modules):
    """Exchange modules of a model of plain transformers."""
    for module in modules:
        parent, _, name = module.rpartition(".")
        setattr(model.get_submodule(parent), name, other.get_submodule(module))
    return model


@torch.no_grad()
def mean_kl(one, other):
    """KL(one || other) over all positions of all sequences, in float64."""
    found = []
    for ids in SEQUENCES:
        tokens = torch.tensor([ids])
        found.append(kl_divergence(one(tokens).logits[0], other(tokens).logits[0]))
    return float(torch.cat(found).mean())


# -- numbers ---------------------------------------------------------------------------------------


def test_single_exchanges_are_those_of_transformers(folders, groups):
    source, output = folders
    found = by_name(groups)
    kl = {
        QKV: mean_kl(
            dense(source, "one"),
            put(
                dense(source, "one"),
                dense(output, "other"),
                [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"],
            ),
        ),
        DOWN: mean_kl(
            dense(source, "one"), put(dense(source, "one"), dense(output, "other"), [DOWN])
        ),
    }
    for name, expected in kl.items():
        assert expected > 1e-6
        assert found[name].kl.mean == pytest.approx(expected, rel=1e-3)
        assert found[name].kl.tokens == 15


def test_putting_back_is_that_of_transformers(folders, groups):
    source, output = folders
    found = groups
    one, other = dense(source, "one"), dense(output, "other")
    whole = mean_kl(one, other)
    back = mean_kl(one, put(dense(output, "other"), one, [DOWN]))
    row = by_name(found)[DOWN]
    assert found.whole.mean == pytest.approx(whole, rel=1e-3)
    assert row.put_back.mean == pytest.approx(back, rel=1e-3)
    assert found.removed(row) == pytest.approx(1 - back / whole, abs=1e-3)


def test_the_whole_is_what_compare_finds(folders, groups):
    source, output = folders
    found = groups
    sources = api.inspect(source), api.inspect(output)
    end = compare_running(*sources, SEQUENCES, Silent(), device=CPU, dtype=torch.float32).end
    assert found.whole.mean == pytest.approx(end.kl_mean, rel=1e-4)
    assert found.whole.standard_error == pytest.approx(end.kl_standard_error, rel=1e-4)
    assert found.sum_of_parts == pytest.approx(sum(row.kl.mean for row in found.units))
    assert found.additivity == pytest.approx(end.kl_mean / found.sum_of_parts, rel=1e-4)
    assert sum(row.share for row in found.units) == pytest.approx(1.0)
    assert "effects add" in found.verdict


def test_errors_of_outputs_are_those_of_compare(folders, layers):
    source, output = folders
    found = by_name(layers)
    sources = api.inspect(source), api.inspect(output)
    compared = compare_running(*sources, SEQUENCES, Silent(), device=CPU, dtype=torch.float32)
    for name, errors in compared.isolated.items():
        if name in found:
            assert found[name].error == pytest.approx(errors.median, rel=1e-4)
    assert len(found) == 21


@pytest.mark.parametrize("lengths", [[3], [40], [7, 64, 64, 7]])
def test_exchanging_nothing_changes_nothing(folders, lengths):
    sequences = [[(i * i + n) % 96 for i in range(n)] for n in lengths]
    assert bisect(*folders, sequences, first_tokens=1000, top=2).nothing == 0.0


def test_variants_along_the_batch_are_those_by_themselves(folders, monkeypatch):
    sequences = [[(i * i) % 96 for i in range(64)]]
    together = bisect(*folders, sequences, top=0)
    monkeypatch.setattr("quantload.accuracy.attribution_runs._STEP_TOKENS", 1)
    alone = bisect(*folders, sequences, top=0)
    assert [row.unit.name for row in together.units] == [row.unit.name for row in alone.units]
    for one, other in zip(together.units, alone.units, strict=True):
        assert one.kl.mean == pytest.approx(other.kl.mean, rel=1e-4)


def test_little_memory_takes_more_passes(folders, layers, monkeypatch):
    expected = by_name(layers)
    monkeypatch.setattr(attribution, "_STATES_BYTES", 1)
    passes = []

    def counted(*arguments, **options):
        passes.append(len(arguments[2]))
        return run_variants(*arguments, **options)

    monkeypatch.setattr(attribution, "run_variants", counted)
    found = by_name(bisect(*folders, top=0, by="layer"))
    assert passes == [16, 8]  # 21 layers, two times nothing, the candidate
    assert {n: r.kl.mean for n, r in found.items()} == {n: r.kl.mean for n, r in expected.items()}


def test_a_model_that_cannot_be_cut_runs_as_a_whole(folders, groups, monkeypatch):
    expected = by_name(groups)

    def refuse(*_):
        raise ModelError("it cannot be cut: for a test")

    monkeypatch.setattr(streaming, "find_cut", refuse)
    found = bisect(*folders, top=2)
    assert found.why_whole == "for a test"
    assert found.nothing == 0.0
    for name, row in by_name(found).items():
        assert row.kl.mean == pytest.approx(expected[name].kl.mean, rel=1e-4)


# -- KL and noise ----------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [1e-3, 0.1, 1.0, 30.0])
def test_kl_in_one_pass(spread):
    generator = torch.Generator().manual_seed(1)
    one = 4 * torch.randn(2, 70, 500, generator=generator)
    other = one + spread * torch.randn(2, 70, 500, generator=generator) + 11.0
    found = ReferenceOutput(one).kl(other)
    expected = kl_divergence(one, other).flatten()
    assert torch.allclose(found, expected, rtol=2e-3, atol=1e-9)
    assert found.mean() == pytest.approx(float(expected.mean()), rel=1e-4)


def test_kl_of_equal_logits_is_exactly_zero():
    logits = 9 * torch.randn(1, 3, 200, generator=torch.Generator().manual_seed(2))
    assert ReferenceOutput(logits).kl(logits.clone()).tolist() == [0.0, 0.0, 0.0]


def test_kl_of_logits_far_apart_and_of_no_numbers():
    one = torch.tensor([[[0.0, -300.0, -math.inf]] * 4])
    other = torch.tensor([[[-300.0, 0.0, -math.inf], [0.0, math.inf, 0.0], [0.0, math.nan, 0.0]]])
    other = torch.cat([other, torch.tensor([[[0.0, 0.0, 0.0]]])], dim=1)
    found = ReferenceOutput(one).kl(other)
    assert found[0] == pytest.approx(300.0)
    assert found[1:3].tolist() == [math.inf, math.inf]
    assert found[3] == pytest.approx(math.log(3.0))
    with pytest.raises(NotComparable, match="logits of the reference are not finite"):
        ReferenceOutput(other)
    with pytest.raises(NotComparable, match="3 logits against 2"):
        ReferenceOutput(one).kl(one[..., :2])


def test_noise_has_the_norm_of_the_error_in_each_token():
    torch.manual_seed(3)
    own, other = (torch.nn.Sequential(torch.nn.Linear(8, 40)).eval() for _ in range(2))
    x = torch.randn(5, 8)
    expected, theirs = own(x).detach(), other(x).detach()
    exchange = Exchange(own, other, "noise", None, 0)
    exchange.put(Site("0"))
    noise = own(x).detach() - expected
    exchange.undo()
    error = theirs - expected
    assert torch.allclose(noise.norm(dim=-1), error.norm(dim=-1), rtol=1e-4)
    cosine = torch.nn.functional.cosine_similarity(noise, error)
    assert cosine.abs().max() < 0.9
    assert torch.equal(own(x), expected)


@torch.no_grad()
def test_an_exchange_is_taken_back_and_measures_the_error():
    own, other = (torch.nn.Sequential(torch.nn.Linear(4, 4)).eval() for _ in range(2))
    x, errors, before = torch.randn(3, 4), {}, own[0]
    exchange = Exchange(own, other, "swap", errors, 0)
    exchange.put(Site("0"))
    assert torch.equal(own(x), other[0](x))
    exchange.undo()
    assert own[0] is before
    assert errors["0"].num_tokens == 6  # called once in the model, once by itself
    exchange.put(Site("0", "bias"))
    assert own[0].bias is other[0].bias
    exchange.undo()
    assert own[0].bias is not other[0].bias
    with pytest.raises(ModelError, match=r"`0\.nothing` is no tensor"):
        exchange.put(Site("0", "nothing"))


# -- what is exchanged -----------------------------------------------------------------------------


def changed(folder, source, change, **sizes):
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    return tiny.write(folder, tiny.config(layers=3, **sizes), tensors)


def test_norms_embedding_and_head_are_exchanged_too(folders, tmp_path):
    def change(tensors):
        tensors["model.layers.2.input_layernorm.weight"] *= 1.5
        tensors["model.embed_tokens.weight"][5] *= -1
        tensors["model.norm.weight"][3] += 1
        tensors["lm_head.weight"][7] *= 3

    other = changed(tmp_path / "other", folders[0], change)
    found = bisect(folders[0], other, top=10)
    assert sorted(by_name(found)) == sorted(
        ("model.layers.2.input_layernorm", "model.embed_tokens", "model.norm", "lm_head")
    )
    assert all(row.kl.mean > 0 and row.noise.mean > 0 for row in found.units)
    assert found.nothing == 0.0
    assert len(found.equal) == len(load_file(other / "model.safetensors")) - 4
    assert "model.layers.0.mlp.down_proj" in found.equal


def test_a_tied_head_goes_with_its_embedding(tmp_path):
    source = tiny.llama(tmp_path / "source", layers=3, tied=True)

    def change(tensors):
        tensors["model.embed_tokens.weight"][5] *= -1

    other = changed(tmp_path / "other", source, change, tied=True)
    found = bisect(source, other, top=1)
    (row,) = found.units
    assert row.unit.name == "model.embed_tokens, tied to lm_head"
    assert row.kl.mean == pytest.approx(found.whole.mean, rel=1e-4)
    assert row.noise.mean > 0
    assert found.additivity == pytest.approx(1.0, rel=1e-4)


def test_a_bias_that_differs_is_part_of_its_layer(tmp_path):
    content = tiny.config(base=tiny.QWEN2)
    tensors = tiny.tensors(content)
    source = tiny.write(tmp_path / "source", content, tensors)
    tensors["model.layers.1.self_attn.k_proj.bias"] += 1
    tensors["model.layers.1.self_attn.v_proj.bias"] -= 1
    other = tiny.write(tmp_path / "other", content, tensors)
    found = bisect(source, other, top=1)
    (row,) = found.units
    assert row.unit.name == "model.layers.1.self_attn.k_proj+v_proj"
    assert row.put_back.mean == 0.0
    assert found.removed(row) == 1.0


def test_equal_checkpoints(folders):
    found = bisect(folders[0], folders[0])
    assert found.units == ()
    assert found.whole.mean == 0.0
    assert len(found.equal) == len(load_file(folders[0] / "model.safetensors"))
    assert bisect(folders[1], folders[1]).units == ()


@pytest.mark.parametrize("scheme", ["W4A16:g32", "W8A8"])
def test_layers_in_another_container_are_equal(folders, tmp_path, scheme):
    """The same numbers, dequantized; where inputs are rounded that is another layer."""
    output = api.convert(folders[0], tmp_path / "out", scheme).folder
    again = api.convert(output, tmp_path / "again", "same").folder
    assert bisect(output, again, top=0).units == ()
    plain = tiny.llama(tmp_path / "plain", layers=3, dtype=torch.float32)
    tensors = load_file(folders[0] / "model.safetensors")
    wide = {name: tensor.float() for name, tensor in tensors.items()}
    content = tiny.config(layers=3, dtype=torch.float32)
    assert bisect(folders[0], tiny.write(plain, content, wide), top=0).units == ()


def test_units(folders, groups, layers):
    assert (len(layers.units), len(groups.units)) == (21, 12)
    blocks = by_name(bisect(*folders, by="block", top=1))
    assert set(blocks) == {f"model.layers.{number}" for number in range(3)}
    assert len(blocks["model.layers.1"].unit.modules) == 7


def test_experts_of_a_projection_are_exchanged_together(tmp_path):
    source = tiny_moe(tmp_path / "source")
    output = api.convert(source, tmp_path / "out", "W4A16:g32").folder
    found = bisect(source, output, top=20)
    names = set(by_name(found))
    assert "model.layers.0.mlp.experts.*.gate_proj+up_proj" in names
    assert "model.layers.1.mlp.experts.*.down_proj" in names
    assert len(names) == 8
    assert found.nothing == 0.0
    modules = zero_of_expert(tmp_path / "broken", output)
    first = bisect(output, tmp_path / "broken", [list(range(90))], top=2).units[0]
    assert set(first.unit.modules) == modules
    assert first.put_back.mean == 0.0


@pytest.mark.parametrize("by", ["group", "block"])
def test_a_router_is_exchanged_without_noise(tmp_path, by):
    source = tiny_moe(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.gate.weight"
    tensors[name] = tensors[name] + 0.3 * torch.randn_like(tensors[name])
    content = json.loads((source / "config.json").read_text())
    changed = tiny.write(tmp_path / "changed", content, tensors)
    found = bisect(source, changed, [list(range(40))], top=2, by=by)
    (row,) = found.units
    assert row.unit.modules == (name.removesuffix(".weight"),)
    assert row.kl.mean > 0
    assert row.noise is None  # it returns no tensor
    assert row.put_back.mean == 0.0


def test_one_token_tells_nothing_apart(folders):
    found = bisect(*folders, [[5]], top=2)
    assert found.leaders.endswith("cannot be told apart on one token") or not found.leaders
    assert "nan" not in found.leaders


def zero_of_expert(folder, output):
    return broken(folder, output, zero_expert, random.Random(1))


# -- planted faults --------------------------------------------------------------------------------

SCHEMES = ("W4A16:g32", "W4A16_ASYM:g32", "FP8_DYNAMIC", "W8A8")
FEW = ("q and k scales exchanged", "zero points off by one", "nibbles swapped")


def hold_faults(folder, scheme, names=()):
    """A fault is all that differs from the unbroken output, and is furthest from its kind."""
    source = tiny.llama(folder / "source", layers=6)
    output = api.convert(source, folder / "out", scheme).folder
    sequences = [[(7 * i * i + 3 * i) % 96 for i in range(64)]]
    plants = plants_of(load_file(output / "model.safetensors"))
    for seed, name in enumerate(names or plants):
        place = folder / str(seed)
        modules = broken(place, output, plants[name], random.Random(seed))
        against_output = bisect(output, place, sequences, top=1)
        assert [set(row.unit.modules) for row in against_output.units] == [modules], name
        assert against_output.removed(against_output.units[0]) == 1.0, name
        rows = bisect(source, place, sequences, top=0).units
        worst = max(rows, key=lambda row: row.of_kind)
        assert modules <= set(worst.unit.modules), name
        assert worst.member in modules, name
        assert worst is rows[0] or not worst.is_suspect, name


def test_a_fault_is_found(tmp_path):
    hold_faults(tmp_path, "W4A16_ASYM:g32", FEW)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_faults_are_found(tmp_path, scheme):
    hold_faults(tmp_path, scheme)


def test_nothing_stands_out_where_nothing_is_broken(tmp_path):
    source = tiny.llama(tmp_path / "source", layers=6)
    output = api.convert(source, tmp_path / "out", "W4A16:g32").folder
    found = bisect(source, output, [list(range(90))], top=0, by="layer")
    assert found.standing_out == ()
    assert all(0.5 < row.of_kind < 1.5 for row in found.units)


def test_suspects_come_first_and_what_does_not_show_is_not_moved():
    def row(kl, of_kind, share):
        mean = KlMean(mean=kl, standard_error=0.0, tokens=9)
        return UnitDrift(unit=None, kl=mean, share=share, of_kind=of_kind)

    rows = [
        row(math.inf, None, 1.0),
        row(0.1, 5.0, 0.1),
        row(0.5, 1.0, 0.5),
        row(0.3, None, 0.3),
        row(0.03, 9.0, 0.03),
    ]
    mixed = [rows[number] for number in (3, 0, 4, 1, 2)]
    assert sorted(mixed, key=lambda row: row.rank, reverse=True) == rows
    assert [row.stands_out for row in rows] == [False, True, False, False, True]


# -- what cannot be used ---------------------------------------------------------------------------


def test_a_candidate_whose_output_is_no_number(folders, tmp_path):
    def change(tensors):
        tensors["model.layers.1.mlp.down_proj.weight"].fill_(3e38)

    other = changed(tmp_path / "other", folders[0], change)
    found = bisect(folders[0], other)
    assert found.units[0].unit.name == DOWN
    assert math.isinf(found.units[0].kl.mean)
    with pytest.raises(NotComparable, match="logits of the reference are not finite"):
        bisect(other, folders[0])


def test_other_models_are_not_comparable(folders, tmp_path):
    other = tiny.llama(tmp_path / "other", layers=2)
    with pytest.raises(NotComparable, match="has `3` blocks, the candidate `2`"):
        bisect(folders[0], other)
    with pytest.raises(NotComparable, match="shape"):
        bisect(folders[0], tiny.llama(tmp_path / "wide", layers=3, hidden=128))


def test_what_is_asked_for_wrongly(folders):
    with pytest.raises(ConfigError, match="no tokens"):
        bisect(*folders, [[]])
    with pytest.raises(ConfigError, match="token id `96`"):
        bisect(*folders, [[96]])
    with pytest.raises(ConfigError, match="`by` is `row`, expected one of"):
        bisect(*folders, by="row")


def test_scales_over_all_tokens_keep_variants_apart(folders):
    models = [open_streamed(api.inspect(f), device=CPU, dtype=torch.float32) for f in folders]
    assert not any(couples_tokens(model) for model in models)


# -- the command -----------------------------------------------------------------------------------


def run(*arguments):
    return CliRunner().invoke(main, ["bisect", *map(str, arguments), "--device", "cpu", "--quiet"])


def test_the_command_shows_a_table(folders, tmp_path):
    file = tmp_path / "ids.json"
    file.write_text(json.dumps(SEQUENCES))
    done = run(*folders, "--token-ids", file, "--first-tokens", 6, "--top", 2)
    assert done.exit_code == 0, done.output
    assert "The 10 that cause most of the drift" in done.stdout
    assert "over 15 tokens; 12 fused groups differ, 9 weights and tensors are equal" in done.stdout
    assert "exchanging nothing gave KL 0\n" in done.stdout
    assert "times the sum of the single exchanges" in done.stdout


def test_json_and_markdown(folders, tmp_path):
    file = tmp_path / "ids.json"
    file.write_text(json.dumps(SEQUENCES))
    content = json.loads(run(*folders, "--token-ids", file, "--json", "--top", 1).stdout)
    assert content["quantload_bisect"] == 1
    assert content["nothing_exchanged"] == 0.0
    first, second = content["units"][:2]
    assert first["refined"]
    assert not second["refined"] or first["kl"]["mean"] >= second["kl"]["mean"]
    assert first["kl"]["tokens"] == 15
    assert first["noise"]["mean"] > 0
    assert 0 < first["gone_if_put_back"] < 1
    text = run(*folders, "--token-ids", file, "--markdown", "--all", "--top", 0).stdout
    assert text.count("\n| model.layers.") == 12
    same = run(folders[0], folders[0], "--token-ids", file, "--markdown").stdout
    assert "nothing differs" in same


def test_exit_codes(folders, tmp_path):
    other = tiny.llama(tmp_path / "other", layers=2)
    file = tmp_path / "ids.json"
    file.write_text("[[1, 2, 3]]")
    assert run(folders[0], other, "--token-ids", file).exit_code == 3
    assert run(*folders, "--token-ids", tmp_path / "none.json").exit_code == 2
    assert run(*folders).exit_code == 0  # tokens that the reference makes up


# -- a real model ----------------------------------------------------------------------------------

REAL = ("W4A16", "W4A16_ASYM", "FP8_DYNAMIC", "W8A8", "mixed")
TOKENS = 64
DRAWS = 12  # of faults, until one is visible


class Real:
    """SmolLM2-135M in full precision, its conversions, and tokens that it makes up itself."""

    def __init__(self, folder):
        self.folder = folder
        self.reference = folder / "dense"
        options = api.PlanOptions(dtype=torch.bfloat16)
        api.convert(smollm2_file(), self.reference, "dense", options=options)
        self.ids = generated_tokens(api.inspect(self.reference), TOKENS, device=CPU)
        self._kl = {}

    def output(self, scheme):
        place = self.folder / scheme
        if not place.exists():
            rules = {"*.self_attn.": "FP8_DYNAMIC"} if scheme == "mixed" else {}
            name = "W4A16" if scheme == "mixed" else scheme
            api.convert(self.reference, place, name, rules=rules, verify_output=False)
        return place

    def kl(self, candidate):
        """KL(reference || candidate) of each position."""
        models = [
            open_streamed(api.inspect(f), device=CPU, dtype=torch.float32, round_inputs=rounds)
            for f, rounds in ((self.reference, False), (candidate, True))
        ]
        found = run_variants(*models, [CANDIDATE], batches_of(self.ids, 512), Silent())
        return found[CANDIDATE].positions

    def is_visible(self, scheme, candidate):
        """True if the end gate of `baseline check` fails: 10 % and 3 standard errors."""
        if scheme not in self._kl:
            self._kl[scheme] = self.kl(self.output(scheme))
        before = self._kl[scheme]
        grown = self.kl(candidate) - before
        least = max(0.1 * float(before.mean()), 3 * standard_error(grown))
        return float(grown.mean()) > least

    def plant(self, seed, place):
        """Break random layers of a conversion until one shows at the output."""
        scheme, rng = REAL[seed % len(REAL)], random.Random(seed)
        original = self.output(scheme)
        plants = plants_of(load_file(original / "model.safetensors"))
        for _ in range(DRAWS):
            name = rng.choice(sorted(plants))
            modules = broken(place, original, plants[name], rng)
            if self.is_visible(scheme, place):
                return f"{scheme}: {name}", modules
        raise AssertionError(f"none of {DRAWS} faults is visible")


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    return Real(tmp_path_factory.mktemp("smollm2"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_fault_of_a_real_model_is_first(real, tmp_path, seed):
    name, modules = real.plant(seed, tmp_path / "broken")
    for reference in (real.output(REAL[seed % len(REAL)]), real.reference):
        found = bisect(reference, tmp_path / "broken", real.ids, first_tokens=TOKENS, top=0)
        assert found.nothing == 0.0
        assert modules <= set(found.units[0].unit.modules), (name, found.units[0].unit.name)
