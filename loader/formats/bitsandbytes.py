"""bitsandbytes: NF4 and FP4 blocks of a flattened weight, LLM.int8() rows.

N output features, K input features; elements are counted through the rows of [N, K].

4 bits (`<parameter>` is `<module>.weight`, or one parameter [E, rows, columns] of all experts)
    <parameter>                   bytes [ceil(elements / 2), 1], as uint8 or seen as another storage
                                  dtype (fewer rows); the high half of a byte comes first
    <parameter>.quant_map         float32 [16], the value of each code
    <parameter>.absmax            float [B], one scale a block of `blocksize` elements, the last
                                  may be partial; with double quantization uint8 [B]
    <parameter>.nested_absmax     float32 [ceil(B / nested_blocksize)]
    <parameter>.nested_quant_map  float32 [256]
    <parameter>.quant_state.bitsandbytes__nf4 (or __fp4)
                                  uint8, a JSON object: quant_type, blocksize, dtype, shape; with
                                  double quantization nested_blocksize, nested_dtype, nested_offset
    absmax[i] = nested_quant_map[code[i]] * nested_absmax[i // nested_blocksize] + nested_offset
    w = quant_map[code] * absmax[element // blocksize]
    in float32, the finished value rounded to `dtype`
8 bits
    <module>.weight               int8 [N, K]
    <module>.SCB                  float32 [N], largest magnitude of each row
    <module>.weight_format        uint8, 0 (rows); other numbers are layouts of old GPU kernels
    w = code * SCB * 7.874015718698502e-3, in float32 from left to right

A layer that keeps its weight as [K, N] (GPT-2) is stored as [N, K]. Of a config only the number of
bits, the type and the skipped modules count: shapes, block sizes and dtypes come from the tensors.
A config without such tensors asks for quantization while loading: the files are in full precision.

Source: bitsandbytes 0.50.2 (`functional.py`, `nn/modules.py`, `nn/parametrize.py`), transformers
5.24.0 (`integrations/bitsandbytes.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantload.errors import FormatMismatch, MissingTensor, UnsupportedVariant
from quantload.loader.checkpoint import Checkpoint, TensorEntry
from quantload.loader.formats.agreement import (
    ConfigSays,
    about_unused_entries,
    check_agreement,
    count_entries,
)
from quantload.loader.formats.bitsandbytes_config import QuantState, parse_config, read_state
from quantload.loader.formats.dense import dense_weight
from quantload.loader.formats.finite import refuse_nonfinite
from quantload.loader.formats.flat_blocks import block_of, on_grid, with_blocks
from quantload.loader.formats.matching import matches_transformers
from quantload.loader.formats.module_leaves import ModuleLeaves, by_module, refuse_leftovers
from quantload.loader.source import FLOAT_DTYPES, Reader, SourceWeight
from quantload.mappers.facts import keeps_input_first
from quantload.quant.grid import INT8, Grid, table_grid
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.scheme import WeightScheme, scheme_of

STATE = "quant_state.bitsandbytes__"
_LEAVES_4BIT = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_LEAVES_8BIT = ("SCB", "weight_format")
_STORAGE = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)
_PER_127 = 7.874015718698502e-3
# Tables of the two types; a file's own table decides, these stand for it in descriptions.
_TABLES = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": (
        *(0.0, 0.0052083334885537624, 0.6666666865348816, 1.0),
        *(0.3333333432674408, 0.5, 0.1666666716337204, 0.25),
        *(0.0, -0.0052083334885537624, -0.6666666865348816, -1.0),
        *(-0.3333333432674408, -0.5, -0.1666666716337204, -0.25),
    ),
}
GRIDS = {name: table_grid(name, table) for name, table in _TABLES.items()}


@dataclass(frozen=True)
class _Packed:
    """A 4-bit parameter: its tensors and what its state says.

    Args:
        name: Name of the parameter.
        leaves: Its tensors, but for the packed bytes.
        state: The parsed state.
    """

    name: str
    leaves: ModuleLeaves
    state: QuantState


class BitsAndBytesReader(Reader):
    """Reader of one checkpoint that bitsandbytes quantized."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._config = parse_config(checkpoint.quantization_config or {}, checkpoint.name)
        self._packed: dict[str, _Packed] = {}

    def weights(self) -> Mapping[str, SourceWeight]:
        """Describe every weight, by module; reads the small states too.

        Raises:
            MissingTensor: A part of a quantized weight is not there.
            FormatMismatch: Tensors contradict each other, or the config.
            UnsupportedVariant: A layout of old GPU kernels, or a type that is not known.
        """
        found = self._packed_weights() | self._int8_weights()
        consumed = {name for weight in found.values() for name in weight.leaves.values()}
        for entry in self.checkpoint.tensors.values():
            plain = dense_weight(entry) if entry.name not in consumed else None
            if plain is not None:
                found[plain.module] = plain
        refuse_leftovers(self.checkpoint, consumed)
        self._compare_with_config(found)
        order = {name: number for number, name in enumerate(self.checkpoint.tensors)}
        first = {module: next(iter(weight.leaves.values())) for module, weight in found.items()}
        return dict(sorted(found.items(), key=lambda item: order[first[item[0]]]))

    def _compare_with_config(self, found: Mapping[str, SourceWeight]) -> None:
        stored = {module: weight.is_quantized for module, weight in found.items()}
        if not any(stored.values()):
            if self._config.entry:
                self.warnings.append(
                    f"the config asks to quantize while loading (`{self._config.entry}`): the "
                    "files hold full precision, which is read as it is"
                )
            return
        said = {}
        for module in stored:
            skipped = self._config.skipped_by(module)
            entry = f"llm_int8_skip_modules: {skipped}" if skipped else self._config.entry
            said[module] = ConfigSays(not skipped, entry)
        self.warnings += check_agreement(said, stored, self.checkpoint.name)
        self.entries = count_entries(said, stored)
        self.warnings += about_unused_entries(
            (f"llm_int8_skip_modules: {pattern}" for pattern in self._config.skipped),
            self.entries,
            self.checkpoint,
            lambda pattern: lambda module: matches_transformers(pattern, module),
        )

    # -- 4 bits --------------------------------------------------------------------------------

    def _packed_weights(self) -> dict[str, SourceWeight]:
        states = [name for name in self.checkpoint.tensors if f".{STATE}" in name]
        kinds = {STATE + name.partition(f".{STATE}")[2] for name in states}
        if unknown := kinds - {STATE + kind for kind in GRIDS}:
            raise UnsupportedVariant(
                f"bitsandbytes type `{min(unknown).removeprefix(STATE)}` is not read, expected "
                f"`nf4` or `fp4`, in `{self.checkpoint.name}`"
            )
        found = by_module(self.checkpoint, (*_LEAVES_4BIT, *kinds))
        weights = (self._describe_packed(name, leaves) for name, leaves in found.items())
        return {weight.module: weight for weight in weights}

    def _describe_packed(self, name: str, leaves: ModuleLeaves) -> SourceWeight:
        kinds = [leaf for leaf in leaves.entries if leaf.startswith(STATE)]
        if len(kinds) > 1:
            raise FormatMismatch(
                f"parameter `{name}` has two states, `{kinds[0]}` and `{kinds[1]}`, expected one, "
                f"in `{self.checkpoint.name}`"
            )
        because = "a 4-bit weight of bitsandbytes has it"
        leaves.require([*kinds] or [f"{STATE}nf4"], because=because)
        kind = kinds[0].removeprefix(STATE)
        state = read_state(self.checkpoint, leaves[kinds[0]], kind)
        self._config.check_bits(4, kind, name, self.checkpoint.name)
        module = name.removesuffix(".weight")
        is_weight = name != module
        if len(state.shape) not in ((2,) if is_weight else (2, 3)):
            raise UnsupportedVariant(
                f"parameter `{name}` has shape `{state.shape}`, expected the weight of a linear "
                f"layer or of its experts, in `{self.checkpoint.name}`"
            )
        packed = _Packed(name, leaves, state)
        codes = self._check_packed(packed)
        self._packed[name] = packed
        *experts, rows, columns = state.shape
        matrix = (state.elements // columns, columns)
        scheme = with_blocks(
            WeightScheme(grid=GRIDS[kind], granularity="tensor"), matrix, state.blocksize
        )
        nested = ", double quantized" if state.nested_blocksize else ""
        return SourceWeight(
            module=module,
            shape=(rows, columns),
            scheme=scheme_of(scheme, None, name=kind),
            encoding=f"bitsandbytes {kind}, blocks of {state.blocksize}{nested}",
            dtype=state.dtype,
            leaves={"weight": codes.name} | {f"weight.{k}": v for k, v in leaves.names.items()},
            decided_by=self._config.entry or kinds[0],
            parameter="" if is_weight else name,
            experts=experts[0] if experts else 0,
            is_transposed=is_weight and keeps_input_first(self.checkpoint.config, module),
        )

    def _check_packed(self, packed: _Packed) -> TensorEntry:
        """Check dtypes and shapes of all parts; return the header of the packed bytes."""
        leaves, state = packed.leaves, packed.state
        because = f"`{packed.name}` holds {state.elements} elements in blocks of {state.blocksize}"
        needed = ["absmax", "quant_map"]
        if state.nested_blocksize:
            needed += ["nested_absmax", "nested_quant_map"]
        leaves.require(needed, because=because)
        extra = [
            leaf for leaf in leaves.entries if leaf.startswith("nested") and leaf not in needed
        ]
        if extra:
            raise FormatMismatch(
                f"tensor `{leaves[extra[0]].name}` is there, but the state says nothing of double "
                f"quantization, in `{self.checkpoint.name}`"
            )
        blocks = -(-state.elements // state.blocksize)
        f32 = (torch.float32,)
        leaves.expect("quant_map", dtypes=f32, shapes=[(16,)], because=because)
        scale_dtypes = (torch.uint8,) if state.nested_blocksize else FLOAT_DTYPES
        leaves.expect("absmax", dtypes=scale_dtypes, shapes=[(blocks,)], because=because)
        if state.nested_blocksize:
            count = -(-blocks // state.nested_blocksize)
            leaves.expect("nested_absmax", dtypes=f32, shapes=[(count,)], because=because)
            leaves.expect("nested_quant_map", dtypes=f32, shapes=[(256,)], because=because)
        return self._check_bytes(packed, because)

    def _check_bytes(self, packed: _Packed, because: str) -> TensorEntry:
        entry = self.checkpoint.tensors.get(packed.name)
        if entry is None:
            raise MissingTensor(
                f"tensor `{packed.name}` is missing in `{self.checkpoint.name}`; the module has "
                "its scales"
            )
        num_bytes = -(-packed.state.elements // 2)
        shapes = [(-(-num_bytes // entry.dtype.itemsize), 1)]
        one = ModuleLeaves(packed.name, {"weight": entry}, self.checkpoint.name)
        return one.expect("weight", dtypes=_STORAGE, shapes=shapes, because=because)

    # -- 8 bits --------------------------------------------------------------------------------

    def _int8_weights(self) -> dict[str, SourceWeight]:
        found = by_module(self.checkpoint, (*_LEAVES_8BIT, "weight"))
        return {
            module: self._describe_int8(module, leaves)
            for module, leaves in found.items()
            if "SCB" in leaves or "weight_format" in leaves or _is_int8(leaves)
        }

    def _describe_int8(self, module: str, leaves: ModuleLeaves) -> SourceWeight:
        because = "an int8 weight of bitsandbytes has it"
        leaves.require(("weight", "SCB"), because=because)
        self._config.check_bits(8, "int8", f"{module}.weight", self.checkpoint.name)
        codes = leaves.expect("weight", dtypes=(torch.int8,), because=because)
        if len(codes.shape) != 2:
            raise UnsupportedVariant(
                f"tensor `{codes.name}` has shape `{codes.shape}`, expected 2 dimensions, in "
                f"`{self.checkpoint.name}`"
            )
        rows, columns = codes.shape
        leaves.expect("SCB", dtypes=FLOAT_DTYPES, shapes=[(rows,)], because=because)
        self._check_weight_format(leaves)
        scheme = WeightScheme(grid=INT8, granularity="channel")
        return SourceWeight(
            module=module,
            shape=(rows, columns),
            scheme=scheme_of(scheme, None),
            encoding="bitsandbytes int8, one scale a row",
            dtype=torch.float32,
            obstacle="its scales are divided by 127 after they meet the codes",
            leaves=leaves.names,
            decided_by=self._config.entry or "SCB",
            is_transposed=keeps_input_first(self.checkpoint.config, module),
        )

    def _check_weight_format(self, leaves: ModuleLeaves) -> None:
        if "weight_format" not in leaves:  # rows, as before the tensor was written
            return
        because = "it is one number, 0 for rows"
        entry = leaves.expect(
            "weight_format", dtypes=(torch.uint8,), shapes=[(), (1,)], because=because
        )
        number = int(self.checkpoint.read(entry.name))
        if number:
            raise UnsupportedVariant(
                f"tensor `{entry.name}` is `{number}`, expected `0`: the codes are in the layout "
                f"of an old GPU kernel, in `{self.checkpoint.name}`",
                hint="load it with the bitsandbytes version that wrote it, and save it again",
            )

    # -- decode --------------------------------------------------------------------------------

    def decode(self, weight: SourceWeight) -> QuantTensor | Tensor:
        """Read a weight [N, K] or [E * N, K]: canonical if it is quantized, else float.

        Raises:
            NonFiniteWeight: A table or scale holds NaN or infinity.
        """
        if weight.scheme is None:
            return self.checkpoint.read(weight.leaves["weight"])
        if "SCB" in weight.leaves:
            return self._decode_int8(weight)
        return self._decode_packed(self._packed[weight.parameter_name])

    def _read_finite(self, name: str) -> Tensor:
        tensor = self.checkpoint.read(name)
        refuse_nonfinite(tensor, name, self.checkpoint.name)
        return tensor

    def _decode_int8(self, weight: SourceWeight) -> QuantTensor:
        rows, columns = weight.shape
        return QuantTensor(
            grid=INT8,
            codes=self.checkpoint.read(weight.leaves["weight"]),
            scale=self._read_finite(weight.leaves["SCB"]).reshape(rows, 1),
            outer=torch.tensor([[_PER_127]]),
            block=(1, columns),
            evaluation=Evaluation(torch.float32, outer="value*"),
        )

    def _decode_packed(self, packed: _Packed) -> QuantTensor:
        state = packed.state
        columns = state.shape[-1]
        shape = (state.elements // columns, columns)
        raw = self.checkpoint.read(packed.name).view(torch.uint8).flatten()
        codes = torch.stack((raw >> 4, raw & 0x0F), dim=-1).flatten()[: state.elements]
        return QuantTensor(
            grid=self._grid(packed),
            codes=codes.reshape(shape),
            scale=on_grid(self._scales(packed), shape, state.blocksize),
            block=block_of(shape, state.blocksize),
            evaluation=Evaluation(torch.float32, result=state.dtype),
        )

    def _grid(self, packed: _Packed) -> Grid:
        """Return the grid of the file's own table."""
        table = self._read_finite(packed.leaves["quant_map"].name)
        usual = GRIDS[packed.state.kind]
        values = tuple(table.tolist())
        return usual if values == usual.table else table_grid(usual.name, values)

    def _scales(self, packed: _Packed) -> Tensor:
        """[B] scale of each block; those of double quantization in float32."""
        names, state = packed.leaves.names, packed.state
        stored = self._read_finite(names["absmax"])
        if not state.nested_blocksize:
            return stored
        values = self._read_finite(names["nested_quant_map"])[stored.to(torch.int32)]
        outer = self._read_finite(names["nested_absmax"])
        outer = outer.repeat_interleave(state.nested_blocksize)[: stored.numel()]
        return values * outer + state.nested_offset


def _is_int8(leaves: ModuleLeaves) -> bool:
    return "weight" in leaves and leaves["weight"].dtype == torch.int8


__all__ = ["GRIDS", "BitsAndBytesReader"]
