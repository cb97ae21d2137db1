"""`WeightMapper`: where a tensor of a checkpoint belongs in a model, decided by names alone.

    name  ->  candidates: as transformers converts it, with or without the base model's prefix, as
              it is, with a nested head stripped, with legacy norm names
          ->  the first whose module path is in the model; the rest of the name is the leaf
          ->  (stack module, leaf, slot) if the module is a member of a fused stack

Module paths are looked up whole and longest first, so that leaves with dots in them
(`weight.quant_state.bitsandbytes__nf4`) stay whole and `gate_proj` never matches `gate_proj_2`.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from quantload.errors import UnexpectedTensor

# Tensors that old checkpoints hold although the model computes them itself.
_COMPUTED = (
    (re.compile(r"rotary_(pos_)?emb\.(inv_freq|cos_cached|sin_cached)$"), "rotary table, computed"),
    (re.compile(r"(^|\.)attn(ention)?\.(masked_)?bias$"), "causal mask, computed"),
    (re.compile(r"(^|\.)position_ids$"), "positions, computed"),
    (re.compile(r"(^|\.)num_batches_tracked$"), "training counter"),
)
_CACHE_SCALE = re.compile(
    r"(^|\.)((k|v|kv|q|qkv)_(scale|zero_point)"
    r"|(q|k|v|qkv)_proj\.(output_scale|output_zero_point)"
    r"|(k|v)_cache\.(scale|zero_point))$"
)
_LEGACY_LEAVES = {"gamma": "weight", "beta": "bias"}
_HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class Target:
    """A place in the model.

    Args:
        module: Dotted path of the module; "" is the model itself.
        leaf: Name of the tensor in the module ("weight", "bias", ...).
        slot: Position in the stack, 0 for a module that is no stack.
        piece: The part of a parameter [E, parts * N, K] that one expert's weight [N, K] fills.
    """

    module: str
    leaf: str
    slot: int = 0
    piece: Piece | None = None

    @property
    def name(self) -> str:
        """Full name of the parameter."""
        return f"{self.module}.{self.leaf}" if self.module else self.leaf

    def __str__(self) -> str:
        if self.piece is not None:
            return f"{self.name}[expert {self.piece.expert}, part {self.piece.part}]"
        return f"{self.name}[{self.slot}]" if self.slot else self.name


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a parameter [E, parts * N, K]: rows part * N .. (part + 1) * N of one expert.

    With `is_transposed` the parameter is [E, K, parts * N].
    """

    expert: int
    part: int
    parts: int
    is_transposed: bool = False


@dataclass(frozen=True, slots=True)
class Conversion:
    """What an architecture makes of a checkpoint name.

    Args:
        name: Name in the model.
        piece: The part of that parameter which the tensor fills; None if all of it.
        refused: Why the tensor cannot be used, "" if it can.
    """

    name: str
    piece: Piece | None = None
    refused: str = ""


class WeightMapper:
    """Maps checkpoint names to places in a model.

    Args:
        modules: Leaves (parameters and persistent buffers of its own) of each module, by dotted
            path, as the model is built: before members of stacks are replaced.
        base_prefix: Attribute that holds the base model ("model", "transformer"), or "".
        convert: What the architecture makes of a checkpoint name.
        stacks: Fused members: {member path: (stack path, slot)}.
        may_ignore: Patterns, searched in names, of tensors that the model class leaves out.
    """

    def __init__(
        self,
        modules: Mapping[str, frozenset[str]],
        *,
        base_prefix: str = "",
        convert: Callable[[str], Conversion] = Conversion,
        stacks: Mapping[str, tuple[str, int]] | None = None,
        may_ignore: Sequence[str] = (),
    ) -> None:
        self._modules = modules
        self._base = f"{base_prefix}." if base_prefix else ""
        self._convert = convert
        self._stacks = dict(stacks or {})
        self._may_ignore = [re.compile(pattern) for pattern in may_ignore]
        self._cache: dict[str, Target | None] = {}

    def with_stacks(self, stacks: Mapping[str, tuple[str, int]]) -> WeightMapper:
        """Return a mapper that knows the members of fused stacks: {member: (stack, slot)}."""
        mapper = copy.copy(self)
        mapper._stacks = dict(stacks)
        return mapper

    def module_of(self, module: str) -> str | None:
        """Return the model path of a checkpoint module that owns a whole weight, or None."""
        found = self._find(f"{module}.weight")
        whole = found is not None and found.leaf == "weight" and found.piece is None
        return found.module if found is not None and whole else None

    def modules_of(self, name: str) -> tuple[str, str] | None:
        """Return the module of a tensor, as the checkpoint and as the model calls it.

        None if the model has no such module, or keeps the tensor in a parameter with others.
        """
        found = next(self._matches(name), None)  # asked once a name: not kept
        if found is None or found.piece is not None:
            return None
        end = f".{found.leaf}"
        module = name.removesuffix(end) if name.endswith(end) else name.rpartition(".")[0]
        return module, found.module

    def find(self, name: str) -> Target | None:
        """Return the place of a tensor, or None if the model has none for it."""
        found = self._find(name)
        if found is None:
            return None
        stack = self._stacks.get(found.module)
        return found if stack is None else Target(stack[0], found.leaf, stack[1])

    def target(self, name: str) -> Target:
        """Return the place of a tensor.

        Raises:
            UnexpectedTensor: The model has no place for it.
        """
        target = self.find(name)
        if target is None:
            raise UnexpectedTensor(
                f"tensor `{name}` has no place in the model", hint=self.explain(name)
            )
        return target

    def why_dropped(self, name: str) -> str | None:
        """Return why a tensor without a place in the model may be left out; None if it may not."""
        for pattern, reason in _COMPUTED:
            if pattern.search(name):
                return reason
        if _CACHE_SCALE.search(name):
            return "scale of a quantized key-value cache"
        if any(pattern.search(name) for pattern in self._may_ignore):
            return "left out by the model class"
        return None

    def explain(self, name: str) -> str:
        """Return one line for people: where a tensor goes and how its name was changed."""
        found = self._find(name)
        if found is None:
            return f"{name}: {self._why_nowhere(name)}"
        line = name if str(found) == name else f"{name} -> {found}"
        stack = self._stacks.get(found.module)
        return (
            line if stack is None else f"{line} -> `{found.leaf}` of slot {stack[1]} in {stack[0]}"
        )

    def _why_nowhere(self, name: str) -> str:
        reason = self.why_dropped(name)
        if reason is not None:
            return f"dropped: {reason}"
        refused = self._convert(name).refused
        if refused:
            return refused
        close = difflib.get_close_matches(name.rpartition(".")[0], self._modules, n=1)
        nearest = f", nearest module `{close[0]}`" if close else ""
        return f"no place in the model{nearest}"

    # -- steps ---------------------------------------------------------------------------------

    def _find(self, name: str) -> Target | None:
        if name not in self._cache:
            self._cache[name] = next(self._matches(name), None)
        return self._cache[name]

    def _matches(self, name: str) -> Iterator[Target]:
        """Yield the place of each candidate name that is in the model, best first."""
        split = []
        for found in self._places(name):
            if found.leaf in self._modules[found.module]:
                yield found
            split.append(found)
        for found in split:
            leaf = _LEGACY_LEAVES.get(found.leaf, "")
            if leaf in self._modules[found.module]:
                yield replace(found, leaf=leaf)
        yield from (found for found in split if self._may_be_companion(found))

    def _places(self, name: str) -> Iterator[Target]:
        """Split candidate names at the longest known module path, without regard to the leaf."""
        converted = self._convert(name)
        if converted.refused:
            return
        starts = [(converted.name, converted.piece)]
        if converted.name != name:
            starts.append((name, None))
        for start, piece in starts:
            for candidate in self._candidates(start):
                found = self._split(candidate)
                if found is not None:
                    yield found if piece is None else Target(found.module, found.leaf, 0, piece)

    def _candidates(self, start: str) -> Iterator[str]:
        yield start
        if self._base:
            yield start.removeprefix(self._base)
            yield self._base + start
        head = start.find(f".{_HEAD}.")
        if head >= 0:
            yield start[head + 1 :]

    def _split(self, name: str) -> Target | None:
        """Split at the longest known module path; None if that module owns no tensors."""
        module = name
        while module:
            module = module.rpartition(".")[0]
            if module in self._modules:
                leaf = name[len(module) + 1 :] if module else name
                return Target(module, leaf) if self._modules[module] else None
        return None

    def _may_be_companion(self, place: Target) -> bool:
        """True for leaves of a quantized weight; what is below a container is none."""
        leaf = place.leaf
        owns_weight = "weight" in self._modules[place.module]
        return owns_weight and not leaf.endswith(".weight") and leaf != "bias"
