"""quantload: load, convert and check quantized Hugging Face checkpoints.

The public names are resolved on first use, so that `import quantload` stays light: it loads
neither torch nor transformers nor triton (the command line and pytest start fast).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantload.accuracy.compare import ModelComparison
    from quantload.accuracy.doctor import doctor
    from quantload.accuracy.verify import LayerReport, VerifyReport
    from quantload.api import compare, convert, explain, inspect, load, load_tokenizer, plan, verify
    from quantload.errors import QuantloadError
    from quantload.loader.plan import Plan
    from quantload.quant.qtensor import QuantTensor
    from quantload.quant.rules import QuantConfig
    from quantload.quant.scheme import Scheme

__version__ = "0.1.0"

_HOMES = {
    "LayerReport": "quantload.accuracy.verify",
    "ModelComparison": "quantload.accuracy.compare",
    "Plan": "quantload.loader.plan",
    "QuantConfig": "quantload.quant.rules",
    "QuantTensor": "quantload.quant.qtensor",
    "QuantloadError": "quantload.errors",
    "Scheme": "quantload.quant.scheme",
    "VerifyReport": "quantload.accuracy.verify",
    "compare": "quantload.api",
    "convert": "quantload.api",
    "doctor": "quantload.accuracy.doctor",
    "explain": "quantload.api",
    "inspect": "quantload.api",
    "load": "quantload.api",
    "load_tokenizer": "quantload.api",
    "plan": "quantload.api",
    "verify": "quantload.api",
}

__all__ = [
    "LayerReport",
    "ModelComparison",
    "Plan",
    "QuantConfig",
    "QuantTensor",
    "QuantloadError",
    "Scheme",
    "VerifyReport",
    "compare",
    "convert",
    "doctor",
    "explain",
    "inspect",
    "load",
    "load_tokenizer",
    "plan",
    "verify",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - the module protocol of PEP 562
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'quantload' has no attribute {name!r}")
