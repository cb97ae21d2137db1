"""The schemes that compressed-tensors has a name for; `config_groups: {"NVFP4": ["Linear"]}`.

Source: compressed-tensors 0.20.1, `quantization/quant_scheme.py`; a test holds them equal.
"""

from __future__ import annotations

from quantload.quant.scheme import ALIASES, DENSE, PRESETS, Scheme

NAMED_SCHEMES: dict[str, Scheme] = {
    "UNQUANTIZED": DENSE,
    **{alias: PRESETS[name] for alias, name in ALIASES.items()},
    **{name: scheme for name, scheme in PRESETS.items() if scheme.weight is not None},
}
