"""A view on a GPU has the values of one on a CPU, and leaves them there."""

import pytest
import tiny_checkpoints as tiny
import torch
from converting import plan_of

from quantload.loader.quantized_view import quantized_view
from quantload.loader.stats import InputStatistics
from quantload.quant.qtensor import QuantTensor
from quantload.quant.scheme import PRESETS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", [name for name, scheme in PRESETS.items() if scheme.weight])
def test_values_do_not_depend_on_the_device(tmp_path, name):
    folder = tiny.llama(tmp_path / "in", hidden=256, intermediate=384)
    plan = plan_of(folder, name, stats=InputStatistics(stated=12.5))
    views = [quantized_view(plan, device=device) for device in ("cpu", "cuda")]
    count = 0
    for module in views[0].weights:
        expected, found = (view.read_weight(module) for view in views)
        if not isinstance(expected, QuantTensor):
            assert torch.equal(found, expected)
            continue
        count += 1
        assert found.codes.is_cuda
        assert found.evaluation == expected.evaluation
        one, two = found.tensors(), expected.tensors()
        assert one.keys() == two.keys()
        for part, tensor in two.items():
            bits = [t.cpu().contiguous().reshape(-1).view(torch.uint8) for t in (one[part], tensor)]
            assert torch.equal(*bits), (module, part)
    assert count == 14
