"""ModelOpt: which modules must have factors of their input (`pre_quant_scale`).

Factors are folded into what comes before a layer wherever that can be done, and kept where not.
An export decides that by kind of layer, so that layers agree: those of one name, and with q, k, v,
gate and up, before which stands a norm that takes any factor, all others.

Seen in exports of ModelOpt 0.47.0: AWQ keeps the factors of o_proj, and of down_proj where they are
not folded into up_proj; SmoothQuant and SVDQuant keep all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from quantload.errors import MissingTensor, listed
from quantload.loader.checkpoint import Checkpoint
from quantload.loader.source import SourceWeight

_LEAF = "pre_quant_scale"
_NUMBER = re.compile(r"\d+")
_AFTER_A_NORM = re.compile(r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj)$")
_AFTER_A_LAYER = re.compile(r"\.(o_proj|down_proj)$")


def check_factors(checkpoint: Checkpoint, weights: Mapping[str, SourceWeight]) -> list[str]:
    """Find modules without factors that should have some.

    Args:
        checkpoint: An open checkpoint.
        weights: What was read of it, by module.

    Returns:
        A warning, if there are such experts: those that saw no token have none.

    Raises:
        MissingTensor: There are other such modules.
    """
    kinds: dict[tuple[str, str], list[SourceWeight]] = {}
    for weight in weights.values():
        if weight.is_quantized:
            name = _NUMBER.sub("#", weight.module)
            kinds.setdefault((weight.encoding, name), []).append(weight)
    unfolded = {
        encoding
        for (encoding, name), found in kinds.items()
        if _AFTER_A_NORM.search(name) and any(_LEAF in weight.leaves for weight in found)
    }
    missing: list[str] = []
    for (encoding, name), found in kinds.items():
        is_usual = bool(_AFTER_A_NORM.search(name) or _AFTER_A_LAYER.search(name))
        must = encoding in unfolded and is_usual
        if must or any(_LEAF in weight.leaves for weight in found):
            missing += _without(found)
    experts = [module for module in missing if ".experts." in module]
    others = [f"{module}.{_LEAF}" for module in missing if module not in experts]
    if others:
        raise MissingTensor(
            f"tensors are missing: {listed(others)}; layers like them have factors of their input, "
            f"in `{checkpoint.name}`"
        )
    names = listed(f"{module}.{_LEAF}" for module in experts)
    return [f"experts without factors of their input, unlike others: {names}"] if experts else []


def _without(weights: Iterable[SourceWeight]) -> list[str]:
    return [weight.module for weight in weights if _LEAF not in weight.leaves]
