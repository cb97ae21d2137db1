"""The leaves of a weight in full precision are the dict that they stand for."""

import pytest

from quantload.loader.formats.dense import OnlyWeight


def test_is_the_dict():
    leaves = OnlyWeight("a.weight")
    assert leaves == {"weight": "a.weight"}
    assert dict(leaves) == {"weight": "a.weight"}
    assert (len(leaves), repr(leaves)) == (1, "{'weight': 'a.weight'}")
    assert "weight" in leaves
    assert leaves.get("weight_scale") is None
    with pytest.raises(KeyError):
        leaves["weight_scale"]
