"""The page of a comparison: its numbers are the comparison's, and it loads nothing."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from read_page import Page, assert_self_contained

from quantload.accuracy.compare import (
    BlockComparison,
    ComparedTokens,
    Exceeded,
    LayerComparison,
    ModelComparison,
)
from quantload.accuracy.end_metrics import EndMetrics
from quantload.accuracy.html_distributions import kl_bins
from quantload.accuracy.html_report import comparison_page
from quantload.accuracy.router_overlap import RouterOverlap
from quantload.accuracy.structure import LayerStructure, StructureComparison
from quantload.accuracy.weight_rounding import Rounding
from quantload.quant.metrics import ErrorSums

EVIL = 'model.layers.0.<script>alert(1)</script>" onload="x.{{ 7 * 7 }}'


def sums(relative):
    return ErrorSums(noise=relative**2, signal=1.0, count=4)


def rounding(*, beyond=0):
    counts = (beyond, *(0,) * 10, *(50,) * 20, *(0,) * 10, beyond)
    return Rounding(
        beyond=beyond,
        max_steps=0.5,
        block_excess=1.0,
        row_excess=1.0,
        histogram=counts,
        bias=0.01,
        rail_share=0.03,
        codes_used=15,
        codes=16,
    )


def layer(module, weight, output=None, **more):
    return LayerComparison(
        module=module,
        reference="BF16",
        candidate="W4A16",
        weight=sums(weight),
        output=None if output is None else sums(output),
        output_median=output,
        tokens=0 if output is None else 64,
        **more,
    )


@pytest.fixture(scope="module")
def comparison():
    generator = torch.Generator().manual_seed(0)
    rows = [
        layer(f"model.layers.{at}.{kind}", 0.09 + 0.001 * at, 0.05 + 0.01 * at, rounding=rounding())
        for at in range(6)
        for kind in ("self_attn.q_proj", "mlp.down_proj")
    ]
    rows.append(layer(EVIL, 0.2, 0.3, rounding=rounding(beyond=3), damage="too <much>"))
    rows.append(layer("lm_head", 0.0))
    blocks = tuple(
        BlockComparison(
            path=f"model.layers.{at}",
            injected=sums(0.02 + at * 0.01),
            propagated=sums(0.03 + at * 0.02),
            injected_median=0.02,
            propagated_median=0.05,
        )
        for at in range(5)
    )
    kl = torch.rand(500, generator=generator, dtype=torch.float64) ** 4 + 1e-6
    end = EndMetrics(
        kl=torch.cat([kl, torch.zeros(12, dtype=torch.float64)]),
        same_top1=torch.arange(512) % 8 != 0,
        confidence=torch.linspace(0.05, 0.99, 512, dtype=torch.float64),
        loss_change=torch.full((500,), 0.25, dtype=torch.float64),
        reference_loss=2.5,
    )
    return ModelComparison(layers=tuple(rows), blocks=blocks, end=end)


def page_of(comparison):
    text = comparison_page(comparison, reference="source", candidate=f"out {EVIL}")
    return Page(text)


@pytest.fixture(scope="module")
def page(comparison):
    return page_of(comparison)


def test_the_page_is_self_contained(page):
    assert_self_contained(page)


def test_names_from_files_are_escaped(page):
    assert page.tags["script"] == 1
    assert "alert(1)" not in page.scripts[0]
    assert "<script>alert" not in page.text
    assert EVIL in page.tables["layer-table"].column("layer")  # and is shown as it is
    assert "49" not in page.ids["verdict"]
    assert "too <much>" in page.shown
    assert f"out {EVIL}" in page.shown


def test_the_numbers_are_the_comparisons(page, comparison):
    """Every cell is sorted by all digits of the number, and shows it rounded."""
    table = page.tables["layer-table"]
    rows = {row.module: row for row in comparison.layers}
    assert set(table.column("layer")) == set(rows)
    weights, outputs = table.sort_keys("weight"), table.sort_keys("output")
    decibels, medians = table.sort_keys("output dB"), table.sort_keys("median")
    total = sum((row.output or row.weight).relative ** 2 for row in comparison.layers)
    shares = table.sort_keys("share")
    for name, row in rows.items():
        assert weights[name] == row.weight.relative
        assert shares[name] == pytest.approx((row.output or row.weight).relative ** 2 / total)
        assert table.column("weight")[name][0] == f"{100 * row.weight.relative:.3f} %"
        if row.output is None:
            assert (outputs[name], decibels[name], medians[name]) == (None, None, None)
        else:
            assert outputs[name] == row.output.relative
            assert decibels[name] == row.output.sqnr_db
            assert medians[name] == row.output_median
    assert table.column("weight dB")["lm_head"] == ("equal", "inf")
    order = [shares[row[0][0]] for row in table.rows]
    assert order == sorted(order, reverse=True)


def test_what_fails_is_marked(page):
    table = page.tables["layer-table"]
    assert table.bad == [row[0][0] == EVIL for row in table.rows]
    assert table.notes == {EVIL: "too <much>"}
    assert "FAILED" in page.ids["verdict"]
    assert f"Fails: `{EVIL}`: too <much>" in page.shown


def test_ten_failures_are_named_and_the_others_counted():
    rows = tuple(layer(f"model.layers.{at}.q", 0.9) for at in range(25))
    page = page_of(ModelComparison(layers=rows))
    assert page.shown.count("Fails: `") == 10
    assert "Fail too: 15" in page.shown


def test_end_metrics_are_shown(page, comparison):
    end = comparison.end
    for text in (
        f"{end.kl_mean:.4g}",
        f"\u00b1 {end.kl_standard_error:.2g} nats",
        f"{end.kl_quantile(0.99):.4g}",
        f"{100 * end.top1:.2f} %",
        "+0.2500",
        "from 2.5000",
    ):
        assert text in page.shown


def test_the_histogram_of_kl_counts_every_position(comparison):
    """Against numpy's histogram of the logarithms."""
    values = [value for value in comparison.end.kl.tolist() if value > 1e-9]
    bins = kl_bins(values)
    first, last = bins[0][0], bins[-1][0]
    edges = np.arange(first, last + 2) / 5
    expected, _ = np.histogram(np.log10(values), bins=edges)
    assert [count for _, count in bins] == expected.tolist()
    assert sum(expected) == len(values)


def test_positions_without_loss_are_told(page):
    assert "12 of 512 positions are below 1e-09 nats or not finite" in page.sections["kl"]
    counts = [int(count) for count in re.findall(r"(\d+) at 0", page.sections["kl"])]
    assert sum(counts) == 512


def test_tooltips_have_the_numbers(page):
    assert "model.layers.3.mlp.down_proj: 21.94 dB, 8.000 %" in page.sections["depth"]
    assert "model.layers.2: injected 4.000 %, 27.96 dB" in page.sections["propagation"]
    assert "-0.50 to -0.45 steps: 50 of 1000 elements" in page.sections["steps"]
    assert "below -1 step: 3 of 1006 elements" in page.sections["steps"]


def test_every_chart_is_drawn_for_both_widths(page):
    assert page.figures == {"depth": 4, "propagation": 4, "kl": 4, "steps": 8}


def test_the_worst_of_each_type_has_a_histogram(page):
    assert page.sections["steps"].index(EVIL[:30]) < page.sections["steps"].index("down_proj")
    assert "15 of 16 codes occur, 3.0 % at the ends" in page.sections["steps"]


def test_parts_without_data_say_why(comparison):
    rows = tuple(
        replace(row, output=None, output_median=None, tokens=0, rounding=None)
        for row in comparison.layers
    )
    page = page_of(ModelComparison(layers=rows))
    assert page.figures == {"depth": 2}  # weights only
    for part in ("depth", "propagation", "kl"):
        assert "No tokens were run" in page.sections[part]
    assert "No weight was rounded from a full-precision reference" in page.sections["steps"]
    assert "output" not in page.tables["layer-table"].heads
    equal = page_of(ModelComparison(layers=(layer("model.layers.0.q_proj", 0.0),)))
    assert "No layer in a numbered block differs" in equal.sections["depth"]
    assert equal.figures == {}


def test_what_the_numbers_do_not_say_is_written(comparison):
    page = page_of(
        replace(
            comparison,
            only_in_reference=("a.<b>",),
            unseen=("model.layers.0.mlp.experts.3.up_proj",),
            why_whole="it has <no> blocks",
            uncompared=("model.layers.9",),
        )
    )
    for text in (
        "Only in the reference: a.<b>",
        "Not exercised, no token reached: model.layers.0.mlp.experts.3.up_proj",
        "The models were in memory as a whole: it has <no> blocks",
        "Outputs that could not be compared: model.layers.9",
    ):
        assert text in page.shown
    assert_self_contained(page)


def test_routers_inputs_tokens_and_limits(comparison):
    rows = tuple(replace(row, input=sums(0.02)) for row in comparison.layers[:2])
    page = page_of(
        replace(
            comparison,
            layers=rows,
            routers={"a.experts": RouterOverlap(8, 16, 12), "b.<experts>": RouterOverlap(8, 16, 4)},
            tokens=ComparedTokens(sha256="0123456789abcdef", count=512, sequences=2),
            limits=("layer.sqnr<15",),
            exceeded=(Exceeded(limit="kl.mean>0.05", where="", value=0.5),),
        )
    )
    routers = page.tables["router-table"]
    assert routers.sort_keys("same choices") == {"b.<experts>": 0.25, "a.experts": 0.75}
    assert page.tables["layer-table"].sort_keys("input") == {row.module: 0.02 for row in rows}
    assert "512 in 2 sequences, sha256 0123456789ab" in page.shown
    assert "Limits: layer.sqnr<15" in page.shown
    assert "Fails: `kl.mean>0.05`: 0.5" in page.shown
    assert "FAILED" in page.ids["verdict"]


def test_the_structure_alone():
    def held(module, bits, **more):
        names = {"weight": f"{module}.weight"}
        return LayerStructure(
            module=module,
            shape=(8, 4),
            reference="BF16",
            candidate="W4<>",
            reference_bits=16.0,
            bits=bits,
            reference_tensors=names,
            tensors=names,
            **more,
        )

    structure = StructureComparison(
        layers=(held("a", 4.25), held("b", 16.0), held("c", 4.5, problem="scales <0>")),
        reference_bits=16.0,
        bits=8.5,
        quantized_bits=4.375,
        skipped=("b",),
    )
    page = page_of(ModelComparison(layers=(), structure=structure, tier="structure"))
    table = page.tables["structure-table"]
    assert table.sort_keys("bits") == {"a": 4.25, "b": 16.0, "c": 4.5}
    assert table.bad == [False, True, True]
    assert table.notes["c"] == "scales <0>"
    assert set(page.sections) == {"structure"}
    assert "8.50 was 16.00; of quantized weights 4.38" in page.shown
    assert_self_contained(page)


def test_experts_are_one_row_and_all_of_them_are_in_a_table_of_their_own():
    names = [f"model.layers.0.mlp.experts.{at}.up_proj" for at in range(40)]
    rows = [layer(name, 0.1, 0.1 + at / 1000) for at, name in enumerate(names)]
    rows[1] = replace(rows[1], output=None, output_median=None, tokens=0)
    comparison = ModelComparison(layers=tuple(rows), unseen=(names[1],), few=(names[2],))
    page = page_of(comparison)
    (row,) = page.tables["layer-table"].rows
    assert row[0][0] == "model.layers.0.mlp.experts.*.up_proj"
    experts = page.tables["expert-table"]
    assert len(experts.rows) == 40
    assert experts.sort_keys("tokens")[names[1]] == 0
    assert experts.column("note")[names[2]][0] == "too few tokens"
    assert page.tables["layer-table"].column("few")[row[0][0]] == ("1", "1.0")
    assert "All experts (40)" in page.shown


def test_values_that_are_not_finite_do_not_break_the_page():
    bad = ErrorSums(noise=math.nan, signal=1.0, count=2, num_nonfinite=1)
    rows = (
        LayerComparison(module="model.layers.0.q", reference="", candidate="", weight=bad),
        LayerComparison(
            module="model.layers.1.q",
            reference="",
            candidate="",
            weight=ErrorSums(noise=1.0, signal=0.0, count=1),
        ),
        layer("model.layers.2.q", 0.1),
    )
    end = EndMetrics(
        kl=torch.tensor([math.inf, 0.5], dtype=torch.float64),
        same_top1=torch.tensor([True, False]),
    )
    page = page_of(ModelComparison(layers=rows, end=end))
    table = page.tables["layer-table"]
    assert table.column("weight")["model.layers.0.q"] == ("not finite", "")
    assert table.column("weight")["model.layers.1.q"] == ("reference is 0", "inf")
    assert table.bad.count(True) == 2
    charts = page.text[page.text.index("<svg") :]
    assert 'nan"' not in charts
    assert not [value for _, name, value in page.attributes if name == "d" and "nan" in value]


def test_comparing_without_a_page_does_not_load_the_templates():
    code = (
        "import sys, quantload.cli, quantload.cli_compare, quantload.cli_baseline_report\n"
        "print([m for m in ('jinja2', 'quantload.accuracy.html_pages') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
