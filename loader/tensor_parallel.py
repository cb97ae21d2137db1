"""Which layers lose whole groups of weights when an engine splits them over several devices.

Engines split the output of a block (`o_proj`, `down_proj`, ...) along its input features, and all
other linear layers along their output features. Many kernels want every part to hold whole groups:
a part of `K / parts` columns that ends inside a group is not loaded, or loaded wrongly.
"""

from __future__ import annotations

from collections.abc import Iterable

from quantload.errors import listed
from quantload.quant.scheme import Scheme

# Last components of the names of layers that are split along their input features.
SPLIT_INPUTS = {
    "c_proj",
    "dense_4h_to_h",
    "down_proj",
    "fc2",
    "o_proj",
    "out_proj",
    "w2",
    "wo",
}
Layer = tuple[str, tuple[int, ...], Scheme | None]


def layers_cut(layers: Iterable[Layer], parts: int) -> dict[str, str]:
    """Return the layers of which a split over `parts` devices cuts a group or a block.

    Args:
        layers: (module, (N, K), scheme); layers in full precision are left out.
        parts: Number of devices.

    Returns:
        What is cut, for people, by module.
    """
    found = {}
    for module, shape, scheme in layers:
        if scheme is None or scheme.weight is None or len(shape) != 2:
            continue
        axis = int(module.rpartition(".")[2] in SPLIT_INPUTS)
        size = scheme.weight.block_of(shape[0], shape[1])[axis]
        whole, what = shape[axis], ("rows", "columns")[axis]
        has_blocks = 1 < size < whole
        if whole % parts or (has_blocks and whole // parts % size):
            found[module] = (
                f"{whole} {what} in {parts} parts, groups of {size if has_blocks else 1}"
            )
    return found


def about_split(layers: Iterable[Layer], parts: int) -> list[str]:
    """Warn of layers of which a split over `parts` devices cuts a group or a block."""
    cut = layers_cut(layers, parts)
    alike: dict[str, list[str]] = {}
    for module, what in cut.items():
        alike.setdefault(what, []).append(module)
    return [
        f"{len(modules)} layers cannot be split over {parts} devices without cutting a group: "
        f"{listed(modules)}: {what}"
        for what, modules in alike.items()
    ]


__all__ = ["SPLIT_INPUTS", "about_split", "layers_cut"]
