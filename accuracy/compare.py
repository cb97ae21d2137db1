"""Compare two checkpoints of one model, layer by layer.

    weights     relative error of each dequantized weight against the reference's, and of each other
                float tensor (norms, biases) that differs
    isolated    the reference's input X of each linear layer goes through both layers:
                ||X W'^T - X W^T|| / ||X W^T||; the candidate quantizes X if its scheme says so
    end         KL(reference || candidate) and top-1 agreement of the next-token distributions

One statistic everywhere: the relative L2 error from two sums in float64, shown as SQNR in dB.

What is compared passes up to these relative errors:

    weight      0 where both hold one scheme and one dtype; of two float dtypes, 4 eps of the
                coarser one; 0.5 where the schemes differ
    other       0 of one dtype; of two, 4 eps of the coarser one
    isolated    4 eps(bfloat16) + sqrt(K) eps(float32) where both hold one scheme: rounded once more
                and summed in another order; else 0.5

A weight whose scale is doubled has an error of 1, one that is lost too; working schemes of 3 bits
and more stay below 0.5. Smaller damage shows in the rounding: see `weight_rounding.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from quantload.accuracy.weight_rounding import Rounding
from quantload.errors import NotComparable
from quantload.progress import Progress
from quantload.quant.metrics import ErrorSums, error_sums, kl_divergence

QUANTIZED_LIMIT = 0.5
_KL_TOKENS = 64  # tokens whose full distributions are held in float64 at a time


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
        is_plain: True for a tensor that is no 2-D weight, such as a norm or a bias.
        weight_limit: Largest relative error of the weight that passes.
        output_limit: Largest relative error of the isolated output that passes.
        rounding: Errors of a quantized weight in units of its steps; None where there are none.
        damage: In what the rounding of this layer stands out; "" if it does not.
    """

    module: str
    reference: str
    candidate: str
    weight: ErrorSums | None
    output: ErrorSums | None = None
    is_plain: bool = False
    weight_limit: float = QUANTIZED_LIMIT
    output_limit: float = QUANTIZED_LIMIT
    rounding: Rounding | None = None
    damage: str = ""

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
class EndMetrics:
    """Agreement of the next-token distributions, over all positions of all sequences.

    Args:
        kl: [T] float64, KL(reference || candidate) of each position, nats.
        same_top1: [T] bool, True where both put the same token first.
    """

    kl: Tensor
    same_top1: Tensor

    @property
    def num_tokens(self) -> int:
        """Number of positions."""
        return self.kl.numel()

    @property
    def kl_mean(self) -> float:
        """Mean KL in nats per token."""
        return float(self.kl.mean())

    @property
    def kl_standard_error(self) -> float:
        """Standard error of the mean KL, positions taken as independent."""
        return (
            float(self.kl.std()) / math.sqrt(self.num_tokens) if self.num_tokens > 1 else math.nan
        )

    def kl_quantile(self, fraction: float) -> float:
        """KL that this fraction of the positions stays below."""
        return float(torch.quantile(self.kl, fraction))

    @property
    def top1(self) -> float:
        """Share of positions where both put the same token first."""
        return float(self.same_top1.to(torch.float64).mean())

    @property
    def top1_standard_error(self) -> float:
        """Binomial standard error of `top1`."""
        return math.sqrt(self.top1 * (1 - self.top1) / self.num_tokens)


@dataclass(frozen=True, kw_only=True)
class ModelComparison:
    """A comparison of two checkpoints.

    Args:
        layers: One row a layer, then one for each other float tensor that differs.
        end: Agreement at the output; None without tokens.
        only_in_reference: Weights and other tensors that the candidate lacks.
        only_in_candidate: Weights and other tensors that the reference lacks.
    """

    layers: tuple[LayerComparison, ...]
    end: EndMetrics | None = None
    only_in_reference: tuple[str, ...] = ()
    only_in_candidate: tuple[str, ...] = ()

    @property
    def failures(self) -> tuple[str, ...]:
        """One line for every row that exceeds its limit."""
        return tuple(f"`{row.module}`: {row.failure}" for row in self.layers if row.failure)

    @property
    def passed(self) -> bool:
        """True if no error exceeds its limit and the candidate lacks nothing."""
        return not self.failures and not self.problems and not self.only_in_reference

    @property
    def problems(self) -> tuple[str, ...]:
        """One line for every row with values that are not finite."""
        return tuple(f"`{row.module}`: {row.problem}" for row in self.layers if row.problem)


@torch.no_grad()
def compare_outputs(
    reference: nn.Module,
    candidate: nn.Module,
    sequences: Sequence[Sequence[int]],
    progress: Progress,
) -> tuple[dict[str, ErrorSums], EndMetrics]:
    """Run token sequences through both models.

    Args:
        reference: A causal language model; its linear layers must be separate modules.
        candidate: The same model with other weights; likewise.
        sequences: Token ids; every position counts.
        progress: Advances by tokens.

    Returns:
        Isolated output errors by module name of the model, and the agreement at the end.

    Raises:
        NotComparable: Vocabularies differ, or an output is not finite.
    """
    device = next(reference.parameters()).device
    sums: dict[str, ErrorSums] = {}
    kl, same = [], []
    progress.start("outputs", total=sum(map(len, sequences)), unit="tokens")
    with _isolated_errors(reference, candidate, sums):
        for ids in sequences:
            tokens = torch.tensor([list(ids)], device=device)
            expected = reference(input_ids=tokens, use_cache=False).logits[0]
            got = candidate(input_ids=tokens, use_cache=False).logits[0]
            _check_logits(expected, got)
            for some, other in zip(expected.split(_KL_TOKENS), got.split(_KL_TOKENS), strict=True):
                kl.append(kl_divergence(some, other).cpu())
                same.append((some.argmax(-1) == other.argmax(-1)).cpu())
            progress.advance(len(ids))
    progress.finish()
    return sums, EndMetrics(kl=torch.cat(kl), same_top1=torch.cat(same))


def _check_logits(expected: Tensor, got: Tensor) -> None:
    if expected.shape != got.shape:
        raise NotComparable(
            f"vocabularies differ: {expected.shape[-1]} logits against {got.shape[-1]}"
        )
    for name, logits in (("reference", expected), ("candidate", got)):
        if not bool(logits.isfinite().all()):
            raise NotComparable(f"logits of the {name} are not finite")


@contextmanager
def _isolated_errors(
    reference: nn.Module, candidate: nn.Module, sums: dict[str, ErrorSums]
) -> Iterator[None]:
    """While open, every linear layer of the reference also feeds its input to the candidate's."""
    others = dict(candidate.named_modules())
    handles = []

    def hook_for(name: str, other: nn.Module):  # type: ignore[no-untyped-def]  # noqa: ANN202 - a torch hook
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            sums[name] = sums.get(name, ErrorSums()) + error_sums(other(inputs[0]), output)

        return hook

    for name, module in reference.named_modules():
        if is_linear(module) and name in others and is_linear(others[name]):
            handles.append(module.register_forward_hook(hook_for(name, others[name])))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def is_linear(module: nn.Module) -> bool:
    """True if the module maps `in_features` to `out_features`, whatever its class."""
    return hasattr(module, "in_features") and hasattr(module, "out_features")


def with_outputs(
    comparison: ModelComparison, outputs: Mapping[str, ErrorSums], end: EndMetrics
) -> ModelComparison:
    """Join weight errors and output errors by module name."""
    rows = {row.module: replace(row, output=outputs.get(row.module)) for row in comparison.layers}
    for name, sums in outputs.items():
        if name not in rows:
            rows[name] = LayerComparison(
                module=name, reference="", candidate="", weight=None, output=sums
            )
    return replace(comparison, layers=tuple(rows.values()), end=end)
