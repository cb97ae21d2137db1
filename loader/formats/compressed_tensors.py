"""compressed-tensors: what vLLM, SGLang and transformers load. Read and written.

N output features, K input features, b bits, G = number of groups, u = unsigned field.

pack-quantized (integers of 2 to 8 bits)
    weight_packed       int32 [N, W]          u = code + 2^(b-1), packed along K, little endian
                                              dense: W = ceil(K * b / 32); before 0.18, for 3, 5, 6
                                              and 7 bits padded: W = ceil(K / (32 // b))
    weight_scale        float [N, G], [N, 1] or [1]
    weight_shape        int64 [2] = (N, K)
    weight_zero_point   int32 [ceil(N * b / 32), G], packed like the weight but along N; or int8 [N, G]
    weight_g_idx        int32 [K], the group of each column (act-order "group")
int-quantized, naive-quantized
    weight              int8 [N, K];  weight_scale as above;  weight_zero_point int8
float-quantized
    weight              e4m3 [N, K];  weight_scale [1], [N, 1], or [ceil(N/128), ceil(K/128)] blocks
all
    w = (code - zero_point) * scale, evaluated in the scale's dtype
    input_scale, input_zero_point belong to static input quantization

Source: compressed-tensors 0.17.0 to 0.20.1, `compressors/`; the padded layout was dense from 0.18.0 on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantload.errors import (
    FormatMismatch,
    MissingTensor,
    ShapeError,
    UnsupportedVariant,
    listed,
)
from quantload.loader.checkpoint import Checkpoint
from quantload.loader.formats.compressed_tensors_config import (
    PACKED,
    Group,
    parse_config,
    written_format,
)
from quantload.loader.formats.dense import dense_weight
from quantload.loader.source import FLOAT_DTYPES, SourceWeight
from quantload.quant.grid import Grid
from quantload.quant.packing import (
    pack_dense,
    unpack_dense,
    unpack_padded,
    words_dense,
    words_padded,
)
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.scheme import Scheme, WeightScheme

_LEAVES = (
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "weight_global_scale",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "weight",
)


class CompressedTensorsReader:
    """Reader of one compressed-tensors checkpoint."""

    widens_floats = False

    def __init__(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.quantization_config is not None, "detected by its config"
        self._checkpoint = checkpoint
        self._config = parse_config(checkpoint.quantization_config)
        self._groups: dict[str, Group] = {}

    def weights(self) -> Mapping[str, SourceWeight]:
        """Describe every weight, by module; config and headers must agree."""
        found = {}
        for module, leaves in _modules(self._checkpoint).items():
            weight = self._describe(module, leaves)
            if weight is not None:
                found[module] = weight
        self._check_exact_targets(found)
        return found

    def _describe(self, module: str, leaves: Mapping[str, str]) -> SourceWeight | None:
        entries = {leaf: self._checkpoint.tensors[name] for leaf, name in leaves.items()}
        if "weight_packed" not in leaves and "weight_scale" not in leaves:
            return self._describe_plain(module, leaves)
        group, decided_by = self._group_of(module)
        codes = entries.get("weight_packed") or entries.get("weight")
        for needed in ("weight_packed" if group.format == PACKED else "weight", "weight_scale"):
            if needed not in leaves:
                raise MissingTensor(
                    f"tensor `{module}.{needed}` is missing in `{self._checkpoint.name}`; config "
                    f"group `{group.name}` says `{group.format}`, the module has {listed(leaves)}"
                )
        assert codes is not None, "one of the two is there, as checked above"
        if len(codes.shape) != 2:
            raise UnsupportedVariant(
                f"tensor `{codes.name}` has {len(codes.shape)} dimensions, expected 2"
            )
        scale = entries["weight_scale"]
        shape = self._shape(module, leaves, group)
        scheme = _scheme_as_stored(group.scheme, scale.shape, shape, module)
        self._groups[module] = group
        return SourceWeight(
            module=module,
            shape=shape,
            scheme=scheme,
            encoding=f"{group.format} {scheme}",
            dtype=scale.dtype,
            leaves=leaves,
            decided_by=f"{group.name}: {decided_by}",
        )

    def _describe_plain(self, module: str, leaves: Mapping[str, str]) -> SourceWeight | None:
        if "weight" not in leaves:
            return None
        entry = self._checkpoint.tensors[leaves["weight"]]
        if len(entry.shape) >= 2 and entry.dtype not in FLOAT_DTYPES:
            raise MissingTensor(
                f"tensor `{module}.weight_scale` is missing: `{entry.name}` is `{entry.dtype}`, in "
                f"`{self._checkpoint.name}`"
            )
        return dense_weight(entry)

    def _group_of(self, module: str) -> tuple[Group, str]:
        matched = self._config.match(module, _class_names(module))
        if matched is not None:
            return matched
        fallback = self._config.fallback()
        if fallback is None:
            raise FormatMismatch(
                f"module `{module}` is quantized in the files, but no config group names it, in "
                f"`{self._checkpoint.name}`"
            )
        return fallback, "the headers (the config leaves it out)"

    def _shape(self, module: str, leaves: Mapping[str, str], group: Group) -> tuple[int, int]:
        if group.format != PACKED:
            rows, columns = self._checkpoint.tensors[leaves["weight"]].shape
            return rows, columns
        if "weight_shape" not in leaves:
            raise MissingTensor(f"tensor `{module}.weight_shape` is missing in `{self._checkpoint.name}`")
        rows, columns = map(int, self._checkpoint.read(leaves["weight_shape"]).tolist())
        packed = self._checkpoint.tensors[leaves["weight_packed"]]
        bits = _weight_scheme(group.scheme).grid.bits
        if packed.shape[0] != rows or packed.shape[1] not in (
            words_dense(columns, bits),
            words_padded(columns, bits),
        ):
            raise FormatMismatch(
                f"tensor `{packed.name}` has shape `{packed.shape}`, expected "
                f"`({rows}, {words_dense(columns, bits)})` for a {bits}-bit weight of "
                f"`({rows}, {columns})`, in `{self._checkpoint.name}`",
                hint=f"config group `{group.name}` says {bits} bits",
            )
        return rows, columns

    def _check_exact_targets(self, found: Mapping[str, SourceWeight]) -> None:
        for group in self._config.groups:
            plain = [t for t in group.targets if t in found and not found[t].is_quantized]
            ignored = set(self._config.ignore)
            plain = [target for target in plain if target not in ignored]
            if plain:
                raise FormatMismatch(
                    f"config group `{group.name}` names modules that are not quantized in the "
                    f"files: {listed(plain)}, in `{self._checkpoint.name}`",
                    hint="these files are not the ones that the config was written for",
                )

    def decode(self, weight: SourceWeight) -> QuantTensor | Tensor:
        """Read a weight [N, K]: canonical if it is quantized, else float."""
        if weight.scheme is None:
            return self._checkpoint.read(weight.leaves["weight"])
        parts = {
            leaf: self._checkpoint.read(name)
            for leaf, name in weight.leaves.items()
            if leaf.startswith("weight") and leaf != "weight_shape"
        }
        return _decode(parts, weight)


def _modules(checkpoint: Checkpoint) -> dict[str, dict[str, str]]:
    """Tensor names by module and leaf."""
    modules: dict[str, dict[str, str]] = {}
    for name in checkpoint.tensors:
        module, _, leaf = name.rpartition(".")
        if leaf in _LEAVES:
            modules.setdefault(module, {})[leaf] = name
    return modules


def _class_names(module: str) -> tuple[str, ...]:
    """Class names of a module, as far as its name tells: a quantized weight is a Linear's or an
    Embedding's."""
    is_embedding = "embed" in module.rpartition(".")[2]
    return ("Embedding",) if is_embedding else ("Linear",)


def _weight_scheme(scheme: Scheme) -> WeightScheme:
    assert scheme.weight is not None, "config groups without weights are left out"
    return scheme.weight


def _scheme_as_stored(
    scheme: Scheme, scale: tuple[int, ...], shape: tuple[int, int], module: str
) -> Scheme:
    """Check the scale's shape against the scheme. A group as wide as the weight is a channel."""
    weight = _weight_scheme(scheme)
    block = weight.block_of(*shape)
    expected = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    allowed = {expected}
    if expected[1] == 1:
        allowed.add((expected[0],))
    if expected == (1, 1):
        allowed.add(())
    if tuple(scale) in allowed:
        return scheme
    per_channel = {(shape[0], 1), (shape[0],)}
    if weight.granularity == "tensor" and tuple(scale) in per_channel:
        return replace(scheme, weight=replace(weight, granularity="channel"))
    raise FormatMismatch(
        f"tensor `{module}.weight_scale` has shape `{tuple(scale)}`, expected `{expected}` for a "
        f"weight of `{shape}` in scheme `{scheme}`"
    )


def _decode(parts: Mapping[str, Tensor], weight: SourceWeight) -> QuantTensor:
    assert weight.scheme is not None, "only quantized weights are decoded"
    scheme = _weight_scheme(weight.scheme)
    rows, columns = weight.shape
    block = scheme.block_of(rows, columns)
    grid_shape = (-(-rows // block[0]), -(-columns // block[1]))
    scale = parts["weight_scale"].reshape(grid_shape)
    zero = parts.get("weight_zero_point")
    if "weight_packed" in parts:
        codes = _unpack(parts["weight_packed"], scheme.grid, columns)
    else:
        codes = parts["weight"]
    if codes.dtype != scheme.grid.storage:
        raise FormatMismatch(
            f"weight of `{weight.module}` is `{codes.dtype}`, expected `{scheme.grid.storage}`"
        )
    return QuantTensor(
        grid=scheme.grid,
        codes=codes,
        scale=scale,
        zero=None if zero is None else _zero_point(zero, scheme.grid, grid_shape),
        block=block,
        group_of=parts.get("weight_g_idx"),
        evaluation=Evaluation(dtype=scale.dtype),
    )


def _unpack(words: Tensor, grid: Grid, columns: int) -> Tensor:
    dense = words.shape[1] == words_dense(columns, grid.bits)
    fields = (unpack_dense if dense else unpack_padded)(words, grid.bits, columns)
    return _signed(fields, grid)


def _signed(fields: Tensor, grid: Grid) -> Tensor:
    """u - 2^(b-1) in int8; wraps to the right value, also for 8 bits."""
    return (fields - (1 << (grid.bits - 1))).view(torch.int8)


def _unsigned(codes: Tensor, grid: Grid) -> Tensor:
    return codes.view(torch.uint8) + (1 << (grid.bits - 1))


def _zero_point(zero: Tensor, grid: Grid, grid_shape: tuple[int, int]) -> Tensor:
    rows, groups = grid_shape
    if zero.dtype != torch.int32:
        return zero.reshape(grid_shape)
    if zero.ndim != 2 or zero.shape[1] != groups:
        raise ShapeError(f"packed zero points have shape `{tuple(zero.shape)}`, expected [*, {groups}]")
    return _unpack(zero.T.contiguous(), grid, rows).T.contiguous()


# -- writing ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf:
    """dtype and shape of one tensor to be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def layout(scheme: Scheme, shape: tuple[int, int], scale_dtype: torch.dtype) -> dict[str, Leaf]:
    """Return the tensors that a quantized weight [N, K] becomes, before anything is computed."""
    weight = _weight_scheme(scheme)
    rows, columns = shape
    block = weight.block_of(rows, columns)
    scale_shape = (-(-rows // block[0]), -(-columns // block[1]))
    bits = weight.grid.bits
    scale = Leaf(scale_dtype, scale_shape if weight.granularity != "tensor" else (1,))
    if written_format(scheme) != PACKED:
        leaves = {"weight": Leaf(weight.grid.storage, shape), "weight_scale": scale}
        if not weight.symmetric:
            leaves["weight_zero_point"] = Leaf(weight.grid.storage, scale.shape)
        return leaves
    leaves = {
        "weight_packed": Leaf(torch.int32, (rows, words_dense(columns, bits))),
        "weight_scale": scale,
        "weight_shape": Leaf(torch.int64, (2,)),
    }
    if not weight.symmetric:
        leaves["weight_zero_point"] = Leaf(torch.int32, (words_dense(rows, bits), scale_shape[1]))
    return leaves


def encode(tensor: QuantTensor, scheme: Scheme) -> dict[str, Tensor]:
    """Turn a canonical weight into the tensors of `layout`, by leaf."""
    weight = _weight_scheme(scheme)
    scale = tensor.scale if weight.granularity != "tensor" else tensor.scale.reshape(1)
    if written_format(scheme) != PACKED:
        leaves = {"weight": tensor.codes, "weight_scale": scale}
        if tensor.zero is not None:
            leaves["weight_zero_point"] = tensor.zero
        return leaves
    leaves = {
        "weight_packed": pack_dense(_unsigned(tensor.codes, tensor.grid), tensor.grid.bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor(tensor.shape, dtype=torch.int64),
    }
    if tensor.zero is not None:
        fields = _unsigned(tensor.zero, tensor.grid).T.contiguous()
        leaves["weight_zero_point"] = pack_dense(fields, tensor.grid.bits).T.contiguous()
    return leaves


__all__ = ["CompressedTensorsReader", "Leaf", "encode", "layout"]
