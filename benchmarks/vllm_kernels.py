"""Products of vLLM's compiled libraries over canonical weights, for vllm_step.py.

Source: vLLM 0.33.0, model_executor/kernels/linear; of the order of Marlin's scales, quantization/
utils/marlin_utils.py.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantload.quant.qtensor import QuantTensor

Product = Callable[..., Tensor]


# -- the libraries ---------------------------------------------------------------------------------


def folder() -> Path:
    """Return where vLLM's libraries are."""
    if given := os.environ.get("VLLM_FOLDER"):
        return Path(given)
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError("no vLLM: install it, or name its folder in VLLM_FOLDER")
    return Path(found.submodule_search_locations[0])


@cache
def ops() -> Any:
    """Return the operators of vLLM's main library."""
    torch.ops.load_library(str(folder() / "_C_stable_libtorch.abi3.so"))
    return torch.ops._C


@cache
def flash() -> Any:
    """Return the operators of vLLM's FlashAttention 3; None where the library does not load."""
    try:
        torch.ops.load_library(str(folder() / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so"))
    except OSError as error:
        print(f"attention by torch: {str(error)[:300]}", flush=True)
        return None
    return torch.ops._vllm_fa3_C


@cache
def code_type(name: str) -> int:
    """Return the id of a type of codes, such as `uint4b8`: 4-bit codes that stand for code - 8."""
    path = folder() / "scalar_type.py"
    spec = importlib.util.spec_from_file_location("vllm_scalar_type", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return int(getattr(module.scalar_types, name).id)


# -- products --------------------------------------------------------------------------------------


def _words(weight: QuantTensor) -> Tensor:
    """Return codes + 8 of a weight [N, K] as int32 [K / 8, N], code i of a word at bits 4 * i."""
    codes = (weight.codes.to(torch.int32) + 8).unflatten(1, (-1, 8))
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=codes.device)
    return (codes << shifts).sum(-1, dtype=torch.int32).T


def _marlin(weight: QuantTensor, locks: Tensor) -> Product:
    n, k = weight.shape
    packed = ops().gptq_marlin_repack(_words(weight).contiguous(), k, n, 4, False)
    order = [i + 8 * j for i in range(8) for j in range(8)]
    scales = weight.scale.T.reshape(-1, 64)[:, order].reshape(-1, n).contiguous()
    kind = code_type("uint4b8")

    def product(x: Tensor) -> Tensor:
        result: Tensor = ops().marlin_gemm(
            x, None, packed, None, scales, None, None, None, locks, kind, x.shape[0], n, k,
            False, True, False,
        )  # fmt: skip
        return result

    return product


def _machete(weight: QuantTensor, locks: Tensor) -> Product:
    kind, dtype = code_type("uint4b8"), torch.bfloat16
    packed = ops().machete_prepack_B(_words(weight).T.contiguous().T, dtype, kind, dtype)
    scales = weight.scale.T.contiguous()
    group = weight.block[1]

    def product(x: Tensor) -> Tensor:
        result: Tensor = ops().machete_mm(
            x, packed, kind, None, scales, None, group, None, None, None
        )
        return result

    return product


def _cutlass(weight: QuantTensor, locks: Tensor) -> Product:
    codes, factors = weight.codes.clone(), weight.scale.float()

    def product(x: Tensor, scales: Tensor) -> Tensor:
        result = torch.empty(len(x), len(codes), dtype=torch.bfloat16, device=x.device)
        ops().cutlass_scaled_mm(result, x, codes.T, scales, factors, None)
        return result

    return product


PRODUCTS = {"marlin": _marlin, "machete": _machete, "cutlass": _cutlass}


def processors(device: torch.device) -> int:
    """Return how many multiprocessors the card has: so many locks are Marlin's least."""
    return torch.cuda.get_device_properties(device).multi_processor_count


__all__ = ["PRODUCTS", "Product", "code_type", "flash", "folder", "ops", "processors"]
