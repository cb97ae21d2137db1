"""`WeightMapper`: where a tensor of a checkpoint belongs in a model, decided by names alone.

    name  ->  rules of the model's author, then what its architecture converts (`Conversion`)
          ->  candidates: as converted, with or without the base model's prefix, with a nested head
              stripped; then the same for the name as it is
          ->  the first whose module path is in the model; the rest of the name is the leaf
          ->  (stack module, leaf, slot) if the module is a member of a fused stack

Module paths are looked up whole and longest first, so that leaves with dots in them
(`weight.quant_state.bitsandbytes__nf4`) stay whole and `gate_proj` never matches `gate_proj_2`. A
scale, or whatever else goes with a weight, takes the weight's route.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from quantload.errors import UnexpectedTensor
from quantload.mappers.cache_scales import cache_scale_of
from quantload.mappers.name_rules import NameRules
from quantload.mappers.targets import Conversion, Converted, Cut, Join, Piece, Target

# Tensors that old checkpoints hold although the model computes them itself.
_COMPUTED = (
    (re.compile(r"rotary_(pos_)?emb\.(inv_freq|cos_cached|sin_cached)$"), "rotary table, computed"),
    (re.compile(r"(^|\.)attn(ention)?\.(masked_)?bias$"), "causal mask, computed"),
    (re.compile(r"(^|\.)position_ids$"), "positions, computed"),
    (re.compile(r"(^|\.)num_batches_tracked$"), "training counter"),
)
_LEGACY_LEAVES = {"gamma": "weight", "beta": "bias"}
_HEAD = "lm_head"
_OF_CLASS = "left out by the model class"


@dataclass(frozen=True, slots=True)
class Route:
    """The way of one checkpoint name.

    Args:
        name: The checkpoint name.
        targets: The places that the tensor goes to; none if the model has no place for it.
        steps: Each rule that fired, in turn, for people.
        reason: Why it goes nowhere, "" if it does go somewhere.
        is_dropped: True if it may be left out.
    """

    name: str
    targets: tuple[Target, ...]
    steps: tuple[str, ...]
    reason: str = ""
    is_dropped: bool = False

    def __str__(self) -> str:
        steps = list(self.steps)
        if not self.targets:
            steps.append(f"dropped: {self.reason}" if self.is_dropped else self.reason)
        for target in map(str, self.targets):
            if target != self.name and not (steps and steps[-1].endswith(f"-> {target}")):
                steps.append(f"-> {target}")
        return f"{self.name}: {'; '.join(steps)}" if steps else self.name


@dataclass(frozen=True, slots=True)
class _Match:
    """Places of one candidate, and how it was made."""

    targets: tuple[Target, ...]
    steps: tuple[str, ...]


class WeightMapper:
    """Maps checkpoint names to places in a model.

    Args:
        modules: Leaves (parameters and persistent buffers of its own) of each module, by dotted
            path, as the model is built: before members of stacks are replaced.
        base_prefix: Attribute that holds the base model ("model", "transformer") in models with a
            head; "" for none.
        rules: What the model's author says of names; applied first.
        convert: What the architecture makes of a name after that.
        stacks: Fused members: {member path: (stack path, slot)}.
        may_ignore: Patterns, searched in names, of tensors that may be left out, with the reason;
            a plain sequence of patterns is what the model class itself leaves out.
    """

    def __init__(
        self,
        modules: Mapping[str, frozenset[str]],
        *,
        base_prefix: str = "",
        rules: NameRules | None = None,
        convert: Callable[[str], Conversion] = Conversion.unchanged,
        stacks: Mapping[str, tuple[str, int]] | None = None,
        may_ignore: Sequence[str] | Mapping[str, str] = (),
    ) -> None:
        if not isinstance(may_ignore, Mapping):
            may_ignore = dict.fromkeys(may_ignore, _OF_CLASS)
        self._modules = modules
        self._base = f"{base_prefix}." if base_prefix else ""
        self._rules = rules
        self._convert = convert
        self._stacks = dict(stacks or {})
        self._may_ignore = [(re.compile(pattern), why) for pattern, why in may_ignore.items()]
        self._cache: dict[str, _Match | None] = {}

    def with_stacks(self, stacks: Mapping[str, tuple[str, int]]) -> WeightMapper:
        """Return a mapper that knows the members of fused stacks: {member: (stack, slot)}."""
        mapper = copy.copy(self)
        mapper._stacks = dict(stacks)
        return mapper

    # -- what a checkpoint name means ------------------------------------------------------------

    def targets(self, name: str) -> tuple[Target, ...]:
        """Return every place that a tensor goes to: several for rows that are fused on disk."""
        found = self._find(name)
        return () if found is None else tuple(self._in_stack(target) for target in found.targets)

    def find(self, name: str) -> Target | None:
        """Return the place of a tensor, the first if it goes to several; None if it has none."""
        return next(iter(self.targets(name)), None)

    def target(self, name: str) -> Target:
        """Return the place of a tensor, the first if it goes to several.

        Raises:
            UnexpectedTensor: The model has no place for it.
        """
        target = self.find(name)
        if target is None:
            raise UnexpectedTensor(
                f"tensor `{name}` has no place in the model", hint=self.explain(name)
            )
        return target

    def layers_of(self, module: str) -> tuple[str, ...]:
        """Return the model paths of the layers that get the weight of a checkpoint module.

        None of a weight that only fills a part of a parameter, or that is transposed.
        """
        found = self._find(f"{module}.weight")
        if found is None or not all(target.is_weight for target in found.targets):
            return ()
        return tuple(target.module for target in found.targets)

    def module_of(self, module: str) -> str | None:
        """Return the model path of a checkpoint module that owns a whole weight, or None."""
        layers = self.layers_of(module)
        return layers[0] if len(layers) == 1 else None

    def modules_of(self, name: str) -> tuple[str, str] | None:
        """Return the module of a tensor, as the checkpoint and as the model calls it.

        None if the model has no such module, keeps the tensor in a parameter with others, or keeps
        it in several.
        """
        match = next(self._matches(name), None)  # asked once a name: not kept
        if match is None or len(match.targets) > 1 or match.targets[0].is_shared:
            return None
        found = match.targets[0]
        end = f".{found.leaf}"
        module = name.removesuffix(end) if name.endswith(end) else name.rpartition(".")[0]
        return module, found.module

    def why_dropped(self, name: str) -> str | None:
        """Return why a tensor without a place in the model may be left out; None if it may not."""
        for pattern, reason in _COMPUTED:
            if pattern.search(name):
                return reason
        if cache_scale_of(name) is not None:
            return "scale of a quantized key-value cache"
        renamed = None if self._rules is None else self._rules.apply(name)
        if renamed is not None and renamed.name is None:
            return "left out by a rule of the model"
        names = (name, *(converted.name for converted in self._converted(name).to))
        for pattern, reason in self._may_ignore:
            if any(pattern.search(candidate) for candidate in names):
                return reason
        return None

    def route(self, name: str) -> Route:
        """Return where a tensor goes, with each rule that fired on the way."""
        found = self._find(name)
        if found is None:
            steps = self._converted(name).steps
            dropped = self.why_dropped(name)
            return Route(name, (), steps, dropped or self._why_nowhere(name), dropped is not None)
        steps = found.steps
        for target in found.targets:
            stack = self._stacks.get(target.module)
            if stack is not None:
                steps += (f"{target.module} is slot {stack[1]} of {stack[0]}",)
        return Route(name, self.targets(name), steps)

    def explain(self, name: str) -> str:
        """Return one line for people: where a tensor goes and which rules sent it there."""
        return str(self.route(name))

    def _why_nowhere(self, name: str) -> str:
        refused = self._converted(name).refused
        if refused:
            return refused
        close = difflib.get_close_matches(name.rpartition(".")[0], self._modules, n=1)
        nearest = f", nearest module `{close[0]}`" if close else ""
        return f"no place in the model{nearest}"

    # -- steps ---------------------------------------------------------------------------------

    def _in_stack(self, target: Target) -> Target:
        stack = self._stacks.get(target.module)
        return target if stack is None else replace(target, module=stack[0], slot=stack[1])

    def _find(self, name: str) -> _Match | None:
        if name not in self._cache:
            self._cache[name] = next(self._matches(name), None)
        return self._cache[name]

    def _converted(self, name: str) -> Conversion:
        """Apply the rules of the model's author, then what the architecture converts."""
        if self._rules is None:
            return self._convert(name)
        renamed = self._rules.apply(name)
        if renamed.name is None:
            return Conversion((), steps=renamed.steps)
        done = self._convert(renamed.name)
        to = (
            done.to
            if renamed.slot is None
            else tuple(replace(end, slot=renamed.slot) for end in done.to)
        )
        return replace(done, to=to, steps=(*renamed.steps, *done.steps))

    def _matches(self, name: str) -> Iterator[_Match]:
        """Yield the places of each candidate name that is in the model, best first."""
        split = list(self._places(name))
        yield from (found for found in split if self._has(found.targets))
        for found in split:
            targets = tuple(
                replace(target, leaf=_LEGACY_LEAVES.get(target.leaf, target.leaf))
                for target in found.targets
            )
            if self._has(targets):
                yield _Match(targets, (*found.steps, "legacy name of a norm"))
        if cache_scale_of(name) is None:  # the attention's, though it may lie in a linear layer
            yield from (found for found in split if all(map(self._may_be_companion, found.targets)))
            yield from self._beside_weights(name)

    def _has(self, targets: tuple[Target, ...]) -> bool:
        return all(target.leaf in self._modules[target.module] for target in targets)

    def _places(self, name: str) -> Iterator[_Match]:
        """Split candidate names at the longest known module path, without regard to the leaf."""
        converted = self._converted(name)
        if converted.refused or not converted.to:
            return
        starts = [(converted.to, converted.steps)]
        if any(end.name != name for end in converted.to):
            starts.append(((Converted(name),), ()))
        for ends, steps in starts:
            for label, change in self._changes():
                names = [change(end.name) for end in ends]
                found = [
                    end.at(*place)
                    for end, new in zip(ends, names, strict=True)
                    if new and (place := self._split(new)) is not None
                ]
                if len(found) == len(ends):
                    changed = (f"{label} -> {names[0]}",) if label else ()
                    yield _Match(tuple(found), (*steps, *changed))

    def _changes(self) -> Iterator[tuple[str, Callable[[str], str]]]:
        """Yield ways to read a name, with a label for people; "" is returned where one fails."""
        base, head = self._base, f".{_HEAD}."
        yield "", lambda name: name
        if base:
            yield (
                f"base prefix `{base}` taken off",
                lambda name: name[len(base) :] if name.startswith(base) else "",
            )
            yield f"base prefix `{base}` added", lambda name: base + name
        yield "nested head", lambda name: name[name.find(head) + 1 :] if head in name else ""

    def _split(self, name: str) -> tuple[str, str] | None:
        """Split at the longest known module path; None if that module owns no tensors."""
        module = name
        while module:
            module = module.rpartition(".")[0]
            if module in self._modules:
                leaf = name[len(module) + 1 :] if module else name
                return (module, leaf) if self._modules[module] else None
        return None

    def _may_be_companion(self, place: Target) -> bool:
        """True for leaves of a quantized weight; what is below a container is none."""
        leaf, owned = place.leaf, self._modules[place.module]
        if leaf.endswith(".weight") or leaf == "bias":
            return False
        return "weight" in owned or any(leaf.startswith((f"{own}_", f"{own}.")) for own in owned)

    def _beside_weights(self, name: str) -> Iterator[_Match]:
        """Send what goes with a weight that is converted, such as one expert's scale, its way."""
        module, _, leaf = name.rpartition(".")
        while module and leaf not in ("weight", "bias") and not leaf.endswith(".weight"):
            weight = f"{module}.weight"
            for found in self._places(weight):
                if self._has(found.targets):
                    targets = tuple(_beside(target, leaf) for target in found.targets)
                    yield _Match(targets, (f"goes with {weight}", *found.steps))
            module, _, last = module.rpartition(".")
            leaf = f"{last}.{leaf}"


def _beside(weight: Target, leaf: str) -> Target:
    return replace(weight, leaf=leaf if weight.leaf == "weight" else f"{weight.leaf}.{leaf}")


__all__ = ["Conversion", "Converted", "Cut", "Join", "Piece", "Route", "Target", "WeightMapper"]
