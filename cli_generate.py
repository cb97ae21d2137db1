"""`quantload generate`: load a model and continue prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from quantload.cli_options import JSON, QUIET, RULE, SCHEME, TRUST

if TYPE_CHECKING:
    import torch

    from quantload.api_generate import TextDecoder
    from quantload.layers.sampling import Sampling
    from quantload.runtime.step_model import CacheScales

_CACHES = {"auto": None, "bf16": "bfloat16", "fp8": "float8_e4m3fn"}
KV_CACHE: Callable[[Callable[..., Any]], Callable[..., Any]] = click.option(
    "--kv-cache",
    type=click.Choice(list(_CACHES)),
    default="auto",
    show_default=True,
    help="Keys and values: as the model's activations, or FP8 with the checkpoint's scales.",
)


def cache_of(
    name: str,
    model: Any,  # noqa: ANN401 - of transformers, which is not imported here
    source: str | None,
) -> tuple[torch.dtype | None, CacheScales | None]:
    """Return dtype and scales of a cache.

    Args:
        name: Value of `--kv-cache`.
        model: The loaded model.
        source: Its checkpoint; None is a synthetic model, whose scales are 1.
    """
    import torch

    from quantload.api_cache import cache_scales, unit_scales

    kind = _CACHES[name]
    if kind is None:
        return None, None
    dtype: torch.dtype = getattr(torch, kind)
    if name != "fp8":
        return dtype, None
    layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    return dtype, unit_scales(layers) if source is None else cache_scales(source, layers)


@click.command()
@click.argument("model")
@click.argument("prompts", nargs=-1, required=True, metavar="PROMPT...")
@click.option("--max-new-tokens", default=64, show_default=True)
@click.option("--chat", is_flag=True, help="Put each prompt into the chat template.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End a text at TEXT; repeatable.")
@click.option(
    "--sample", is_flag=True, help="Draw tokens with the model's own settings; else greedy."
)
@click.option("--temperature", type=float, help="Draw with this temperature; 0 is greedy.")
@click.option("--top-k", type=int, help="Draw from this many of the most likely tokens.")
@click.option("--top-p", type=float, help="Draw from tokens of this probability together.")
@click.option("--min-p", type=float, help="Draw from tokens above this share of the highest.")
@click.option("--repetition-penalty", type=float, help="Above 1 makes repeated tokens unlikely.")
@click.option("--seed", type=int, help="Seed of the draws.")
@click.option("--stream/--no-stream", default=True, help="Print one prompt's text as it comes.")
@KV_CACHE
@click.option("--device", help="cpu or cuda; default cuda if there is one.")
@click.option("--dtype", help="float32, bfloat16 or float16; default (auto) that of the config.")
@SCHEME
@RULE
@TRUST
@JSON
@QUIET
def generate(model: str, prompts: tuple[str, ...], **flags: Any) -> None:  # noqa: ANN401
    """Load MODEL and continue each PROMPT, all of them together.

    With --scheme or --rule its weights are quantized while they are read, as convert does it;
    nothing is written.
    """
    from quantload import api, api_generate, cli_output

    sampling = _sampling(flags)
    with cli_output.BarProgress(quiet=flags["quiet"]) as progress:
        loaded = api.load(
            model,
            scheme=flags["scheme"],
            rules=flags["rules"],
            device=flags["device"],
            dtype=flags["dtype"],
            trust_remote_code=flags["trust_remote_code"],
            progress=progress,
        )
    dtype, scales = cache_of(flags["kv_cache"], loaded, model)
    tokenizer = api_generate.load_tokenizer(model)
    decoder = api_generate.TextDecoder(loaded, tokenizer, cache_dtype=dtype, scales=scales)
    _show(decoder, prompts, sampling, flags)


def _sampling(flags: dict[str, Any]) -> Sampling:
    from quantload.layers.sampling import Sampling

    names = ("temperature", "top_k", "top_p", "min_p")
    given = {name: flags[name] for name in names if flags[name] is not None}
    draws = bool(flags["sample"] or given)
    if given.get("temperature") == 0:
        draws, given = False, {}
    return Sampling(
        sample=draws,
        repetition_penalty=flags["repetition_penalty"],
        seed=flags["seed"],
        **given,
    )


def _show(
    decoder: TextDecoder, prompts: tuple[str, ...], sampling: Sampling, flags: dict[str, Any]
) -> None:
    from quantload import cli_output

    streams = flags["stream"] and len(prompts) == 1 and not flags["as_json"]
    done = decoder.generate(
        prompts,
        max_new_tokens=flags["max_new_tokens"],
        chat=flags["chat"],
        stop=flags["stop"],
        sampling=sampling,
        emit=(lambda _, text: click.echo(text, nl=False)) if streams else None,
    )
    if flags["as_json"]:
        rows = [{"prompt": p, **asdict(found)} for p, found in zip(prompts, done, strict=True)]
        cli_output.print_json({"quantload_generate": 1, "completions": rows})
    elif streams:
        click.echo()
    else:
        for number, found in enumerate(done):
            if len(done) > 1:
                click.echo(f"{'' if number == 0 else chr(10)}[{number}]")
            click.echo(found.text)


__all__ = ["KV_CACHE", "cache_of", "generate"]
