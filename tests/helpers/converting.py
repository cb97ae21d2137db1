"""Plans and conversions without transformers: groups and ties come from names."""

from pathlib import Path

from quantload.loader.convert import run_plan
from quantload.loader.formats import open_source
from quantload.loader.open import open_checkpoint
from quantload.loader.plan import PlanOptions, make_plan
from quantload.mappers.facts import facts_from_names
from quantload.progress import Silent
from quantload.quant.rules import QuantConfig


def opened(folder):
    """The source of a folder."""
    return open_source(open_checkpoint(folder))


def plan_of(folder, scheme, rules=(), *, group_size=None, **options):
    """The plan of a conversion."""
    source = opened(folder)
    is_tied = bool(source.checkpoint.config.get("tie_word_embeddings"))
    facts = facts_from_names(source.weights, tied_head=is_tied)
    config = QuantConfig.from_options(scheme, rules, group_size=group_size)
    made = make_plan(source, config, facts, PlanOptions(**options))
    if "quantization_config" in made.config:
        made.target.check(made.config["quantization_config"])
    return made


def converted(folder, output, scheme, rules=(), **options):
    """Convert a folder; returns the output folder."""
    return run_plan(plan_of(folder, scheme, rules, **options), Path(output), Silent())


def rows_of(plan):
    """Rows of a plan, by module."""
    return {row.module: row for row in plan.rows}
