"""Checkpoints by 18 tools against their full-precision sources: no layer is taken for damaged."""

from __future__ import annotations

import pytest
from truth import CHECKPOINTS

from quantload import api
from quantload.accuracy.weight_rounding import far_above, rounding_of, standing_out
from quantload.errors import QuantloadError
from quantload.quant.metrics import error_sums
from quantload.quant.qtensor import QuantTensor

FEWEST_PAIRS, FEWEST_TOOLS, FEWEST_LAYERS = 250, 12, 3000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="no folder shared/checkpoints"),
]


def opened(folder):
    """An open checkpoint; None if the folder holds what is refused, which other tests are about."""
    try:
        return api.inspect(folder)
    except QuantloadError:
        return None


def fits(source, base):
    """True if a checkpoint has every weight of a base, in its shape."""
    return all(
        name in source.weights and source.weights[name].shape == weight.shape
        for name, weight in base.weights.items()
    )


def roundings(source, base):
    """Encoding, relative error and rounding of each quantized weight against its base."""
    found = {}
    for name, original in base.weights.items():
        try:
            held, reference = source.read_weight(name), base.read_weight(name)
        except QuantloadError:
            continue
        if isinstance(held, QuantTensor) and original.shape == held.shape:
            values = held.dequantize()
            error = error_sums(values, reference).relative
            rounding = rounding_of(held, values, reference)
            found[name] = source.weights[name].encoding, error, rounding
    return found


def damage(found):
    """What `compare` says of them."""
    return far_above(found) | standing_out({n: (held, r) for n, (held, _, r) in found.items()})


def test_no_checkpoint_of_a_tool_is_flagged():
    folders = sorted(path for path in CHECKPOINTS.glob("*/*") if path.is_dir())
    bases = [opened(folder) for folder in folders if folder.parent.name == "base"]
    pairs, layers, tools, flagged = 0, 0, set(), []
    for folder in folders:
        source = None if folder.parent.name == "base" else opened(folder)
        for base in [] if source is None else bases:
            found = roundings(source, base) if fits(source, base) else {}
            pairs += bool(found)
            layers += len(found)
            tools |= {folder.parent.name} if found else set()
            flagged += [
                (folder.parent.name, folder.name, base.checkpoint.name, name, why)
                for name, why in damage(found).items()
            ]
    print(f"{pairs} comparisons, {layers} layers, {len(tools)} tools")  # noqa: T201 - with -s
    assert flagged == []
    assert pairs >= FEWEST_PAIRS
    assert layers >= FEWEST_LAYERS
    assert len(tools) >= FEWEST_TOOLS
