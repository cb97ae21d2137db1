"""HQQ: groups of a flattened weight with float scales and float zero points.

N output features, K input features, g = group size, e = N * K.

    <module>.W_q      codes C [e / g, g] (axis 1) or [g, e / g] (axis 0), without groups [N, K],
                      packed along their rows: with f fields a word and R = ceil(rows / f), word
                      [r, c] holds C[r, c], C[r + R, c], C[r + 2 R, c], ..., from high to low
                      bits. 8, 6 and 5 bits: uint8, f = 1; 4, 2 and 1 bits: uint8, f = 2, 4, 8;
                      3 bits: int32, f = 10, bits 27..29 down to 0..2. With `view_as_float` the
                      same bytes as a float dtype, fewer or as many columns
    <module>.scale, .zero    float [e / g, 1] (axis 1), [1, e / g] (axis 0), [N, 1], [1, K] or []
    <module>.nbits, .group_size, .axis, .shape, .packing, .view_as_float, .channel_wise,
    .compute_dtype, .quant_scale, .quant_zero, ...    small tensors; texts as their characters

    w = ((C - zero) * scale) reshaped to [N, K], in `compute_dtype`

hqq's own `qmodel.pt` holds a dictionary of these by module, numbers and texts as Python objects (in
files of early versions under `meta`). There scales and zero points may be quantized again:
`scale_q` is to `meta_scale` (`nbits`, `scale`, `zero`, ...) as `W_q` is to the module, `zero_q` to
`meta_zero`; and `zero_scale` may stand for both, stacked.

Axis 1 is canonical; where a group straddles rows, scales are repeated. Groups of axis 0 take
elements from several rows: such a weight is decoded to floats, unless a group is a whole column.

Source: hqq 0.2.8 (`core/quantize.py`, `core/bitpack.py`, `core/utils.py`), transformers 4.51.3 and
5.24.0 (`integrations/hqq.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantload.errors import FormatMismatch, UnsupportedVariant
from quantload.loader.checkpoint import Checkpoint
from quantload.loader.formats.agreement import (
    about_unused_entries,
    check_agreement,
    count_entries,
)
from quantload.loader.formats.dense import dense_weight
from quantload.loader.formats.finite import refuse_nonfinite
from quantload.loader.formats.flat_blocks import block_of, on_grid, with_blocks
from quantload.loader.formats.hqq_meta import (
    SCALARS,
    HqqMeta,
    Packing,
    check_params,
    matches_tag,
    parse_config,
    parse_meta,
    scalars_of,
    text_beside,
)
from quantload.loader.formats.module_leaves import ModuleLeaves, by_module, refuse_leftovers
from quantload.loader.source import FLOAT_DTYPES, Reader, SourceWeight
from quantload.quant.qtensor import Evaluation, QuantTensor
from quantload.quant.scheme import Scheme, WeightScheme, scheme_of

_META = ("meta_scale", "meta_zero")
_CORE = ("W_q", "scale", "zero", "scale_q", "zero_q", "zero_scale")
_NOTES = (
    *("encoded_state_dict", "stores_quant_config", "offload_meta", "optimize", "round_zero"),
    "unpack_view_dtype",
)
_LEAVES = (
    *(*_CORE, *SCALARS, *_NOTES),
    *(f"{meta}.{leaf}" for meta in _META for leaf in ("scale", "zero")),
)
_SIGNS = ("W_q", "nbits", "packing", "encoded_state_dict")  # of a module that is quantized


@dataclass(frozen=True)
class _Stored:
    """The tensors of one quantized tensor, and how it is quantized.

    Args:
        leaves: Headers by leaf.
        meta: How the weight is quantized.
        inner: How scales ("scale") and zero points ("zero") are, if they are.
    """

    leaves: ModuleLeaves
    meta: HqqMeta
    inner: Mapping[str, HqqMeta]

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of evaluation."""
        if self.meta.compute_dtype is not None:
            return self.meta.compute_dtype
        scale = self.leaves.entries.get("scale")
        return torch.float16 if scale is None else scale.dtype


class HqqReader(Reader):
    """Reader of one checkpoint that HQQ quantized, with or without transformers."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.checkpoint = _without_meta(checkpoint)
        config = checkpoint.quantization_config
        self._config = parse_config(config, checkpoint.name)
        self._stored: dict[str, _Stored] = {}

    def weights(self) -> Mapping[str, SourceWeight]:
        """Describe every weight, by module; reads the small tensors too.

        Raises:
            MissingTensor: A part of a quantized weight is not there.
            FormatMismatch: Tensors contradict each other, or the config.
            UnsupportedVariant: Codes that are packed in another way.
        """
        found: dict[str, SourceWeight] = {}
        for module, leaves in by_module(self.checkpoint, _LEAVES).items():
            if any(leaf in leaves for leaf in _SIGNS):
                found[module] = self._describe(module, leaves)
        for entry in self.checkpoint.tensors.values():
            plain = dense_weight(entry)
            if plain is not None:
                self._refuse_both(plain, found)
                found[plain.module] = plain
        consumed = {name for weight in found.values() for name in weight.leaves.values()}
        refuse_leftovers(self.checkpoint, consumed)
        self._compare_with_config(found)
        return found

    def _refuse_both(self, plain: SourceWeight, found: Mapping[str, SourceWeight]) -> None:
        if plain.module in found:
            raise FormatMismatch(
                f"module `{plain.module}` has both `W_q` and `weight`, expected one, in "
                f"`{self.checkpoint.name}`",
                hint="one of the two is left over from another export",
            )

    def _compare_with_config(self, found: Mapping[str, SourceWeight]) -> None:
        if not self._config.is_stated:
            return
        stored = {module: weight.is_quantized for module, weight in found.items()}
        if not any(stored.values()):
            self.warnings.append(
                "the config asks to quantize while loading (`hqq`): the files hold full precision, "
                "which is read as it is"
            )
            return
        said = {module: self._config.says_of(module)[0] for module in stored}
        self.warnings += check_agreement(said, stored, self.checkpoint.name)
        self.entries = count_entries(said, stored)
        self.warnings += about_unused_entries(
            self._config.entries(), self.entries, self.checkpoint, matches_tag
        )

    # -- headers -------------------------------------------------------------------------------

    def _describe(self, module: str, leaves: ModuleLeaves) -> SourceWeight:
        stored = self._read_meta(module, leaves)
        self._check_tensors(stored)
        says, params = self._config.says_of(module)
        meta = stored.meta
        check_params(params, meta, f"module `{module}` in `{self.checkpoint.name}`")
        self._stored[module] = stored
        groups = f"g{meta.group_size}" if meta.group_size is not None else "without groups"
        again = ", scales quantized again" if stored.inner else ""
        return SourceWeight(
            module=module,
            shape=(meta.shape[0], meta.shape[1]),
            scheme=_scheme(meta),
            encoding=f"HQQ {meta.nbits} bits {groups}, axis {meta.axis}{again}",
            dtype=stored.compute_dtype,
            leaves=leaves.names,
            decided_by=says.entry if self._config.is_stated else "W_q",
            obstacle="" if meta.axis == 1 else "its groups run across rows",
        )

    def _read_meta(self, module: str, leaves: ModuleLeaves) -> _Stored:
        where = f"module `{module}` in `{self.checkpoint.name}`"
        leaves.require(["W_q"], because="it is quantized by HQQ")
        text = text_beside(self.checkpoint, module)
        old = text_beside(self.checkpoint, f"{module}.meta")
        content = {**(text or {}), **(old or {}), **scalars_of(self.checkpoint, leaves)}
        meta = parse_meta(content, where, channel_wise=_has_many(leaves, "scale"))
        inner = {}
        for part, is_quantized in (("scale", meta.quant_scale), ("zero", meta.quant_zero)):
            if is_quantized:
                start = f"{module}.meta.meta_{part}" if old else f"{module}.meta_{part}"
                again = text_beside(self.checkpoint, start) or {}
                channel_wise = _has_many(leaves, f"meta_{part}.scale")
                inner[part] = parse_meta(
                    again, f"the {part}s of {where}", channel_wise=channel_wise
                )
        return _Stored(leaves, meta, inner)

    def _check_tensors(self, stored: _Stored) -> None:
        leaves, meta = stored.leaves, stored.meta
        because = f"its shape is `{meta.shape}`, {meta.nbits} bits, axis {meta.axis}"
        _check_codes(leaves, "W_q", meta, because)
        if "zero_scale" in leaves:
            self._check_zero_scale(stored, because)
            return
        for part in ("scale", "zero"):
            inner = stored.inner.get(part)
            if inner is None:
                leaves.require([part], because=because)
                leaves.expect(part, dtypes=FLOAT_DTYPES, shapes=meta.scale_shapes, because=because)
                continue
            names = (f"{part}_q", f"meta_{part}.scale", f"meta_{part}.zero")
            leaves.require(names, because=f"its {part}s are quantized again")
            _check_codes(leaves, f"{part}_q", inner, because)
            self._check_inner_shape(part, inner, stored)
            for name in names[1:]:
                leaves.expect(name, dtypes=FLOAT_DTYPES, shapes=inner.scale_shapes, because=because)

    def _check_zero_scale(self, stored: _Stored, because: str) -> None:
        meta = stored.meta
        if stored.inner:
            raise UnsupportedVariant(
                f"tensor `{stored.leaves['zero_scale'].name}` holds scales that are quantized "
                f"again and stacked, expected `scale_q` and `zero_q`, in `{self.checkpoint.name}`",
                hint="quantize with `offload_meta=False`",
            )
        shapes = [(2, *shape) for shape in meta.scale_shapes]
        stored.leaves.expect("zero_scale", dtypes=FLOAT_DTYPES, shapes=shapes, because=because)

    def _check_inner_shape(self, part: str, inner: HqqMeta, stored: _Stored) -> None:
        if inner.shape not in stored.meta.scale_shapes:
            raise FormatMismatch(
                f"the {part}s of module `{stored.leaves.module}` have shape `{inner.shape}`, "
                f"expected `{stored.meta.scale_shapes[0]}`, in `{self.checkpoint.name}`"
            )

    # -- decode --------------------------------------------------------------------------------

    def decode(self, weight: SourceWeight) -> QuantTensor | Tensor:
        """Read a weight [N, K]: canonical if it is quantized along axis 1, else float.

        Raises:
            NonFiniteWeight: A scale or zero point is NaN or infinity.
        """
        if weight.scheme is None:
            return self.checkpoint.read(weight.leaves["weight"])
        stored = self._stored[weight.module]
        meta, dtype = stored.meta, stored.compute_dtype
        codes = _unpacked(self.checkpoint.read(weight.leaves["W_q"]), meta)
        scale, zero = self._scales(stored)
        size = _flat_size(meta)
        if size is None and meta.code_shape[1] != meta.shape[1]:
            values = (codes.to(dtype) - zero.to(dtype)) * scale.to(dtype)
            return values.reshape(meta.shape)
        block = (meta.shape[0], 1) if size is None else block_of(weight.shape, size)
        return QuantTensor(
            grid=meta.grid,
            codes=codes.reshape(meta.shape),
            scale=scale if size is None else on_grid(scale.flatten(), weight.shape, size),
            zero=zero if size is None else on_grid(zero.flatten(), weight.shape, size),
            block=block,
            evaluation=Evaluation(dtype, result=dtype),
        )

    def _scales(self, stored: _Stored) -> tuple[Tensor, Tensor]:
        """Read scales and zero points, in one of `scale_shapes`."""
        if "zero_scale" in stored.leaves:
            both = self._read_finite(stored.leaves["zero_scale"].name)
            return both[1], both[0]
        return self._part("scale", stored), self._part("zero", stored)

    def _part(self, part: str, stored: _Stored) -> Tensor:
        names = stored.leaves.names
        if part not in stored.inner:
            return self._read_finite(names[part])
        inner, dtype = stored.inner[part], stored.compute_dtype
        codes = _unpacked(self.checkpoint.read(names[f"{part}_q"]), inner)
        scale, zero = (
            self._read_finite(names[f"meta_{part}.{leaf}"]) for leaf in ("scale", "zero")
        )
        return ((codes.to(dtype) - zero.to(dtype)) * scale.to(dtype)).reshape(inner.shape)

    def _read_finite(self, name: str) -> Tensor:
        tensor = self.checkpoint.read(name)
        refuse_nonfinite(tensor, name, self.checkpoint.name)
        return tensor


def _without_meta(checkpoint: Checkpoint) -> Checkpoint:
    """Give the tensors that early versions kept under `meta` their usual names."""
    names = {}
    for name in checkpoint.tensors:
        module, found, leaf = name.rpartition(".meta.")
        if found and leaf in _LEAVES and f"{module}.W_q" in checkpoint.tensors:
            names[name] = f"{module}.{leaf}"
    return checkpoint.renamed(names) if names else checkpoint


def _flat_size(meta: HqqMeta) -> int | None:
    """Consecutive elements that share a scale; None for axis 0."""
    if not meta.channel_wise:
        return meta.shape[0] * meta.shape[1]
    if meta.axis == 0:
        return None
    return meta.shape[1] if meta.group_size is None else meta.group_size


def _scheme(meta: HqqMeta) -> Scheme:
    shape, size = (meta.shape[0], meta.shape[1]), _flat_size(meta)
    scheme = WeightScheme(grid=meta.grid, granularity="tensor", symmetric=False, zero="float")
    if size is None:  # so many elements of a column, for people
        height = meta.code_shape[0]
        scheme = WeightScheme(
            grid=meta.grid, granularity="block", symmetric=False, zero="float", block=(height, 1)
        )
    else:
        scheme = with_blocks(scheme, shape, size)
    return scheme_of(scheme, None)


def _has_many(leaves: ModuleLeaves, leaf: str) -> bool:
    """False if scales are one number, which then covers the whole tensor."""
    return leaf not in leaves or leaves[leaf].shape != ()


def _check_codes(leaves: ModuleLeaves, leaf: str, meta: HqqMeta, because: str) -> None:
    rows, columns = meta.packed_shape
    if not meta.view_as_float:
        dtypes: tuple[torch.dtype, ...] = (meta.packing.storage,)
    else:
        dtypes = FLOAT_DTYPES
        columns = columns * meta.packing.storage.itemsize // leaves[leaf].dtype.itemsize
    leaves.expect(leaf, dtypes=dtypes, shapes=[(rows, columns)], because=because)


def _unpacked(words: Tensor, meta: HqqMeta) -> Tensor:
    """Return the codes, of `meta.code_shape`, in uint8."""
    packing: Packing = meta.packing
    words = words.contiguous().view(packing.storage)
    mask = (1 << packing.bits) - 1
    shifts = range(packing.bits * (packing.fields - 1), -1, -packing.bits)
    parts = [((words >> shift) & mask).to(torch.uint8) for shift in shifts]
    return torch.cat(parts)[: meta.code_shape[0]]


__all__ = ["HqqReader"]
