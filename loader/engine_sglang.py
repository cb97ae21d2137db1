"""SGLang 0.5.23, as its sources say; it was not run."""

from __future__ import annotations

from quantload.loader.engine_facts import (
    FOUR,
    FOUR_OR_EIGHT,
    FP8,
    FP8_WEIGHT,
    INT,
    INT4_FP8,
    INT4_INT8,
    INT8,
    MARLIN_GROUPS,
    MODELOPT,
    MXFP4,
    MXFP8,
    NO_WIDTH,
    NVFP4,
    NVFP4_WEIGHT,
    Engine,
    Kernel,
    Kernels,
    Method,
    int8,
    plain,
)

_SGLANG = "srt/layers/quantization"
_SGLANG_CT = f"{_SGLANG}/compressed_tensors/compressed_tensors.py"
_SGLANG_MODELOPT = Method(families=MODELOPT, source=f"{_SGLANG}/modelopt_quant.py")
_SGLANG_METHODS = {
    "compressed-tensors": Method(
        families=frozenset({INT, INT8, INT4_FP8, FP8, FP8_WEIGHT, NVFP4, NVFP4_WEIGHT}),
        expert_families=frozenset(
            {INT, INT8, INT4_INT8, INT4_FP8, FP8, NVFP4, NVFP4_WEIGHT, MXFP4}
        ),
        symmetric=FOUR_OR_EIGHT,
        asymmetric=FOUR_OR_EIGHT,
        source=_SGLANG_CT,
    ),
    "fp8": Method(families=frozenset({FP8, FP8_WEIGHT}), source=f"{_SGLANG}/fp8.py"),
    "mxfp8": Method(families=frozenset({MXFP8}), source=f"{_SGLANG}/fp8.py"),
    "gptq": Method(
        families=frozenset({INT}),
        symmetric=FOUR_OR_EIGHT,
        asymmetric=NO_WIDTH,
        group_sizes=MARLIN_GROUPS,
        source=f"{_SGLANG}/gptq/gptq.py",
    ),
    "awq": Method(
        families=frozenset({INT}),
        symmetric=NO_WIDTH,
        asymmetric=FOUR,
        source=f"{_SGLANG}/awq/awq.py",
    ),
    "modelopt": _SGLANG_MODELOPT,
    "modelopt_fp8": _SGLANG_MODELOPT,
    "modelopt_fp4": _SGLANG_MODELOPT,
    "modelopt_mixed": _SGLANG_MODELOPT,
    "quark": Method(families=frozenset({FP8, MXFP4}), source=f"{_SGLANG}/quark/quark.py"),
    "auto-round": Method(
        families=frozenset({INT}),
        symmetric=frozenset({2, 3, 4, 8}),
        source=f"{_SGLANG}/auto_round.py",
    ),
    "bitsandbytes": Method(package="bitsandbytes", source=f"{_SGLANG}/bitsandbytes.py"),
    "gguf": Method(source=f"{_SGLANG}/gguf.py"),
    "mxfp4": Method(families=frozenset({MXFP4}), source=f"{_SGLANG}/mxfp4.py"),
    "w8a8_int8": Method(families=frozenset({INT8}), source=f"{_SGLANG}/w8a8_int8.py"),
    "w8a8_fp8": Method(families=frozenset({FP8}), source=f"{_SGLANG}/w8a8_fp8.py"),
    "blockwise_int8": Method(source=f"{_SGLANG}/blockwise_int8.py"),
}
_SGLANG_KERNEL_TABLE: Kernels = {
    ("cuda", INT): (
        Kernel(
            name="AWQ",
            symmetric=NO_WIDTH,
            asymmetric=FOUR,
            methods=frozenset({"awq"}),
            rows=8,
            source=f"{_SGLANG}/awq/awq.py",
        ),
        Kernel(
            name="Marlin",
            symmetric=FOUR_OR_EIGHT,
            asymmetric=FOUR,
            group_sizes=MARLIN_GROUPS,
            rows=64,
            columns=128,
            source=f"{_SGLANG}/marlin_utils.py",
        ),
    ),
    ("cuda", INT8): int8("int8", f"{_SGLANG}/compressed_tensors/schemes"),
    ("cuda", INT4_FP8): plain("W4AFP8", f"{_SGLANG}/w4afp8.py", columns=128),
    ("cuda", FP8): plain("FP8", f"{_SGLANG}/fp8_utils.py"),
    ("cuda", FP8_WEIGHT): plain("Marlin FP8", f"{_SGLANG}/compressed_tensors/schemes"),
    ("cuda", NVFP4): plain("NVFP4", f"{_SGLANG}/fp4_utils.py", columns=16),
    ("cuda", NVFP4_WEIGHT): plain("Marlin FP4", f"{_SGLANG}/compressed_tensors", columns=16),
    ("cuda", MXFP4): plain("MXFP4", f"{_SGLANG}/mxfp4.py", columns=32),
    ("cuda", MXFP8): plain("MXFP8", f"{_SGLANG}/fp8.py", columns=32),
}
SGLANG = Engine(
    name="sglang",
    title="SGLang",
    version="0.5.23",
    methods=_SGLANG_METHODS,
    kernels=_SGLANG_KERNEL_TABLE,
    fuses=True,
    largest_global_scale=True,
    methods_source=f"{_SGLANG}/__init__.py",
    sources={
        "block": f"{_SGLANG}/fp8.py",
        "cache": _SGLANG_CT,
        "config-field": "srt/models/registry.py",
        "container": "srt/model_loader/loader.py",
        "dtype": "srt/configs/model_config.py",
        "experts": "srt/models/gpt_oss.py",
        "files": "srt/model_loader/weight_utils.py",
        "fused-scale": f"{_SGLANG}/compressed_tensors/schemes",
        "fused-scheme": f"{_SGLANG}/compressed_tensors/utils.py",
        "head-tied": "srt/layers/vocab_parallel_embedding.py",
        "missing": "srt/model_loader/weight_utils.py",
        "parallel": "srt/layers/linear.py",
        "scale": f"{_SGLANG}/compressed_tensors/schemes",
        "tensor": f"{_SGLANG}/compressed_tensors/schemes",
        "tokenizer": "srt/server_args.py",
        "unexpected": "srt/models/llama.py",
    },
)
