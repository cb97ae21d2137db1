"""Devices: what a user names, and whether it is here."""

from __future__ import annotations

import torch

from quantload.arguments import shown
from quantload.errors import ConfigError, WrongType

_EXPECTED = "expected `cpu`, `cuda` or `cuda:N`"


def parse_device(device: str | torch.device | None, *, name: str = "device") -> torch.device:
    """Return a device; None is CUDA where there is one, else the CPU.

    Args:
        device: What the user passed.
        name: What the argument is called, for messages.

    Raises:
        ConfigError: There is no such device here, or nothing of ours runs on one of its kind.
        WrongType: It is neither a text nor a device.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given: object = device  # whatever is passed
    if not isinstance(given, str | torch.device):
        is_number = isinstance(given, int) and not isinstance(given, bool) and given >= 0
        raise WrongType(
            f"unknown device: `{name}` is {shown(device)}, {_EXPECTED}",
            hint=f"write `cuda:{given}`"
            if is_number
            else "leave it out for CUDA where there is one, else the CPU",
        )
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"unknown device: `{device}`, {_EXPECTED}", hint=_NAMES) from error
    if found.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"nothing runs on devices of the kind `{found.type}`: `{name}` is `{found}`, "
            f"{_EXPECTED}",
            hint="headers alone are read by `quantload.inspect`, and memory is told by `quantload "
            "inspect --model`"
            if found.type == "meta"
            else "take `cpu`",
        )
    count = torch.cuda.device_count() if found.type == "cuda" else 0
    if found.type == "cuda" and not count:
        raise ConfigError(f"no CUDA device here: found `{device}`", hint="use `cpu`")
    if found.type == "cuda" and (found.index or 0) >= count:
        raise ConfigError(
            f"no device `{found}` here: found {count} CUDA devices, numbered from 0",
            hint="devices that `CUDA_VISIBLE_DEVICES` leaves out do not count",
        )
    return found


_NAMES = "a GPU is `cuda`, the third of several is `cuda:2`"

__all__ = ["parse_device"]
