"""transformers 5.24.0 with compressed-tensors 0.20.1, as its sources say; both were also run."""

from __future__ import annotations

from quantload.loader.engine_facts import (
    Engine,
    Method,
)


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
        "experts": "models/gpt_oss/modeling_gpt_oss.py",
        "head-tied": "modeling_utils.py",
        "missing": "modeling_utils.py",
        "parallel": "integrations/tensor_parallel.py",
        "scale": "quantizers",
        "unexpected": "modeling_utils.py",
    },
)
