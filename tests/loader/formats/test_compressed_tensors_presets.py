"""Named schemes against those of compressed-tensors, and arguments there and back."""

import compressed
import pytest

from quantload.loader.formats.compressed_tensors_arguments import (
    READ_FORMATS,
    infer_format,
    input_arguments,
    parse_input,
    parse_weight,
    weight_arguments,
    written_format,
)
from quantload.loader.formats.compressed_tensors_config import (
    build_config,
    parse_config,
    validate_config,
)
from quantload.loader.formats.compressed_tensors_presets import NAMED_SCHEMES
from quantload.quant.grid import E2M1, E4M3, int_grid
from quantload.quant.scheme import DENSE, InputScheme, WeightScheme, scheme_of

QUANTIZED = [name for name, scheme in NAMED_SCHEMES.items() if scheme.weight is not None]


def test_all_names_of_the_library_are_there():
    assert set(NAMED_SCHEMES) == set(compressed.library().PRESET_SCHEMES)
    assert NAMED_SCHEMES["UNQUANTIZED"] == DENSE


@pytest.mark.parametrize("name", QUANTIZED)
def test_named_schemes_are_those_of_the_library(name):
    theirs = compressed.preset(name).model_dump(mode="json")
    weights, inputs = theirs["weights"], theirs["input_activations"]
    layout = infer_format(weights, has_inputs=inputs is not None)
    weight = parse_weight(weights, layout, "g")
    input = None if inputs is None else parse_input(inputs, "g")
    assert (weight, input) == (NAMED_SCHEMES[name].weight, NAMED_SCHEMES[name].input)
    assert scheme_of(weight, input).name == {"INT8": "W8A8"}.get(name, name)


@pytest.mark.parametrize("name", QUANTIZED)
def test_formats_are_inferred_as_by_the_library(name):
    from compressed_tensors.compressors.format import infer_module_format
    from torch.nn import Linear

    theirs = compressed.preset(name)
    arguments = theirs.weights.model_dump(mode="json")
    has_inputs = theirs.input_activations is not None
    expected = infer_module_format(Linear, theirs).value
    assert infer_format(arguments, has_inputs=has_inputs) == expected
    assert expected in READ_FORMATS
    is_packed = expected == "int-quantized" and theirs.weights.num_bits < 8
    assert written_format(NAMED_SCHEMES[name]) == ("pack-quantized" if is_packed else expected)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("case", [str.upper, str.lower])
def test_groups_named_by_a_preset(name, case):
    (group,) = parse_config({"config_groups": {case(name): ["Linear"]}}).groups
    assert (group.scheme.weight, group.scheme.input) == (
        NAMED_SCHEMES[name].weight,
        NAMED_SCHEMES[name].input,
    )


def test_the_preset_without_quantization():
    config = parse_config({"config_groups": {"UNQUANTIZED": ["Linear"]}, "format": "dense"})
    assert not config.groups[0].is_quantized
    assert config.match("a", ("Linear",)) == (config.groups[0], "Linear")


@pytest.mark.parametrize("name", QUANTIZED)
def test_what_is_generated_is_parsed_back(name):
    scheme = NAMED_SCHEMES[name]
    config = build_config({"a.b": scheme}, [])
    validate_config(config)
    (group,) = parse_config(config).groups
    assert (group.scheme, group.format) == (scheme, written_format(scheme))


@pytest.mark.parametrize(
    ("weight", "input"),
    [
        (WeightScheme(grid=int_grid(3), granularity="tensor", symmetric=False), None),
        (WeightScheme(grid=int_grid(4), granularity="block", block=(64, 32)), None),
        (WeightScheme(grid=E4M3, granularity="group", group_size=64), None),
        (
            WeightScheme(grid=int_grid(8), granularity="channel"),
            InputScheme(grid=int_grid(8), granularity="tensor", dynamic=False, symmetric=False),
        ),
        (
            WeightScheme(grid=E2M1, granularity="group", group_size=16, scale="e4m3"),
            InputScheme(grid=E4M3, granularity="tensor", dynamic=False),
        ),
    ],
)
def test_arguments_there_and_back(weight, input):
    scheme = scheme_of(weight, input)
    layout = written_format(scheme)
    assert parse_weight(weight_arguments(weight), layout, "g") == weight
    if input is not None:
        assert parse_input(input_arguments(input), "g") == input
    validate_config(build_config({"m": scheme}, []))


def test_act_order():
    weight = WeightScheme(grid=int_grid(4), granularity="group", group_size=32, act_order=True)
    arguments = weight_arguments(weight)
    assert arguments["actorder"] == "group"
    assert parse_weight(arguments, "pack-quantized", "g") == weight
    for value, is_ordered in (
        ("dynamic", True),
        ("weight", False),
        ("static", False),
        (None, False),
    ):
        found = parse_weight({**arguments, "actorder": value}, "pack-quantized", "g")
        assert found.act_order is is_ordered
