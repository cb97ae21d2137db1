"""FP8 checkpoints of a few tensors, and a slow reference of their values."""

import json

import numpy as np
import oracles
import tiny_checkpoints
import torch
from safetensors.torch import save_file

from quantload.loader.formats import open_source
from quantload.loader.open import open_checkpoint

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def codes(shape, *, seed=0, storage=E4M3):
    """Random codes without NaN and infinity, all others likely."""
    rng = np.random.default_rng(seed)
    highest = 0x7E if storage == E4M3 else 0x7B
    raw = rng.integers(0, highest + 1, shape) | (rng.integers(0, 2, shape) << 7)
    return torch.from_numpy(raw.astype(np.uint8)).view(storage)


def scales(shape, dtype, *, seed=1):
    rng = np.random.default_rng(seed)
    if dtype in (E8M0, torch.uint8):
        return torch.from_numpy(rng.integers(100, 140, shape).astype(np.uint8)).view(dtype)
    return torch.from_numpy(rng.uniform(1e-3, 2e-2, shape)).to(dtype)


def reference(q, s, block, *, divides=False, result=None):
    """The formula of `float8.py`, one element at a time, in float32."""
    values = (oracles.e4m3_values if q.dtype == E4M3 else oracles.e5m2_values)()
    raw = q.view(torch.uint8).numpy()
    if s.dtype in (E8M0, torch.uint8):
        factors = oracles.e8m0_values()[s.view(torch.uint8).numpy()].astype(np.float32)
    else:
        factors = s.float().numpy()
    rows, columns = raw.shape
    out = np.empty((rows, columns), np.float32)
    for n in range(rows):
        for k in range(columns):
            value, factor = np.float32(values[raw[n, k]]), factors[n // block[0], k // block[1]]
            out[n, k] = value / factor if divides else value * factor
    found = torch.from_numpy(out)
    return found if result is None else found.to(result)


def write(folder, tensors, config, *, dtype=BF16, **more):
    folder.mkdir(parents=True, exist_ok=True)
    content = {**tiny_checkpoints.config(dtype=dtype), "quantization_config": config, **more}
    (folder / "config.json").write_text(json.dumps(content))
    tensors = {name: part.contiguous().clone() for name, part in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def opened(folder):
    return open_source(open_checkpoint(folder))
