"""Which tokens a command runs: one set of options for all that run models, and how they are read.

    --data FILE        text, cut into sequences of 512 tokens; or .jsonl, a document in each line:
                       {"text": "..."} or {"messages": [{"role": "...", "content": "..."}]},
                       which the tokenizer's chat template puts together
    --token-ids FILE   JSON: a list of lists, or an object with that under "ids"
    --prompt TEXT      one sequence each
    --prompts FILE     one sequence a line; or .jsonl, as --data
    --generated        the model makes them up itself: sampled, with a fixed seed

Nothing is downloaded. The sha256 of the ids tells whether two runs had the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from quantload.errors import ConfigError

SEQUENCE_TOKENS = 512
_FILES = {"data": "--data", "token_ids": "--token-ids", "prompts_file": "--prompts"}
_GIVEN = {**_FILES, "prompts": "--prompt", "generated": "--generated"}
_Command = Callable[..., Any]


def token_options(
    *, max_tokens: int, least: int = 1, without: str = "outputs are not compared"
) -> Callable[[_Command], _Command]:
    """Return a decorator that gives a command the options about tokens.

    Args:
        max_tokens: Default of `--max-tokens`.
        least: Fewest tokens that the command can use.
        without: What it does where no tokens are asked for, for the help text.
    """
    file = click.Path(path_type=Path)
    options = (
        click.option(
            "--data", type=file, help="Text to run, or .jsonl with `text` or chat `messages`."
        ),
        click.option("--token-ids", type=file, help="JSON file to run: lists of token ids."),
        click.option("--prompt", "prompts", multiple=True, help="Text to run; repeatable."),
        click.option(
            "--prompts", "prompts_file", type=file, help="File to run: a prompt a line, or .jsonl."
        ),
        click.option(
            "--generated",
            is_flag=True,
            help="Run tokens that the (reference) model makes up, sampled with a fixed seed.",
        ),
        click.option(
            "--max-tokens",
            type=click.IntRange(min=least),
            default=max_tokens,
            show_default=True,
            help=f"Tokens to run at most; where none are given, {without}.",
        ),
    )

    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def read_tokens(
    source: str, flags: Mapping[str, Any], *, generate: bool = False
) -> list[list[int]]:
    """Return the token sequences that a command was asked to run, `max_tokens` in all at most.

    Args:
        source: Whose tokenizer reads text, and who makes up tokens.
        flags: Values of the options of `token_options`, and `device`.
        generate: Tokens are made up where none are given; else there are none then.

    Raises:
        ConfigError: A file cannot be read or is not of its form, options contradict each other, or
            a text has no tokens.
    """
    given = tokens_given(flags)
    if len(given) > 1 and given[-1] == "--generated":
        raise ConfigError(f"`--generated` and `{given[0]}` are both given, expected one of them")
    if given and given != ["--generated"]:
        from quantload import api

        return read_sequences(
            **{name: flags.get(name) for name in _FILES},
            prompts=flags.get("prompts") or (),
            tokenizer=lambda: api.load_tokenizer(source),
            max_tokens=flags["max_tokens"],
        )
    if not generate and not flags.get("generated"):
        return []
    from quantload import api
    from quantload.api_load import parse_device
    from quantload.api_stats import cut_tokens, generated_tokens

    made = generated_tokens(
        api.inspect(source),
        flags["max_tokens"],
        device=parse_device(flags["device"]),
        trust_remote_code=flags.get("trust_remote_code", False),
    )
    return cut_tokens(made, flags["max_tokens"])


def tokens_given(flags: Mapping[str, Any]) -> list[str]:
    """Return the options that give tokens; `--generated` last."""
    return [option for name, option in _GIVEN.items() if flags.get(name)]


def read_sequences(
    *,
    tokenizer: Callable[[], Any],
    max_tokens: int,
    data: Path | None = None,
    token_ids: Path | None = None,
    prompts: Iterable[str] = (),
    prompts_file: Path | None = None,
) -> list[list[int]]:
    """Return the token sequences of files and texts, at most `max_tokens` in all.

    Args:
        tokenizer: Loads the tokenizer; called only if there is text.
        max_tokens: Sequences are cut at this many tokens in all.
        data: See the top of this file.
        token_ids: Likewise.
        prompts: Texts, one sequence each, or more where they are longer than 512 tokens.
        prompts_file: See the top of this file.

    Raises:
        ConfigError: A file cannot be read or is not of its form, or there are no tokens in them.
    """
    sequences = [] if token_ids is None else _read_ids(token_ids)
    loaded: list[Any] = []

    def of_text(text: str) -> list[int]:
        return list(_loaded(loaded, tokenizer)(text)["input_ids"])

    for text in prompts:
        sequences += _cut(of_text(text))
    for file, is_lines in ((prompts_file, True), (data, False)):
        if file is None:
            continue
        content = _read_text(file)
        if file.suffix == ".jsonl":
            sequences += _read_jsonl(content, file, _loaded(loaded, tokenizer))
            continue
        texts = content.splitlines() if is_lines else [content]
        sequences += [ids for text in texts if text.strip() for ids in _cut(of_text(text))]
    from quantload.api_stats import cut_tokens

    kept = cut_tokens(sequences, max_tokens)
    if not kept:
        raise ConfigError("there are no tokens in what was given", hint="give a longer text")
    return kept


def _loaded(loaded: list[Any], tokenizer: Callable[[], Any]) -> Any:  # noqa: ANN401 - transformers'
    if not loaded:
        loaded.append(tokenizer())
    return loaded[0]


def _cut(ids: list[int]) -> list[list[int]]:
    return [ids[i : i + SEQUENCE_TOKENS] for i in range(0, len(ids), SEQUENCE_TOKENS)]


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read `{file}`: {error}") from error


def _read_ids(file: Path) -> list[list[int]]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read token ids from `{file}`: {error}") from error
    ids = content.get("ids") if isinstance(content, dict) else content
    good = isinstance(ids, list) and all(
        isinstance(row, list) and row and all(type(number) is int for number in row) for row in ids
    )
    if not good or not ids:
        raise ConfigError(
            f"`{file}` does not hold token ids, expected a list of lists of numbers, or an object "
            "with that under `ids`"
        )
    return [list(row) for row in ids]


def _read_jsonl(content: str, file: Path, tokenizer: Any) -> list[list[int]]:  # noqa: ANN401
    sequences: list[list[int]] = []
    for number, line in enumerate(content.split("\n"), start=1):  # not U+2028
        if line.strip():
            sequences += _cut(_ids_of_line(line, f"line {number} of `{file}`", tokenizer))
    return sequences


def _ids_of_line(line: str, where: str, tokenizer: Any) -> list[int]:  # noqa: ANN401
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is no JSON: {error}") from error
    text = content.get("text") if isinstance(content, dict) else None
    if isinstance(text, str):
        return list(tokenizer(text)["input_ids"])
    messages = content.get("messages") if isinstance(content, dict) else None
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ConfigError(f"{where} has neither `text` nor a list of chat `messages`")
    try:
        found = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)
    except Exception as error:  # templates raise what they like
        raise ConfigError(
            f"{where} cannot be put into the chat template of the tokenizer: {error}"
        ) from error
    return list(found["input_ids"])


__all__ = ["SEQUENCE_TOKENS", "read_sequences", "read_tokens", "token_options", "tokens_given"]
