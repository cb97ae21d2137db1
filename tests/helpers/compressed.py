"""compressed-tensors as an oracle; imported on first use, since that takes seconds and may warn."""

import warnings
from functools import cache
from types import SimpleNamespace

import torch


@cache
def library():
    """The functions of compressed-tensors that tests compare with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from compressed_tensors.compressors.pack_quantized import helpers as packing
        from compressed_tensors.quantization import quant_scheme
        from compressed_tensors.quantization.lifecycle import forward
        from compressed_tensors.quantization.utils import helpers
    return SimpleNamespace(
        PRESET_SCHEMES=quant_scheme.PRESET_SCHEMES,
        QuantizationArgs=quant_scheme.QuantizationArgs,
        calculate_qparams=helpers.calculate_qparams,
        compute_dynamic_scales_and_zp=helpers.compute_dynamic_scales_and_zp,
        dequantize=forward.dequantize,
        fake_quantize=forward.fake_quantize,
        generate_gparam=helpers.generate_gparam,
        pack_to_int32=packing.pack_to_int32,
        preset_name_to_scheme=quant_scheme.preset_name_to_scheme,
        quantize=forward.quantize,
        unpack_from_int32=packing.unpack_from_int32,
    )


def preset(name):
    """The preset of this name."""
    return library().preset_name_to_scheme(name, ["Linear"])


def quantized(weight, args):
    """Codes, scale, zero point and values of a weight, with minmax scales.

    Args:
        weight: [N, K] float dtype.
        args: QuantizationArgs of integers or e4m3.
    """
    low, high = _range(weight, args)
    scale, zero = library().calculate_qparams(low, high, args)
    codes = library().quantize(weight, scale, zero, args, dtype=args.pytorch_dtype())
    return codes, scale, zero, library().dequantize(codes, scale, zero, args)


def produced(weight, theirs, layout, *, fused=()):
    """The tensors of a module as llm-compressor makes and compressed-tensors stores them, by leaf.

    Args:
        weight: [N, K] float dtype.
        theirs: The library's scheme.
        layout: Name of the format.
        fused: Weights that share a global scale with it.

    Returns:
        The tensors; None where a scale is not finite.
    """
    args, outer = theirs.weights, None
    low, high = _range(weight, args)
    if args.strategy == "tensor_group":
        largest = max(member.abs().max() for member in (weight, *fused))
        outer = library().generate_gparam(-largest.reshape(1), largest.reshape(1))
    scale, zero = library().calculate_qparams(low, high, args, global_scale=outer)
    if not scale.isfinite().all():
        return None
    state = {"weight": weight, "weight_scale": scale.to(weight.dtype), "weight_zero_point": zero}
    if outer is not None:
        state["weight_global_scale"] = outer
    return compressors()[layout].compress(state, theirs)


def fake_quantized(x, args, outer=None):
    """A dynamically quantized input [B, T, K], dequantized again.

    Args:
        x: The input.
        args: QuantizationArgs.
        outer: [1], the global scale of NVFP4.
    """
    scale, zero = library().compute_dynamic_scales_and_zp(x, args, module=None, global_scale=outer)
    return library().fake_quantize(x, scale, zero, args, global_scale=outer)


@cache
def compressors():
    """The compressors of compressed-tensors by format."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.config import CompressionFormat
    names = (f.value for f in CompressionFormat if f.value != "mixed-precision")
    found = {}
    for name in names:
        try:
            found[name] = BaseCompressor.get_value_from_registry(name)
        except KeyError:
            continue
    return found


def read_config(config):
    """A `quantization_config` as the library reads it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from compressed_tensors.quantization import QuantizationConfig

        return QuantizationConfig.model_validate(config)


def library_scheme(scheme):
    """The library's own scheme of what `build_config` writes for a scheme of ours."""
    from quantload.loader.formats.compressed_tensors_config import build_config

    config = build_config({"m": scheme}, [])
    for group in config["config_groups"].values():
        group["weights"]["actorder"] = None  # the library reads "group" no longer
    (read,) = read_config(config).config_groups.values()
    return read


def decompressed(leaves, scheme):
    """The weight that compressed-tensors makes of tensors by leaf.

    Args:
        leaves: Tensors of a module.
        scheme: Ours.
    """
    theirs = library_scheme(scheme)
    return compressors()[theirs.format].decompress(dict(leaves), theirs)["weight"]


def _range(weight, args):
    """Smallest and largest value of each group, row or block, as the memoryless observer does."""
    if args.strategy == "block":
        height, width = args.block_structure
        blocks = [rows.split(width, dim=1) for rows in weight.split(height, dim=0)]
        low = torch.stack([torch.stack([part.amin() for part in rows]) for rows in blocks])
        high = torch.stack([torch.stack([part.amax() for part in rows]) for rows in blocks])
        return low, high
    if args.strategy == "tensor":
        return weight.amin().reshape(1), weight.amax().reshape(1)
    size = args.group_size if "group" in args.strategy else weight.shape[1]
    groups = weight.unflatten(1, (-1, size))
    return torch.amin(groups, dim=-1), torch.amax(groups, dim=-1)
