"""What a target writes, as a checkpoint: in memory for our readers, in a folder for other tools."""

import json
from pathlib import Path

import torch
from int_packing import memory_checkpoint
from safetensors.torch import load_file, save_file

from quantload.loader.formats import open_source
from quantload.loader.formats.target import WrittenModules
from quantload.quant.activation import with_input_scale

INPUT_ABSMAX = 12.0
MODULES = ("model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj")


def uneven_weight(rows, columns, *, dtype=torch.bfloat16, seed=0):
    """[N, K] of random numbers whose runs of 16 columns and rows differ in size."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    factors = 4.0 ** (2 * torch.rand(rows, -(-columns // 16), generator=generator) - 1)
    weight *= factors.repeat_interleave(16, 1)[:, :columns]
    return (weight * 0.05).to(dtype)


def quantized(target, weight, scheme, *, shared=None):
    """A weight as `convert` quantizes it for a target."""
    tensor = target.quantize(weight, scheme.weight, shared=shared)
    if scheme.input is not None and scheme.input.needs_scale:
        tensor = with_input_scale(tensor, scheme.input, INPUT_ABSMAX)
    return tensor


def leaves_of(target, tensor, scheme):
    """The tensors of a module; they must be those that the plan lays out."""
    leaves = target.encode(tensor, scheme, tensor.shape)
    planned = target.layout(scheme, tensor.shape, torch.bfloat16)
    assert {n: (t.dtype, tuple(t.shape)) for n, t in leaves.items()} == {
        n: (leaf.dtype, leaf.shape) for n, leaf in planned.items()
    }
    return leaves


def written_tensors(target, modules):
    """Tensors and canonical weights of {module: (weight, scheme)}; no scheme keeps a weight."""
    tensors, made = {}, {}
    for module, (weight, scheme) in modules.items():
        if scheme is None:
            tensors[f"{module}.weight"] = weight
            continue
        assert target.obstacle(scheme, tuple(weight.shape)) == ""
        made[module] = quantized(target, weight, scheme)
        leaves = leaves_of(target, made[module], scheme)
        tensors |= {f"{module}.{leaf}": part for leaf, part in leaves.items()}
    return tensors, made


def written_config(target, modules, *, named=(), cache_scheme=None):
    """What the target says of such modules."""
    return target.config(
        WrittenModules(
            schemes={m: scheme for m, (_, scheme) in modules.items() if scheme is not None},
            kept=[m for m, (_, scheme) in modules.items() if scheme is None],
            named=named,
            cache_scheme=cache_scheme,
        )
    )


def read_back(target, modules, *, dtype="bfloat16", named=()):
    """Write modules in memory, and read them: the source, and what was encoded."""
    tensors, made = written_tensors(target, modules)
    config = written_config(target, modules, named=named).quantization_config
    checkpoint = memory_checkpoint(
        tensors, json.loads(json.dumps(config)), config={"torch_dtype": dtype}
    )
    return open_source(checkpoint), made


def assert_reads_back(target, modules, **options):
    """Our reader finds the same schemes, and values equal bit for bit."""
    source, made = read_back(target, modules, **options)
    assert not source.warnings
    for module, (weight, scheme) in modules.items():
        found = source.read_weight(module)
        if scheme is None:
            assert torch.equal(found, weight)
            continue
        expected = made[module].dequantize()
        values = found.dequantize()
        assert torch.equal(values.double(), expected.double()), module
        assert torch.equal(found.codes.view(torch.uint8), made[module].codes.view(torch.uint8))
    return source


def write_folder(folder, target, modules, config):
    """Write a checkpoint for other tools: config.json, side files and one safetensors file."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    tensors, made = written_tensors(target, modules)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    written = written_config(target, modules)
    content = {**config, "quantization_config": written.quantization_config}
    for name, value in {"config.json": content, **written.files}.items():
        (folder / name).write_text(json.dumps(value, indent=2))
    return made


def write_model(folder, base, target, scheme, *, kept=("lm_head",)):
    """Write the model of a folder for other tools: every linear layer is quantized but some.

    Args:
        folder: Must not exist.
        base: Holds config.json and model.safetensors in full precision.
        target: The format.
        scheme: Of all matrices of linear layers that are not kept.
        kept: Ends of names of linear layers in full precision.

    Returns:
        The canonical weights by module.
    """
    linear = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down"))
    modules, plain = {}, {}
    for name, tensor in load_file(Path(base) / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if name.endswith(linear) or module == "lm_head":
            modules[module] = (tensor, None if module.endswith(kept) else scheme)
        else:
            plain[name] = tensor
    made = write_folder(
        folder, target, modules, json.loads((Path(base) / "config.json").read_text())
    )
    file = Path(folder) / "model.safetensors"
    save_file({**load_file(file), **plain}, file, metadata={"format": "pt"})
    return made
