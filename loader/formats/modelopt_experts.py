"""ModelOpt: the experts of one block in one parameter, as Llama 4 and gpt-oss have them.

E experts, N output and K input features, g columns of a group. The parameter P is named without
`.weight`; it lies as the model has it, [E, N, K] or with input features first, [E, K, N].

layout   P                      P_weight_scale                     value
e4m3     e4m3 [E, N, K]         float [], [E], [E, 1], [E, 1, 1]   q * s
         or [E, K, N]           or [E, N]                          q * s, a scale a row
nvfp4    uint8 [E, N, K/2]      e4m3 [E, N, K/g]                   q * (s * P_weight_scale_2),
         or [E, K/2, N]         or [E, K/g, N]                     low nibble is the even column

`P_weight_scale_2` and `P_input_scale` hold one float32 or E of them. Which way the parameter lies
is seen from the shapes; where one scale serves an expert it makes no difference, and where the
shapes fit both ways (a square expert with a scale a row) the weight is refused.

Source: `_export_quantized_weight`, `maybe_transpose_expert_weight_dimensions`, ModelOpt 0.47.0.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quantload.errors import FormatMismatch, UnsupportedVariant
from quantload.loader.checkpoint import Checkpoint
from quantload.loader.formats.modelopt_config import Algorithm
from quantload.loader.formats.modelopt_layouts import read_finite
from quantload.loader.formats.module_leaves import ModuleLeaves
from quantload.loader.safetensors_header import NAMES
from quantload.loader.source import FLOAT_DTYPES, Block, SourceWeight
from quantload.quant.grid import E2M1, E4M3
from quantload.quant.packing import unpack_bytes
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.scheme import WeightScheme, scheme_of

_LEAVES = ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")
_NO_PARAMETER = (".weight", "_scale")
_FLOAT8 = torch.float8_e4m3fn
_CODES = (_FLOAT8, torch.uint8, torch.int8)

_Fit = tuple[tuple[int, int], WeightScheme, bool]  # (N, K), what shares a scale, transposed


def expert_leaves(checkpoint: Checkpoint) -> Iterator[ModuleLeaves]:
    """Yield the tensors of each quantized parameter with three axes, it itself as `weight`."""
    for name, entry in checkpoint.tensors.items():
        if len(entry.shape) != 3 or entry.dtype not in _CODES or name.endswith(_NO_PARAMETER):
            continue
        named = {"weight": name, **{leaf: f"{name}_{leaf}" for leaf in _LEAVES}}
        entries = {
            leaf: checkpoint.tensors[full]
            for leaf, full in named.items()
            if full in checkpoint.tensors
        }
        yield ModuleLeaves(name, entries, checkpoint.name)


def describe_experts(leaves: ModuleLeaves, algorithm: Algorithm, decided_by: str) -> SourceWeight:
    """Describe a quantized parameter of experts from its headers.

    Raises:
        MissingTensor: A tensor that the algorithm needs is missing.
        FormatMismatch: dtypes or shapes do not fit the algorithm or each other.
        UnsupportedVariant: The algorithm is not read for such parameters, or the shapes fit twice.
    """
    if algorithm.layout not in ("e4m3", "nvfp4") or "pre_quant_scale" in leaves:
        raise UnsupportedVariant(
            f"parameter `{leaves.module}` of several experts is not read in `{algorithm.name}`, "
            f"in `{leaves.checkpoint_name}`"
        )
    because = f"the config says `{algorithm.name}` ({decided_by})"
    is_fp4 = algorithm.layout == "nvfp4"
    leaves.require(["weight_scale", *(["weight_scale_2"] if is_fp4 else [])], because=because)
    codes = leaves.expect("weight", dtypes=(torch.uint8 if is_fp4 else _FLOAT8,), because=because)
    dtypes = (_FLOAT8,) if is_fp4 else FLOAT_DTYPES
    scale = leaves.expect("weight_scale", dtypes=dtypes, because=because)
    fits = list((_fp4_fits if is_fp4 else _fp8_fits)(codes.shape, scale.shape, algorithm))
    if not fits:
        raise FormatMismatch(
            f"tensor `{scale.name}` has shape `{scale.shape}`, which does not fit `{codes.name}` "
            f"of shape `{codes.shape}`, in `{leaves.checkpoint_name}`",
            hint=because,
        )
    if len(fits) > 1:
        raise UnsupportedVariant(
            f"tensor `{scale.name}` of shape `{scale.shape}` may hold scales of rows or of columns "
            f"of `{codes.name}`, whose experts are square, in `{leaves.checkpoint_name}`"
        )
    experts = codes.shape[0]
    for leaf in ("weight_scale_2", "input_scale"):
        if leaf in leaves:
            shapes = ((), *_of_experts(experts))
            leaves.expect(leaf, dtypes=FLOAT_DTYPES, shapes=shapes, because=because)
    shape, weight, is_transposed = fits[0]
    names = leaves.names
    if "input_scale" in names:  # of several experts: not the scale of one layer's input
        names["expert_input_scale"] = names.pop("input_scale")
    return SourceWeight(
        module=leaves.module,
        shape=shape,
        scheme=scheme_of(weight, algorithm.input, name=algorithm.name),
        encoding=f"{algorithm.name}: {experts} experts, {weight.grid.name}, scales "
        f"{NAMES[scale.dtype]}",
        dtype=torch.float32,
        leaves=names,
        decided_by=decided_by,
        parameter=leaves.module,
        experts=experts,
        is_transposed=is_transposed,
    )


def _of_experts(experts: int) -> tuple[tuple[int, ...], ...]:
    return (experts,), (experts, 1), (experts, 1, 1)


def _fp8_fits(codes: tuple[int, ...], scale: tuple[int, ...], _: Algorithm) -> Iterator[_Fit]:
    experts, rows, columns = codes
    if scale in ((), *_of_experts(experts)):
        yield (rows, columns), WeightScheme(grid=E4M3, granularity="tensor"), False
        return
    by_row = WeightScheme(grid=E4M3, granularity="channel")
    if scale in ((experts, rows), (experts, rows, 1)):
        yield (rows, columns), by_row, False
    if scale in ((experts, columns), (experts, 1, columns)):
        yield (columns, rows), by_row, True


def _fp4_fits(
    codes: tuple[int, ...], scale: tuple[int, ...], algorithm: Algorithm
) -> Iterator[_Fit]:
    experts, first, second = codes
    sizes = algorithm.group_sizes if algorithm.group_size is None else (algorithm.group_size,)
    for size in sizes:
        weight = WeightScheme(grid=E2M1, granularity="group", group_size=size, scale="e4m3")
        if not 2 * second % size and scale == (experts, first, 2 * second // size):
            yield (first, 2 * second), weight, False
        if not 2 * first % size and scale == (experts, 2 * first // size, second):
            yield (second, 2 * first), weight, True


def blocks_of_experts(checkpoint: Checkpoint, weight: SourceWeight) -> dict[str, Block]:
    """Return what elements of the tensors of each expert stand for; see `Reader.blocks_of`."""
    assert weight.scheme is not None, "a quantized weight has a scheme"
    assert weight.scheme.weight is not None, "a quantized weight has a weight scheme"
    scheme, is_transposed = weight.scheme.weight, weight.is_transposed
    scale = Block(0, 0)
    if scheme.granularity == "channel":
        stored = checkpoint.tensors[weight.leaves["weight_scale"]]
        scale = Block(1, 0, is_transposed and len(stored.shape) == 3)
    elif scheme.granularity == "group":
        assert scheme.group_size is not None, "a group scheme has a group size"
        scale = Block(1, scheme.group_size, is_transposed)
    codes = Block(1, 2 if scheme.grid is E2M1 else 1, is_transposed)
    return {
        **dict.fromkeys(weight.leaves, Block(0, 0)),
        "weight": codes,
        "weight_scale": scale,
    }


def read_experts(checkpoint: Checkpoint, weight: SourceWeight) -> QuantTensor:
    """Read a parameter that `describe_experts` described: [E * N, K], expert after expert.

    Raises:
        NonFiniteWeight: A tensor holds NaN or infinity.
        FormatMismatch: A scale is zero everywhere.
    """
    assert weight.scheme is not None, "a quantized weight has a scheme"
    assert weight.scheme.weight is not None, "a quantized weight has a weight scheme"
    parts = {leaf: read_finite(checkpoint, name) for leaf, name in weight.leaves.items()}
    scheme, (rows, columns), experts = weight.scheme.weight, weight.shape, weight.experts
    codes, scale = parts["weight"], parts["weight_scale"]
    if weight.is_transposed:
        codes = codes.transpose(1, 2).contiguous()
        scale = scale.transpose(1, 2).contiguous() if scale.ndim == 3 else scale
    codes = codes.reshape(experts * rows, -1)
    outer = None
    if scheme.scale == "e4m3":
        codes = unpack_bytes(codes, 4, columns)
        outer = _per_expert(parts["weight_scale_2"], experts).repeat_interleave(rows, dim=0)
    block = scheme.block_of(rows, columns)
    if scheme.granularity == "tensor":
        scale = _per_expert(scale, experts)
    return QuantTensor(
        grid=scheme.grid,
        codes=codes,
        scale=scale.reshape(-(-experts * rows // block[0]), -(-columns // block[1])),
        block=block,
        outer=outer,
        evaluation=Evaluation(dtype=torch.float32, outer="scale*"),
    )


def _per_expert(values: Tensor, experts: int) -> Tensor:
    """[E, 1] of one value or E of them."""
    return values.reshape(-1, 1).expand(experts, 1).contiguous()
