"""`Parallel`: this process among those that run one model together, and what they exchange.

    tensor parallel     `tp_size` adjacent ranks hold parts of the same layers
    pipeline parallel   `pp_size` stages hold different layers, one after the other

    rank = pp_rank * tp_size + tp_rank

Ranks are passed on explicitly; nothing is global but the process group of torch.distributed. All
exchanges are no-ops where there is nobody to exchange with. They are for inference: an input that
needs a gradient is refused, since it would be lost.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from numbers import Integral
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from quantload.arguments import check_counts, check_type, plain
from quantload.errors import ConfigError, ModelError, WorkerError
from quantload.runtime.devices import parse_device

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_START = "start it with `torchrun --nproc-per-node N ...`"
_TIMEOUT = timedelta(hours=1)  # a rank may read far longer than another before they first meet
_NARROW = (torch.bfloat16, torch.float16)
# the later of its two names, where torch has it
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Parallel:
    """This process among those that run a model together; `Parallel()` is one process alone.

    Args:
        tp_rank: Number of this process among those that share its layers.
        tp_size: Number of processes that share its layers.
        pp_rank: Number of its stage.
        pp_size: Number of stages.
        tp_group: Processes that share its layers; None if there are no others.
        pp_group: Processes with the same `tp_rank` in all stages, in order; None if there is one.
        device: Where this process computes; None leaves it to the caller.
        expert_parallel: True if processes that share layers hold whole experts of a block, False if
            each holds a part of every expert.

    Raises:
        ConfigError: A rank is not below its size.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    tp_group: ProcessGroup | None = None
    pp_group: ProcessGroup | None = None
    device: torch.device | None = None
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        place: object = self.device
        if place is not None and not isinstance(place, torch.device):
            object.__setattr__(self, "device", parse_device(self.device))  # a name of one
        for name in ("tp", "pp"):
            rank, size = getattr(self, f"{name}_rank"), getattr(self, f"{name}_size")
            for what, number in ((f"{name}_rank", rank), (f"{name}_size", size)):
                check_type(what, number, Integral, expected="a whole number")
                object.__setattr__(self, what, int(plain(number)))
            if not 0 <= rank < size:
                raise ConfigError(
                    f"`{name}_rank` is {rank}, expected at least 0 and less than `{name}_size`, "
                    f"{size}"
                )

    @classmethod
    def from_environment(
        cls,
        tp: int | None = None,
        pp: int = 1,
        *,
        device: str | torch.device | None = None,
        expert_parallel: bool = False,
    ) -> Parallel:
        """Connect this process with the others that `torchrun` started, on one node or several.

        Processes talk through NCCL if `device` is CUDA, through gloo if it is the CPU. A process
        group that is already there is used as it is. Call it in every process.

        Args:
            tp: Processes that share layers; None takes all that `pp` leaves.
            pp: Stages.
            device: "cuda" (the GPU of this process's local rank), "cuda:1" or "cpu"; None takes
                CUDA where there is one.
            expert_parallel: As in the class.

        Returns:
            A single process, if `torchrun` did not start this one and no others are asked for.

        Raises:
            ConfigError: `tp` * `pp` is not the number of processes, or `torchrun` did not start
                this process, or there is no such device.
            WorkerError: The processes cannot be connected.
        """
        size = _world_size(tp, pp)
        tp = _tensor_parallel_size(tp, pp, size)
        place = _device(device)
        if size == 1:
            return cls(device=place)
        _connect(place)
        rank = dist.get_rank()
        return cls(
            tp_rank=rank % tp,
            tp_size=tp,
            pp_rank=rank // tp,
            pp_size=pp,
            tp_group=_group([[s * tp + t for t in range(tp)] for s in range(pp)], rank),
            pp_group=_group([[s * tp + t for s in range(pp)] for t in range(tp)], rank),
            device=place,
            expert_parallel=expert_parallel,
        )

    # -- facts ---------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Number of this process among all."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def size(self) -> int:
        """Number of all processes."""
        return self.tp_size * self.pp_size

    @property
    def is_first_stage(self) -> bool:
        """True if this process embeds the tokens."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True if this process computes the logits."""
        return self.pp_rank == self.pp_size - 1

    def __str__(self) -> str:
        if self.size == 1:
            return "one process"
        return (
            f"tensor parallel {self.tp_rank} of {self.tp_size}, "
            f"stage {self.pp_rank} of {self.pp_size}"
        )

    def share_of(self, length: int, what: str) -> tuple[int, int]:
        """Return (start, stop) of the equal part of a length that this process holds.

        Raises:
            ConfigError: The length does not divide; `what` says which it is.
        """
        if length % self.tp_size:
            raise ConfigError(
                f"{what} cannot be shared by {self.tp_size} processes: found {length}, expected a "
                f"multiple of {self.tp_size}",
                hint="take fewer processes for tensor parallelism, or a replicated layer",
            )
        part = length // self.tp_size
        return self.tp_rank * part, (self.tp_rank + 1) * part

    # -- exchange between processes that share layers --------------------------------------------

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of x over the processes; the memory of x may hold it then.

        The sum is taken in the dtype of x, on the CPU in float32 for narrower floats.
        """
        return self._reduced(x, dist.ReduceOp.SUM)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """Return the largest of each element over the processes; x may hold it then."""
        return self._reduced(x, dist.ReduceOp.MAX)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Join the equally shaped x of all processes along `dim`, in the order of ranks."""
        if self.tp_size == 1:
            return x
        _refuse_gradient(x)
        parts = x.new_empty((self.tp_size, *x.shape))
        _gather(_flat(parts), _flat(x.contiguous()), group=_connected(self.tp_group))
        dim %= x.ndim
        return parts.movedim(0, dim).flatten(dim, dim + 1)

    def _reduced(self, x: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.tp_size == 1:
            return x
        _refuse_gradient(x)
        is_widened = x.device.type == "cpu" and x.dtype in _NARROW
        reduced = x.to(torch.float32) if is_widened else x.contiguous()
        dist.all_reduce(reduced, operation, group=_connected(self.tp_group))
        return reduced.to(x.dtype)

    # -- exchange between stages -----------------------------------------------------------------

    def send(self, x: Tensor) -> None:
        """Send x to the next stage; the last stage has none, and sends nothing."""
        if not self.is_last_stage:
            _refuse_gradient(x)
            dist.send(x.contiguous(), group=_connected(self.pp_group), group_dst=self.pp_rank + 1)

    def receive(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return what the previous stage sent.

        Args:
            shape: Shape of what it sent.
            dtype: dtype of what it sent.
            device: Where it was on that process; the result is on the like device here.

        Raises:
            ModelError: This is the first stage.
        """
        if self.is_first_stage:
            raise ModelError("the first stage receives nothing: it has no previous stage")
        x = torch.empty(tuple(shape), dtype=dtype, device=device)
        dist.recv(x, group=_connected(self.pp_group), group_src=self.pp_rank - 1)
        return x

    def broadcast(self, x: Tensor, stage: int) -> Tensor:
        """Return the x of one stage in all of them.

        Args:
            x: In that stage what is sent; in the others a tensor of equal shape and dtype, which
                is overwritten.
            stage: Number of the stage; -1 is the last.
        """
        if self.pp_size == 1:
            return x
        _refuse_gradient(x)
        x = x.contiguous()
        dist.broadcast(x, group=_connected(self.pp_group), group_src=stage % self.pp_size)
        return x

    # -- exchange between all --------------------------------------------------------------------

    def exchange(self, value: T) -> list[T]:
        """Return the values of all processes, by rank; they are pickled.

        Raises:
            WorkerError: Another process is gone.
        """
        if self.size == 1:
            return [value]
        found: list[T] = [value] * self.size
        try:
            dist.all_gather_object(found, value)
        except RuntimeError as error:  # what gloo and NCCL raise when a connection is closed
            raise WorkerError(f"another process is gone: {_first_line(error)}") from error
        return found


# -- connecting ------------------------------------------------------------------------------------


def _world_size(tp: int | None, pp: int) -> int:
    """Return the number of processes that are there."""
    check_counts(1, pp=pp, **({} if tp is None else {"tp": tp}))
    if dist.is_initialized():
        return dist.get_world_size()
    missing = [name for name in _TORCHRUN if name not in os.environ]
    if not missing:
        return _number("WORLD_SIZE")
    if (tp or 1) * pp == 1:
        return 1
    raise ConfigError(
        f"{(tp or 1) * pp} processes are asked for, but `torchrun` did not start this one: "
        f"`{missing[0]}` is not set",
        hint=_START.replace(" N ", f" {(tp or 1) * pp} "),
    )


def _tensor_parallel_size(tp: int | None, pp: int, size: int) -> int:
    tp = size // pp if tp is None else tp
    if tp * pp == size:
        return tp
    raise ConfigError(
        f"tensor parallel {tp} times {pp} stages is {tp * pp} processes, but {size} are there"
        if tp
        else f"{pp} stages are asked for, but only {size} processes are there",
        hint=f"{_START}, N processes on each node, {max(tp, 1) * pp} in all",
    )


def _device(device: str | torch.device | None) -> torch.device:
    """Return the device of this process, and make it the current one."""
    place = parse_device(device)
    if place.type != "cuda":
        return place
    count = torch.cuda.device_count()
    index: int | None = place.index
    if index is None:
        index = _number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else 0
    if index >= count:
        raise ConfigError(
            f"no device `cuda:{index}` here: found {count} CUDA devices",
            hint="start one process for each GPU: `--nproc-per-node` is larger than their number"
            if count
            else "use `cpu`",
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _connect(place: torch.device) -> None:
    """Make the process group of all processes, unless it is there."""
    backend = "nccl" if place.type == "cuda" else "gloo"
    if dist.is_initialized():
        found = str(dist.get_backend())
        if found != backend:
            raise ConfigError(
                f"the process group uses `{found}`, expected `{backend}` for `{place}`",
                hint="pass the device that the process group is for",
            )
        return
    try:
        dist.init_process_group(
            backend, timeout=_TIMEOUT, device_id=place if backend == "nccl" else None
        )
    except (RuntimeError, ValueError) as error:
        raise WorkerError(
            f"`{os.environ.get('WORLD_SIZE')}` processes cannot be connected: {_first_line(error)}",
            hint=_START,
        ) from error


def _group(members: list[list[int]], rank: int) -> ProcessGroup | None:
    """Return the group that holds `rank`; every process makes all groups, in one order."""
    if len(members[0]) == 1:
        return None
    groups: list[ProcessGroup | None] = [dist.group.WORLD]
    if len(members) > 1:
        groups = [dist.new_group(ranks) for ranks in members]
    return next(g for g, ranks in zip(groups, members, strict=True) if rank in ranks)


def _connected(group: ProcessGroup | None) -> ProcessGroup:
    if group is None:
        raise ConfigError(
            "processes are not connected: a `Parallel` of several ranks has no process group",
            hint="make it by `Parallel.from_environment` in a process of `torchrun`",
        )
    return group


def _refuse_gradient(x: Tensor) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        raise ModelError(
            "parallel layers are for inference only: an input needs a gradient, which would be "
            "lost between processes",
            hint="run it under `torch.no_grad()`",
        )


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1)


def _number(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        raise ConfigError(f"`{name}` is `{text}`, expected a number")
    return int(text)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


__all__ = ["Parallel"]
