"""Schemes: presets against compressed-tensors, names, group sizes that fit."""

from dataclasses import replace

import compressed
import pytest
import torch

from quantload.errors import ConfigError, UnknownScheme, WrongType
from quantload.quant.grid import E4M3, INT8, int_grid
from quantload.quant.scheme import (
    ALIASES,
    DENSE,
    PRESETS,
    SERVED_GROUP_SIZES,
    InputScheme,
    WeightScheme,
    parse_scheme,
    scheme_of,
)

QUANTIZED = [name for name, scheme in PRESETS.items() if scheme.weight is not None]
SCALE_DTYPES = {"float": None, "e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn}


def described(scheme):
    """A scheme of ours in the words of compressed-tensors."""
    block = getattr(scheme, "block", None)
    dynamic = getattr(scheme, "dynamic", False)
    return {
        "num_bits": scheme.grid.bits,
        "type": "int" if scheme.grid.is_integer else "float",
        "symmetric": scheme.symmetric,
        "strategy": "tensor_group" if scheme.scale == "e4m3" else scheme.granularity,
        "group_size": scheme.group_size,
        "block_structure": None if block is None else list(block),
        "dynamic": "local" if dynamic and scheme.scale == "e4m3" else dynamic,
        "actorder": None,
        "scale_dtype": SCALE_DTYPES[scheme.scale],
    }


@pytest.mark.parametrize("name", QUANTIZED)
def test_presets_are_those_of_compressed_tensors(name):
    theirs = compressed.preset(name)
    assert PRESETS[name].name == name
    for ours, args in (
        (PRESETS[name].weight, theirs.weights),
        (PRESETS[name].input, theirs.input_activations),
    ):
        if ours is None:
            assert args is None
            continue
        assert described(ours) == {name: getattr(args, name) for name in described(ours)}
        if ours.grid.bits == 8 or ours.grid.is_integer:
            assert args.pytorch_dtype() == ours.grid.storage
    assert theirs.output_activations is None


def test_all_presets_of_compressed_tensors_and_two_of_our_own():
    theirs = set(compressed.library().PRESET_SCHEMES)
    assert set(QUANTIZED) | set(ALIASES) | {"UNQUANTIZED"} == theirs
    assert set(PRESETS) - set(QUANTIZED) == {"dense", "same"}
    assert (DENSE.weight, DENSE.input) == (None, None)
    for alias, name in ALIASES.items():
        assert (
            compressed.library().PRESET_SCHEMES[alias]
            is (compressed.library().PRESET_SCHEMES[name])
        )
        assert parse_scheme(alias) is PRESETS[name]


@pytest.mark.parametrize("name", QUANTIZED)
def test_presets_are_found_by_what_they_are(name):
    scheme = PRESETS[name]
    assert scheme_of(scheme.weight, scheme.input) == scheme
    if scheme.weight.granularity == "group":
        other = replace(scheme.weight, group_size=64)
        is_free = scheme.weight.scale == "float"
        assert (scheme_of(other, scheme.input).name == name) == is_free
        channel = replace(scheme.weight, granularity="channel", group_size=None)
        expected = f"{name}:channel" if is_free else None
        if name in ("W8A16", "W4A8", "W4A16_ASYM"):
            assert str(scheme_of(channel, scheme.input)) == expected


def test_what_is_no_preset_is_named_by_its_grids():
    weight = replace(PRESETS["W8A8"].weight, granularity="tensor")
    assert scheme_of(weight, None).name == "int8"
    assert scheme_of(weight, PRESETS["FP8"].input).name == "int8, input e4m3"
    assert scheme_of(weight, None, name="mine").name == "mine"


def test_what_shares_one_number_for_the_tensor():
    shared = {name for name in QUANTIZED if PRESETS[name].weight.shares_range}
    assert shared == {"FP8", "NVFP4", "NVFP4A16"}
    inputs = {name: PRESETS[name].input for name in QUANTIZED if PRESETS[name].input is not None}
    assert {name for name, input in inputs.items() if input.needs_scale} == {"FP8", "NVFP4"}


@pytest.mark.parametrize(
    ("granularity", "fields", "block"),
    [
        ("tensor", {}, (6, 40)),
        ("channel", {}, (1, 40)),
        ("group", {"group_size": 8}, (1, 8)),
        ("block", {"block": (2, 3)}, (2, 3)),
    ],
)
def test_rows_and_columns_that_share_a_scale(granularity, fields, block):
    scheme = WeightScheme(grid=INT8, granularity=granularity, **fields)
    assert scheme.block_of(6, 40) == block


# -- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_names_are_read_in_any_case(name):
    for text in (name, name.lower(), name.upper(), f"  {name} "):
        assert parse_scheme(text) is PRESETS[name]


def test_a_group_size_after_the_name_or_beside_it():
    expected = replace(PRESETS["W4A16"], weight=replace(PRESETS["W4A16"].weight, group_size=64))
    for text in ("W4A16:g64", "w4a16:G64", "W4A16 : g64"):
        assert parse_scheme(text) == expected
    assert parse_scheme("W4A16", group_size=64) == expected
    assert parse_scheme("W4A16:g64", group_size=64) == expected
    assert parse_scheme("W4A16:g128") == PRESETS["W4A16"]


def test_one_scale_a_channel():
    scheme = parse_scheme("W8A16:channel")
    assert scheme == parse_scheme("w8a16:Channel")
    assert scheme.weight == WeightScheme(grid=int_grid(8), granularity="channel")


@pytest.mark.parametrize(
    "text", [*PRESETS, "W4A16:g32", "W4A16_ASYM:g64", "W8A16:channel", "W4A16:g256"]
)
def test_a_scheme_prints_as_it_is_written(text):
    assert str(parse_scheme(text)) == text
    assert parse_scheme(str(parse_scheme(text))) == parse_scheme(text)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("W4A15", "did you mean `W4A16`? "),
        ("fp8_dynamc", "did you mean `FP8_DYNAMIC`? "),
        ("dens", "did you mean `dense`? "),
        ("W4A16g64", "did you mean `W4A16`? "),
        ("xyz", ""),
        ("", ""),
    ],
)
def test_unknown_schemes_name_a_near_one(text, hint):
    with pytest.raises(UnknownScheme) as error:
        parse_scheme(text)
    assert str(error.value) == (
        f"no such scheme: `{text}`\n\nhint: {hint}`quantload schemes` lists all; "
        "`keep` is full precision"
    )


@pytest.mark.parametrize(
    ("text", "size", "message"),
    [
        (
            "W4A16:g64",
            32,
            "two group sizes for one scheme: `W4A16:g64` and `group_size = 32`",
        ),
        (
            "W4A16:channel",
            32,
            "two group sizes for one scheme: `W4A16:channel` and `group_size = 32`",
        ),
        (
            "W8A8:g64",
            None,
            "scheme `W8A8` takes no group size: found `W8A8:g64`\n\n"
            "hint: only group-wise schemes such as `W4A16` take `:g64` or `:channel`",
        ),
        (
            "dense",
            64,
            "scheme `dense` takes no group size: found `dense, group_size = 64`\n\n"
            "hint: only group-wise schemes such as `W4A16` take `:g64` or `:channel`",
        ),
        (
            "FP8_BLOCK:channel",
            None,
            "scheme `FP8_BLOCK` takes no group size: found `FP8_BLOCK:channel`\n\n"
            "hint: only group-wise schemes such as `W4A16` take `:g64` or `:channel`",
        ),
        (
            "W4A16:64",
            None,
            "unknown scheme suffix: `64` in `W4A16:64`, expected `g` and a number, or `channel`"
            "\n\nhint: for example `W4A16:g64`",
        ),
        (
            "W4A16:",
            None,
            "unknown scheme suffix: `` in `W4A16:`, expected `g` and a number, or `channel`"
            "\n\nhint: for example `W4A16:g64`",
        ),
        (
            "W8A16:g0",
            None,
            "unknown scheme suffix: `g0` in `W8A16:g0`, expected `g` and a number, or `channel`"
            "\n\nhint: for example `W8A16:g64`",
        ),
        (
            "W4A16:g48",
            None,
            "group size `48` in `W4A16:g48` is not served by any engine, expected a power of two "
            "of at least 16\n\nhint: use 32, 64 or 128",
        ),
        (
            "W4A16",
            8,
            "group size `8` in `W4A16, group_size = 8` is not served by any engine, expected a "
            "power of two of at least 16\n\nhint: use 32, 64 or 128",
        ),
        (
            "W4A16",
            -64,
            "unknown scheme suffix: `g-64` in `W4A16, group_size = -64`, expected `g` and a "
            "number, or `channel`\n\nhint: for example `W4A16:g64`",
        ),
        (
            "NVFP4:g32",
            None,
            "scheme `NVFP4` has groups of 16 only: found `NVFP4:g32`\n\n"
            "hint: leave the group size out",
        ),
        (
            "MXFP8A16:channel",
            None,
            "scheme `MXFP8A16` has groups of 32 only: found `MXFP8A16:channel`\n\n"
            "hint: leave the group size out",
        ),
    ],
)
def test_group_sizes_that_make_no_sense(text, size, message):
    with pytest.raises(ConfigError) as error:
        parse_scheme(text, group_size=size)
    assert str(error.value) == message


# -- fitting -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "columns", "size"),
    [
        ("W4A16", 4096, 128),
        ("W4A16", 192, 64),
        ("W4A16", 96, 32),
        ("W4A16", 100, None),
        ("W4A16:g32", 4096, 32),
        ("W4A16:g32", 48, None),
        ("W4A16:g64", 96, 32),
        ("W4A16:g256", 384, 128),
        ("W4A16:g16", 48, 16),
        ("W4A16:g16", 24, None),
    ],
)
def test_a_group_size_falls_to_one_that_divides(text, columns, size):
    fitted = parse_scheme(text).fitted(columns)
    if size is None:
        assert fitted is None
    else:
        assert fitted == parse_scheme("W4A16", group_size=size)


@pytest.mark.parametrize(("name", "size"), [("NVFP4", 16), ("MXFP4A16", 32), ("MXFP8", 32)])
def test_groups_of_one_size_only_fit_or_do_not(name, size):
    scheme = parse_scheme(name)
    assert parse_scheme(f"{name}:g{size}") == scheme
    assert scheme.fitted(size * 3) == scheme
    assert scheme.fitted(size * 3 // 2) is None


@pytest.mark.parametrize("text", ["dense", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "W4A16:channel"])
def test_schemes_without_groups_fit_any_width(text):
    scheme = parse_scheme(text)
    assert scheme.fitted(77) is scheme


def test_the_group_sizes_that_engines_serve():
    assert SERVED_GROUP_SIZES == (128, 64, 32)


def test_inputs_are_dynamic_and_symmetric_unless_said_otherwise():
    scheme = InputScheme(grid=E4M3, granularity="token")
    assert not scheme.needs_scale
    assert replace(scheme, dynamic=False).needs_scale
    assert (scheme.dynamic, scheme.symmetric, scheme.group_size) == (True, True, None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("W4A16:g64", "groups of 64"),
        ("FP8_BLOCK", "blocks of 128 x 128"),
        ("FP8_DYNAMIC", "one scale a row"),
    ],
)
def test_what_shares_a_scale(name, expected):
    weight = parse_scheme(name).weight
    assert weight.sharing == expected
    whole = replace(weight, granularity="tensor", group_size=None, block=None)
    assert whole.sharing == "one scale a tensor"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dense", "full precision: dequantize or copy"),
        ("same", "as in the source, same values"),
        ("W4A16_ASYM", "weights int4, group 128, zero points"),
        ("W8A8", "weights int8, channel; inputs int8 per token, dynamic"),
        ("FP8", "weights e4m3, tensor; inputs e4m3 per tensor, static"),
        ("FP8_BLOCK", "weights e4m3, block 128x128; inputs e4m3 per group 128, dynamic"),
        ("MXFP6A16", "weights e2m3, group 32, powers of two as scales"),
        (
            "NVFP4",
            "weights e2m1, group 16, e4m3 scales and one of the tensor; "
            "inputs e2m1 per group 16, e4m3 scales and one of the tensor, dynamic",
        ),
    ],
)
def test_schemes_in_words(name, expected):
    assert PRESETS[name].in_words == expected


def test_a_block_in_a_list_becomes_a_tuple():
    scheme = WeightScheme(grid=E4M3, granularity="block", block=[2, 3])
    assert scheme.block == (2, 3)
    assert hash(scheme) == hash(WeightScheme(grid=E4M3, granularity="block", block=(2, 3)))
    with pytest.raises(WrongType, match=r"`block` is .*, expected \(rows, columns\)"):
        WeightScheme(grid=E4M3, granularity="block", block=(2.5, 3))
