"""`quantload stats`: what enters the layers of a model, for `quantload convert --stats`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantload.cli_options import JSON, QUIET, TRUST, warn
from quantload.errors import ConfigError, counted

if TYPE_CHECKING:
    from quantload.accuracy.statistics import InputStatisticsReport

_SEQUENCE_TOKENS = 512


@click.command()
@click.argument("source")
@click.argument("output", type=click.Path(path_type=Path))
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Text file, or .jsonl with `text` or chat `messages` in each line.",
)
@click.option("--token-ids", type=click.Path(path_type=Path), help="JSON file: lists of token ids.")
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="Tokens to run at most; without --data and --token-ids, tokens that the model makes up.",
)
@click.option("--device", help="cpu or cuda; default cuda if there is one.")
@click.option("--dtype", default="float32", show_default=True, help="dtype of the run.")
@click.option("--overwrite", is_flag=True, help="Replace OUTPUT if it is there.")
@TRUST
@JSON
@QUIET
def stats(
    source: str,
    output: Path,
    data: Path | None,
    token_ids: Path | None,
    max_tokens: int,
    **flags: Any,  # noqa: ANN401 - click's values
) -> None:
    """Run tokens through SOURCE block by block and write what enters its layers to OUTPUT.

    OUTPUT is a safetensors file that `convert --stats` takes: mean square, largest and smallest
    values of each input feature, and how many tokens reached each layer and each expert. Without
    --data or --token-ids the model makes up the tokens itself, with a fixed seed.
    """
    from quantload import api, api_stats
    from quantload.accuracy.statistics_file import check_free
    from quantload.cli_output import BarProgress, print_json
    from quantload.loader.peak_memory import peak_rss

    started = time.perf_counter()
    check_free(output, overwrite=flags["overwrite"])
    opened = api.inspect(source)
    warn(opened.warnings)
    with BarProgress(quiet=flags["quiet"]) as progress:
        report = api_stats.stats(
            opened,
            output,
            sequences=sequences_of(
                data=data, token_ids=token_ids, tokenizer=lambda: api.load_tokenizer(source)
            ),
            max_tokens=max_tokens,
            device=flags["device"],
            dtype=flags["dtype"],
            overwrite=flags["overwrite"],
            progress=progress,
            trust_remote_code=flags["trust_remote_code"],
        )
    seconds, peak = time.perf_counter() - started, peak_rss()
    if flags["as_json"]:
        print_json(stats_json(report, seconds=seconds, peak=peak))
        return
    warn(report.warnings)
    show_stats(report, seconds=seconds, peak=peak)


def sequences_of(
    *, data: Path | None, token_ids: Path | None, tokenizer: Callable[[], Any]
) -> list[list[int]] | None:
    """Return the token sequences that the user asked for; None if nothing is asked for.

    Args:
        data: Text, cut into sequences of 512 tokens; or, called `.jsonl`, a document in each line:
            `{"text": "..."}` or `{"messages": [{"role": "...", "content": "..."}]}`.
        token_ids: JSON file with a list of lists, or an object with that under "ids".
        tokenizer: Loads the tokenizer; called only if there is text.

    Raises:
        ConfigError: A file cannot be read or is not of this form.
    """
    from quantload.cli_compare import read_sequences

    if data is None and token_ids is None:
        return None
    is_jsonl = data is not None and data.suffix == ".jsonl"
    found = read_sequences(
        data=None if is_jsonl else data,
        token_ids=token_ids,
        prompts=(),
        tokenizer=tokenizer,
        max_tokens=1 << 62,
    )
    return found + (read_jsonl(data, tokenizer()) if is_jsonl and data is not None else [])


def read_jsonl(file: Path, tokenizer: Any) -> list[list[int]]:  # noqa: ANN401 - of transformers
    """Return the tokens of a file with a JSON object in each line, cut into sequences of 512.

    Raises:
        ConfigError: It cannot be read, a line is of another form, or there is no chat template.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read `{file}`: {error}") from error
    sequences: list[list[int]] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            ids = _ids_of_line(line, f"line {number} of `{file}`", tokenizer)
            sequences += [
                ids[i : i + _SEQUENCE_TOKENS] for i in range(0, len(ids), _SEQUENCE_TOKENS)
            ]
    return sequences


def _ids_of_line(line: str, where: str, tokenizer: Any) -> list[int]:  # noqa: ANN401
    try:
        content = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON: {error}") from error
    text = content.get("text") if isinstance(content, dict) else None
    if isinstance(text, str):
        return tokenizer(text)["input_ids"]  # type: ignore[no-any-return]
    messages = content.get("messages") if isinstance(content, dict) else None
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ConfigError(f"{where} has neither `text` nor a list of chat `messages`")
    try:
        found = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)
    except Exception as error:  # templates raise what they like
        raise ConfigError(
            f"{where} cannot be put into the chat template of the tokenizer: {error}"
        ) from error
    return found["input_ids"]  # type: ignore[no-any-return]


def show_stats(report: InputStatisticsReport, *, seconds: float, peak: int) -> None:
    """Print what was collected."""
    from quantload.cli_output import console, size

    out = console()
    out.print(
        f"{counted(report.num_tokens, 'token')} in {counted(report.num_sequences, 'sequence')}, "
        f"statistics of {counted(len(report.sums), 'module')}"
    )
    counts = sorted(sums.count for name, sums in report.sums.items() if ".experts." in name)
    if counts:
        middle = counts[len(counts) // 2]
        out.print(f"tokens of an expert: {counts[0]} to {counts[-1]}, {middle} in the middle")
    out.print(f"{seconds:.1f} s, peak memory {size(peak)}")
    out.print(f"written: {report.file}")


def stats_json(report: InputStatisticsReport, *, seconds: float, peak: int) -> dict[str, Any]:
    """Return what was collected for machines; the numbers of single features are in the file."""
    return {
        "quantload_stats": 1,
        "file": str(report.file),
        "metadata": dict(report.metadata),
        "num_tokens": report.num_tokens,
        "num_sequences": report.num_sequences,
        "modules": {
            module: {"tokens": sums.count, "input_absmax": sums.absmax}
            for module, sums in report.sums.items()
        },
        "unseen": list(report.unseen),
        "without_statistics": list(report.uncovered),
        "loaded_whole": report.why_whole,
        "warnings": list(report.warnings),
        "seconds": seconds,
        "peak_rss": peak,
    }


__all__ = ["read_jsonl", "sequences_of", "show_stats", "stats", "stats_json"]
