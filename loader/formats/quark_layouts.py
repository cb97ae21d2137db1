"""AMD Quark: one weight from its headers to canonical form; `quark.py` specifies the layouts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantload.errors import FormatMismatch, UnsupportedVariant
from quantload.loader.checkpoint import Checkpoint
from quantload.loader.formats.finite import refuse_nonfinite
from quantload.loader.formats.float8 import as_scale, float8_scheme
from quantload.loader.formats.module_leaves import ModuleLeaves
from quantload.loader.formats.quark_config import LayerConfig
from quantload.loader.formats.quark_spec import Spec
from quantload.loader.safetensors_header import NAMES
from quantload.loader.source import FLOAT_DTYPES, SourceWeight
from quantload.quant.grid import Grid
from quantload.quant.packing import unpack_bytes, unpack_dense
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.scheme import WeightScheme, scheme_of

Shape = tuple[int, int]

# In which nibble of a word with `pack_method: reorder` field 0, 1, 2, ... lies.
_REORDERED = (0, 4, 1, 5, 2, 6, 3, 7)
_SCALE_DTYPES = {
    "float": FLOAT_DTYPES,
    "e8m0": (torch.uint8, torch.float8_e8m0fnu),
    "e4m3": (torch.float8_e4m3fn,),
}
_SCALAR = ((), (1,))


@dataclass(frozen=True)
class _Layout:
    """Shapes of one weight.

    Args:
        shape: (N, K).
        scheme: What shares one scale.
        scale: Shape of the scale as stored.
        zero: Shapes that the zero point may have.
    """

    shape: Shape
    scheme: WeightScheme
    scale: tuple[int, ...]
    zero: tuple[tuple[int, ...], ...]


def describe(
    leaves: ModuleLeaves, layer: LayerConfig, *, decided_by: str, is_reordered: bool
) -> SourceWeight:
    """Describe a quantized weight from its headers.

    Args:
        leaves: Tensors of the module.
        layer: How the config says it is quantized.
        decided_by: The entry of the config that says so.
        is_reordered: True if the fields of a word are in AWQ's order.

    Raises:
        MissingTensor: A tensor that the config asks for is missing.
        FormatMismatch: dtypes or shapes do not fit the config or each other.
        UnsupportedVariant: The weight has not two dimensions.
    """
    spec = layer.weight
    assert spec is not None, "only quantized layers are described"
    because = f"the config says `{spec.name}` weights {spec.granularity}-wise ({decided_by})"
    needed = ["weight", "weight_scale"]
    needed += ["weight_scale_2"] if spec.scale == "e4m3" else []
    needed += [] if spec.symmetric else ["weight_zero_point"]
    leaves.require(needed, because=because)
    codes = leaves.expect("weight", dtypes=(_stored_dtype(spec.grid),), because=because)
    scale = leaves.expect("weight_scale", dtypes=_SCALE_DTYPES[spec.scale], because=because)
    if len(codes.shape) != 2:
        raise UnsupportedVariant(
            f"tensor `{codes.name}` has {len(codes.shape)} dimensions, expected 2, in "
            f"`{leaves.checkpoint_name}`"
        )
    layout = _layout((codes.shape[0], codes.shape[1]), scale.shape, spec)
    if layout is None:
        raise FormatMismatch(
            f"tensor `{scale.name}` has shape `{scale.shape}`, which does not fit `{codes.name}` "
            f"of shape `{codes.shape}`, in `{leaves.checkpoint_name}`",
            hint=because,
        )
    _check_others(leaves, spec, layout, because)
    order = f", {'reordered' if is_reordered else 'in order'}" if _is_packed_int(spec) else ""
    evaluated = torch.float32 if spec.scale == "e4m3" else torch.bfloat16
    return SourceWeight(
        module=leaves.module,
        shape=layout.shape,
        scheme=scheme_of(layout.scheme, layer.input),
        encoding=f"{_encoding(layout.scheme, NAMES[scale.dtype])}{order}",
        dtype=scale.dtype if spec.scale == "float" else evaluated,
        leaves={
            leaf.replace("input_scale_2", "input_scale"): n for leaf, n in leaves.names.items()
        },
        decided_by=decided_by,
    )


def _is_packed_int(spec: Spec) -> bool:
    return spec.grid.is_integer and spec.grid.bits == 4


def _is_transposed(spec: Spec) -> bool:
    """Integers in groups are stored with their input features first."""
    return spec.grid.is_integer and spec.granularity == "group"


def _stored_dtype(grid: Grid) -> torch.dtype:
    if grid.bits == 4 and grid.is_integer:
        return torch.int32
    return grid.storage


def _layout(codes: Shape, scale: tuple[int, ...], spec: Spec) -> _Layout | None:
    """Return the shapes of a weight; None if codes and scale do not fit the config."""
    if _is_packed_int(spec):
        return _packed_layout(codes, scale, spec)
    rows, columns = codes[::-1] if _is_transposed(spec) else codes
    if spec.grid.bits < 8:
        columns, rest = divmod(columns * 8, spec.grid.bits)
        if rest:
            return None
    shape = rows, columns
    if spec.granularity == "group":
        size = spec.group_size or columns
        expected = (rows, columns // size)
        if columns % size or scale != (expected[::-1] if _is_transposed(spec) else expected):
            return None
        return _Layout(shape, _group_scheme(spec, size), scale, (scale,))
    scheme = float8_scheme(shape, scale, spec.block, grid=spec.grid)
    if scheme is None or (scheme.granularity != spec.granularity and rows != 1):
        return None
    return _Layout(shape, _with(scheme, spec), scale, (scale,))


def _packed_layout(codes: Shape, scale: tuple[int, ...], spec: Spec) -> _Layout | None:
    if spec.granularity == "group":
        columns, words = codes
        size = spec.group_size or columns
        if columns % size or len(scale) != 2 or scale[0] != columns // size:
            return None
        rows = scale[1]
        if words != -(-rows // 8):
            return None
        return _Layout((rows, columns), _group_scheme(spec, size), scale, ((scale[0], words),))
    rows, columns = codes[0], codes[1] * 8
    scheme = float8_scheme((rows, columns), scale, None, grid=spec.grid)
    if scheme is None or scheme.granularity != spec.granularity:
        return None
    zero = ((-(-rows // 8),),) if spec.granularity == "channel" else _SCALAR
    return _Layout((rows, columns), _with(scheme, spec), scale, zero)


def _group_scheme(spec: Spec, size: int) -> WeightScheme:
    return _with(WeightScheme(grid=spec.grid, granularity="group", group_size=size), spec)


def _with(scheme: WeightScheme, spec: Spec) -> WeightScheme:
    return WeightScheme(
        grid=scheme.grid,
        granularity=scheme.granularity,
        group_size=scheme.group_size,
        block=scheme.block,
        symmetric=spec.symmetric,
        scale=spec.scale,
    )


def _check_others(leaves: ModuleLeaves, spec: Spec, layout: _Layout, because: str) -> None:
    """Check the tensors beside codes and scale."""
    allowed: dict[str, tuple[tuple[torch.dtype, ...], tuple[tuple[int, ...], ...]]] = {
        "input_scale": (FLOAT_DTYPES, _SCALAR),
        "input_zero_point": ((torch.int8, torch.uint8, torch.int32), _SCALAR),
    }
    if spec.scale == "e4m3":
        allowed["weight_scale_2"] = (FLOAT_DTYPES, _SCALAR)
        allowed["input_scale_2"] = (FLOAT_DTYPES, _SCALAR)
        del allowed["input_scale"]
    if spec.grid.is_integer:
        whole = (torch.int8, torch.uint8, torch.int32)
        dtypes: tuple[torch.dtype, ...] = (torch.int32,) if _is_packed_int(spec) else whole
        allowed["weight_zero_point"] = (dtypes, layout.zero)
    for leaf in leaves.entries:
        if leaf in ("weight", "weight_scale"):
            continue
        if leaf not in allowed:
            raise FormatMismatch(
                f"tensor `{leaves[leaf].name}` does not belong to a weight in `{spec.name}`, in "
                f"`{leaves.checkpoint_name}`",
                hint=because,
            )
        dtypes, shapes = allowed[leaf]
        leaves.expect(leaf, dtypes=dtypes, shapes=shapes, because=because)


def _encoding(scheme: WeightScheme, scale: str) -> str:
    kind = {"e8m0": "E8M0", "e4m3": "F8_E4M3 times one of the tensor"}.get(scheme.scale, scale)
    zero = "" if scheme.symmetric else ", zero points"
    return f"{scheme.grid.name}, {scheme.sharing}, scales {kind}{zero}"


def read_weight(
    checkpoint: Checkpoint, weight: SourceWeight, spec: Spec, *, is_reordered: bool
) -> QuantTensor:
    """Read a weight that `describe` described.

    Raises:
        NonFiniteWeight: A tensor holds NaN or infinity.
        FormatMismatch: Scales are zero everywhere, or a symmetric weight has zero points.
    """
    assert weight.scheme is not None, "a quantized weight has a scheme"
    assert weight.scheme.weight is not None, "a quantized weight has a weight scheme"
    parts = {leaf: _read(checkpoint, name) for leaf, name in weight.leaves.items()}
    scheme, (rows, columns) = weight.scheme.weight, weight.shape
    block = scheme.block_of(rows, columns)
    grid_shape = -(-rows // block[0]), -(-columns // block[1])
    is_transposed = _is_transposed(spec)
    codes, scale = parts["weight"], as_scale(parts["weight_scale"])
    zero = parts.get("weight_zero_point")
    if _is_packed_int(spec):
        wide = rows if is_transposed else columns
        codes = _fields(codes, wide, spec.grid, is_reordered=is_reordered)
        zero = None if zero is None else _zeros(zero, rows, spec, is_reordered=is_reordered)
    elif spec.grid.bits < 8:
        codes = unpack_bytes(codes, spec.grid.bits, columns)
    if is_transposed:
        codes, scale = codes.T.contiguous(), scale.T.contiguous()
        zero = None if zero is None else zero.T.contiguous()
    zero = _asymmetric(zero, spec, weight.leaves.get("weight_zero_point", ""), checkpoint.name)
    outer = parts["weight_scale_2"].reshape(1, 1) if spec.scale == "e4m3" else None
    return QuantTensor(
        grid=spec.grid,
        codes=codes,
        scale=scale.reshape(grid_shape),
        zero=None if zero is None else zero.reshape(grid_shape),
        block=block,
        outer=outer,
        evaluation=Evaluation(dtype=weight.dtype, outer="scale*"),
    )


def _read(checkpoint: Checkpoint, name: str) -> Tensor:
    tensor = checkpoint.read(name)
    values = as_scale(tensor) if name.endswith("weight_scale") else tensor
    refuse_nonfinite(values, name, checkpoint.name)
    if tensor.dtype in FLOAT_DTYPES and not bool(tensor.any()):
        raise FormatMismatch(
            f"tensor `{name}` is zero everywhere, in `{checkpoint.name}`",
            hint="the file is damaged, or the tool that wrote it met an underflow",
        )
    return tensor


def _fields(words: Tensor, wide: int, grid: Grid, *, is_reordered: bool) -> Tensor:
    """[R, ceil(wide / 8)] int32 to [R, wide] 4-bit fields in the storage of the grid."""
    fields = unpack_dense(words, 4, 8 * words.shape[1])
    if is_reordered:
        order = torch.tensor(_REORDERED, device=words.device)
        fields = torch.unflatten(fields, 1, (-1, 8)).index_select(2, order).flatten(1)
    fields = fields[:, :wide].contiguous()
    return fields if grid.storage == torch.uint8 else ((fields ^ 8) - 8).view(torch.int8)


def _zeros(stored: Tensor, rows: int, spec: Spec, *, is_reordered: bool) -> Tensor:
    """Unpack zero points: [G, ceil(N / 8)] to [G, N], [ceil(N / 8)] to [1, N]; scalars stay."""
    if spec.granularity == "tensor":
        return stored
    words = stored if stored.ndim == 2 else stored.unsqueeze(0)
    return _fields(words, rows, spec.grid, is_reordered=is_reordered)


def _asymmetric(zero: Tensor | None, spec: Spec, name: str, checkpoint: str) -> Tensor | None:
    """Return the zero points of an asymmetric weight; those of a symmetric one must be zeros."""
    if zero is None:
        return None
    if not spec.symmetric:
        low, high = int(zero.min()), int(zero.max())
        if spec.grid.low <= low and high <= spec.grid.high:
            return zero
        raise FormatMismatch(
            f"tensor `{name}` has zero points from {low} to {high}, expected those of "
            f"`{spec.grid.name}`, in `{checkpoint}`"
        )
    if bool(zero.any()):
        raise FormatMismatch(
            f"tensor `{name}` is not all zero, but the config says that the weight is symmetric, "
            f"in `{checkpoint}`"
        )
    return None
