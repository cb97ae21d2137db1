"""`WeightMapper`: where a tensor of a checkpoint belongs in a model, decided by names alone.

    name  ->  candidates: renamed by transformers, with or without the base model's prefix, as it is,
              with a nested head stripped, with legacy norm names
          ->  the first whose module path is in the model; the rest of the name is the leaf
          ->  (stack module, leaf, slot) if the module is a member of a fused stack

Module paths are looked up whole and longest first, so that leaves with dots in them
(`weight.quant_state.bitsandbytes__nf4`) stay whole and `gate_proj` never matches `gate_proj_2`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Target:
    """A place in the model.

    Args:
        module: Dotted path of the module; "" is the model itself.
        leaf: Name of the tensor in the module ("weight", "bias", ...).
        slot: Position in the stack, 0 for a module that is no stack.
    """

    module: str
    leaf: str
    slot: int = 0

    def __str__(self) -> str:
        name = f"{self.module}.{self.leaf}" if self.module else self.leaf
        return f"{name}[{self.slot}]" if self.slot else name


class WeightMapper:
    """Maps checkpoint names to places in a model.

    Args:
        modules: Leaves (parameters and buffers of its own) of each module, by dotted path, as the
            model is built: before members of stacks are replaced.
        base_prefix: Attribute that holds the base model ("model", "transformer"), or "".
        rename: Renaming of checkpoint names that comes with the architecture.
        stacks: Fused members: {member path: (stack path, slot)}.
        may_ignore: Patterns, searched in names, of tensors that the model class leaves out.
    """

    def __init__(
        self,
        modules: Mapping[str, frozenset[str]],
        *,
        base_prefix: str = "",
        rename: Callable[[str], str] | None = None,
        stacks: Mapping[str, tuple[str, int]] | None = None,
        may_ignore: Sequence[str] = (),
    ) -> None:
        self._modules = modules
        self._base = f"{base_prefix}." if base_prefix else ""
        self._rename = rename
        self._stacks = dict(stacks or {})
        self._may_ignore = [re.compile(pattern) for pattern in may_ignore]
        self._cache: dict[str, tuple[str, str] | None] = {}

    def with_stacks(self, stacks: Mapping[str, tuple[str, int]]) -> WeightMapper:
        """Return a mapper that knows the members of fused stacks: {member: (stack, slot)}."""
        mapper = WeightMapper(self._modules, rename=self._rename, stacks=stacks)
        mapper._base, mapper._may_ignore, mapper._cache = self._base, self._may_ignore, self._cache
        return mapper

    def module_of(self, module: str) -> str | None:
        """Return the model path of a checkpoint module that owns a weight; None if there is none."""
        found = self._find(f"{module}.weight")
        return found[0] if found is not None and found[1] == "weight" else None

    def modules_of(self, name: str) -> tuple[str, str] | None:
        """Return the module of a tensor, as the checkpoint and as the model calls it."""
        found = self._find(name)
        if found is None:
            return None
        module, leaf = found
        end = f".{leaf}"
        return name.removesuffix(end) if name.endswith(end) else name.rpartition(".")[0], module

    def find(self, name: str) -> Target | None:
        """Return the place of a tensor, or None if the model has none for it."""
        found = self._find(name)
        if found is None:
            return None
        module, leaf = found
        stack = self._stacks.get(module)
        return Target(module, leaf) if stack is None else Target(stack[0], leaf, stack[1])

    def target(self, name: str) -> Target:
        """Return the place of a tensor.

        Raises:
            UnexpectedTensor: The model has no place for it.
        """
        target = self.find(name)
        if target is None:
            nearest = self._nearest(name)
            raise UnexpectedTensor(
                f"tensor `{name}` has no place in the model",
                hint=f"the nearest module of the model is `{nearest}`" if nearest else "",
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
            reason = self.why_dropped(name)
            return f"{name}: dropped: {reason}" if reason else f"{name}: no place in the model"
        module, leaf = found
        in_model = f"{module}.{leaf}" if module else leaf
        line = name if in_model == name else f"{name} -> {in_model}"
        stack = self._stacks.get(module)
        return line if stack is None else f"{line} -> `{leaf}` of slot {stack[1]} in {stack[0]}"

    # -- steps ---------------------------------------------------------------------------------

    def _find(self, name: str) -> tuple[str, str] | None:
        if name not in self._cache:
            self._cache[name] = next(self._matches(name), None)
        return self._cache[name]

    def _matches(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield (module path, leaf) of each candidate name that is in the model, best first."""
        split = [found for c in self._candidates(name) if (found := self._split(c)) is not None]
        yield from (found for found in split if found[1] in self._modules[found[0]])
        for module, leaf in split:
            legacy = _LEGACY_LEAVES.get(leaf)
            if legacy in self._modules[module]:
                yield module, legacy  # type: ignore[misc]  # a member of a set of names
        yield from (found for found in split if self._may_be_companion(*found))

    def _candidates(self, name: str) -> Iterator[str]:
        for start in dict.fromkeys((self._rename(name) if self._rename else name, name)):
            yield start
            if self._base:
                yield start.removeprefix(self._base)
                yield self._base + start
            head = start.find(f".{_HEAD}.")
            if head >= 0:
                yield start[head + 1 :]

    def _split(self, name: str) -> tuple[str, str] | None:
        """Split at the longest known module path that owns tensors."""
        module = name
        while module:
            module = module.rpartition(".")[0]
            if module in self._modules:
                leaves = self._modules[module]
                leaf = name[len(module) + 1 :] if module else name
                return (module, leaf) if leaves else None
        return None

    def _may_be_companion(self, module: str, leaf: str) -> bool:
        """True for leaves of a quantized weight; what is below a container is none."""
        return "weight" in self._modules[module] and not leaf.endswith(".weight") and leaf != "bias"

    def _nearest(self, name: str) -> str:
        close = difflib.get_close_matches(name.rpartition(".")[0], self._modules, n=1)
        return close[0] if close else ""
