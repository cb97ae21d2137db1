"""The tensors of one module by leaf, and the checks that every format makes of their headers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch

from quantload.errors import FormatMismatch, MissingTensor, UnsupportedVariant, listed
from quantload.loader.checkpoint import Checkpoint, TensorEntry
from quantload.loader.formats.dense import quantized_names
from quantload.loader.source import SourceWeight

_INPUT_SCALES = {"input_scale", "activation_scale", "input_global_scale", "expert_input_scale"}


@dataclass(frozen=True, slots=True)
class ModuleLeaves:
    """The tensors of one module.

    Args:
        module: Dotted checkpoint name.
        entries: Headers by leaf: "qweight", "weight.absmax", ...
        checkpoint_name: For messages.
    """

    module: str
    entries: Mapping[str, TensorEntry]
    checkpoint_name: str

    def __contains__(self, leaf: str) -> bool:
        return leaf in self.entries

    def __getitem__(self, leaf: str) -> TensorEntry:
        return self.entries[leaf]

    @property
    def names(self) -> dict[str, str]:
        """Tensor names by leaf, as `SourceWeight.leaves` holds them."""
        return {leaf: entry.name for leaf, entry in self.entries.items()}

    def require(self, leaves: Iterable[str], *, because: str) -> None:
        """Demand that leaves are there.

        Args:
            leaves: Names.
            because: What says so: "the config says 4 bits, asymmetric".

        Raises:
            MissingTensor: One of them is missing.
        """
        for leaf in leaves:
            if leaf not in self.entries:
                raise MissingTensor(
                    f"tensor `{self.module}.{leaf}` is missing in `{self.checkpoint_name}`; "
                    f"{because}, the module has {listed(self.entries)}"
                )

    def expect(
        self,
        leaf: str,
        *,
        dtypes: Collection[torch.dtype],
        shapes: Collection[tuple[int, ...]] | None = None,
        because: str,
    ) -> TensorEntry:
        """Demand a dtype, and a shape, of a leaf that is there.

        Args:
            leaf: Name of the leaf.
            dtypes: Those that may stand there.
            shapes: Those that may stand there; None for any.
            because: What says so: "the config says 4 bits in groups of 128".

        Returns:
            Its header.

        Raises:
            FormatMismatch: It is something else.
        """
        entry = self.entries[leaf]
        if entry.dtype not in dtypes:
            raise FormatMismatch(
                f"tensor `{entry.name}` is `{entry.dtype}`, expected {listed(map(str, dtypes))}, "
                f"in `{self.checkpoint_name}`",
                hint=because,
            )
        if shapes is not None and entry.shape not in shapes:
            raise FormatMismatch(
                f"tensor `{entry.name}` has shape `{entry.shape}`, expected "
                f"{listed(map(str, shapes))}, in `{self.checkpoint_name}`",
                hint=because,
            )
        return entry


def by_module(checkpoint: Checkpoint, leaves: Collection[str]) -> dict[str, ModuleLeaves]:
    """Group tensors by module, in the order of the checkpoint.

    A leaf may have dots in it; of two that fit a name, the longer one counts.

    Args:
        checkpoint: An open checkpoint.
        leaves: Names of the leaves that the format knows; other tensors are left out.
    """
    known = frozenset(leaves)
    most_dots = max((leaf.count(".") for leaf in known), default=0)
    found: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in checkpoint.tensors.items():
        if not most_dots:  # as nearly all formats have it
            module, dot, leaf = name.rpartition(".")
            if dot and leaf in known:
                found.setdefault(module, {})[leaf] = entry
            continue
        parts = name.split(".")
        for count in range(min(most_dots + 1, len(parts) - 1), 0, -1):
            leaf = ".".join(parts[-count:])
            if leaf in known:
                found.setdefault(".".join(parts[:-count]), {})[leaf] = entry
                break
    return {module: ModuleLeaves(module, e, checkpoint.name) for module, e in found.items()}


def refuse_leftovers(checkpoint: Checkpoint, consumed: Iterable[str]) -> None:
    """Refuse quantized tensors that nothing reads: they would be taken for full precision.

    Args:
        checkpoint: An open checkpoint.
        consumed: Names of the tensors that weights are decoded from.

    Raises:
        UnsupportedVariant: There are some.
    """
    taken = set(consumed)
    left = quantized_names(e for e in checkpoint.tensors.values() if e.name not in taken)
    if left:
        raise UnsupportedVariant(
            f"quantized tensors that are not the weight of one module are not read: "
            f"{listed(left)}, in `{checkpoint.name}`"
        )


def refuse_unknown_parts(checkpoint: Checkpoint, weights: Mapping[str, SourceWeight]) -> None:
    """Refuse other tensors of quantized modules than a bias: each may be a part of the weight.

    Args:
        checkpoint: An open checkpoint.
        weights: What was read of it, by module.

    Raises:
        UnsupportedVariant: There are some.
    """
    quantized = {module: weight for module, weight in weights.items() if weight.is_quantized}
    taken = {name for weight in quantized.values() for name in weight.leaves.values()}
    unknown = [
        name
        for name in checkpoint.tensors
        if name.rpartition(".")[0] in quantized and name not in taken and not name.endswith(".bias")
    ]
    if unknown:
        raise UnsupportedVariant(
            f"quantized modules have tensors that are not read: {listed(unknown)}, in "
            f"`{checkpoint.name}`"
        )


def require_input_scales(checkpoint: Checkpoint, weights: Mapping[str, SourceWeight]) -> None:
    """Demand the fixed scale of an input of every module that should have one, if any has it.

    An export in which none has one is of another kind: its inputs are quantized dynamically.

    Args:
        checkpoint: An open checkpoint.
        weights: What was read of it, by module.

    Raises:
        MissingTensor: Some have their scale, some have not.
    """
    inputs = [(weight, weight.scheme and weight.scheme.input) for weight in weights.values()]
    static = [w for w, input in inputs if input and (not input.dynamic or input.scale == "e4m3")]
    without = [weight.module for weight in static if not _INPUT_SCALES & weight.leaves.keys()]
    if without and len(without) < len(static):
        raise MissingTensor(
            f"`{len(without)}` of `{len(static)}` modules have no scale for their input, which the "
            f"config says is fixed: {listed(f'{m}.input_scale' for m in without)} missing, in "
            f"`{checkpoint.name}`",
            hint="a shard may be missing",
        )
