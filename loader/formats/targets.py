"""The formats that are written, one row each."""

from __future__ import annotations

from quantload.errors import ConfigError
from quantload.loader.formats.awq_target import AwqTarget
from quantload.loader.formats.compressed_tensors_target import CompressedTensorsTarget
from quantload.loader.formats.fp8_target import Fp8Target
from quantload.loader.formats.gptq_target import GptqTarget
from quantload.loader.formats.modelopt_target import ModelOptTarget
from quantload.loader.formats.target import Target

COMPRESSED_TENSORS = CompressedTensorsTarget()
TARGETS: dict[str, Target] = {
    target.name: target
    for target in (COMPRESSED_TENSORS, Fp8Target(), GptqTarget(), AwqTarget(), ModelOptTarget())
}


def target_named(name: str) -> Target:
    """Return the format that is written under a name.

    Raises:
        ConfigError: No format of this name is written.
    """
    if name not in TARGETS:
        raise ConfigError(
            f"no such output format: `{name}`, expected one of {', '.join(TARGETS)}",
        )
    return TARGETS[name]
