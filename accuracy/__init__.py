"""Per-layer comparison of checkpoints: verify, compare, reports."""
