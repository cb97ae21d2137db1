"""compressed-tensors: what vLLM, SGLang and transformers load. Read and written.

N output features, K input features, b bits, G = number of groups, u = unsigned field.

pack-quantized (integers of 2 to 8 bits)
    weight_packed       int32 [N, W]          u = code + 2^(b-1), packed along K, little endian
                                              dense: W = ceil(K * b / 32); before 0.18, for 3, 5, 6
                                              and 7 bits padded: W = ceil(K / (32 // b))
    weight_scale        float [N, G], [N, 1] or [1]
    weight_shape        int64 [2] = (N, K)
    weight_zero_point   int32 [ceil(N * b / 32), G], packed as the weight but along N, or int8
    weight_g_idx        int32 [K], the group of each column (act-order "group")
int-quantized, naive-quantized
    weight              int8 [N, K];  weight_scale as above;  weight_zero_point int8
float-quantized
    weight              e4m3 [N, K];  weight_scale [1], [N, 1], or [ceil(N/128), ceil(K/128)] blocks
all
    w = (code - zero_point) * scale, evaluated in the scale's dtype
    input_scale, input_zero_point belong to static input quantization

A `weight_g_idx` of -1 is a placeholder: groups are in order. Zero points of pack-quantized weights
are packed where they are int32.

Source: compressed-tensors 0.17.0 to 0.20.1, `compressors/`; dense instead of padded from 0.18.0 on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantload.errors import (
    FormatMismatch,
    MissingTensor,
    UnsupportedVariant,
    listed,
)
from quantload.loader.checkpoint import Checkpoint, TensorEntry
from quantload.loader.formats.compressed_tensors_config import (
    PACKED,
    Group,
    parse_config,
    written_format,
)
from quantload.loader.formats.compressed_tensors_shapes import (
    check_zero_point,
    scale_shape,
    scheme_as_stored,
    weight_of,
)
from quantload.loader.formats.dense import dense_weight, quantized_names
from quantload.loader.source import FLOAT_DTYPES, Reader, SourceWeight
from quantload.quant.grid import Grid
from quantload.quant.packing import (
    pack_dense,
    unpack_dense,
    unpack_padded,
    words_dense,
    words_padded,
)
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.scheme import Scheme

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


class CompressedTensorsReader(Reader):
    """Reader of one compressed-tensors checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        assert checkpoint.quantization_config is not None, "detected by its config"
        self.cache_scheme = checkpoint.quantization_config.get("kv_cache_scheme")
        self._config = parse_config(checkpoint.quantization_config)

    def weights(self) -> Mapping[str, SourceWeight]:
        """Describe every weight, by module; config and headers must agree."""
        found = {}
        for module, leaves in _modules(self.checkpoint).items():
            weight = self._describe(module, leaves)
            if weight is not None:
                found[module] = weight
        self._check_exact_targets(found)
        self._check_leftovers(found)
        return found

    def _describe(self, module: str, leaves: Mapping[str, str]) -> SourceWeight | None:
        if "weight_packed" not in leaves and "weight_scale" not in leaves:
            return self._describe_plain(module, leaves)
        entries = {leaf: self.checkpoint.tensors[name] for leaf, name in leaves.items()}
        group, decided_by = self._group_of(module)
        self._check_leaves(module, leaves, group)
        scale = entries["weight_scale"]
        if scale.dtype not in FLOAT_DTYPES:
            raise UnsupportedVariant(f"tensor `{scale.name}` is `{scale.dtype}`, expected floats")
        shape = self._shape(module, entries, group)
        scheme = scheme_as_stored(group.scheme, scale.shape, shape, module)
        check_zero_point(entries.get("weight_zero_point"), group, scheme, shape)
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
        entry = self.checkpoint.tensors[leaves["weight"]]
        if len(entry.shape) >= 2 and entry.dtype not in FLOAT_DTYPES:
            raise MissingTensor(
                f"tensor `{module}.weight_scale` is missing: `{entry.name}` is `{entry.dtype}`, in "
                f"`{self.checkpoint.name}`"
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
                f"`{self.checkpoint.name}`"
            )
        return fallback, "the headers (the config leaves it out)"

    def _check_leaves(self, module: str, leaves: Mapping[str, str], group: Group) -> None:
        needed = ["weight_packed", "weight_shape"] if group.format == PACKED else ["weight"]
        needed += ["weight_scale"]
        if not weight_of(group.scheme).symmetric:
            needed += ["weight_zero_point"]
        for leaf in needed:
            if leaf not in leaves:
                raise MissingTensor(
                    f"tensor `{module}.{leaf}` is missing in `{self.checkpoint.name}`; config "
                    f"group `{group.name}` says `{group.format}`, the module has {listed(leaves)}"
                )
        if {"weight", "weight_packed"} <= leaves.keys():
            raise FormatMismatch(
                f"module `{module}` has both `weight` and `weight_packed`, expected only "
                f"`{needed[0]}` in format `{group.format}`, in `{self.checkpoint.name}`",
                hint="one of the two is left over from another export",
            )
        if "weight_global_scale" in leaves:
            raise UnsupportedVariant(
                f"tensor `{leaves['weight_global_scale']}` is not read in format `{group.format}`"
            )

    def _shape(
        self, module: str, entries: Mapping[str, TensorEntry], group: Group
    ) -> tuple[int, int]:
        """Return (N, K); checks dtype and shape of the codes."""
        grid = weight_of(group.scheme).grid
        codes = entries["weight_packed" if group.format == PACKED else "weight"]
        if len(codes.shape) != 2:
            raise UnsupportedVariant(
                f"tensor `{codes.name}` has {len(codes.shape)} dimensions, expected 2"
            )
        storage = torch.int32 if group.format == PACKED else grid.storage
        if codes.dtype != storage:
            raise FormatMismatch(
                f"tensor `{codes.name}` is `{codes.dtype}`, expected `{storage}` for `{grid.name}` "
                f"in format `{group.format}`, in `{self.checkpoint.name}`",
                hint=f"config group `{group.name}` says so",
            )
        if group.format == PACKED:
            return self._packed_shape(codes, entries["weight_shape"], group)
        return codes.shape[0], codes.shape[1]

    def _packed_shape(
        self, packed: TensorEntry, shape: TensorEntry, group: Group
    ) -> tuple[int, int]:
        if shape.shape != (2,) or shape.dtype not in (torch.int64, torch.int32):
            raise FormatMismatch(
                f"tensor `{shape.name}` is `{shape.dtype}` of shape `{shape.shape}`, expected two "
                f"integers, in `{self.checkpoint.name}`"
            )
        rows, columns = map(int, self.checkpoint.read(shape.name).tolist())
        bits = weight_of(group.scheme).grid.bits
        if (
            min(rows, columns) < 1
            or packed.shape[0] != rows
            or packed.shape[1] not in (words_dense(columns, bits), words_padded(columns, bits))
        ):
            raise FormatMismatch(
                f"tensor `{packed.name}` has shape `{packed.shape}`, expected "
                f"`({rows}, {words_dense(columns, bits)})` for a {bits}-bit weight of "
                f"`({rows}, {columns})`, in `{self.checkpoint.name}`",
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
                    f"files: {listed(plain)}, in `{self.checkpoint.name}`",
                    hint="these files are not the ones that the config was written for",
                )

    def _check_leftovers(self, found: Mapping[str, SourceWeight]) -> None:
        """Refuse what nothing reads: it would be taken for a tensor in full precision."""
        consumed = {name for weight in found.values() for name in weight.leaves.values()}
        left = [e for e in self.checkpoint.tensors.values() if e.name not in consumed]
        quantized = quantized_names(left)
        if quantized:
            raise UnsupportedVariant(
                f"quantized tensors that are not the weight of one module are not read: "
                f"{listed(quantized)}, in `{self.checkpoint.name}`"
            )

    def decode(self, weight: SourceWeight) -> QuantTensor | Tensor:
        """Read a weight [N, K]: canonical if it is quantized, else float."""
        if weight.scheme is None:
            return self.checkpoint.read(weight.leaves["weight"])
        parts = {
            leaf: self.checkpoint.read(name)
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
    """Return the class that a name suggests: a quantized weight is a Linear's or an Embedding's."""
    is_embedding = "embed" in module.rpartition(".")[2]
    return ("Embedding",) if is_embedding else ("Linear",)


def _decode(parts: Mapping[str, Tensor], weight: SourceWeight) -> QuantTensor:
    assert weight.scheme is not None, "only quantized weights are decoded"
    scheme = weight_of(weight.scheme)
    rows, columns = weight.shape
    grid_shape = scale_shape(scheme, weight.shape)
    scale = parts["weight_scale"].reshape(grid_shape)
    zero = parts.get("weight_zero_point")
    codes = parts["weight"] if "weight" in parts else parts["weight_packed"]
    if "weight_packed" in parts:
        codes = _unpack(codes, scheme.grid, columns)
        if zero is not None and zero.dtype == torch.int32:
            zero = _transposed(_unpack(_transposed(zero), scheme.grid, rows))
    return QuantTensor(
        grid=scheme.grid,
        codes=codes,
        scale=scale,
        zero=_zero_point(zero, weight, grid_shape),
        block=scheme.block_of(rows, columns),
        group_of=_group_of_columns(parts.get("weight_g_idx"), weight, grid_shape[1]),
        evaluation=Evaluation(dtype=scale.dtype),
    )


def _zero_point(
    zero: Tensor | None, weight: SourceWeight, grid_shape: tuple[int, int]
) -> Tensor | None:
    """[R, G] zero points; producers store zeros for symmetric schemes too, and nothing else."""
    assert weight.scheme is not None, "only quantized weights are decoded"
    if zero is None or not weight_of(weight.scheme).symmetric:
        return None if zero is None else zero.reshape(grid_shape)
    if bool(zero.to(torch.float32).any()):
        raise FormatMismatch(
            f"tensor `{weight.leaves['weight_zero_point']}` is not all zero, but the config says "
            f"that `{weight.scheme}` is symmetric"
        )
    return None


def _group_of_columns(groups: Tensor | None, weight: SourceWeight, count: int) -> Tensor | None:
    if groups is None or bool((groups == -1).all()):
        return None
    columns = weight.shape[1]
    if tuple(groups.shape) != (columns,) or not bool(((groups >= 0) & (groups < count)).all()):
        raise FormatMismatch(
            f"tensor `{weight.leaves['weight_g_idx']}` of shape `{tuple(groups.shape)}` has values "
            f"from {int(groups.min())} to {int(groups.max())}, expected {columns} numbers of "
            f"{count} groups"
        )
    return groups.to(torch.int32)


def _transposed(tensor: Tensor) -> Tensor:
    # NOTE: `contiguous` keeps the odd strides of a column of one element; packing views bytes.
    return tensor.T.clone(memory_format=torch.contiguous_format)


def _unpack(words: Tensor, grid: Grid, columns: int) -> Tensor:
    dense = words.shape[1] == words_dense(columns, grid.bits)
    fields = (unpack_dense if dense else unpack_padded)(words, grid.bits, columns)
    return _signed(fields, grid)


def _signed(fields: Tensor, grid: Grid) -> Tensor:
    """Return u - 2^(b-1) in int8; wraps to the right value, also for 8 bits."""
    return (fields - (1 << (grid.bits - 1))).view(torch.int8)


def _unsigned(codes: Tensor, grid: Grid) -> Tensor:
    return codes.view(torch.uint8) + (1 << (grid.bits - 1))


# -- writing ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf:
    """dtype and shape of one tensor to be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def layout(scheme: Scheme, shape: tuple[int, int], scale_dtype: torch.dtype) -> dict[str, Leaf]:
    """Return the tensors that a quantized weight [N, K] becomes, before anything is computed."""
    weight = weight_of(scheme)
    rows, columns = shape
    blocks = scale_shape(weight, shape)
    bits = weight.grid.bits
    scale = Leaf(scale_dtype, blocks if weight.granularity != "tensor" else (1,))
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
        leaves["weight_zero_point"] = Leaf(torch.int32, (words_dense(rows, bits), blocks[1]))
    return leaves


def encode(tensor: QuantTensor, scheme: Scheme) -> dict[str, Tensor]:
    """Turn a canonical weight into the tensors of `layout`, by leaf."""
    weight = weight_of(scheme)
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
        fields = _transposed(_unsigned(tensor.zero, tensor.grid))
        leaves["weight_zero_point"] = _transposed(pack_dense(fields, tensor.grid.bits))
    return leaves


__all__ = ["CompressedTensorsReader", "Leaf", "encode", "layout"]
