"""How an architecture keeps and calls the experts of a block, read off its own module.

Most modules of transformers 5.24 have the parameters

    gate_up_proj   [E, 2I, H]   rows of gate, then those of up; or alternating (gpt-oss)
    up_proj        [E, I, H]    where there is no gate (NemotronH)
    down_proj      [E, H, I]
    *_bias         [E, 2I] and [E, H]
    input first    [E, K, N]    (gpt-oss, Llama 4, Aria)

and are called with tokens and their routing, `forward(x [T, H], index [T, k], weights [T, k])`, or
with the tokens of each expert one after the other, `forward(x [E * T, H])` (Llama 4).

What is read here is a conjecture; `experts_proof.py` puts it to the test.

Letters: E experts, H width of the model, I width inside an expert, T tokens, k experts of a token.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from torch import nn

_BIAS = "_bias"


@dataclass(frozen=True, kw_only=True)
class Projection:
    """One of the two weights of an expert.

    Args:
        leaf: Name of the parameter that holds it for all experts in the model's own code.
        parts: Slots of an expert: 2 where rows of gate come before those of up, else 1.
        rows: N of one part.
        columns: K.
        has_bias: True if there is a bias, under the name of the parameter with `_bias`.
        has_input_first: True if the model's own parameter is [E, K, N].
    """

    leaf: str
    parts: int
    rows: int
    columns: int
    has_bias: bool = False
    has_input_first: bool = False

    @property
    def bias_leaf(self) -> str:
        """Name of the biases."""
        return self.leaf + _BIAS


@dataclass(frozen=True, kw_only=True)
class ExpertsLayout:
    """The experts of one block.

    Args:
        experts: E.
        up: The weight that reads the tokens.
        down: The weight that gives the result.
        is_gated: True if the product of `up` holds gate and up.
        is_routed: False if the tokens come sorted, as many for each expert.
        arguments: Names of the arguments of the forward.
        post_norm: Name of the module that each expert's result goes through, "" if none.
    """

    experts: int
    up: Projection
    down: Projection
    is_gated: bool = True
    is_routed: bool = True
    arguments: tuple[str, ...] = ("hidden_states", "top_k_index", "top_k_weights")
    post_norm: str = ""

    @classmethod
    def gated(
        cls, *, experts: int, hidden: int, intermediate: int, bias: bool = False
    ) -> ExpertsLayout:
        """Return the usual layout, for models written by hand.

        Args:
            experts: E.
            hidden: H.
            intermediate: I.
            bias: True if both weights have biases.
        """
        return cls(
            experts=experts,
            up=Projection(
                leaf="gate_up_proj", parts=2, rows=intermediate, columns=hidden, has_bias=bias
            ),
            down=Projection(
                leaf="down_proj", parts=1, rows=hidden, columns=intermediate, has_bias=bias
            ),
        )

    @property
    def projections(self) -> tuple[Projection, Projection]:
        """Both weights."""
        return self.up, self.down

    def projection(self, leaf: str) -> Projection:
        """Return the weight that a parameter, or its bias, belongs to."""
        found = {p.leaf: p for p in self.projections} | {p.bias_leaf: p for p in self.projections}
        return found[leaf]

    def is_bias(self, leaf: str) -> bool:
        """True for the name of biases."""
        return leaf in (self.up.bias_leaf, self.down.bias_leaf)


def holds_experts(module: nn.Module) -> bool:
    """True if parameters of the module hold the weights of all experts of a block."""
    matrices = [n for n, p in module._parameters.items() if p is not None and p.ndim == 3]
    return "down_proj" in matrices and len(matrices) > 1


def layout_of(module: nn.Module) -> ExpertsLayout | str:
    """Return the layout of a module that `holds_experts`, or why it is not known."""
    shapes = {n: tuple(p.shape) for n, p in module._parameters.items() if p is not None}
    up = next((name for name in ("gate_up_proj", "up_proj") if name in shapes), "")
    known = {up, "down_proj", f"{up}{_BIAS}", f"down_proj{_BIAS}"}
    if not up or "down_proj" not in shapes or not known.issuperset(shapes):
        return f"its parameters are {', '.join(sorted(shapes))}"
    if any(buffer is not None for buffer in module._buffers.values()):
        return "it has buffers of its own"
    arguments = tuple(inspect.signature(type(module).forward).parameters)[1:]
    if len(arguments) not in (1, 3):
        return f"its forward takes {', '.join(arguments)}"
    is_gated = up == "gate_up_proj" and bool(getattr(module, "has_gate", True))
    input_first = _has_input_first(module, shapes[up], shapes["down_proj"], is_gated=is_gated)
    if input_first is None:
        return f"shapes {shapes[up]} and {shapes['down_proj']} do not fit each other"
    return _layout(module, shapes, up, arguments, is_gated=is_gated, input_first=input_first)


def _has_input_first(
    module: nn.Module, up: tuple[int, ...], down: tuple[int, ...], *, is_gated: bool
) -> bool | None:
    """Say whether parameters are [E, K, N]; None if the shapes are those of no experts."""
    if len(up) != 3 or len(down) != 3 or up[0] != down[0]:
        return None
    each = 2 if is_gated else 1
    fits = {
        False: up[2] == down[1] and up[1] == each * down[2],
        True: up[1] == down[2] and up[2] == each * down[1],
    }
    if all(fits.values()):  # without a gate both do
        return bool(getattr(module, "is_transposed", False))
    return next((first for first, fit in fits.items() if fit), None)


def _layout(
    module: nn.Module,
    shapes: dict[str, tuple[int, ...]],
    up: str,
    arguments: tuple[str, ...],
    *,
    is_gated: bool,
    input_first: bool,
) -> ExpertsLayout:
    alternates = is_gated and not getattr(module, "is_concatenated", True)
    parts = 2 if is_gated and not alternates else 1
    first, last = (2, 1) if input_first else (1, 2)
    return ExpertsLayout(
        experts=shapes[up][0],
        up=Projection(
            leaf=up,
            parts=parts,
            rows=shapes[up][first] // parts,
            columns=shapes[up][last],
            has_bias=up + _BIAS in shapes,
            has_input_first=input_first,
        ),
        down=Projection(
            leaf="down_proj",
            parts=1,
            rows=shapes["down_proj"][first],
            columns=shapes["down_proj"][last],
            has_bias="down_proj" + _BIAS in shapes,
            has_input_first=input_first,
        ),
        is_gated=is_gated,
        is_routed=len(arguments) == 3,
        arguments=arguments,
        post_norm="post_expert_norm" if getattr(module, "has_post_expert_norm", False) else "",
    )


__all__ = ["ExpertsLayout", "Projection", "holds_experts", "layout_of"]
