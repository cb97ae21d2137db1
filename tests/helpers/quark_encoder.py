"""Checkpoints as AMD Quark stores them, from the format's specification in NumPy."""

from dataclasses import dataclass, field

import narrow_floats as nf
import numpy as np
import tiny_checkpoints as tiny
import torch

TABLES = {
    "fp8_e4m3": nf.E4M3,
    "fp8_e5m2": nf.E5M2,
    "fp4": nf.E2M1,
    "fp6_e2m3": nf.E2M3,
    "fp6_e3m2": nf.E3M2,
}
_STORED = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_REORDERED = (0, 2, 4, 6, 1, 3, 5, 7)  # which field lies in nibble 0, 1, 2, ...


@dataclass
class Encoded:
    """Tensors of one module by leaf, and its values [N, K], rounded to the dtype of the scale."""

    values: np.ndarray
    leaves: dict = field(default_factory=dict)


def spec(dtype, qscheme, *, group_size=None, symmetric=None, scale_format=None, **more):
    """A tensor specification as Quark's config writes it."""
    return {
        "block_size": None,
        "ch_axis": {"per_channel": 0, "per_group": -1}.get(qscheme),
        "dtype": dtype,
        "group_size": group_size,
        "is_dynamic": False,
        "is_scale_quant": False,
        "mx_element_dtype": None,
        "qscheme": qscheme,
        "scale_format": scale_format,
        "scale_type": "float",
        "symmetric": symmetric,
        **more,
    }


def layer(weight, inputs=None, **more):
    """A layer's config."""
    found = {"bias": None, "input_tensors": inputs, "output_tensors": None, "weight": weight}
    return {**found, **more}


def config(weight, inputs=None, *, pack_method="reorder", **more):
    """A whole quantization config."""
    return {
        "quant_method": "quark",
        "algo_config": None,
        "exclude": ["lm_head"],
        "export": {"kv_cache_group": [], "pack_method": pack_method},
        "global_quant_config": layer(weight, inputs),
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        **more,
    }


def write(folder, modules, quantization, *, plain=None):
    """A checkpoint of a few modules."""
    content = {**tiny.config(layers=1), "quantization_config": quantization}
    tensors = {"lm_head.weight": torch.ones(4, 8, dtype=torch.bfloat16), **(plain or {})}
    for module, made in modules.items():
        tensors |= {f"{module}.{leaf}": tensor for leaf, tensor in made.leaves.items()}
    return tiny.write(folder, content, tensors)


def rounded(values, dtype):
    """Round float32 values, ties to even, without torch; float32 again."""
    if dtype == torch.float16:
        return values.astype(np.float16).astype(np.float32)
    if dtype == torch.float32:
        return values
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return ((bits >> 16) << 16).astype(np.uint32).view(np.float32)


def encoded(spec, rows, columns, *, pack_method="reorder", dtype=torch.bfloat16, seed=0):
    """A random weight of one specification; `dtype` is that of its float scales."""
    random = np.random.default_rng(seed)
    shape = _grid_of(spec, rows, columns)
    if spec["scale_format"] == "e8m0":
        stored = torch.from_numpy(random.integers(100, 150, shape, dtype=np.uint8))
        scale = nf.e8m0(stored.numpy())
    else:
        stored = torch.from_numpy(np.exp2(random.uniform(-7, -1, shape)).astype(np.float32))
        stored = stored.to(dtype)
        scale = stored.float().numpy()
    if "int" in spec["dtype"]:
        made, values = _integers(spec, random, rows, columns, pack_method)
    else:
        made, values = _floats(spec, random, rows, columns)
    exact = values * _spread(scale, spec, rows, columns)
    made.values = rounded(exact.astype(np.float32), dtype)
    made.leaves["weight_scale"] = _as_stored(stored, spec)
    return made


def nvfp4(rows, columns, *, seed=0):
    """A random NVFP4 weight: e4m3 scales times one float32."""
    random = np.random.default_rng(seed)
    level = spec("fp4", "per_group", group_size=16)
    made, values = _floats(level, random, rows, columns)
    scale = random.integers(1, 0x7F, (rows, columns // 16), dtype=np.uint8)
    outer = np.float32(random.uniform(0.001, 0.1))
    made.values = values * np.repeat((nf.E4M3[scale] * outer).astype(np.float32), 16, 1)
    made.leaves["weight_scale"] = torch.from_numpy(scale).view(torch.float8_e4m3fn)
    made.leaves["weight_scale_2"] = torch.tensor(outer)
    return made


def _grid_of(spec, rows, columns):
    match spec["qscheme"]:
        case "per_tensor":
            return 1, 1
        case "per_channel":
            return rows, 1
        case "per_group":
            return rows, columns // spec["group_size"]
        case "per_block":
            height, width = spec["block_size"]
            return -(-rows // height), -(-columns // width)


def _spread(part, spec, rows, columns):
    """Repeat [R, G] to [N, K]."""
    grid = _grid_of(spec, rows, columns)
    height, width = spec["block_size"] or (-(-rows // grid[0]), -(-columns // grid[1]))
    return np.repeat(np.repeat(part, height, 0), width, 1)[:rows, :columns]


def _as_stored(part, spec):
    """[R, G] as the scale lies in the file."""
    if spec["qscheme"] == "per_tensor":
        return part.reshape(())
    if spec["qscheme"] == "per_channel":
        return part.reshape(-1)
    return part.T.contiguous() if "int" in spec["dtype"] else part


def _floats(spec, random, rows, columns):
    values = TABLES[spec["dtype"]]
    bits = len(values).bit_length() - 1
    codes = random.integers(0, 1 << bits, (rows, columns), dtype=np.uint8)
    if bits < 8:
        return Encoded(None, {"weight": torch.from_numpy(nf.packed(codes, bits))}), values[codes]
    special = 0x7F if spec["dtype"] == "fp8_e4m3" else 0x7C
    codes = np.where((codes & 0x7F) >= special, np.uint8(0x3C), codes)
    stored = torch.from_numpy(codes).view(_STORED[spec["dtype"]])
    return Encoded(None, {"weight": stored}), values[codes]


def _integers(spec, random, rows, columns, pack_method):
    bits, is_signed = int(spec["dtype"][-1]), spec["dtype"].startswith("int")
    low, high = (-(1 << (bits - 1)), 1 << (bits - 1)) if is_signed else (0, 1 << bits)
    codes = random.integers(low, high, (rows, columns))
    zero = random.integers(low, high, _grid_of(spec, rows, columns)) * (not spec["symmetric"])
    values = (codes - _spread(zero, spec, rows, columns)).astype(np.float32)
    if bits == 8:
        kind = np.int8 if is_signed else np.uint8
        stored = codes.T.copy() if spec["qscheme"] == "per_group" else codes
        parts = stored.astype(kind), _as_stored(torch.from_numpy(zero.astype(kind)), spec)
        return Encoded(
            None, {"weight": torch.from_numpy(parts[0]), "weight_zero_point": parts[1]}
        ), values
    if spec["qscheme"] == "per_group":
        weight, zero = _words(codes.T, pack_method), _words(zero.T, pack_method)
    else:
        weight, zero = _words(codes, pack_method), _words(zero.T, pack_method)[0]
    leaves = {"weight": torch.from_numpy(weight), "weight_zero_point": torch.from_numpy(zero)}
    return Encoded(None, leaves), values


def _words(fields, pack_method):
    """[R, C] integers to [R, ceil(C / 8)] int32 of eight nibbles each."""
    order = _REORDERED if pack_method == "reorder" else range(8)
    rows = []
    for row in fields.tolist():
        row = row + [0] * (-len(row) % 8)
        words = [row[start : start + 8] for start in range(0, len(row), 8)]
        rows.append([sum((word[j] & 15) << (4 * i) for i, j in enumerate(order)) for word in words])
    return np.array(rows, dtype=np.uint32).view(np.int32)
