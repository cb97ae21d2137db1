"""How many bytes of weights one step of decoding has to read.

All that a model holds on its device counts once, except tables of which a step reads single rows
(embeddings that are not also the head), and experts that no token of the step takes. How many
experts B tokens take is that of even routing: E * (1 - (1 - k / E) ** B).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from quantload.layers.experts import FusedExperts
from quantload.layers.experts_layout import holds_experts
from quantload.layers.meta_model import TransformersModel, output_head


def weight_bytes(model: TransformersModel, batch: int) -> int:
    """Return the fewest bytes of weights that a step of `batch` rows reads."""
    head = output_head(model)
    of_head = set() if head is None else {tensor.data_ptr() for tensor in _own_tensors(head)}
    share = experts_share(model, batch)
    seen: set[int] = set()
    total = 0.0
    for module, in_experts in _modules(model):
        for tensor in _own_tensors(module):
            is_table = isinstance(module, nn.Embedding) and tensor.data_ptr() not in of_head
            if tensor.data_ptr() in seen or is_table or not tensor.numel():
                continue
            seen.add(tensor.data_ptr())
            total += tensor.nbytes * (share if in_experts else 1.0)
    return round(total)


def experts_share(model: TransformersModel, batch: int) -> float:
    """Return the share of the experts of a block that `batch` tokens take, routed evenly."""
    config = model.config.get_text_config(decoder=True)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    experts = experts or getattr(config, "n_routed_experts", None)
    each = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None)
    if not experts or not each:
        return 1.0
    return float(1 - (1 - min(each, experts) / experts) ** batch)


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            yield tensor


def _modules(module: nn.Module, in_experts: bool = False) -> Iterator[tuple[nn.Module, bool]]:
    """Yield each module, and whether it belongs to routed experts."""
    in_experts = in_experts or isinstance(module, FusedExperts) or holds_experts(module)
    yield module, in_experts
    for child in module.children():
        yield from _modules(child, in_experts)


__all__ = ["experts_share", "weight_bytes"]
