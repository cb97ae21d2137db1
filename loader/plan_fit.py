"""Does a scheme fit a weight, and can the format that is written hold it?"""

from __future__ import annotations

from quantload.errors import ConfigError
from quantload.loader.formats.target import Target
from quantload.loader.plan_warnings import UNFIT
from quantload.loader.source import SourceWeight
from quantload.quant.scheme import Scheme


def fit(
    scheme: Scheme, weight: SourceWeight, reason: str, *, why_whole: str = ""
) -> tuple[Scheme | None, str]:
    """Return the scheme that fits a weight, and the reason; None keeps it in full precision.

    Args:
        scheme: What is asked for.
        weight: What shall be quantized.
        reason: Who asks.
        why_whole: Why the experts that it holds are not taken apart.

    Raises:
        ConfigError: A group size was asked for that does not divide the columns.
    """
    columns = weight.shape[1]
    if not weight.is_matrix:
        kind = f"{weight.experts} experts" if weight.experts else "input features first"
        kind += f": {why_whole}" if why_whole else ""
        return None, f"kept: `{weight.parameter_name}` holds {kind}; {reason}"
    if 0 in weight.shape:
        return None, f"kept: the weight is empty; {reason}"
    fitted = scheme.fitted(columns)
    if fitted != scheme and scheme.is_size_asked:
        raise _not_divided(scheme, weight, reason)
    if fitted is None:
        return None, f"{UNFIT} of 128, 64 or 32 divides its {columns} columns; {reason}"
    if fitted != scheme:
        assert scheme.weight is not None, "only groups are fitted"
        assert fitted.weight is not None, "only groups are fitted"
        reason += (
            f"; group {fitted.weight.group_size}, since {scheme.weight.group_size} does not divide "
            f"{columns}"
        )
    return fitted, reason


def _not_divided(scheme: Scheme, weight: SourceWeight, reason: str) -> ConfigError:
    assert scheme.weight is not None, "only groups divide columns"
    return ConfigError(
        f"group size does not divide the width of `{weight.module}`: {weight.shape[1]} columns, "
        f"group {scheme.weight.group_size} ({reason})",
        hint=f"leave out the group size, or add a rule, for example `{weight.module} = keep`",
    )


def refuse_unwritable(target: Target, scheme: Scheme | None, weight: SourceWeight) -> None:
    """Refuse a scheme that the format has no form for.

    Raises:
        ConfigError: It has none.
    """
    obstacle = target.obstacle(scheme, weight.shape) if scheme is not None else ""
    if obstacle:
        raise ConfigError(
            f"`{weight.module}` cannot be written as {scheme} in the format `{target.name}`: "
            f"{obstacle}",
            hint=f"add a rule, for example `{weight.module} = keep`, or write compressed-tensors",
        )


def refuse_same(target: Target) -> None:
    """Refuse `same` where the format cannot re-express a quantized weight.

    Raises:
        ConfigError: It cannot.
    """
    if not target.keeps_values:
        raise ConfigError(
            f"scheme `same` is not written in the format `{target.name}`",
            hint="leave out `--format`, or name a scheme",
        )
