"""ModelOpt: both spellings of its quantization config, and what they say of modules."""

import pytest

from quantload.errors import FormatMismatch, UnsupportedVariant
from quantload.loader.formats.modelopt_config import ALGORITHMS, needs_side_file, parse_config

DOWN = "model.layers.0.mlp.down_proj"


def nested(**details):
    return {"producer": {"name": "modelopt"}, "quantization": details}


def said(config, module):
    says, algorithm = parse_config(config).of_module(module)
    return says.is_quantized, algorithm and algorithm.name


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "fp8_pb_wo", "Nvfp4"])
def test_algorithms_in_both_spellings(algorithm):
    for config in (nested(quant_algo=algorithm), {"quant_algo": algorithm}):
        assert said(config, DOWN) == (True, algorithm.upper())


@pytest.mark.parametrize("algorithm", [None, "none"])
def test_no_algorithm_but_a_cache(algorithm):
    config = parse_config(nested(quant_algo=algorithm, kv_cache_quant_algo="FP8"))
    assert config.default is None
    assert config.cache_scheme["type"] == "float"
    assert parse_config({"kv_cache_scheme": "FP8"}).default is None


@pytest.mark.parametrize(
    ("entry", "module", "is_excluded"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head*", "lm_head", True),
        ("model.layers.0.mlp.down", DOWN, False),
        ("model.layers.0.mlp.down*", DOWN, True),
        ("layers.0.mlp", DOWN, False),  # nowhere a part of a name
        ("*.mlp.*", DOWN, True),
        ("model.layers.?.mlp.[d]own_proj", DOWN, True),
        ("model.layers.1*", "model.layers.10.mlp.down_proj", True),
        ("language_model.model.layers.0.mlp*", DOWN, True),
        ("model.layers.0.mlp.down_proj", "model.language_model.layers.0.mlp.down_proj", True),
        ("*.MLP.*", DOWN, False),
    ],
)
def test_excluded_modules(entry, module, is_excluded):
    for key in ("exclude_modules", "ignore"):
        says, algorithm = parse_config({"quant_algo": "FP8", key: [entry]}).of_module(module)
        assert says.is_quantized is not is_excluded
        assert says.entry == (f"exclude_modules: {entry}" if is_excluded else "quant_algo")
        assert algorithm.name == "FP8"


def test_layers_of_mixed_precision():
    layers = {
        DOWN: {"quant_algo": "fp8"},
        "model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.1.mlp": {"quant_algo": None},
    }
    config = parse_config({"quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
    says, algorithm = config.of_module(DOWN)
    assert (says.is_quantized, says.is_exact, algorithm.name) == (True, True, "FP8")
    says, algorithm = config.of_module("model.layers.0.mlp.experts.3.up_proj")
    assert (says.is_quantized, says.is_exact, algorithm.group_size) == (True, False, 16)
    says, algorithm = config.of_module("model.layers.1.mlp.up_proj")
    assert (says.is_quantized, algorithm) == (False, None)


def test_what_only_the_side_file_says():
    mixed = {"quant_algo": "MIXED_PRECISION"}
    assert needs_side_file(mixed)
    assert needs_side_file({"quant_algo": "W4A16_AWQ"})
    assert not needs_side_file({"quant_algo": "W4A16_AWQ", "group_size": 128})
    assert not needs_side_file({"quant_algo": "FP8"})
    beside = nested(quant_algo="MIXED_PRECISION", quantized_layers={DOWN: {"quant_algo": "FP8"}})
    assert parse_config(mixed, beside).of_module(DOWN)[1].name == "FP8"
    with pytest.raises(FormatMismatch, match="quantized_layers"):
        parse_config(mixed)


@pytest.mark.parametrize(
    ("stated", "bits", "kind"),
    [
        ({"kv_cache_quant_algo": "fp8"}, 8, "float"),
        ({"kv_cache_quant_algo": "INT8"}, 8, "int"),
        ({"kv_cache_quant_algo": "NVFP4"}, 4, "float"),
        ({"kv_cache_scheme": "NVFP4"}, 4, "float"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}, 8, "float"),
    ],
)
def test_cache(stated, bits, kind):
    scheme = parse_config({"quant_algo": "FP8", **stated}).cache_scheme
    assert (scheme["num_bits"], scheme["type"]) == (bits, kind)
    assert parse_config({"quant_algo": "FP8", "kv_cache_scheme": None}).cache_scheme is None


@pytest.mark.parametrize("name", ["NVFP4_AFFINE", {"num_bits": 3, "type": "int"}])
def test_other_caches(name):
    with pytest.raises(UnsupportedVariant, match=r"cache algorithm `(NVFP4_AFFINE|3-bit int)`"):
        parse_config({"quant_algo": "FP8", "kv_cache_scheme": name})


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({}, "has no `quant_algo`"),
        ({"quantization": 3}, "`quantization` .* is `3`, expected an object"),
        ({"quant_algo": 4}, "`quant_algo` .* is `4`"),
        ({"quant_algo": "FP8", "ignore": "lm_head"}, "`ignore` .* expected a list"),
        ({"quant_algo": "FP8", "exclude_modules": [1]}, "`exclude_modules` .* expected a list"),
        ({"quant_algo": "NVFP4", "group_size": -1}, "`group_size` .* is `-1`"),
        ({"quant_algo": "NVFP4", "group_size": True}, "`group_size` .* is `True`"),
        ({"quant_algo": "NVFP4", "group_size": 64}, "`group_size` .* is `64`, expected `16`"),
        ({"quant_algo": "FP8", "config_groups": [1]}, "`config_groups` .* expected an object"),
        ({"quant_algo": "FP8", "config_groups": {"g": 1}}, "`config_groups: g` .* is `1`"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": [1]},
            "`quantized_layers` .* object",
        ),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": "FP8"}},
            "`quantized_layers: a` .* is `'FP8'`",
        ),
    ],
)
def test_malformed(config, match):
    with pytest.raises(FormatMismatch, match=match):
        parse_config(config)


def test_an_algorithm_that_is_not_read():
    with pytest.raises(UnsupportedVariant, match="`INT3` is not read, found in `quant_algo`"):
        parse_config({"quant_algo": "int3"})
    with pytest.raises(UnsupportedVariant, match="found in `quantized_layers: a`"):
        parse_config(
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "INT3"}}}
        )
