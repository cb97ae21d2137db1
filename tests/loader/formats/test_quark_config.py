"""AMD Quark: its quantization config, and what it says of modules."""

import pytest
from quark_encoder import config, layer, spec

from quantload.errors import FormatMismatch, UnsupportedVariant
from quantload.loader.formats.quark_config import parse_config

FP8 = spec("fp8_e4m3", "per_tensor", symmetric=True)
INT8 = spec("int8", "per_tensor", symmetric=True)
CACHED = layer(FP8, output_tensors=FP8)
DOWN = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize("value", [None, spec("bfloat16", "per_tensor")])
def test_weights_in_full_precision(value):
    says, found = parse_config(config(value)).of_module(DOWN)
    assert not says.is_quantized
    assert found.weight is None


@pytest.mark.parametrize(
    ("weight", "inputs", "text"),
    [
        (FP8, FP8, "e4m3 tensor static symmetric"),
        (FP8, {**FP8, "is_dynamic": True}, "e4m3 tensor dynamic symmetric"),
        (FP8, spec("fp8_e4m3", "per_channel", is_dynamic=True), "e4m3 token dynamic symmetric"),
        (INT8, {**INT8, "symmetric": False}, "int8 tensor static asymmetric"),
        (
            spec("fp4", "per_group", group_size=32, scale_format="e8m0"),
            spec("fp4", "per_group", group_size=32, scale_format="e8m0", is_dynamic=True),
            "e2m1 group dynamic symmetric",
        ),
    ],
)
def test_inputs(weight, inputs, text):
    found = parse_config(config(weight, inputs)).everything.input
    kind = "dynamic" if found.dynamic else "static"
    sign = "symmetric" if found.symmetric else "asymmetric"
    assert f"{found.grid.name} {found.granularity} {kind} {sign}" == text


def test_excluded_modules_keep_their_config():
    says, found = parse_config(config(FP8, exclude=["*.mlp.*"])).of_module(DOWN)
    assert (says.is_quantized, says.entry) == (False, "exclude: *.mlp.*")
    assert found.weight.grid.name == "e4m3"


@pytest.mark.parametrize(
    "name", ["Linear", "nn.Linear", "<class 'torch.nn.modules.linear.Linear'>"]
)
def test_classes(name):
    parsed = parse_config(config(FP8, layer_type_quant_config={name: layer(INT8)}))
    assert parsed.of_module(DOWN)[1].weight.grid.name == "int8"
    assert parsed.of_module("model.embed_tokens")[1].weight.grid.name == "e4m3"


def test_cache():
    cached = {"*k_proj": CACHED, "*v_proj": CACHED}
    named = config(FP8, layer_quant_config=cached, kv_cache_quant_config=cached)
    grouped = config(
        FP8, layer_quant_config=cached, export={"kv_cache_group": ["*k_proj", "*v_proj"]}
    )
    for found in (parse_config(named), parse_config(grouped)):
        assert found.cache_scheme["num_bits"] == 8
        assert found.cache_scheme["type"] == "float"
    assert parse_config(config(FP8)).cache_scheme is None
    with pytest.raises(FormatMismatch, match=r"`kv_cache_group`.*no entry"):
        parse_config(config(FP8, export={"kv_cache_group": ["*k_proj"]}))
    other = layer(FP8, output_tensors=spec("fp8_e4m3", "per_channel"))
    with pytest.raises(UnsupportedVariant, match="`fp8_e4m3 per_channel` is not read"):
        parse_config(
            config(
                FP8, layer_quant_config={"*k_proj": other}, export={"kv_cache_group": ["*k_proj"]}
            )
        )


@pytest.mark.parametrize(
    ("quantization", "match"),
    [
        (config(FP8, layer_quant_config={"*k_proj": CACHED}), "quantized `output_tensors`"),
        (config(FP8) | {"global_quant_config": layer(FP8, bias=FP8)}, "quantized `bias`"),
        (config(FP8, pack_method="other"), "`pack_method`"),
        (config(spec("int3", "per_group")), "dtype `'int3'` is not read"),
        (config(spec("mx9", "per_group")), "dtype `'mx9'`"),
        (config(spec("int4", "per_row")), "`qscheme` `'per_row'` is not read"),
        (config({**FP8, "is_dynamic": True}), "quantized while the model runs"),
        (config(spec("fp4", "per_tensor")), "`fp4` weights tensor-wise"),
        (config([FP8, spec("int4", "per_channel")]), "in several levels"),
        (config(spec("int8", "per_block", block_size=[2, 2])), "by blocks"),
        (
            config(FP8, algo_config=[{"name": "rotation", "r3": True}]),
            "rotated while the model runs.*`r3`",
        ),
        (
            config(
                FP8,
                algo_config=[
                    {"name": "rotation", "online_config": {"online_rotation_layers": ["x"]}}
                ],
            ),
            "rotated while the model runs",
        ),
    ],
)
def test_what_is_not_read(quantization, match):
    with pytest.raises(UnsupportedVariant, match=match):
        parse_config(quantization)


def test_algorithms_that_leave_nothing_to_do_while_running():
    algorithms = [{"name": "awq"}, {"name": "rotation", "r1": True, "r3": False}]
    assert parse_config(config(FP8, algo_config=algorithms)).everything.weight is not None


@pytest.mark.parametrize(
    ("quantization", "match"),
    [
        (config(FP8, exclude="lm_head"), "`exclude` .* expected a list"),
        (config(FP8, exclude=["re:("]), r"`re:\(` in the quantization config"),
        (config(FP8, layer_quant_config=[1]), "`layer_quant_config` .* expected an object"),
        (config(FP8, layer_quant_config={"a": 1}), "`layer_quant_config: a` .* is `1`"),
        (config(FP8, export=3), "`export` .* expected an object"),
        (config(FP8, algo_config=[3]), "`algo_config` .* expected an object"),
        (config("fp8"), "`'fp8'` .* no specification"),
        (config({**FP8, "is_dynamic": "no"}), "`is_dynamic` .* is `'no'`"),
        (config(spec("int4", "per_group", group_size=0)), "`group_size` .* is `0`"),
        (config(spec("int4", "per_group")), "`group_size` .* is `None`"),
        (config(spec("fp8_e4m3", "per_block", block_size=[128])), "`block_size` .* is"),
    ],
)
def test_malformed(quantization, match):
    with pytest.raises(FormatMismatch, match=match):
        parse_config(quantization)
