"""Tiny torchao checkpoints: written from the specification, without torchao."""

import enum
import json
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_checkpoints as tiny
import torch
from safetensors.torch import save_file
from torch import Tensor

CONFIG = tiny.config(layers=1)
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
DTYPE = {"_type": "torch.dtype", "_data": "bfloat16"}
INT8 = {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}


def dtype(name: str) -> dict[str, str]:
    """A dtype as JSON."""
    return {"_type": "torch.dtype", "_data": name}


def subclass(kind: str, parts: dict[str, Tensor], **data: Any) -> tuple[dict[str, Tensor], Any]:
    """Return a tensor subclass: its parts, and its description."""
    return parts, {"_type": kind, "_data": data, "_tensor_data_names": list(parts)}


def int8(shape=(128, 64), block=(1, 64), *, seed=0, zero=True, **data):
    """A random Int8Tensor."""
    generator = torch.Generator().manual_seed(seed)
    counts = [n // size for n, size in zip(shape, block, strict=True)]
    parts = {
        "qdata": torch.randint(-128, 128, shape, generator=generator).to(torch.int8),
        "scale": torch.rand(counts, generator=generator) + 0.01,
    }
    if zero:
        parts["zero_point"] = torch.zeros(counts, dtype=torch.int8)
    return subclass("Int8Tensor", parts, **{"block_size": list(block), "dtype": DTYPE, **data})


def quantization(default: Any = INT8, **others: Any) -> dict[str, Any]:
    """A quantization config."""
    return {"quant_method": "torchao", "quant_type": {"default": default}, **others}


def fqn(rules: dict[str, Any]) -> dict[str, Any]:
    """An FqnToConfig."""
    return {"_type": "FqnToConfig", "_version": 1, "_data": {"fqn_to_config": rules}}


def flattened(subclasses: dict[str, tuple[dict[str, Tensor], Any]]) -> dict[str, Tensor]:
    """Parts of subclasses by tensor name."""
    tensors = {}
    for name, (parts, _) in subclasses.items():
        module, _, leaf = name.rpartition(".")
        tensors |= {f"{module}._{leaf}_{part}": tensor for part, tensor in parts.items()}
    return tensors


def metadata(subclasses: dict[str, tuple[dict[str, Tensor], Any]], plain=()) -> dict[str, str]:
    """The texts of a header."""
    described = {name: json.dumps(d) for name, (_, d) in subclasses.items()}
    described |= {name: json.dumps({"_type": "Tensor"}) for name in plain}
    return described | {"format": "pt", "tensor_names": json.dumps(sorted(described))}


def write(
    folder: Path, subclasses: Any, *, config: Any = None, shards: int = 1, whole: bool = False
) -> Path:
    """Write a checkpoint of quantized weights by parameter name.

    Args:
        folder: New.
        subclasses: See `subclass`, by parameter name.
        config: Quantization config; None is INT8 for all.
        shards: Files; the parts of one weight go to several.
        whole: Add all other tensors of the model.
    """
    folder.mkdir(parents=True)
    plain = {n: t for n, t in tiny.tensors(CONFIG).items() if n not in subclasses} if whole else {}
    tensors = {**flattened(subclasses), **plain}
    texts = metadata(subclasses, plain)
    content = CONFIG | {"quantization_config": config or quantization()}
    (folder / "config.json").write_text(json.dumps(content))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata=texts)
        return folder
    weight_map = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {n: t for i, (n, t) in enumerate(tensors.items()) if i % shards == number}
        save_file(part, folder / name, metadata=texts)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


class MappingType(enum.Enum):
    """As in torchao."""

    SYMMETRIC = enum.auto()
    ASYMMETRIC = 3


class ZeroPointDomain(enum.Enum):
    """As in torchao."""

    INT = 1
    FLOAT = 2


@dataclass(frozen=True)
class PerRow:
    """As in torchao."""

    dim: int = -1


@dataclass(frozen=True)
class PlainLayout:
    """As in torchao."""


@dataclass
class QuantizeTensorToInt8Kwargs:
    """As in torchao."""

    granularity: Any
    mapping_type: Any = MappingType.SYMMETRIC


def pickled_class(name: str) -> type:
    """A tensor subclass of this name that holds its attributes, as torchao's do."""

    def new(cls: type, shape: Any, kind: torch.dtype, **_: Any) -> Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=kind)

    def init(self: Any, _shape: Any, _kind: torch.dtype, **state: Any) -> None:
        self.__dict__.update(state)

    def dispatch(cls: type, *_: Any, **__: Any) -> None:
        raise NotImplementedError(cls)

    members = {"__new__": new, "__init__": init, "__torch_dispatch__": classmethod(dispatch)}
    members["__torch_function__"] = torch._C._disabled_torch_function_impl
    return type(name, (torch.Tensor,), members)


def save_pickled(content: Any, file: Path, *classes: Any, package: str = "torchao.quantization"):
    """Pickle objects of classes that then no longer exist, as on a machine without torchao."""
    names = [".".join(package.split(".")[: i + 1]) for i in range(package.count(".") + 1)]
    modules = {name: types.ModuleType(name) for name in names}
    before = {cls: cls.__module__ for cls in classes}
    for cls in classes:
        cls.__module__ = package
        setattr(modules[package], cls.__name__, cls)
    sys.modules.update(modules)
    try:
        torch.save(content, file)
    finally:
        for name in modules:
            del sys.modules[name]
        for cls, module in before.items():
            cls.__module__ = module
