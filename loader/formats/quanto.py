"""optimum-quanto: int8 and float8 rows; int4 and int2 groups of a flattened weight with a shift.

N output features, K input features, g columns a group, b bits.

    qint8, qfloat8_e4m3fn, qfloat8_e5m2
        <module>.weight._data         int8, e4m3 or e5m2 [N, K]
        <module>.weight._scale        float [N, 1]
        w = code * scale
    qint4, qint2
        <module>.weight._data._data   uint8 [ceil(R / f), g], f = 8 / b fields a byte: row r of the
                                      codes C [R, g] is field r // ceil(R / f), from low to high
                                      bits, of byte row r % ceil(R / f)
        <module>.weight._scale        float [R, 1]
        <module>.weight._shift        float [R, 1], or integers
        w = C * scale - shift, or (C - shift) * scale for integers; reshaped to [N, K]
    all
        evaluated in the dtype of the scale
        <module>.input_scale, .output_scale     one number, of static activations; else 1

R = N * K / g. Above 128 columns, g is the first of 128, 96, 64, 32 that divides K; without one, and
up to 128 columns, it is K. The files do not hold K: where a bias does not tell N, the model does.

`quanto_qmap.json` holds {"<module>": {"weights": "qint4", "activations": "none"}, ...}. The config
of transformers (`quant_method: quanto`) quantizes while loading; it saves no such models itself.

Source: optimum-quanto 0.2.7 (`tensor/packed.py`, `tensor/qbits.py`, `tensor/qbytes.py`,
`tensor/grouped.py`, `nn/qmodule.py`, `models/transformers_models.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quantload.errors import FormatMismatch, MissingTensor, ModelError, UnsupportedVariant, listed
from quantload.loader.checkpoint import Checkpoint
from quantload.loader.formats.agreement import (
    ConfigSays,
    about_unused_entries,
    check_agreement,
    count_entries,
)
from quantload.loader.formats.dense import dense_weight
from quantload.loader.formats.finite import refuse_nonfinite
from quantload.loader.formats.matching import matches_transformers, names_of
from quantload.loader.formats.module_leaves import ModuleLeaves, by_module, refuse_leftovers
from quantload.loader.formats.quanto_config import (
    SKIPPED,
    TYPES,
    Says,
    parse_map,
    parse_skipped,
    parse_type,
)
from quantload.loader.model_shapes import output_features, parameter_shapes
from quantload.loader.source import FLOAT_DTYPES, Reader, SourceWeight
from quantload.quant.grid import E4M3, E5M2, INT8, Grid
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.scheme import InputScheme, WeightScheme, scheme_of

_CODES, _PACKED, _SCALE, _SHIFT = (
    "weight._data",
    "weight._data._data",
    "weight._scale",
    "weight._shift",
)
_ACTIVATIONS = ("input_scale", "output_scale")
_GROUP_SIZES = (128, 96, 64, 32)
_SHIFTS = (*FLOAT_DTYPES, torch.int8, torch.uint8)


class QuantoReader(Reader):
    """Reader of one checkpoint that optimum-quanto saved."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        config = checkpoint.quantization_config or {}
        self._is_map = checkpoint.quantization_config_file != "config.json"
        self._map = parse_map(config, checkpoint.name) if self._is_map else {}
        self._skipped = () if self._is_map else parse_skipped(config, checkpoint.name)
        self._default = "" if self._is_map else parse_type(config, checkpoint.name)
        self.checkpoint = self._without_numbers(checkpoint)

    def _without_numbers(self, checkpoint: Checkpoint) -> Checkpoint:
        """Leave out the scales of activations of modules whose weight is not quantized."""
        tensors = checkpoint.tensors
        left = {
            name
            for module in self._map
            for leaf in _ACTIVATIONS
            if (name := f"{module}.{leaf}") in tensors
            and not {f"{module}.{_CODES}", f"{module}.{_PACKED}"} & tensors.keys()
        }
        if not left:
            return checkpoint
        if any(says.activations for says in self._map.values()):
            self.warnings.append(
                f"{len(left)} scales of activations are left out, since their modules keep a "
                f"weight in full precision: {listed(left)}"
            )
        return replace(checkpoint, tensors={n: e for n, e in tensors.items() if n not in left})

    def weights(self) -> Mapping[str, SourceWeight]:
        """Describe every weight, by module.

        Raises:
            MissingTensor: A part of a quantized weight is not there.
            FormatMismatch: Tensors contradict each other, or the map.
            UnsupportedVariant: Nothing is quantized, or the width of a weight stays open.
        """
        leaves_of = by_module(self.checkpoint, (_CODES, _PACKED, _SCALE, _SHIFT, *_ACTIVATIONS))
        found = {
            module: self._describe(module, leaves)
            for module, leaves in leaves_of.items()
            if any(leaf.startswith("weight.") for leaf in leaves.entries)
        }
        if not found:
            raise UnsupportedVariant(
                f"no weight is quantized in `{self.checkpoint.name}`, expected `{_CODES}` beside "
                "the scales of optimum-quanto: transformers quantizes with it while loading",
                hint="take `quantization_config` out of config.json to read the full precision",
            )
        for entry in self.checkpoint.tensors.values():
            plain = dense_weight(entry)
            if plain is not None:
                if plain.module in found:
                    raise FormatMismatch(
                        f"module `{plain.module}` has both `weight` and `{_SCALE}`, expected one, "
                        f"in `{self.checkpoint.name}`"
                    )
                found[plain.module] = plain
        consumed = {name for weight in found.values() for name in weight.leaves.values()}
        refuse_leftovers(self.checkpoint, consumed)
        self._compare_with_map(found)
        return found

    def _compare_with_map(self, found: Mapping[str, SourceWeight]) -> None:
        if not self._is_map:
            self.warnings += about_unused_entries(
                [f"{SKIPPED}: {entry}" for entry in self._skipped],
                {},
                self.checkpoint,
                lambda entry: lambda module: matches_transformers(entry, module),
            )
            return
        wanted = [module for module, says in self._map.items() if says.weights]
        if missing := [module for module in wanted if module not in found]:
            raise MissingTensor(
                f"`quanto_qmap.json` names modules that are not in the files: {listed(missing)}, "
                f"in `{self.checkpoint.name}`"
            )
        stored = {module: weight.is_quantized for module, weight in found.items()}
        said = {
            module: ConfigSays(
                is_quantized=module in self._map and bool(self._map[module].weights),
                entry="quanto_qmap.json",
                is_exact=True,
            )
            for module in stored
        }
        self.warnings += check_agreement(said, stored, self.checkpoint.name)
        self.entries = count_entries(said, stored)
        if any(weight.scheme is not None and weight.scheme.input for weight in found.values()):
            self.warnings.append(
                "outputs are rounded too by optimum-quanto (`output_scale`): here they are not"
            )

    # -- headers -------------------------------------------------------------------------------

    def _describe(self, module: str, leaves: ModuleLeaves) -> SourceWeight:
        says = self._map.get(module, Says(self._default, ""))
        leaves.require([_SCALE], because="a weight of optimum-quanto has it")
        if _CODES in leaves and _PACKED in leaves:
            raise FormatMismatch(
                f"module `{module}` has both `{_CODES}` and `{_PACKED}`, expected one, in "
                f"`{self.checkpoint.name}`"
            )
        is_packed = _PACKED in leaves or _SHIFT in leaves
        describe = self._describe_packed if is_packed else self._describe_rows
        shape, scheme = describe(leaves, says)
        names = dict(leaves.names)
        static = _input_scheme(says)
        for leaf, other in zip(_ACTIVATIONS, ("x_scale", "y_scale"), strict=True):
            if leaf in names:
                leaves.expect(
                    leaf, dtypes=FLOAT_DTYPES, shapes=[(), (1,)], because="it is one number"
                )
                if static is None or leaf == "output_scale":  # not run
                    names[other] = names.pop(leaf)
        if static is not None:
            leaves.require(["input_scale"], because=f"activations are `{says.activations}`")
        return SourceWeight(
            module=module,
            shape=shape,
            scheme=scheme_of(scheme, static),
            encoding=f"quanto {scheme.grid.name.replace('uint', 'int')}",
            dtype=leaves[_SCALE].dtype,
            leaves=names,
            decided_by="quanto_qmap.json" if module in self._map else "the headers",
        )

    def _describe_rows(
        self, leaves: ModuleLeaves, says: Says
    ) -> tuple[tuple[int, int], WeightScheme]:
        leaves.require([_CODES], because="a weight of optimum-quanto has it")
        because = f"the weight is `{says.weights}`" if says.weights else "it is a weight of quanto"
        grids = {INT8.storage: INT8, E4M3.storage: E4M3, E5M2.storage: E5M2}
        if says.weights:
            grids = {TYPES[says.weights].storage: TYPES[says.weights]}
        if says.weights in ("qint4", "qint2"):
            leaves.require([_PACKED], because=because)
        codes = leaves.expect(_CODES, dtypes=tuple(grids), because=because)
        if len(codes.shape) != 2:
            raise UnsupportedVariant(
                f"tensor `{codes.name}` has shape `{codes.shape}`, expected 2 dimensions, in "
                f"`{self.checkpoint.name}`"
            )
        rows, columns = codes.shape
        leaves.expect(_SCALE, dtypes=FLOAT_DTYPES, shapes=[(rows, 1)], because=because)
        return (rows, columns), WeightScheme(grid=grids[codes.dtype], granularity="channel")

    def _describe_packed(
        self, leaves: ModuleLeaves, says: Says
    ) -> tuple[tuple[int, int], WeightScheme]:
        leaves.require([_PACKED, _SHIFT], because="a packed weight of optimum-quanto has it")
        scale, codes = leaves[_SCALE], leaves[_PACKED]
        because = f"`{leaves.module}` has {scale.shape[:1]} groups"
        leaves.expect(_PACKED, dtypes=(torch.uint8,), because=because)
        if len(scale.shape) != 2 or len(codes.shape) != 2:
            raise FormatMismatch(
                f"tensors `{scale.name}` and `{codes.name}` have shapes `{scale.shape}` and "
                f"`{codes.shape}`, expected 2 dimensions, in `{self.checkpoint.name}`"
            )
        groups, width = scale.shape[0], codes.shape[1]
        leaves.expect(_SCALE, dtypes=FLOAT_DTYPES, shapes=[(groups, 1)], because=because)
        leaves.expect(_SHIFT, dtypes=_SHIFTS, shapes=[(groups, 1)], because=because)
        grid = self._packed_grid(leaves, says, groups)
        packed = (-(-groups // (8 // grid.bits)), width)
        leaves.expect(_PACKED, dtypes=(torch.uint8,), shapes=[packed], because=because)
        shape = self._shape_of(leaves.module, groups, width)
        is_float = leaves[_SHIFT].dtype.is_floating_point
        scheme = WeightScheme(
            grid=grid,
            granularity="channel",
            symmetric=False,
            zero="offset" if is_float else "int",
        )
        if shape[1] > width:
            scheme = replace(scheme, granularity="group", group_size=width)
        return shape, scheme

    def _packed_grid(self, leaves: ModuleLeaves, says: Says, groups: int) -> Grid:
        if says.weights:
            grid = TYPES[says.weights]
            if grid.bits in (2, 4):
                return grid
        fitting = [
            name
            for name in ("qint4", "qint2")
            if leaves[_PACKED].shape[0] == -(-groups // (8 // TYPES[name].bits))
        ]
        if says.weights or len(fitting) != 1:
            raise FormatMismatch(
                f"tensor `{leaves[_PACKED].name}` of shape `{leaves[_PACKED].shape}` holds "
                f"{groups} groups, expected `{says.weights or 'qint4 or qint2'}`, in "
                f"`{self.checkpoint.name}`"
            )
        return TYPES[fitting[0]]

    def _shape_of(self, module: str, groups: int, width: int) -> tuple[int, int]:
        """Return (N, K) of a packed weight with `groups` rows of `width` codes."""
        bias = self.checkpoint.tensors.get(f"{module}.bias")
        if bias is not None and len(bias.shape) == 1:
            rows = bias.shape[0]
        else:
            rows = self._rows_in_model(module, groups if width not in _GROUP_SIZES else None)
        columns = groups * width // rows if rows else 0
        if rows * columns != groups * width or _group_width(columns) != width:
            raise FormatMismatch(
                f"module `{module}` has {groups} groups of {width} codes and {rows} output "
                f"features, which optimum-quanto does not make of {columns} input features, in "
                f"`{self.checkpoint.name}`"
            )
        return rows, columns

    def _rows_in_model(self, module: str, without_model: int | None) -> int:
        """Return N as the model has it; `without_model`, if given, where there is no model."""
        try:
            found = [output_features(self._model_shapes, name) for name in names_of(module)]
        except UnsupportedVariant:
            if without_model is None:
                raise
            return without_model
        rows = next((rows for rows in found if rows), without_model)
        if rows is None:
            raise UnsupportedVariant(
                f"the width of the weight of `{module}` cannot be told: its tensors leave several "
                f"open, and the model has no such layer, in `{self.checkpoint.name}`"
            )
        return rows

    @cached_property
    def _model_shapes(self) -> Mapping[str, tuple[int, ...]]:
        try:
            return parameter_shapes(self.checkpoint.config, self.checkpoint.name)
        except ModelError as error:
            raise UnsupportedVariant(
                "the width of packed weights of optimum-quanto is not in the files, and "
                f"{error.message}"
            ) from error

    # -- decode --------------------------------------------------------------------------------

    def decode(self, weight: SourceWeight) -> QuantTensor | Tensor:
        """Read a weight [N, K]: canonical if it is quantized, else float.

        Raises:
            NonFiniteWeight: A code, scale or shift is NaN or infinity.
        """
        if weight.scheme is None:
            return self.checkpoint.read(weight.leaves["weight"])
        assert weight.scheme.weight is not None, "quantized weights have a scheme"
        scheme, leaves = weight.scheme.weight, weight.leaves
        scale = self._read_finite(leaves[_SCALE])
        parts: dict[str, Any] = {
            "grid": scheme.grid,
            "block": scheme.block_of(*weight.shape),
            "evaluation": Evaluation(scale.dtype, result=scale.dtype),
        }
        if _CODES in leaves:
            return QuantTensor(codes=self._read_finite(leaves[_CODES]), scale=scale, **parts)
        rows = weight.shape[0]
        codes = _unpacked(self.checkpoint.read(leaves[_PACKED]), scheme.grid.bits, scale.shape[0])
        shift = self._read_finite(leaves[_SHIFT]).reshape(rows, -1)
        is_float = shift.is_floating_point()
        return QuantTensor(
            codes=codes.reshape(weight.shape),
            scale=scale.reshape(rows, -1),
            zero=None if is_float else shift,
            offset=-shift if is_float else None,
            **parts,
        )

    def _read_finite(self, name: str) -> Tensor:
        tensor = self.checkpoint.read(name)
        refuse_nonfinite(tensor, name, self.checkpoint.name)
        return tensor


def _unpacked(packed: Tensor, bits: int, rows: int) -> Tensor:
    """[ceil(rows / f), g] bytes to [rows, g] codes in uint8."""
    mask = (1 << bits) - 1
    return torch.cat([(packed >> shift) & mask for shift in range(0, 8, bits)])[:rows]


def _group_width(columns: int) -> int:
    """Columns that share a scale in a weight with this many."""
    if columns <= _GROUP_SIZES[0]:
        return columns
    return next((size for size in _GROUP_SIZES if columns % size == 0), columns)


def _input_scheme(says: Says) -> InputScheme | None:
    if not says.activations:
        return None
    grid = TYPES[says.activations]
    return InputScheme(grid=grid, granularity="tensor", dynamic=False)


__all__ = ["QuantoReader"]
