"""Tests of layers that run on kernels take the device that tests of kernels take."""

from tests.runtime.conftest import kernel_device

__all__ = ["kernel_device"]
