"""`quantload tune`: find the fastest launch settings of kernels on this card, and keep them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from quantload.cli_explain import parse_numbers
from quantload.cli_options import JSON, QUIET, TRUST
from quantload.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from quantload.quant.scheme import Scheme
    from quantload.runtime.tune import Tuned

_Layer = tuple["Scheme", int, int]


@click.command()
@click.argument("model", required=False)
@click.option("--shapes", default="", metavar="NxK,...", help="Shapes of weights; not with MODEL.")
@click.option(
    "--schemes", default="", metavar="SCHEME,...", help="With --shapes, for example W4A16,W8A8."
)
@click.option(
    "--tokens",
    default="1,2,4,8,16,32,64,128,256",
    show_default=True,
    metavar="M,M,...",
    help="Tokens of a call.",
)
@click.option("--seconds", type=float, help="Stop after this time; a later run goes on.")
@click.option(
    "--workers",
    type=click.IntRange(min=0),
    help="Processes that compile ahead; default one for each processor but one, at most 16.",
)
@click.option("--again", is_flag=True, help="Measure also what the table of this card has.")
@TRUST
@JSON
@QUIET
def tune(
    model: str | None,
    shapes: str,
    schemes: str,
    tokens: str,
    seconds: float | None,
    workers: int | None,
    **flags: Any,  # noqa: ANN401 - click's values
) -> None:
    """Try launch settings for the layers of MODEL, or for --shapes and --schemes, on this card.

    The fastest settings whose results are right go to a table in the user's cache folder, which
    wins over the one that comes with quantload. It is written after every finding, and a later run
    measures only what is missing.
    """
    from quantload import cli_output
    from quantload.api_load import parse_device
    from quantload.runtime import tune as tuning
    from quantload.runtime.launch_settings import card_limits

    if seconds is not None and not seconds >= 0:
        raise ConfigError(f"`--seconds` is `{seconds}`, expected a number that is not negative")
    if bool(model) == bool(shapes or schemes):
        raise ConfigError("expected MODEL, or `--shapes` and `--schemes`")
    counts, device = parse_numbers(tokens, "--tokens"), parse_device("cuda")
    layers = _of_model(model, flags) if model else _of_options(shapes, schemes)
    card = _card_name(device)
    table = tuning.read_own_table(card)
    if card_limits(device) is None:
        table.limits = tuning.measure_limits(device)
        tuning.write_own_table(table)
    found = []
    for one in tuning.tune(
        layers,
        counts,
        device=device,
        table=table,
        seconds=float("inf") if seconds is None else seconds,
        again=flags["again"],
        workers=min(16, len(os.sched_getaffinity(0)) - 1) if workers is None else workers,
    ):
        tuning.write_own_table(table)
        found.append(one)
        if not flags["as_json"] and not flags["quiet"]:
            click.echo(told(one))
    path = tuning.write_own_table(table)
    if flags["as_json"]:
        cli_output.print_json(
            {
                "quantload_tune": 1,
                "card": card,
                "table": str(path),
                "found": [as_json(f) for f in found],
            }
        )
    else:
        click.echo(f"{len(found)} measured, written: {path}")


def told(found: Tuned) -> str:
    """Return a line for people."""
    n, k = found.shape
    text = f"{found.kernel}, {n}x{k}, M={found.tokens}: "
    if found.settings is None:
        text += f"the rule is best, {found.us:.2f} us"
    else:
        chosen = ", ".join(f"{name} {value}" for name, value in found.settings.items())
        text += f"{found.us:.2f} us, {found.gain:.1%} less than the rule's {found.rule_us:.2f}: "
        text += chosen
    text += f" ({found.tried} tried, {found.failed} failed)"
    return text if found.complete else f"{text}, not all: time is up"


def as_json(found: Tuned) -> dict[str, Any]:
    """Return a finding for machines."""
    return {**vars(found), "settings": found.settings and dict(found.settings), "gain": found.gain}


def _card_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device)


def _of_options(shapes: str, schemes: str) -> list[_Layer]:
    from quantload.quant.scheme import parse_scheme
    from quantload.runtime.tune import parse_shapes

    pairs = parse_shapes(shapes)
    names = [name.strip() for name in schemes.split(",") if name.strip()]
    if not pairs or not names:
        raise ConfigError("`--shapes` and `--schemes` go together")
    layers = []
    for scheme in map(parse_scheme, names):
        if scheme.weight is None:
            raise ConfigError(f"scheme `{scheme}` has nothing to tune: full precision")
        for n, k in pairs:
            fitted = scheme.fitted(k)
            if fitted is None:
                raise ConfigError(f"scheme `{scheme}` does not fit `{n}x{k}`: no group divides {k}")
            layers.append((fitted, n, k))
    return layers


def _of_model(model: str, flags: dict[str, Any]) -> list[_Layer]:
    """Layers of a model that are quantized, each scheme and shape once."""
    import torch

    from quantload import api, cli_output
    from quantload.layers.linear import QuantLinear

    with cli_output.BarProgress(quiet=flags["quiet"]) as progress:
        loaded = api.load(
            model,
            device="cuda",
            trust_remote_code=flags["trust_remote_code"],
            progress=progress,
        )
    layers = dict.fromkeys(
        (module.scheme, module.out_features, module.in_features)
        for module in loaded.modules()
        if isinstance(module, QuantLinear) and module.scheme.weight is not None
    )
    del loaded
    torch.cuda.empty_cache()
    if not layers:
        raise ConfigError(f"`{model}` has no quantized linear layers")
    return list(layers)
