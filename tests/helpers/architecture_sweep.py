"""Load a tiny model of one architecture in every way, and say how each linear layer ran.

The reference is always plain transformers on full-precision weights: the saved model itself, or
what `quantload convert --scheme dense` makes of the quantized one. Siblings are counted in a real
forward of that reference, not by the probe that loading uses.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny_architectures import architectures, inputs_of, tiny_model
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

import quantload
from quantload.layers.linear import QuantLinear
from quantload.layers.stack import LinearStack, StackView

SCHEMES = ("W4A16", "FP8_DYNAMIC")
LIMIT = 1e-5


@dataclass
class Row:
    """What became of one architecture.

    `groups` are sets of linear layers that read one tensor in the reference; `fused` counts those
    that run as one product in the loaded model. `launches` counts products of linear layers in one
    forward: of the reference, then of the loaded model. Errors are relative; a text says why there
    is none.
    """

    model_type: str
    model_class: str
    linears: int = 0
    groups: int = 0
    fused: int = 0
    launches: tuple[int, int] = (0, 0)
    unfused: dict[str, str] = field(default_factory=dict)
    dense: float | str = ""
    schemes: dict[str, float | str] = field(default_factory=dict)
    quantized: dict[str, int] = field(default_factory=dict)
    per_linear: float | str = ""
    fallback: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


@contextlib.contextmanager
def calls_of(model: nn.Module, chosen: list[tuple[str, nn.Module]]) -> Iterator[list[Any]]:
    """Record (name, input object, its version) of each call of some modules."""
    calls: list[tuple[str, Tensor, int]] = []
    handles = [
        module.register_forward_pre_hook(
            lambda _, args, name=name: calls.append((name, args[0], args[0]._version))
        )
        for name, module in chosen
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def sibling_groups(calls: list[Any]) -> list[tuple[str, ...]]:
    """Sets of linear layers that read one tensor object, nothing being written to it between."""
    by_input: dict[tuple[int, int], list[str]] = {}
    for name, x, version in calls:
        by_input.setdefault((id(x), version), []).append(name)
    return [names for names in dict.fromkeys(tuple(n) for n in by_input.values()) if len(names) > 1]


def products(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module that is one matrix product each time it runs."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, LinearStack) and module.separate is not None:
            found += [(f"{name}.{i}", gemm) for i, gemm in enumerate(module.separate)]
        elif isinstance(module, QuantLinear):
            found.append((name, module.gemm))
        elif is_linear(module):
            found.append((name, module))
    return found


def sweep(
    model_type: str, cls: type[PreTrainedModel], folder: Path, schemes: tuple[str, ...] = SCHEMES
) -> Row:
    """Fill a row; nothing raises but errors of the tiny model itself."""
    row = Row(model_type, cls.__name__)
    model = tiny_model(model_type, cls)
    inputs = inputs_of(model)
    source = folder / "source"
    model.save_pretrained(source)
    del model
    plain, info = cls.from_pretrained(source, dtype=torch.float32, output_loading_info=True)
    plain.eval()
    lost = {k: sorted(v)[:3] for k, v in info.items() if v and k != "error_msgs"}
    if lost:
        row.fallback = f"transformers itself: {lost}"
    linears = [(n, m) for n, m in plain.named_modules() if is_linear(m)]
    row.linears = len(linears)
    with calls_of(plain, linears) as calls:
        expected = logits(plain, inputs)
    wide = {name for name, m in linears if getattr(m, "out_features", 2) > 1}
    groups = sibling_groups([call for call in calls if call[0] in wide])
    _dense(row, source, inputs, expected, groups, len(calls), plain)
    for scheme in schemes:
        output = folder / scheme
        try:
            _quantized(row, source, output, scheme, cls, inputs)
        except Exception as error:  # noqa: BLE001 - the row says what failed
            row.schemes[scheme] = _text(error)
    return row


def reference(cls: type[PreTrainedModel], folder: Path) -> PreTrainedModel:
    """Transformers' own model of a folder; single experts that it cannot read are joined here."""
    model, info = cls.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")) if info["missing_keys"] else ():
        tensors |= load_file(file)
    for name in info["missing_keys"]:
        block, _, leaf = name.rpartition(".")
        place = model.get_parameter(name)
        parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
        experts = [
            torch.cat([tensors[f"{block}.{e}.{part}.weight"] for part in parts])
            for e in range(len(place))
        ]
        if place.shape[1:] != experts[0].shape or "Llama4" in cls.__name__:
            experts = [weight.t() for weight in experts]
        place.data.copy_(torch.stack(experts))
    return model.eval()


def _text(error: Exception) -> str:
    """First line of an error, without the folders of this run."""
    line = re.sub(r"`/[^`]*/([^/`]+)`", r"`\1`", str(error).partition("\n")[0])
    return f"{type(error).__name__}: {line}"[:300]


def _dense(
    row: Row,
    source: Path,
    inputs: dict[str, Tensor],
    expected: Tensor,
    groups: list[tuple[str, ...]],
    launches: int,
    plain: nn.Module,
) -> None:
    row.groups = len(groups)
    try:
        model = quantload.load(source, device="cpu", dtype=torch.float32)
        with calls_of(model, products(model)) as calls:
            found = logits(model, inputs)
        row.dense = relative(found, expected)
        row.launches = (launches, len(calls))
        _count_fused(row, model, groups, plain)
    except Exception as error:  # noqa: BLE001 - the row says what failed
        row.dense = _text(error)


def _count_fused(
    row: Row, model: nn.Module, groups: list[tuple[str, ...]], plain: nn.Module
) -> None:
    modules = dict(model.named_modules())
    for group in groups:
        views = [modules.get(name) for name in group]
        stacks = {id(v.__dict__["stack"]) if isinstance(v, StackView) else id(v) for v in views}
        if len(stacks) == 1:
            row.fused += 1
        else:
            names = " + ".join(name.rpartition(".")[2] for name in group)
            why = _why_apart([plain.get_submodule(name) for name in group], plain)
            row.unfused.setdefault(names, f"{len(stacks)} products for {len(group)}{why}")


def _why_apart(linears: list[nn.Module], plain: nn.Module) -> str:
    users = Counter(id(p) for _, p in plain.named_parameters(remove_duplicate=False))
    if len({linear.bias is None for linear in linears}) > 1:
        return ", since not all have biases"
    if any(users[id(linear.weight)] > 1 for linear in linears):
        return ", since they are tied to those of other layers"
    kinds = {type(linear).__name__ for linear in linears} - {"Linear"}
    return f", since `{', '.join(sorted(kinds))}` is no plain linear layer" if kinds else ""


def _quantized(
    row: Row,
    source: Path,
    output: Path,
    scheme: str,
    cls: type[PreTrainedModel],
    inputs: dict[str, Tensor],
) -> None:
    quantload.convert(source, output, scheme, verify_output=False)
    dense = output.with_name(f"{scheme}-dense")
    quantload.convert(output, dense, "dense", verify_output=False)
    plain = reference(cls, dense)
    model = quantload.load(output, device="cpu", dtype=torch.float32, quantize_inputs=False)
    row.quantized[scheme] = sum(r.scheme != "dense" for r in quantload.explain(model))
    row.schemes[scheme] = relative(logits(model, inputs), logits(plain, inputs))
    if scheme.startswith("FP8"):
        model = quantload.load(output, device="cpu", dtype=torch.float32)
        row.per_linear = max(_linear_errors(model, plain), default=0.0)
    for path in (output, dense):
        shutil.rmtree(path)


def _linear_errors(model: nn.Module, plain: nn.Module) -> Iterator[float]:
    """Compare each FP8 linear layer with torch on the same input, rounded to FP8 a token."""
    for report in quantload.explain(model):
        if report.scheme == "dense" or getattr(report, "experts", 0):
            continue  # experts have their own tests on quantized inputs
        reference = plain.get_submodule(report.module)
        weight = reference.weight.t() if isinstance(reference, Conv1D) else reference.weight
        x = torch.randn(3, weight.shape[1])
        scale = x.abs().amax(-1, keepdim=True) / 448
        rounded = (x / scale).to(torch.float8_e4m3fn).float() * scale
        with torch.no_grad():
            expected = nn.functional.linear(rounded, weight, reference.bias)
            yield relative(model.get_submodule(report.module)(x), expected)


def both(
    model_type: str, folder: Path, scheme: str, *, cls: type[PreTrainedModel] | None = None
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A tiny model quantized and loaded, and transformers' own on its dequantized weights."""
    cls = cls or architectures()[model_type]
    tiny_model(model_type, cls).save_pretrained(folder / "source")
    quantload.convert(folder / "source", folder / scheme, scheme, verify_output=False)
    quantload.convert(folder / scheme, folder / "dense", "dense", verify_output=False)
    plain = reference(cls, folder / "dense")
    return quantload.load(folder / scheme, device="cpu", dtype=torch.float32), plain
