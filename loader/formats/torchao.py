"""torchao 0.13 to 0.18: tensor subclasses, flattened into safetensors or pickled.

Which tensors are quantized, and how, stands beside each tensor (`torchao_stored.py`); the config
(`torchao_config.py`) is held against it. N output features, K input features, G groups of columns,
[bn, bk] = `block_size`; experts put a dimension E before all shapes and sizes.

class                       parts                                   value
Float8Tensor                qdata e4m3 or e5m2 [N, K]               f32(q) * scale
                            scale f32 [N/bn, K/bk]
Int8Tensor                  qdata int8 [N, K]                       (q - zero_point) * scale
                            scale float [N/bn, K/bk]
                            zero_point int8 like scale, or absent
IntxUnpackedToInt8Tensor    the same; codes of 1 to 8 bits, one a byte (`target_dtype`)
Int4Tensor                  qdata int8 [N, K/2], two codes of two's complement a byte, the even
                            column in the low half
                            scale, zero_point float [G, N]          f32(q) * scale + zero_point
AffineQuantizedTensor       see `torchao_affine.py`

Values are computed in the wider of the scale's dtype and the weight's own (`dtype` among the
attributes; float32 for Float8Tensor), then rounded to the weight's own. Those of an Int4Tensor, for
which torchao has no function, stay in float32. Differences of integers are exact in every dtype.

    act_quant_kwargs, activation_quantization    how inputs are quantized while the model runs
    act_pre_scale [K]                            inputs are multiplied by it first
    act_quant_scale, act_quant_zero_point        fixed scale and zero point of inputs, one number

Refused by name: layouts for one kernel (Int4TilePackedTo4dTensor, Int4PreshuffledTensor,
Int4OpaqueTensor, Int4PlainInt32Tensor, sparse ones), prototypes (MXTensor, NVFP4Tensor).

Source: torchao 0.18.0 `quantization/quantize_/workflows/`, `quantization/quant_primitives.py`;
`int4_row_quantize_zp` of fbgemm_gpu for Int4Tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantload.errors import FormatMismatch, listed
from quantload.loader.checkpoint import Checkpoint
from quantload.loader.formats.agreement import (
    ConfigSays,
    about_unused_entries,
    check_agreement,
    count_entries,
)
from quantload.loader.formats.dense import dense_weight
from quantload.loader.formats.finite import refuse_nonfinite
from quantload.loader.formats.float8 import refuse_lost_scales
from quantload.loader.formats.module_leaves import refuse_leftovers, refuse_unknown_parts
from quantload.loader.formats.torchao_affine import affine_quantized, linear_activation
from quantload.loader.formats.torchao_config import Rule, matches_entry, parse_config
from quantload.loader.formats.torchao_layouts import float8, int4, int8, intx
from quantload.loader.formats.torchao_shapes import Layout
from quantload.loader.formats.torchao_stored import Stored, read_stored
from quantload.loader.source import Reader, SourceWeight
from quantload.quant.grid import Grid
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.scheme import scheme_of

_LAYOUTS: dict[str, Callable[[Stored, Rule | None], Layout]] = {
    "AffineQuantizedTensor": affine_quantized,
    "Float8Tensor": float8,
    "Int4Tensor": int4,
    "Int8Tensor": int8,
    "IntxUnpackedToInt8Tensor": intx,
    "LinearActivationQuantizedTensor": linear_activation,
}
_OLD = ("AffineQuantizedTensor", "LinearActivationQuantizedTensor")
# Classes of tensors that each config makes.
_MADE_BY = {
    "Float8WeightOnlyConfig": ("Float8Tensor", *_OLD),
    "Float8DynamicActivationFloat8WeightConfig": ("Float8Tensor", *_OLD),
    "Int4WeightOnlyConfig": ("Int4Tensor", *_OLD),
    "Int8WeightOnlyConfig": ("Int8Tensor", *_OLD),
    "Int8DynamicActivationInt8WeightConfig": ("Int8Tensor", *_OLD),
    "Int8StaticActivationInt8WeightConfig": ("Int8Tensor", *_OLD),
    "IntxWeightOnlyConfig": ("IntxUnpackedToInt8Tensor", *_OLD),
    "Int8DynamicActivationIntxWeightConfig": ("IntxUnpackedToInt8Tensor", *_OLD),
}


class TorchaoReader(Reader):
    """Reader of torchao checkpoints."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        assert checkpoint.quantization_config is not None, "detected by its config"
        self._config = parse_config(checkpoint.quantization_config, checkpoint.name)
        self._layouts: dict[str, Layout] = {}

    def weights(self) -> Mapping[str, SourceWeight]:
        """Describe every weight, by module; config, metadata and headers must agree."""
        found: dict[str, SourceWeight] = {}
        said: dict[str, ConfigSays] = {}
        for name, stored in read_stored(self.checkpoint).items():
            says, rule = self._config.says(name)
            weight = self._describe(stored, says, rule)
            found[weight.module], said[weight.module] = weight, says
        for entry in self.checkpoint.tensors.values():
            plain = dense_weight(entry)
            if plain is not None:
                found[plain.module], said[plain.module] = plain, self._config.says(entry.name)[0]
        is_stored = {module: weight.is_quantized for module, weight in found.items()}
        self.warnings += check_agreement(said, is_stored, self.checkpoint.name)
        self.entries = count_entries(said, is_stored)
        self.warnings += about_unused_entries(
            self._config.entries(), self.entries, self.checkpoint, matches_entry
        )
        consumed = (name for weight in found.values() for name in weight.leaves.values())
        refuse_leftovers(self.checkpoint, consumed)
        refuse_unknown_parts(self.checkpoint, found)
        return found

    def _describe(self, stored: Stored, says: ConfigSays, rule: Rule | None) -> SourceWeight:
        made = _MADE_BY.get(rule.kind) if rule is not None else None
        make = _LAYOUTS.get(stored.kind)
        if make is None:
            raise stored.refused(f"torchao's `{stored.kind}`")
        if made is not None and stored.kind not in made:
            assert rule is not None, "only a rule names a config"
            raise FormatMismatch(
                f"`{stored.name}` is a `{stored.kind}`, but the quantization config says "
                f"`{rule.kind}`: {says.entry}, in `{self.checkpoint.name}`",
                hint="these files are not the ones that the config was written for",
            )
        layout = make(stored, rule)
        _check(stored, layout, rule)
        module, _, leaf = stored.name.rpartition(".")
        is_usual = leaf == "weight" and module
        is_experts = len(layout.shape) == 3
        weight = SourceWeight(
            module=module if is_usual and not is_experts else stored.name,
            shape=(layout.shape[-2], layout.shape[-1]),
            scheme=scheme_of(layout.weight, layout.input),
            encoding=_encoding(stored, layout),
            dtype=layout.result or layout.evaluation,
            leaves={_leaf(part): stored.parts[part].name for part in layout.parts},
            decided_by=says.entry if rule is not None else "the metadata of the header",
            parameter="" if is_usual and not is_experts else stored.name,
            experts=layout.shape[0] if is_experts else 0,
            obstacle="its input channels have factors of their own" if layout.inner else "",
        )
        self._layouts[weight.module] = layout
        return weight

    def decode(self, weight: SourceWeight) -> QuantTensor | Tensor:
        """Read a weight [N, K] or [E * N, K]: canonical if it is quantized, else float.

        Raises:
            NonFiniteWeight: Codes or scales hold NaN or infinity.
            FormatMismatch: Codes are beyond their grid, scales are all zero, or zero points are not
                zero although the config says that there are none.
        """
        if weight.scheme is None:
            return self.checkpoint.read(weight.leaves["weight"])
        layout = self._layouts[weight.module]
        return _Parts(self.checkpoint, weight, layout).decode()


def _check(stored: Stored, layout: Layout, rule: Rule | None) -> None:
    if unknown := set(stored.parts) - set(layout.parts):
        raise stored.refused(f"part {listed(unknown)} of a `{stored.kind}`")
    if rule is None or rule.group_size is None:
        return
    expected = (1, min(rule.group_size, layout.columns))
    if layout.block != expected:
        found = f"scales for blocks of `{layout.block}`"
        raise stored.wrong(stored.parts[layout.scale], found, f"groups of {expected[1]}")


def _leaf(part: str) -> str:
    """Return what a part is called among a weight's leaves; those of inputs keep their name."""
    return part if part.startswith("act_quant") else f"weight_{part}"


def _encoding(stored: Stored, layout: Layout) -> str:
    scheme = layout.weight
    kind = scheme.granularity
    sharing = f"g{scheme.group_size}" if kind == "group" else kind
    return f"{stored.kind} {scheme.grid.name} {sharing}"


@dataclass(frozen=True)
class _Parts:
    """The parts of one weight while it is read."""

    checkpoint: Checkpoint
    weight: SourceWeight
    layout: Layout

    def decode(self) -> QuantTensor:
        layout = self.layout
        grid = layout.weight.grid
        codes = self._codes(grid)
        scale = self._scales(layout.scale)
        refuse_lost_scales(codes, scale, self._name(layout.scale), self.checkpoint.name)
        zero = self._scales(layout.zero) if layout.zero else None
        if zero is not None and layout.weight.symmetric:
            self._refuse_shift(zero)
            zero = None
        return QuantTensor(
            grid=grid,
            codes=codes,
            scale=scale,
            zero=zero if layout.use == "zero" else None,
            offset=zero if layout.use == "offset" else None,
            inner=self._inner(),
            input_scale=self._number(layout.input_scale),
            input_zero=self._number(layout.input_zero),
            block=layout.block,
            evaluation=Evaluation(layout.evaluation, result=layout.result),
        )

    def _codes(self, grid: Grid) -> Tensor:
        """[N, K] or [E * N, K] codes of the grid."""
        layout = self.layout
        stored = self._read(layout.codes)
        stored = stored.reshape(layout.rows, stored.shape[-1])
        if grid.is_float8:
            return stored
        if layout.is_packed:
            fields = stored.view(torch.uint8)
            stored = torch.stack((fields & 15, fields >> 4), dim=-1).flatten(1)
            return ((stored ^ 8) - 8).view(torch.int8)
        if layout.middle:
            return (stored - layout.middle).view(torch.int8)
        if bool((stored < grid.low).any()) or bool((stored > grid.high).any()):
            raise FormatMismatch(
                f"tensor `{self._name(layout.codes)}` has codes from {int(stored.min())} to "
                f"{int(stored.max())}, expected those of `{grid.name}`, in "
                f"`{self.checkpoint.name}`"
            )
        return stored

    def _scales(self, part: str) -> Tensor:
        """[R, G] scales, zero points or offsets."""
        layout = self.layout
        tensor = self._read(part)
        if layout.is_turned:
            tensor = tensor.transpose(-1, -2)
        groups = layout.columns // layout.block[1]
        return tensor.reshape(layout.rows // layout.block[0], groups).contiguous()

    def _inner(self) -> Tensor | None:
        if not self.layout.inner:
            return None
        factors = self._read(self.layout.inner).reshape(-1)
        return factors.expand(self.layout.columns).contiguous()

    def _number(self, part: str) -> Tensor | None:
        return self._read(part).reshape(1) if part else None

    def _refuse_shift(self, zero: Tensor) -> None:
        if bool(zero.any()):
            raise FormatMismatch(
                f"tensor `{self._name(self.layout.zero)}` is not all zero, but the config says "
                f"that `{self.weight.scheme}` is symmetric, in `{self.checkpoint.name}`"
            )

    def _read(self, part: str) -> Tensor:
        tensor = self.checkpoint.read(self._name(part))
        refuse_nonfinite(tensor, self._name(part), self.checkpoint.name)
        return tensor

    def _name(self, part: str) -> str:
        return self.weight.leaves[_leaf(part)]
