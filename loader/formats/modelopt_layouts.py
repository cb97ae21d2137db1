"""ModelOpt: one weight from its headers to canonical form; `modelopt.py` specifies the layouts."""

from __future__ import annotations

import torch
from torch import Tensor

from quantload.errors import FormatMismatch, UnsupportedVariant
from quantload.loader.checkpoint import Checkpoint
from quantload.loader.formats.finite import refuse_nonfinite
from quantload.loader.formats.float8 import as_scale, float8_scheme
from quantload.loader.formats.modelopt_config import Algorithm
from quantload.loader.formats.module_leaves import ModuleLeaves
from quantload.loader.safetensors_header import NAMES
from quantload.loader.source import FLOAT_DTYPES, SourceWeight
from quantload.quant.grid import E2M1, E4M3, INT4, INT8
from quantload.quant.packing import unpack_bytes
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.scheme import ScaleKind, WeightScheme, scheme_of

Shape = tuple[int, int]

_CODES = {
    "e4m3": torch.float8_e4m3fn,
    "e4m3 blocks": torch.float8_e4m3fn,
    "mxfp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,
    "nvfp4": torch.uint8,
    "mxfp4": torch.uint8,
}
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
_SCALES = {"mxfp8": _EXPONENTS, "mxfp4": _EXPONENTS, "nvfp4": (torch.float8_e4m3fn,)}
_KINDS: dict[str, ScaleKind] = {"mxfp8": "e8m0", "mxfp4": "e8m0", "nvfp4": "e4m3"}
_SCALAR = ((), (1,))


def describe(leaves: ModuleLeaves, algorithm: Algorithm, decided_by: str) -> SourceWeight:
    """Describe a quantized weight from its headers.

    Args:
        leaves: Tensors of the module, low-rank factors under their short names.
        algorithm: How the config says it is stored.
        decided_by: The entry of the config that says so.

    Raises:
        MissingTensor: A tensor that the algorithm needs is missing.
        FormatMismatch: dtypes or shapes do not fit the algorithm or each other.
        UnsupportedVariant: The weight has not two dimensions.
    """
    because = f"the config says `{algorithm.name}` ({decided_by})"
    needed = ["weight", "weight_scale"]
    if algorithm.layout == "nvfp4":
        needed.append("weight_scale_2")
    if algorithm.name == "NVFP4_SVD":
        needed += ["svdquant_lora_a", "svdquant_lora_b"]
    leaves.require(needed, because=because)
    codes = leaves.expect("weight", dtypes=(_CODES[algorithm.layout],), because=because)
    if len(codes.shape) != 2:
        raise UnsupportedVariant(
            f"tensor `{codes.name}` has {len(codes.shape)} dimensions, expected 2, in "
            f"`{leaves.checkpoint_name}`"
        )
    scale = leaves.expect(
        "weight_scale", dtypes=_SCALES.get(algorithm.layout, FLOAT_DTYPES), because=because
    )
    shape = _logical_shape((codes.shape[0], codes.shape[1]), algorithm)
    weight = _weight_scheme(shape, scale.shape, algorithm)
    if weight is None:
        raise FormatMismatch(
            f"tensor `{scale.name}` has shape `{scale.shape}`, which fits no weight of `{shape}` "
            f"(`{codes.name}` has shape `{codes.shape}`), in `{leaves.checkpoint_name}`",
            hint=because,
        )
    _check_others(leaves, algorithm, shape, because)
    return SourceWeight(
        module=leaves.module,
        shape=shape,
        scheme=scheme_of(weight, algorithm.input, name=algorithm.name),
        encoding=_encoding(leaves, algorithm, weight),
        dtype=torch.float32,
        leaves=leaves.names,
        decided_by=decided_by,
        obstacle=_obstacle(leaves),
    )


def _obstacle(leaves: ModuleLeaves) -> str:
    if "svdquant_lora_a" in leaves:
        return f"a product of rank {leaves['svdquant_lora_a'].shape[0]} is added to its codes"
    if "pre_quant_scale" in leaves:
        return "its input channels have factors of their own"
    return ""


def _logical_shape(stored: Shape, algorithm: Algorithm) -> Shape:
    rows, columns = stored
    if algorithm.layout == "int4":
        return 2 * rows, columns
    return rows, columns * (2 if algorithm.layout in ("nvfp4", "mxfp4") else 1)


def _weight_scheme(
    shape: Shape, scale: tuple[int, ...], algorithm: Algorithm
) -> WeightScheme | None:
    """Return what shares one scale; None if the shapes do not fit."""
    match algorithm.layout:
        case "e4m3":
            return float8_scheme(shape, scale, None)
        case "e4m3 blocks":
            return float8_scheme(shape, scale, (128, 128))
        case "int8":
            return float8_scheme(shape, scale, None, grid=INT8)
    group_size = _group_size(shape, scale, algorithm)
    if group_size is None:
        return None
    grid = {"mxfp8": E4M3, "int4": INT4}.get(algorithm.layout, E2M1)
    kind = _KINDS.get(algorithm.layout, "float")
    return WeightScheme(grid=grid, granularity="group", group_size=group_size, scale=kind)


def _group_size(shape: Shape, scale: tuple[int, ...], algorithm: Algorithm) -> int | None:
    """Columns of a group: what the scale shows, if the config allows it."""
    rows, columns = shape
    if len(scale) != 2 or scale[0] != rows or not 0 < scale[1] <= columns or columns % scale[1]:
        return None
    size = columns // scale[1]
    stated = algorithm.group_size
    if algorithm.layout == "int4":
        return size if stated is None or -(-columns // stated) == scale[1] else None
    allowed = algorithm.group_sizes if stated is None else (stated,)
    return size if size in allowed else None


def _check_others(leaves: ModuleLeaves, algorithm: Algorithm, shape: Shape, because: str) -> None:
    """Check the tensors beside codes and scale."""
    rows, columns = shape
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {"input_scale": _SCALAR}
    if algorithm.layout == "nvfp4" or algorithm.name == "W4A8_AWQ":
        shapes["weight_scale_2"] = _SCALAR
    shapes["pre_quant_scale"] = ((columns,),)
    if "svdquant_lora_a" in leaves and algorithm.layout == "nvfp4":
        leaves.require(["svdquant_lora_b"], because=because)
        factor = leaves["svdquant_lora_a"].shape
        rank = factor[0] if factor else 0
        shapes["svdquant_lora_a"] = ((rank, columns),)
        shapes["svdquant_lora_b"] = ((rows, rank),)
    for leaf in leaves.entries:
        if leaf in ("weight", "weight_scale"):
            continue
        if leaf not in shapes:
            raise FormatMismatch(
                f"tensor `{leaves[leaf].name}` does not belong to a weight in "
                f"`{algorithm.name}`, in `{leaves.checkpoint_name}`",
                hint=because,
            )
        leaves.expect(leaf, dtypes=FLOAT_DTYPES, shapes=shapes[leaf], because=because)


def _encoding(leaves: ModuleLeaves, algorithm: Algorithm, weight: WeightScheme) -> str:
    scale = NAMES[leaves["weight_scale"].dtype]
    scale = "E8M0" if weight.scale == "e8m0" else scale
    text = f"{algorithm.name}: {weight.grid.name}, {weight.sharing}, scales {scale}"
    if algorithm.layout == "nvfp4":
        text += " times one of the tensor"
    if "svdquant_lora_a" in leaves:
        text += f", plus a product of rank {leaves['svdquant_lora_a'].shape[0]}"
    return text


def quantized_part(checkpoint: Checkpoint, weight: SourceWeight) -> QuantTensor:
    """Read the codes of a weight that `describe` described, with all that multiplies them.

    Raises:
        NonFiniteWeight: A tensor holds NaN or infinity.
        FormatMismatch: A scale is zero everywhere.
    """
    assert weight.scheme is not None, "a quantized weight has a scheme"
    assert weight.scheme.weight is not None, "a quantized weight has a weight scheme"
    parts = {
        leaf: read_finite(checkpoint, name)
        for leaf, name in weight.leaves.items()
        if not leaf.startswith("svdquant")
    }
    scheme, (rows, columns) = weight.scheme.weight, weight.shape
    block = scheme.block_of(rows, columns)
    is_outer = scheme.scale == "e4m3"
    scale = as_scale(parts["weight_scale"])
    return QuantTensor(
        grid=scheme.grid,
        codes=_codes(parts["weight"], scheme, weight.shape),
        scale=scale.reshape(-(-rows // block[0]), -(-columns // block[1])),
        block=block,
        outer=parts["weight_scale_2"].reshape(1, 1) if is_outer else None,
        inner=parts.get("pre_quant_scale"),
        evaluation=Evaluation(dtype=torch.float32, outer="scale*", inner="*"),
    )


def read_finite(checkpoint: Checkpoint, name: str) -> Tensor:
    """Read a tensor of a quantized weight.

    Raises:
        NonFiniteWeight: It holds NaN or infinity.
        FormatMismatch: It is a float, and zero everywhere.
    """
    tensor = checkpoint.read(name)
    refuse_nonfinite(
        as_scale(tensor) if name.endswith("weight_scale") else tensor, name, checkpoint.name
    )
    if tensor.dtype in FLOAT_DTYPES and not bool(tensor.any()):
        raise FormatMismatch(
            f"tensor `{name}` is zero everywhere, in `{checkpoint.name}`",
            hint="the file is damaged, or the tool that wrote it met an underflow",
        )
    return tensor


def _codes(stored: Tensor, scheme: WeightScheme, shape: Shape) -> Tensor:
    """[N, K] in the storage of the grid."""
    rows, columns = shape
    if scheme.grid == E2M1:
        return unpack_bytes(stored, 4, columns)
    if scheme.grid != INT4:
        return stored
    nibbles = torch.stack([stored & 15, stored >> 4], dim=1).reshape(rows, columns)
    return ((nibbles ^ 8) - 8).view(torch.int8)


def packed_rows(codes: Tensor) -> Tensor:
    """[N, K] int4 codes as int8 to [N/2, K] uint8: undoes `_codes`, row 2i in the low nibble."""
    fields = codes.view(torch.uint8) & 15
    return fields[0::2] | (fields[1::2] << 4)
