"""Mathematics on tensors: schemes, grids, the canonical quantized tensor, rules, rounding, metrics.

No files, no models, no device policy.
"""
