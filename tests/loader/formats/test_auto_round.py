"""AutoRound: integers of all bits in each packing, by an independent reference."""

import pytest
import torch
from int_packing import awq_tensors, gptq_tensors, quantized_llama, random_parts, values_of

from quantload.errors import UnsupportedVariant
from quantload.loader.formats import open_source
from quantload.loader.open import open_checkpoint

GROUP = 32
CONFIG = {
    "quant_method": "auto-round",
    "data_type": "int",
    "group_size": GROUP,
    "block_name_to_quantize": "model.layers",
}


def packer(packing, bits, *, symmetric):
    def pack(_, rows, columns):
        count = columns // GROUP
        fields, zeros, scales = random_parts(rows, columns, count, bits, seed=bits)
        if symmetric:
            zeros[:] = 1 << (bits - 1)
            scales[::2] *= -1  # AutoRound's scales have signs
        groups = torch.arange(columns).numpy() // GROUP
        values = values_of(fields, zeros, scales, groups, torch.float16)
        if packing.endswith("awq"):
            return awq_tensors(fields, zeros, scales, bits=bits), values
        offset = int(packing.endswith("auto_gptq"))
        return gptq_tensors(fields, zeros, scales, bits=bits, offset=offset), values

    return pack


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("packing", "bits"),
    [
        *((packing, bits) for packing in ("auto_gptq", "gptqmodel", "") for bits in range(2, 9)),
        *(("auto_awq", bits) for bits in (4, 5, 6, 7)),
    ],
)
def test_fields_of_all_bits_are_dense(tmp_path, packing, bits, symmetric):
    name = f"auto_round:{packing}" if packing else "auto_round"
    stated = {**CONFIG, "packing_format": name, "bits": bits, "sym": symmetric}
    values = quantized_llama(tmp_path, packer(packing, bits, symmetric=symmetric), stated)
    source = open_source(open_checkpoint(tmp_path))
    for module, expected in values.items():
        assert torch.equal(source.read_weight(module).dequantize(), expected), module


def test_layers_of_other_bits(tmp_path):
    def pack(module, rows, columns):
        bits = 6 if module.endswith("down_proj") else 4
        return packer("auto_gptq", bits, symmetric=True)(module, rows, columns)

    stated = {
        **CONFIG,
        "packing_format": "auto_round:auto_gptq",
        "bits": 4,
        "sym": True,
        "extra_config": {"model.layers.0.mlp.down_proj": {"bits": 6}},
    }
    values = quantized_llama(tmp_path, pack, stated)
    source = open_source(open_checkpoint(tmp_path))
    for module, expected in values.items():
        assert torch.equal(source.read_weight(module).dequantize(), expected), module


@pytest.mark.parametrize("data_type", ["mx_int", "int_asym_dq"])
def test_other_data_types_are_refused(tmp_path, data_type):
    stated = {**CONFIG, "packing_format": "auto_round", "bits": 4, "sym": True}
    stated["data_type"] = data_type
    quantized_llama(tmp_path, packer("", 4, symmetric=True), stated)
    with pytest.raises(UnsupportedVariant, match=f"`{data_type}`"):
        open_source(open_checkpoint(tmp_path))
