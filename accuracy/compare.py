"""Compare two checkpoints of one model, layer by layer.

    weights     relative error of each dequantized weight against the reference's, and of each other
                float tensor (norms, biases) that differs
    isolated    the reference's input X of each linear layer goes through both layers:
                ||X W'^T - X W^T|| / ||X W^T||; the candidate quantizes X if its scheme says so
    end         KL(reference || candidate) and top-1 agreement of the next-token distributions

One statistic everywhere: the relative L2 error from two sums in float64, shown as SQNR in dB.

What is compared passes up to these relative errors:

    weight      0 where both hold one scheme and one dtype; of two float dtypes, 4 eps of the
                coarser one; 0.5 where the schemes differ, 0.8 if the candidate has two bits
    other       0 of one dtype; of two, 4 eps of the coarser one
    isolated    4 eps(bfloat16) + sqrt(K) eps(float32) where both hold one scheme: rounded once more
                and summed in another order; else 0.5, or 0.8

A weight whose scale is doubled has an error of 1, one that is lost too; working schemes of 3 bits
and more stay below 0.5, those of 2 bits below 0.61. Smaller damage shows in the rounding: see
`weight_rounding.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, get_args

from quantload.accuracy.end_metrics import EndMetrics
from quantload.accuracy.weight_rounding import Rounding
from quantload.errors import counted, listed
from quantload.quant.metrics import ErrorSums

if TYPE_CHECKING:
    from quantload.accuracy.compare_outputs import OutputComparison
    from quantload.accuracy.router_overlap import RouterOverlap
    from quantload.accuracy.structure import StructureComparison

QUANTIZED_LIMIT = 0.5
FEW_VALUES, FEW_VALUES_LIMIT = 4, 0.8
Tier = Literal["structure", "weights", "layers", "end"]
TIERS: tuple[Tier, ...] = get_args(Tier)  # each measures what those before it do, and more


@dataclass(frozen=True, kw_only=True)
class LayerComparison:
    """Errors of one layer.

    Args:
        module: Checkpoint name, or the model's name where only outputs were compared; the name of
            the tensor where that is no weight of a module.
        reference: What the reference holds.
        candidate: What the candidate holds.
        weight: Error sums of the weight; None if only outputs were compared.
        output: Error sums of the isolated output; None without tokens.
        output_median: Median over tokens of the relative error of each; None without tokens.
        input: Error sums of the isolated output that rounding the input alone makes; None where
            the candidate's scheme does not round it.
        tokens: Tokens that reached it.
        is_plain: True for a tensor that is no 2-D weight, such as a norm or a bias.
        weight_limit: Largest relative error of the weight that passes.
        output_limit: Largest relative error of the isolated output that passes.
        rounding: Errors of a quantized weight in units of its steps; None where there are none.
        damage: In what the rounding of this layer stands out; "" if it does not.
        worst_row: Output feature (row of the weight; with experts in one tensor, row of all of
            them) with the largest relative error; None where the weight is equal or has no rows.
        worst_row_error: Relative error of that row; infinite where the reference is zero, or a
            value is not finite.
    """

    module: str
    reference: str
    candidate: str
    weight: ErrorSums | None
    output: ErrorSums | None = None
    output_median: float | None = None
    input: ErrorSums | None = None
    tokens: int = 0
    is_plain: bool = False
    weight_limit: float = QUANTIZED_LIMIT
    output_limit: float = QUANTIZED_LIMIT
    rounding: Rounding | None = None
    damage: str = ""
    worst_row: int | None = None
    worst_row_error: float | None = None

    @property
    def failure(self) -> str:
        """What exceeds its limit, and which limit that is; "" if nothing does."""
        kinds = (
            ("weight", self.weight, self.weight_limit),
            ("output", self.output, self.output_limit),
        )
        found = [
            f"{what} error {sums.relative:.3g}, limit {limit:.3g}"
            for what, sums, limit in kinds
            if sums is not None and not sums.relative <= limit  # NaN fails
        ]
        return "; ".join([*found, *([self.damage] if self.damage else [])])

    @property
    def differs(self) -> bool:
        """True if the weight is not equal; also if it is not finite."""
        return self.weight is not None and self.weight.noise != 0.0

    @property
    def problem(self) -> str:
        """What makes the numbers of this row worthless; "" if nothing does."""
        if self.weight is None or math.isfinite(self.weight.noise):
            return ""
        if self.weight.num_nonfinite:
            return f"{self.weight.num_nonfinite} values of the candidate are not finite"
        return "values of the reference are not finite"


@dataclass(frozen=True, kw_only=True)
class BlockComparison:
    """Errors of the output of one block of layers.

    Args:
        path: Its path in the model.
        injected: Error sums on the reference's hidden states: what the block adds.
        propagated: Error sums on the candidate's own: what has gathered up to here.
        injected_median: Median over tokens of the relative error of each.
        propagated_median: The same of the candidate's own hidden states.
    """

    path: str
    injected: ErrorSums
    propagated: ErrorSums
    injected_median: float
    propagated_median: float


@dataclass(frozen=True, kw_only=True)
class ComparedTokens:
    """The tokens that both models ran.

    Args:
        sha256: Of the ids as JSON without spaces, `[[1,2],[3]]`: the same wherever they are.
        count: Number of tokens.
        sequences: Number of sequences.
    """

    sha256: str
    count: int
    sequences: int


@dataclass(frozen=True, kw_only=True)
class Exceeded:
    """A limit of the user that something is beyond.

    Args:
        limit: The limit, as the user wrote it.
        where: The layer or block; "" for the model.
        value: What was found.
    """

    limit: str
    where: str
    value: float

    def __str__(self) -> str:
        where = f"`{self.where}`: " if self.where else ""
        return f"{where}`{self.limit}`: {self.value:.5g}"


@dataclass(frozen=True, kw_only=True)
class ModelComparison:
    """A comparison of two checkpoints.

    Args:
        layers: One row a layer, then one for each other float tensor that differs; none in tier
            "structure".
        end: Agreement at the output; None without tokens.
        only_in_reference: Weights and other tensors that the candidate lacks.
        only_in_candidate: Weights and other tensors that the reference lacks.
        blocks: Errors of the outputs of blocks, in order; none without tokens.
        routers: How often routers chose what they chose in the reference, by path of their experts.
        unseen: Experts that no token reached.
        few: Experts that fewer than 32 tokens reached.
        uncompared: Layers and experts of the model whose outputs could not be compared, by path.
        why_whole: Why the models were in memory as a whole; "" if they were not.
        tier: The highest tier that was measured.
        structure: How both hold their layers; None if nobody looked.
        tokens: What was run; None without tokens.
        limits: Limits of the user, as they were written; they take the place of the built-in ones.
        exceeded: What is beyond them, by limit, the worst first.
        config_differences: One line for each key that changes what the model computes and differs.
        not_run: Why nothing was run although there are tokens; "" if something was.
    """

    layers: tuple[LayerComparison, ...]
    end: EndMetrics | None = None
    only_in_reference: tuple[str, ...] = ()
    only_in_candidate: tuple[str, ...] = ()
    blocks: tuple[BlockComparison, ...] = ()
    routers: Mapping[str, RouterOverlap] = field(default_factory=dict)
    unseen: tuple[str, ...] = ()
    few: tuple[str, ...] = ()
    uncompared: tuple[str, ...] = ()
    why_whole: str = ""
    tier: Tier = "weights"
    structure: StructureComparison | None = None
    tokens: ComparedTokens | None = None
    limits: tuple[str, ...] = ()
    exceeded: tuple[Exceeded, ...] = ()
    config_differences: tuple[str, ...] = ()
    not_run: str = ""

    @property
    def failures(self) -> tuple[str, ...]:
        """One line for each row beyond a built-in limit or damaged, and for each limit of users."""
        rows = (f"`{row.module}`: {row.failure}" for row in self.layers if row.failure)
        by_limit: dict[str, list[Exceeded]] = {}
        for found in self.exceeded:
            by_limit.setdefault(found.limit, []).append(found)
        return (
            *rows,
            *(
                str(worst) + (f", and {len(others)} more" if others else "")
                for worst, *others in by_limit.values()
            ),
        )

    @property
    def passed(self) -> bool:
        """True if no error exceeds its limit, configs agree and the candidate lacks nothing."""
        return not self.failures and not self.problems and not self.only_in_reference

    @property
    def problems(self) -> tuple[str, ...]:
        """One line for what configs, structure and rows with values that are not finite show."""
        rows = (f"`{row.module}`: {row.problem}" for row in self.layers if row.problem)
        of_structure = () if self.structure is None else self.structure.problems
        return (*self.config_differences, *of_structure, *rows)


def about_input_scales(comparison: ModelComparison) -> list[str]:
    """Say what is known of static input scales, and that nobody judged them where nothing ran."""
    if comparison.structure is None:
        return []
    scales, lines = comparison.structure.input_scales, []
    if scales.differ:
        lines.append(f"input scales differ from the reference's: {listed(scales.differ)}")
    if scales.far:
        lines.append(
            f"input scales 1000 times and more off those of other blocks: {listed(scales.far)}"
        )
    if scales.count and comparison.tokens is None:
        scale = counted(scales.count, "static input scale was", "static input scales were")
        lines.append(f"{scale} not judged: only outputs show what they lose, give tokens")
    return lines


def with_outputs(comparison: ModelComparison, outputs: OutputComparison) -> ModelComparison:
    """Join weight errors and what running both models showed, by module name."""
    rows = {row.module: row for row in comparison.layers}
    for name, errors in outputs.isolated.items():
        row = rows.get(name) or LayerComparison(
            module=name, reference="", candidate="", weight=None
        )
        by_input = outputs.isolated_inputs.get(name)
        rows[name] = replace(
            row,
            output=errors.sums,
            output_median=errors.median,
            input=None if by_input is None else by_input.sums,
            tokens=errors.num_tokens,
        )
    blocks = tuple(
        BlockComparison(
            path=path,
            injected=outputs.injected[path].sums,
            propagated=errors.sums,
            injected_median=outputs.injected[path].median,
            propagated_median=errors.median,
        )
        for path, errors in outputs.propagated.items()
    )
    return replace(
        comparison,
        layers=tuple(rows.values()),
        end=outputs.end,
        blocks=blocks,
        routers=outputs.routers,
        unseen=outputs.unseen,
        few=outputs.few,
        uncompared=outputs.uncompared,
        why_whole=outputs.why_whole,
    )


__all__ = [
    "FEW_VALUES",
    "FEW_VALUES_LIMIT",
    "QUANTIZED_LIMIT",
    "BlockComparison",
    "LayerComparison",
    "ModelComparison",
    "about_input_scales",
    "with_outputs",
]
