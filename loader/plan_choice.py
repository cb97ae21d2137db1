"""What rules and defaults say of each module, before fused groups are settled."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from quantload.loader.experts import Experts, split_experts
from quantload.loader.plan_fit import fit, refuse_same, refuse_unwritable
from quantload.loader.plan_options import PlanOptions
from quantload.loader.plan_same import is_in_scheme, same_scheme
from quantload.loader.source import Source, SourceWeight
from quantload.mappers.default_keeps import reason_to_keep
from quantload.mappers.facts import Kind, ModelFacts, groups_from_names
from quantload.quant.rules import Decision, QuantConfig, Rule, resolve
from quantload.quant.scheme import SAME, Scheme


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The decision for one module.

    Args:
        module: Checkpoint name of the module.
        weight: Its weight.
        asked: What rules or the default ask for.
        scheme: What fits the weight; None is full precision.
        reason: Which rule, default or limit decided.
        keeps_values: True if the weight is in that scheme already.
        is_same: True if its rule asks for what the source has.
    """

    module: str
    weight: SourceWeight
    asked: Scheme | None
    scheme: Scheme | None
    reason: str
    keeps_values: bool = False
    is_same: bool = False


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The decisions for a checkpoint.

    Args:
        source: The checkpoint, its experts taken apart if any of them is quantized.
        facts: Facts about its modules.
        of: By module.
        undecided: Rules that decide nothing.
        whole_experts: Why parameters of experts stay as they are, by name.
        not_served: Those of which it is that no engine reads them one by one; and modules that are
            taken apart nevertheless.
    """

    source: Source
    facts: ModelFacts
    of: Mapping[str, Choice]
    undecided: tuple[Rule, ...]
    whole_experts: Mapping[str, str]
    not_served: Mapping[str, str]


def choose(source: Source, config: QuantConfig, facts: ModelFacts, options: PlanOptions) -> Choices:
    """Decide every module.

    Raises:
        ConfigError: Rules do not fit the model; UnusedRule is a kind of it.
    """
    experts = split_experts(source, unserved=options.lossless)
    seen = _facts_of(experts, facts)
    chosen, undecided = _choose(experts, config, seen, options)
    if experts.parameter_of and not any(
        not is_dense(chosen[module].scheme) for module in experts.parameter_of if module in chosen
    ):
        return _as_they_were(source, facts, experts, chosen, undecided)
    return Choices(
        source=experts.source,
        facts=seen,
        of=chosen,
        undecided=undecided,
        whole_experts=experts.kept,
        not_served={**experts.kept, **experts.unserved},
    )


def _facts_of(experts: Experts, facts: ModelFacts) -> ModelFacts:
    """Return facts under the names of modules that were taken apart or renamed."""
    new_name = {old: new for new, old in experts.renamed.items()}
    pairs = groups_from_names(experts.parameter_of)
    if not new_name and not pairs:
        return facts
    return replace(
        facts,
        kinds={new_name.get(module, module): kind for module, kind in facts.kinds.items()},
        groups=(
            *(tuple(new_name.get(module, module) for module in group) for group in facts.groups),
            *pairs,
        ),
        aliases={
            **{new_name.get(module, module): names for module, names in facts.aliases.items()},
            **{new: (old, *facts.aliases.get(old, ())) for new, old in experts.renamed.items()},
        },
    )


def _as_they_were(
    source: Source,
    facts: ModelFacts,
    experts: Experts,
    chosen: Mapping[str, Choice],
    undecided: tuple[Rule, ...],
) -> Choices:
    """Return choices for a checkpoint of which no expert is quantized: nothing is taken apart."""
    of_parameter: dict[str, Choice] = {}
    for module, parameter in experts.parameter_of.items():
        of_parameter.setdefault(parameter, chosen[module])
    new_name = {old: new for new, old in experts.renamed.items()}
    restored = {}
    for module, weight in source.weights.items():
        choice = of_parameter.get(weight.parameter_name) or chosen[new_name.get(module, module)]
        restored[module] = replace(choice, module=module, weight=weight)
    restored |= {
        module: choice
        for module, choice in chosen.items()
        if module not in experts.source.weights  # heads that get a weight of their own
    }
    whole = {name: choice.reason for name, choice in of_parameter.items()}
    return Choices(
        source=source,
        facts=facts,
        of=restored,
        undecided=undecided,
        whole_experts={**experts.kept, **whole},
        not_served=experts.kept,
    )


def _choose(
    experts: Experts, config: QuantConfig, facts: ModelFacts, options: PlanOptions
) -> tuple[dict[str, Choice], tuple[Rule, ...]]:
    weights = dict(experts.source.weights)
    aliases = {
        alias: owner
        for alias, owner in facts.tied.items()
        if owner in weights and alias not in weights
    }
    weights |= {alias: weights[owner] for alias, owner in aliases.items()}
    names = {module: facts.names_of(module) for module in weights}
    for module, parameter in experts.parameter_of.items():
        names[module] = (*names[module], parameter)
    resolution = resolve(config, names)
    choices = {
        module: _choice(
            module,
            weight,
            resolution.decisions[module],
            kind_of(module, facts),
            experts.kept.get(weight.parameter_name, ""),
            options,
        )
        for module, weight in weights.items()
    }
    for alias, owner in aliases.items():
        are_dense = is_dense(choices[alias].scheme) and is_dense(choices[owner].scheme)
        if are_dense or choices[alias].is_same:
            del choices[alias]  # stays tied: nothing of its own is written
        else:
            reason = f"{choices[alias].reason}; untied from `{owner}`"
            choices[alias] = replace(choices[alias], reason=reason)
    return choices, resolution.undecided


def _choice(
    module: str,
    weight: SourceWeight,
    decision: Decision,
    kind: Kind,
    why_whole: str,
    options: PlanOptions,
) -> Choice:
    scheme = decision.scheme
    reason = f"rule `{decision.rule}`" if decision.rule else "default scheme"
    keeps_values = False
    if scheme == SAME:
        refuse_same(options.target)
        scheme, same_reason = same_scheme(weight, try_all=options.lossless)
        if scheme is None and weight.is_quantized and why_whole:
            same_reason += f": {why_whole}"
        reason, keeps_values = f"{reason}: {same_reason}", scheme is not None
    elif scheme is not None and scheme.weight is not None:
        kept = reason_to_keep(module, kind)
        if kept is not None and not decision.covers_whole_name:
            scheme, reason = None, f"kept by default: {kept}"
        else:
            scheme, reason = fit(scheme, weight, reason, why_whole=why_whole)
            refuse_unwritable(options.target, scheme, weight)
            keeps_values = (
                scheme is not None and options.target.keeps_values and is_in_scheme(weight, scheme)
            )
            reason += "; it is in this scheme already" if keeps_values else ""
    return Choice(
        module=module,
        weight=weight,
        asked=decision.scheme,
        scheme=scheme,
        reason=reason,
        keeps_values=keeps_values,
        is_same=decision.scheme == SAME,
    )


def agree_in_blocks(
    choices: Mapping[str, Choice], blocks: Iterable[Collection[str]]
) -> dict[str, Choice]:
    """Give the experts of a block one scheme where only their widths made it differ.

    Engines run all projections of a block in one scheme. Groups become as small as the narrowest
    needs; where none fits one of them, all stay in full precision.

    Args:
        choices: By module.
        blocks: Modules of the experts of each block.
    """
    settled = dict(choices)
    for block in blocks:
        members = [choices[module] for module in block if module in choices]
        asked = {member.asked for member in members}
        if len(asked) != 1 or len({member.scheme for member in members}) < 2 or SAME in asked:
            continue
        unfit = next((member for member in members if member.scheme is None), None)
        narrowest = min(members, key=_group_size)
        for member in members:
            if unfit is not None and member.scheme is not None:
                reason = f"kept: like `{unfit.module}` of its block, which is {unfit.reason}"
                settled[member.module] = replace(
                    member, scheme=None, reason=reason, keeps_values=False
                )
            elif unfit is None and member.scheme != narrowest.scheme:
                reason = f"{member.reason}; then {narrowest.scheme}, like the rest of its block"
                settled[member.module] = replace(
                    member, scheme=narrowest.scheme, reason=reason, keeps_values=False
                )
    return settled


def _group_size(choice: Choice) -> int:
    weight = choice.scheme.weight if choice.scheme is not None else None
    return (weight.group_size if weight is not None else None) or 1 << 30


def is_dense(scheme: Scheme | None) -> bool:
    """True for full precision."""
    return scheme is None or scheme.weight is None


def kind_of(module: str, facts: ModelFacts) -> Kind:
    """Return the kind of a module, also of a tied one that gets a weight of its own."""
    if module in facts.kinds:
        return facts.kinds[module]
    owner = facts.kinds.get(facts.tied.get(module, ""), "linear")
    return {"head": "embedding", "embedding": "head"}.get(owner, owner)  # type: ignore[return-value]
