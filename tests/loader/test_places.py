"""What a rank holds is cut exactly out of a checkpoint, and every rank proves the whole of it."""

from __future__ import annotations

import pytest
import torch
from fake_source import fake_source
from torch import Tensor, nn

from quantload.errors import MissingTensor, ShapeError, UnexpectedTensor
from quantload.loader.assign import assign
from quantload.loader.places import ExpertsReceiver, RankShare, Receiver
from quantload.mappers.mapper import WeightMapper
from quantload.mappers.targets import Conversion, Converted, Join
from quantload.quant.qtensor import QuantTensor
from quantload.quant.region import WHOLE, Region
from quantload.quant.rtn import quantize_rtn
from quantload.quant.scheme import parse_scheme

CPU = torch.device("cpu")
EXPERTS, INNER, HIDDEN = 3, 6, 4


class Cut(nn.Module):
    """Waits for [8, 16] and keeps a region of it."""

    dtype = torch.float32

    def __init__(self, region: Region | None) -> None:
        super().__init__()
        self._region, self.got = region, {}

    def awaits(self) -> dict[tuple[str, int], tuple[int, ...]]:
        return {("weight", 0): (8, 16)}

    def region(self, leaf: str, slot: int) -> Region | None:
        return self._region

    def receive(self, leaf: str, slot: int, value: QuantTensor | Tensor) -> None:
        self.got[leaf, slot] = value

    def finish(self, device: torch.device) -> None:
        self.finished = True


class Experts(Cut):
    """Gate and up of each expert, and down; holds experts 1 and 2 only."""

    def __init__(self, *, input_first: bool = False) -> None:
        super().__init__(WHOLE)
        self.input_first = input_first

    def awaits(self) -> dict[tuple[str, int], tuple[int, ...]]:
        up = {("gate_up_proj", slot): (INNER, HIDDEN) for slot in range(2 * EXPERTS)}
        down = {("down_proj", slot): (HIDDEN, INNER) for slot in range(EXPERTS)}
        bias = {("down_proj_bias", slot): (HIDDEN,) for slot in range(EXPERTS)}
        return up | down | bias

    def region(self, leaf: str, slot: int) -> Region | None:
        return None if slot < (2 if leaf == "gate_up_proj" else 1) else WHOLE

    def has_input_first(self, leaf: str) -> bool:
        return self.input_first


def model_of(layer: nn.Module) -> nn.Module:
    model = nn.Module()
    model.layer = layer
    model.norm = nn.Module()
    model.norm.weight = nn.Parameter(torch.empty(5, device="meta"))
    return model


def mapper_of(leaves: set[str]) -> WeightMapper:
    return WeightMapper({"layer": frozenset(leaves), "norm": frozenset({"weight"})})


def test_the_protocols_are_those_of_the_layers():
    assert isinstance(Cut(WHOLE), Receiver)
    assert not isinstance(Cut(WHOLE), ExpertsReceiver)
    assert isinstance(Experts(), ExpertsReceiver)


def load(
    layer: nn.Module, tensors: dict[str, Tensor], quantized=None, *, mapper=None, **options
) -> int:
    leaves = {leaf for leaf, _ in layer.awaits()}
    tensors = {"norm.weight": torch.ones(5), **tensors}
    return assign(
        model_of(layer),
        fake_source({}, tensors, quantized),
        mapper or mapper_of(leaves),
        device=CPU,
        tied={},
        **options,
    ).elsewhere


REGIONS = [Region(rows=((2, 5),)), Region(columns=(3, 9)), Region(rows=((0, 1), (6, 8)))]


@pytest.mark.parametrize("region", REGIONS, ids=str)
def test_a_layer_gets_its_region_of_a_float_weight(region):
    layer, weight = Cut(region), torch.randn(8, 16)
    load(layer, {"layer.weight": weight})
    got = layer.got["weight", 0]
    assert torch.equal(got, region.of(weight))
    assert got.untyped_storage().nbytes() == got.nbytes, "the whole tensor must not stay alive"


@pytest.mark.parametrize("region", REGIONS, ids=str)
def test_a_layer_gets_its_region_of_codes(region):
    scheme = parse_scheme("W4A16:g32")
    weight = quantize_rtn(torch.randn(8, 32), scheme.weight)
    layer = Cut(region)
    layer.awaits = lambda: {("weight", 0): (8, 32)}
    load(layer, {}, {"layer": (scheme, weight)})
    got = layer.got["weight", 0]
    assert torch.equal(got.dequantize(), region.of(weight.dequantize()))
    assert got.codes.untyped_storage().nbytes() == got.codes.nbytes


def test_what_is_another_ranks_is_not_handed_over():
    layer = Cut(None)
    load(layer, {"layer.weight": torch.randn(8, 16)})
    assert not layer.got
    assert layer.finished


def test_what_is_another_ranks_must_still_be_there():
    with pytest.raises(MissingTensor, match=r"layer\.weight"):
        load(Cut(None), {})


def test_a_wrong_shape_shows_on_every_rank():
    with pytest.raises(ShapeError, match=r"\(8, 15\)"):
        load(Cut(Region(rows=((0, 2),))), {"layer.weight": torch.randn(8, 15)})


def experts_of(*, input_first: bool) -> dict[str, Tensor]:
    gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN)
    down = torch.randn(EXPERTS, HIDDEN, INNER)
    if input_first:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    return {
        "layer.gate_up_proj": gate_up.contiguous(),
        "layer.down_proj": down.contiguous(),
        "layer.down_proj_bias": torch.randn(EXPERTS, HIDDEN),
    }


@pytest.mark.parametrize("input_first", [False, True])
def test_experts_in_one_tensor_come_one_by_one(input_first):
    layer, tensors = Experts(input_first=input_first), experts_of(input_first=input_first)
    load(layer, tensors)
    assert sorted(layer.got) == [
        *(("down_proj", slot) for slot in (1, 2)),
        *(("down_proj_bias", slot) for slot in (1, 2)),
        *(("gate_up_proj", slot) for slot in (2, 3, 4, 5)),
    ]
    gate_up, down = tensors["layer.gate_up_proj"], tensors["layer.down_proj"]
    if input_first:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    assert torch.equal(layer.got["gate_up_proj", 5], gate_up[2, INNER:])
    assert torch.equal(layer.got["gate_up_proj", 2], gate_up[1, :INNER])
    assert torch.equal(layer.got["down_proj", 1], down[1])
    assert torch.equal(layer.got["down_proj_bias", 2], tensors["layer.down_proj_bias"][2])


def joining_mapper(axis: int, parts: int = 2) -> WeightMapper:
    """Gate and up of all experts are tensors of their own (Step 3.7)."""

    def convert(name: str) -> Conversion:
        part = {"layer.gate_proj": 0, "layer.up_proj": 1}.get(name)
        if part is None:
            return Conversion.unchanged(name)
        return Conversion((Converted("layer.gate_up_proj", join=Join(part, parts, axis)),))

    leaves = frozenset(leaf for leaf, _ in Experts().awaits())
    return WeightMapper({"layer": leaves, "norm": frozenset({"weight"})}, convert=convert)


@pytest.mark.parametrize("input_first", [False, True])
def test_gate_and_up_of_all_experts_in_one_tensor_each(input_first):
    layer, tensors = Experts(input_first=input_first), experts_of(input_first=input_first)
    axis = 2 if input_first else 1
    gate, up = tensors.pop("layer.gate_up_proj").chunk(2, axis)
    apart = {"layer.gate_proj": gate.contiguous(), "layer.up_proj": up.contiguous()}
    load(layer, tensors | apart, mapper=joining_mapper(axis))
    slots = [slot for leaf, slot in sorted(layer.got) if leaf == "gate_up_proj"]
    assert slots == [2, 3, 4, 5]
    for slot in slots:
        value = (gate, up)[slot % 2][slot // 2]
        assert torch.equal(layer.got["gate_up_proj", slot], value.t() if input_first else value)


def test_one_of_two_joined_tensors_is_missing():
    tensors = experts_of(input_first=False)
    tensors["layer.gate_proj"] = tensors.pop("layer.gate_up_proj")[:, :INNER].contiguous()
    with pytest.raises(MissingTensor, match=r"gate_up_proj\[1\]"):
        load(Experts(), tensors, mapper=joining_mapper(1))


@pytest.mark.parametrize(("axis", "parts"), [(2, 2), (1, 3)])
def test_tensors_that_are_joined_otherwise_than_experts_lie(axis, parts):
    tensors = experts_of(input_first=False)
    tensors["layer.gate_proj"] = tensors.pop("layer.gate_up_proj")[:, :INNER].contiguous()
    with pytest.raises(ShapeError, match="along axis"):
        load(Experts(), tensors, mapper=joining_mapper(axis, parts))


def test_a_missing_expert_is_found_even_if_it_is_another_ranks():
    tensors = experts_of(input_first=False)
    tensors["layer.gate_up_proj"] = tensors["layer.gate_up_proj"][1:].contiguous()
    with pytest.raises(ShapeError, match="gate_up_proj"):
        load(Experts(), tensors)


def test_a_bias_of_one_expert_too_few():
    tensors = experts_of(input_first=False)
    tensors["layer.down_proj_bias"] = torch.randn(EXPERTS, HIDDEN - 1)
    with pytest.raises(ShapeError, match="down_proj_bias"):
        load(Experts(), tensors)


def test_a_part_of_a_parameter():
    model = model_of(Cut(WHOLE))
    share = RankShare(parts={"norm.weight": ((9,), Region(rows=((4, 9),)))})
    tensors = {"layer.weight": torch.randn(8, 16), "norm.weight": torch.arange(9.0)}
    assign(
        model,
        fake_source({}, tensors),
        mapper_of({"weight"}),
        device=CPU,
        tied={},
        share=share,
    )
    assert model.norm.weight.tolist() == [4, 5, 6, 7, 8]


def test_modules_of_other_ranks_are_left_out_and_counted():
    layer = Cut(WHOLE)
    mapper = WeightMapper(
        {"layer": frozenset({"weight"}), "norm": frozenset({"weight"}), "far": frozenset({"bias"})}
    )
    tensors = {
        "layer.weight": torch.randn(8, 16),
        "norm.weight": torch.ones(5),
        "far.bias": torch.ones(6),
    }
    options = {"device": CPU, "tied": {}}
    with pytest.raises(UnexpectedTensor, match=r"far\.bias"):
        assign(model_of(layer), fake_source({}, tensors), mapper, **options)
    share = RankShare(elsewhere=("far",))
    done = assign(model_of(layer), fake_source({}, tensors), mapper, **options, share=share)
    assert done.elsewhere == 24
