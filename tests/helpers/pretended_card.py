"""Run code that launches Triton kernels as if a card were here: kernels are compiled, not launched.

Tensors are on the CPU but say `cuda:0`; what torch computes is real, what kernels write is left as
it was. So the whole way of a call is taken, with the launch settings of the pretended card, and
every kernel on it is compiled to machine code for that card.

    with pretended_card(90) as compiled:
        some_op(on_card(torch.randn(4, 64)))
    {kernel.name: kernel.asm["cubin"] for kernel in compiled}
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import jit

CUDA = torch.device("cuda", 0)
SHARED = {80: 166_912, 89: 101_376, 90: 232_448}  # bytes that a program may use
PROCESSORS = {80: 108, 89: 128, 90: 132}
NAMES = {80: "NVIDIA A100-SXM4-80GB", 89: "NVIDIA GeForce RTX 4090", 90: "NVIDIA H200"}
_FACTORIES = (
    *("empty", "zeros", "ones", "full", "arange", "tensor", "eye", "randn", "empty_strided"),
    *("rand", "randint", "as_tensor", "empty_like", "zeros_like", "ones_like", "linspace"),
)


class OnCard(torch.Tensor):
    """A CPU tensor that says it is on a card."""

    @property
    def device(self) -> torch.device:
        return CUDA

    @property
    def is_cuda(self) -> bool:
        return True

    def get_device(self) -> int:
        return 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args, kwargs = _to_cpu(args), _to_cpu(kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)


def on_card(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that says it is on the card."""
    return tensor.as_subclass(OnCard)


def _to_cpu(value: Any) -> Any:
    """Replace devices in arguments."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, str) and value.startswith("cuda"):
        return "cpu"
    if isinstance(value, dict):
        return {key: _to_cpu(part) for key, part in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_to_cpu(part) for part in value)
    return value


class _Driver:
    """As much of a driver as compiling needs; its devices are numbered by capability."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_active_torch_device(self) -> torch.device:
        return CUDA


class _Asking:
    """Stands for `kernel[grid]`."""

    def __init__(self, kernel: Any, grid: Any, compiled: list) -> None:
        self.kernel, self.grid, self.compiled = kernel, grid, compiled

    def __call__(self, *args, **kwargs):
        done = self.kernel.run(*args, grid=self.grid, warmup=True, **kwargs)
        self.compiled.append(done)
        return done


@contextlib.contextmanager
def pretended_card(capability: int) -> Iterator[list]:
    """Pretend a card of a capability: 80, 89 or 90; yields the list of compiled kernels."""
    compiled: list = []
    properties = SimpleNamespace(
        name=NAMES[capability],
        major=capability // 10,
        minor=capability % 10,
        multi_processor_count=PROCESSORS[capability],
        shared_memory_per_block_optin=SHARED[capability],
        shared_memory_per_multiprocessor=SHARED[capability] + 1024,
        L2_cache_size=50 << 20,
        total_memory=80 << 30,
        warp_size=32,
        regs_per_multiprocessor=65536,
    )
    major_minor = (capability // 10, capability % 10)
    stream = SimpleNamespace(cuda_stream=0)
    cuda = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_capability": lambda device=None: major_minor,
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name,
        "device_of": lambda tensor: contextlib.nullcontext(),
        "device": lambda device: contextlib.nullcontext(),
        "synchronize": lambda device=None: None,
        "current_stream": lambda device=None: stream,
        "is_current_stream_capturing": lambda: False,
    }
    previous = triton.runtime.driver._active
    with contextlib.ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for name in _FACTORIES:
            stack.enter_context(mock.patch.object(torch, name, _made(getattr(torch, name))))
        stack.enter_context(mock.patch.object(torch.Tensor, "to", _moved(torch.Tensor.to)))
        stack.enter_context(mock.patch.object(torch.Tensor, "cuda", lambda self: on_card(self)))
        stack.enter_context(
            mock.patch.object(
                jit.KernelInterface, "__getitem__", lambda self, grid: _Asking(self, grid, compiled)
            )
        )
        triton.runtime.driver.set_active(_Driver(capability))
        try:
            yield compiled
        finally:
            triton.runtime.driver._active = previous


def _made(factory: Any) -> Any:
    """A function that makes tensors, on the pretended card where it is asked for that."""

    def make(*args, **kwargs):
        wanted = _is_card(kwargs.get("device"))
        made = factory(*_to_cpu(args), **_to_cpu(kwargs))
        return on_card(made) if wanted else made

    return make


def _moved(to: Any) -> Any:
    def move(self, *args, **kwargs):
        places = [part for part in (*args, kwargs.get("device")) if _is_device(part)]
        moved = to(self, *_to_cpu(args), **_to_cpu(kwargs))
        if any(_is_card(place) for place in places):
            return on_card(moved)
        return moved.as_subclass(torch.Tensor) if places else moved

    return move


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (
        isinstance(value, str) and value.split(":")[0] in ("cpu", "cuda")
    )


def _is_card(value: Any) -> bool:
    return _is_device(value) and str(value).startswith("cuda")
