"""Modules: quantized linear layers, fused stacks, and the surgery on transformers models."""
