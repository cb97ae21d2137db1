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
    from quantload.api_generate import TextDecoder, generate
    from quantload.api_stats import stats
    from quantload.errors import QuantloadError
    from quantload.layers.registry import register_model
    from quantload.loader.plan import Plan
    from quantload.mappers.name_rules import NameRules
    from quantload.quant.qtensor import QuantTensor
    from quantload.quant.rules import QuantConfig
    from quantload.quant.scheme import Scheme
    from quantload.runtime.parallel import Parallel
    from quantload.written_models import load_weights

__version__ = "0.1.0"

_HOMES = {
    "LayerReport": "quantload.accuracy.verify",
    "ModelComparison": "quantload.accuracy.compare",
    "NameRules": "quantload.mappers.name_rules",
    "Parallel": "quantload.runtime.parallel",
    "Plan": "quantload.loader.plan",
    "QuantConfig": "quantload.quant.rules",
    "QuantTensor": "quantload.quant.qtensor",
    "QuantloadError": "quantload.errors",
    "Scheme": "quantload.quant.scheme",
    "TextDecoder": "quantload.api_generate",
    "VerifyReport": "quantload.accuracy.verify",
    "compare": "quantload.api",
    "convert": "quantload.api",
    "doctor": "quantload.accuracy.doctor",
    "explain": "quantload.api",
    "generate": "quantload.api_generate",
    "inspect": "quantload.api",
    "load": "quantload.api",
    "load_tokenizer": "quantload.api",
    "load_weights": "quantload.written_models",
    "plan": "quantload.api",
    "register_model": "quantload.layers.registry",
    "stats": "quantload.api_stats",
    "verify": "quantload.api",
}

__all__ = [
    "LayerReport",
    "ModelComparison",
    "NameRules",
    "Parallel",
    "Plan",
    "QuantConfig",
    "QuantTensor",
    "QuantloadError",
    "Scheme",
    "TextDecoder",
    "VerifyReport",
    "compare",
    "convert",
    "doctor",
    "explain",
    "generate",
    "inspect",
    "load",
    "load_tokenizer",
    "load_weights",
    "plan",
    "register_model",
    "stats",
    "verify",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - the module protocol of PEP 562
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'quantload' has no attribute {name!r}")
