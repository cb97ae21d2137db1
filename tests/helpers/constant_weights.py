"""Quantized modules whose codes and scales are the same everywhere, written down byte by byte."""

import torch

E4M3 = torch.float8_e4m3fn
INT4_ARGUMENTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FP8_CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel"}
FP8_TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor"}


def ct_config(weights, *, layout=None, ignore=(), targets=("Linear",), **more):
    """A compressed-tensors config with one group."""
    group = {"targets": list(targets), "weights": weights, "format": layout, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }


def int4(module, rows, columns, *, code=3, scale=0.5, zero=None, group=32, dtype=torch.bfloat16):
    """Tensors of pack-quantized int4: every code and zero point is the same; by name."""
    word = sum((code + 8) << (4 * i) for i in range(8))
    made = {
        "weight_packed": torch.full((rows, columns // 8), _signed(word), dtype=torch.int32),
        "weight_scale": torch.full((rows, columns // group), scale, dtype=dtype),
        "weight_shape": torch.tensor([rows, columns]),
    }
    if zero is not None:
        word = sum((zero + 8) << (4 * i) for i in range(8))
        shape = (-(-rows // 8), columns // group)
        made["weight_zero_point"] = torch.full(shape, _signed(word), dtype=torch.int32)
    return {f"{module}.{leaf}": tensor for leaf, tensor in made.items()}


def _signed(word):
    return word - (1 << 32) if word >= 1 << 31 else word


def fp8(module, rows, columns, *, code=0x38, scale=None, leaf="weight_scale"):
    """Tensors of an FP8 weight with one code (0x38 is 1.0); `scale` is a tensor or None."""
    made = {f"{module}.weight": fp8_codes(rows, columns, code=code)}
    if scale is not None:
        made[f"{module}.{leaf}"] = scale
    return made


def fp8_codes(*shape, code=0x38):
    return torch.full(shape, code, dtype=torch.uint8).view(E4M3)


def plain(module, rows=64, columns=64, *, seed=0, dtype=torch.bfloat16):
    """A random weight in full precision, by name."""
    generator = torch.Generator().manual_seed(seed)
    return {f"{module}.weight": torch.randn(rows, columns, generator=generator).to(dtype)}
