"""Replace the linear layers of a meta model by ours, from outside, whatever the architecture.

quantized linear               -> QuantLinear
siblings of one scheme         -> LinearStack on their parent, StackView in their places
full-precision siblings        -> the same, with a dense GEMM
any other module (embedding)   -> stays: a quantized weight is dequantized into its parameter
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from quantload.errors import ModelError, listed
from quantload.layers.checkpoint_names import mapper_of
from quantload.layers.experts_surgery import ExpertsReport, explain_experts, replace_experts
from quantload.layers.guard import guard
from quantload.layers.kernel_facts import Call, call_of, launches_of, layout_of, weight_bytes
from quantload.layers.layer_builder import LayerBuilder, Sharing
from quantload.layers.linear import QuantLinear
from quantload.layers.meta_model import (
    TransformersModel,
    is_transposed_linear,
    tied_names,
    untie_in_config,
)
from quantload.layers.replacement import put
from quantload.layers.siblings import Siblings, is_plain_linear
from quantload.layers.stack import LinearStack, StackView, share_within
from quantload.mappers.mapper import WeightMapper
from quantload.quant.scheme import DENSE, Scheme

_log = logging.getLogger("quantload")


@dataclass(frozen=True, kw_only=True)
class LinearReport:
    """How one linear layer of a loaded model runs.

    Args:
        module: Dotted path in the model.
        scheme: How its weight and input are quantized.
        kernel: Name of the kernel.
        refused: (kernel, reason) of the kernels before it in the table.
        fused_into: Path of the stack that computes it, "" if it runs on its own.
        note: What differs from the scheme or from fusion, "" if nothing does.
        experts: How many experts of a block run so; 0 for a layer of its own.
        shape: (N, K) of the product that computes it, of the whole stack; () of experts.
        layout: How the weight of that product lies in memory, "" if its kernel does not say.
        weight_bytes: Bytes of that weight on its device, scales included; of all experts of a block
            together, of which a call reads those that its tokens take.
        calls: What calls launch and may take, for numbers of tokens that were asked for.
    """

    module: str
    scheme: str
    kernel: str
    refused: tuple[tuple[str, str], ...] = ()
    fused_into: str = ""
    note: str = ""
    experts: int = 0
    shape: tuple[int, ...] = ()
    layout: str = ""
    weight_bytes: int = 0
    calls: tuple[Call, ...] = ()


def replace_linears(
    model: TransformersModel,
    schemes: Mapping[str, Scheme],
    siblings: Siblings,
    *,
    dtype: torch.dtype,
    fuse: bool = True,
    sharing: Sharing | None = None,
) -> dict[str, tuple[str, int]]:
    """Put our layers into the model.

    Args:
        model: A model on the meta device.
        schemes: Scheme of each quantized module, by model path.
        siblings: Layers that read the same input.
        dtype: dtype of activations.
        fuse: Make stacks; False replaces quantized layers one by one.
        sharing: How ranks share the model; None if there is one.

    Returns:
        Members of stacks: {member path: (stack path, slot)}.
    """
    builder = LayerBuilder(schemes, dtype, sharing or Sharing())
    linears = {path: m for path, m in model.named_modules() if isinstance(m, nn.Linear)}
    stacks: dict[str, tuple[str, int]] = {}
    shared = _shared_parameters(model)
    for group in siblings.widest if fuse else ():
        held = {path: linears[path] for path in group if path in linears}
        proven, scope = siblings.is_proven(group), siblings.scope_of(group)
        for members in _alike(held, builder, shared):
            stacks |= _make_stack(model, members, builder, scope=scope, proven=proven)
    for path, module in list(model.named_modules()):
        is_linear = is_plain_linear(module) or is_transposed_linear(module)
        if is_linear and path not in stacks and (path in schemes or builder.is_cut(path)):
            put(model, path, builder.alone(module, path))
    return stacks


def _alike(
    group: Mapping[str, nn.Linear], builder: LayerBuilder, shared: frozenset[int]
) -> list[dict[str, nn.Linear]]:
    """Split a group into runs that can be one GEMM: equal schemes and widths, all or no biases.

    Inputs with a scale from the checkpoint are shared within one parent at most: other modules
    have another scale, which would separate them all.
    """
    alike: dict[object, dict[str, nn.Linear]] = {}
    for path, linear in group.items():
        is_dense = builder.scheme(path) is DENSE
        if is_dense and (linear.weight.dtype != builder.dtype or id(linear.weight) in shared):
            continue
        key = builder.alike(path, linear)
        scale = builder.scheme(path).input
        is_static = scale is not None and not scale.dynamic
        if key is not None:
            parent = path.rpartition(".")[0] if is_static else ""
            alike.setdefault((key, parent), {})[path] = linear
    return [members for members in alike.values() if len(members) > 1]


def _shared_parameters(model: nn.Module) -> frozenset[int]:
    """Return the ids of tied parameters: these must stay parameters."""
    users = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return frozenset(key for key, count in users.items() if count > 1)


def _make_stack(
    model: nn.Module,
    members: Mapping[str, nn.Linear],
    builder: LayerBuilder,
    *,
    scope: str,
    proven: bool,
) -> dict[str, tuple[str, int]]:
    """Put one stack into the module in whose forward all members are called."""
    start = f"{scope}." if scope else ""
    name = "_".join(path.removeprefix(start).replace(".", "_") for path in members) + "_stack"
    path = start + name
    stack = builder.stack(members, prefix=path, proven=proven)
    for slot, member in enumerate(members):
        put(model, member, StackView(stack, slot))
    owner = model.get_submodule(scope)
    owner.add_module(name, stack)
    share_within(owner, stack)
    return {member: (path, slot) for slot, member in enumerate(members)}


def schemes_in_model(mapper: WeightMapper, schemes: Mapping[str, Scheme]) -> dict[str, Scheme]:
    """Turn schemes by checkpoint name into schemes by model path; other modules are left out."""
    return {path: scheme for name, scheme in schemes.items() for path in mapper.layers_of(name)}


def finish(
    model: TransformersModel,
    device: torch.device,
    *,
    untied: Iterable[str] = (),
    keeps_ties: bool = False,
) -> TransformersModel:
    """Make a loaded model ready: buffers on the device, nothing left on meta, no gradients.

    It refuses what it cannot do, see `layers/guard.py`.

    Args:
        model: All of its parameters are loaded.
        device: Where it lives.
        untied: Parameters that the checkpoint holds with values of their own.
        keeps_ties: Leave in the config that embedding and head are one, although they are no
            parameters.

    Raises:
        ModelError: A parameter or buffer was never loaded.
    """
    if tuple(untied) or not (keeps_ties or tied_names(model)):
        untie_in_config(model)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type != "meta":
                module._buffers[name] = buffer.to(device)
    tensors = (*model.named_parameters(), *model.named_buffers())
    left = [name for name, tensor in tensors if tensor.device.type == "meta"]
    if left:
        raise ModelError(f"never loaded: {listed(left)} of `{type(model).__name__}`")
    _log_notes(model)
    _keep_device_and_dtype(model, device)
    guard(model)
    return model.requires_grad_(False)


def _keep_device_and_dtype(model: TransformersModel, device: torch.device) -> None:
    """Give models without parameters an empty one: transformers reads device and dtype from it."""
    layers = (module for module in model.modules() if isinstance(module, QuantLinear))
    dtype = next((layer.dtype for layer in layers), torch.get_default_dtype())
    for part in model.modules():
        if isinstance(part, TransformersModel) and not any(
            parameter.is_floating_point() for parameter in part.parameters()
        ):
            empty = nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False)
            part.register_parameter("device_and_dtype", empty)


def _log_notes(model: nn.Module) -> None:
    """Warn of layers that run otherwise than their scheme says, once for each way."""
    noted: dict[str, list[str]] = {}
    for report in explain(model):
        if report.note:
            noted.setdefault(report.note, []).append(report.module)
    for note, modules in noted.items():
        _log.warning("%d layers: %s (%s)", len(modules), note, listed(modules, limit=2))


def explain(model: nn.Module, tokens: Sequence[int] = ()) -> list[LinearReport]:
    """Return how each linear layer of a loaded model runs, in the order of the model.

    Args:
        model: A loaded model.
        tokens: Numbers of tokens of which the reports tell calls.
    """
    reports: list[LinearReport] = []
    block = None  # experts, whose layers are told together
    viewed = {id(vars(m)["stack"]) for m in model.modules() if isinstance(m, StackView)}
    for path, module in model.named_modules():
        if block is not None and path.startswith(block):
            continue
        experts = explain_experts(path, module)
        block = f"{path}." if experts else None
        if experts:
            reports += [_experts_report(module, report, tokens) for report in experts]
        elif isinstance(module, StackView):
            stack: LinearStack = module.__dict__["stack"]
            fused = "" if stack.separate is not None else stack.prefix
            note = f"not fused: {stack.why_separate}" if stack.why_separate else stack.kernel.note
            slot = None if stack.separate is None else module.slot
            reports.append(_report(path, stack, tokens, slot=slot, fused_into=fused, note=note))
        elif isinstance(module, QuantLinear) and id(module) not in viewed:
            why = module.why_separate if isinstance(module, LinearStack) else ""
            note = f"not fused: {why}" if why else module.kernel.note
            reports.append(_report(path, module, tokens, note=note))
        elif isinstance(module, nn.Linear):
            shape = (module.out_features, module.in_features)
            size = module.weight.nbytes
            reports.append(
                LinearReport(
                    module=path, scheme="dense", kernel="dense", shape=shape, weight_bytes=size
                )
            )
    return reports


def _experts_report(block: nn.Module, report: ExpertsReport, tokens: Sequence[int]) -> LinearReport:
    packed = getattr(block, "_modules", {}).get(f"{report.module.rpartition('.')[2]}_experts")
    if packed is None:
        return LinearReport(**vars(report))
    return LinearReport(
        **vars(report),
        layout=layout_of(packed),
        weight_bytes=weight_bytes(packed),
        calls=tuple(Call(m, launches_of(packed, m)) for m in tokens),
    )


def _report(
    path: str,
    layer: QuantLinear,
    tokens: Sequence[int],
    *,
    note: str,
    fused_into: str = "",
    slot: int | None = None,
) -> LinearReport:
    """Report on a layer, or on one member of a stack whose members run one by one."""
    gemm, n = layer.gemm, layer.out_features
    if slot is not None and isinstance(layer, LinearStack) and layer.separate is not None:
        gemm, n = layer.separate[slot], layer.sizes[slot]
    shape = (n, layer.in_features)
    return LinearReport(
        module=path,
        scheme=str(layer.scheme),
        kernel=layer.kernel.name,
        refused=layer.kernel.refused,
        fused_into=fused_into,
        note=note,
        shape=shape,
        layout=layout_of(gemm),
        weight_bytes=weight_bytes(gemm),
        calls=tuple(call_of(gemm, shape, layer.scheme.input, m) for m in tokens),
    )


__all__ = [
    "LinearReport",
    "explain",
    "finish",
    "mapper_of",
    "replace_experts",
    "replace_linears",
    "schemes_in_model",
]
