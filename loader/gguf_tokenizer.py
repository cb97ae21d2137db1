"""The Hugging Face tokenizer that the metadata of a GGUF file amounts to.

Built from the metadata with `tokenizers` itself: the conversion in transformers (5.24) leaves out
parts that change ids, namely the split of several `pre` names (digits of `smollm`), words that are
taken whole although no merges lead to them (`llama-bpe`), normalization (`qwen2`), the BOS token
where a file does not mention it, and a leading space of SentencePiece text that has one already.

    model "gpt2"    byte-level BPE; `tokenizer.ggml.pre` names how text is split before it
    model "llama"   SentencePiece BPE; merges follow from scores, text is not split

Types of tokens: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte. Texts of types 2, 3
and 4 are matched in the input before anything else.

Source: https://github.com/ggml-org/llama.cpp/blob/00ad355e009e83abf98f96a6ded7193b95763681/src/llama-vocab.cpp
and the `tokenizer.json` of SmolLM2, Llama 3, Qwen2, StarCoder, Mistral Nemo and Llama 2.
"""  # noqa: E501

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantload.errors import HeaderError, UnsupportedVariant, listed
from quantload.loader.gguf_header import read_header
from quantload.loader.gguf_metadata import special_token_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPACE = "\u2581"  # what SentencePiece writes for a space
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_OTHER_SOURCE = "convert the model's safetensors checkpoint, which brings its own tokenizer"

_DIGIT = r"\p{N}"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Pre:
    """How a byte-level vocabulary treats text before BPE.

    Args:
        splits: Expressions that cut the text one after the other; matches and gaps stay apart.
        takes_whole_words: True if a word that is a token needs no merges.
        adds_bos: True if BOS is added where the metadata does not say so.
        composes: True if text is brought to Unicode form NFC.
    """

    splits: tuple[str, ...]
    takes_whole_words: bool = False
    adds_bos: bool = False
    composes: bool = False


_PRE = {
    "gpt-2": _Pre((_GPT2,)),
    "smollm": _Pre((_DIGIT, _GPT2)),
    "starcoder": _Pre((_DIGIT, _GPT2)),
    "refact": _Pre((_DIGIT, _GPT2)),
    "llama3": _Pre((_LLAMA3,), takes_whole_words=True, adds_bos=True),
    "llama-v3": _Pre((_LLAMA3,), takes_whole_words=True, adds_bos=True),
    "llama-bpe": _Pre((_LLAMA3,), takes_whole_words=True, adds_bos=True),
    "qwen2": _Pre((_QWEN2,), composes=True),
    "tekken": _Pre((_TEKKEN,), takes_whole_words=True, adds_bos=True),
}
# What llama.cpp does for files that do not say it, made before there was a name for it.
_UNNAMED_PRE = _Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))


@dataclass(frozen=True)
class _Vocabulary:
    """The vocabulary of a GGUF file.

    Args:
        tokens: Text of each id.
        types: Type of each id.
        metadata: All metadata.
        file: The file, for messages.
    """

    tokens: list[str]
    types: list[int]
    metadata: Mapping[str, Any]
    file: Path

    @property
    def ids(self) -> dict[str, int]:
        """Id of each token."""
        return {token: index for index, token in enumerate(self.tokens)}

    def option(self, name: str, default: Any) -> Any:  # noqa: ANN401
        """Return `tokenizer.ggml.<name>`."""
        return self.metadata.get(f"tokenizer.ggml.{name}", default)

    def of_types(self, *types: int) -> list[str]:
        """Return the tokens of these types, by id."""
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in types]


def write_tokenizer(gguf_file: Path, folder: Path) -> list[str]:
    """Write the tokenizer of a GGUF file as Hugging Face files, and its generation_config.json.

    If the way that text is split is not known, `tokenizer.json` beside the GGUF file is copied in
    its place, provided that its vocabulary is the same.

    Returns:
        Names of the files written, relative to `folder`. A file without a vocabulary has none
        but generation_config.json.

    Raises:
        HeaderError: The metadata contradicts itself.
        UnsupportedVariant: The tokenizer is of a kind that cannot be made faithfully.
    """
    metadata = read_header(gguf_file).metadata
    written = [_write_generation_config(metadata, gguf_file, folder)]
    model = metadata.get("tokenizer.ggml.model", "none")
    if model in ("none", "no_vocab"):
        return written
    vocabulary = _read_vocabulary(metadata, gguf_file)
    if model == "gpt2":
        name = metadata.get("tokenizer.ggml.pre", "default")
        if name not in (*_PRE, "default"):
            return written + _copy_from_beside(vocabulary, name, folder)
        tokenizer, adds_bos = _byte_level(vocabulary, name)
    elif model == "llama":
        tokenizer, adds_bos = _sentencepiece(vocabulary), True
    else:
        raise UnsupportedVariant(
            f"GGUF tokenizer model `{model}` is not read, expected `gpt2` or `llama`, "
            f"in `{gguf_file}`",
            hint=_OTHER_SOURCE,
        )
    _add_tokens(tokenizer, vocabulary)
    return written + _save(tokenizer, vocabulary, folder, adds_bos=adds_bos)


def _read_vocabulary(metadata: Mapping[str, Any], file: Path) -> _Vocabulary:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise HeaderError(f"metadata key `tokenizer.ggml.tokens` is missing, in `{file}`")
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    twice = [token for token, count in Counter(tokens).items() if count > 1]
    if twice:
        raise HeaderError(f"tokens are in the vocabulary twice: {listed(twice)}, in `{file}`")
    types = metadata.get("tokenizer.ggml.token_type")
    types = [_NORMAL] * len(tokens) if types is None else list(map(int, types))
    if len(types) != len(tokens):
        raise HeaderError(
            f"`{len(types)}` token types for a vocabulary of `{len(tokens)}`, in `{file}`"
        )
    return _Vocabulary(tokens, types, metadata, file)


# -- the two models ------------------------------------------------------------------------------


def _byte_level(vocabulary: _Vocabulary, name: str) -> tuple[Tokenizer, bool]:
    """Return a byte-level BPE tokenizer, and whether it adds BOS unless told otherwise."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    if vocabulary.option("add_space_prefix", False):
        raise UnsupportedVariant(
            f"a byte-level tokenizer that prepends a space is not read, in `{vocabulary.file}`",
            hint=_OTHER_SOURCE,
        )
    pre = _PRE.get(name, _UNNAMED_PRE)
    if pre is _UNNAMED_PRE:
        logging.getLogger("quantload").warning(
            "`%s` does not say how its tokenizer splits text (`tokenizer.ggml.pre` is missing or "
            "`default`); the split of llama.cpp is taken, which the model may not be trained with",
            vocabulary.file,
        )
    model = models.BPE(
        vocab=vocabulary.ids, merges=_merges(vocabulary), ignore_merges=pre.takes_whole_words
    )
    tokenizer = Tokenizer(model)
    if pre.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(split), behavior="isolated") for split in pre.splits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.adds_bos


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    ids = special_token_ids(vocabulary.metadata, vocabulary.file)
    has_merges = vocabulary.option("merges", None) is not None
    model = models.BPE(
        vocab=vocabulary.ids,
        merges=_merges(vocabulary) if has_merges else _merges_by_score(vocabulary),
        unk_token=_token(vocabulary, ids["unk"]),
        fuse_unk=True,
        byte_fallback=bool(vocabulary.of_types(_BYTE)),
    )
    tokenizer = Tokenizer(model)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    decoding: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback()]
    decoding.append(decoders.Fuse())
    if vocabulary.option("add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(_SPACE))
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    stored = vocabulary.option("merges", None)
    if not isinstance(stored, list):
        raise HeaderError(
            f"metadata key `tokenizer.ggml.merges` is missing, in `{vocabulary.file}`"
        )
    ids = vocabulary.ids
    merges = []
    for merge in stored:
        cut = merge.find(" ", 1)  # a token may begin with a space
        left, right = merge[:cut], merge[cut + 1 :]
        if cut < 0 or left not in ids or right not in ids or left + right not in ids:
            raise HeaderError(
                f"merge `{merge}` joins texts that are no tokens, in `{vocabulary.file}`"
            )
        merges.append((left, right))
    return merges


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return all ways to join two tokens into one; the token of the highest score comes first."""
    stored = vocabulary.option("scores", None)
    scores = [] if stored is None else list(map(float, stored))
    if len(scores) != len(vocabulary.tokens):
        raise HeaderError(
            f"`{len(scores)}` token scores for a vocabulary of `{len(vocabulary.tokens)}`, "
            f"in `{vocabulary.file}`"
        )
    ids = vocabulary.ids
    normal = {token: scores[ids[token]] for token in vocabulary.of_types(_NORMAL)}
    merges = [
        (-score, token[:cut], token[cut:])
        for token, score in normal.items()
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    if len(merges) > 1 and len({score for score, _, _ in merges}) == 1:
        raise UnsupportedVariant(
            f"all tokens have the same score, which gives no order of merges, "
            f"in `{vocabulary.file}`",
            hint=_OTHER_SOURCE,
        )
    merges.sort(key=lambda merge: merge[0])
    return [(left, right) for _, left, right in merges]


# -- what both share -----------------------------------------------------------------------------


def _token(vocabulary: _Vocabulary, token_id: int | None) -> str | None:
    if token_id is None:
        return None
    if token_id >= len(vocabulary.tokens):
        raise HeaderError(
            f"special token id `{token_id}` in a vocabulary of `{len(vocabulary.tokens)}`, "
            f"in `{vocabulary.file}`"
        )
    return vocabulary.tokens[token_id]


def _add_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    from tokenizers import AddedToken

    special = vocabulary.of_types(_UNKNOWN, _CONTROL)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    plain = vocabulary.of_types(_USER_DEFINED)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])


def _save(
    tokenizer: Tokenizer, vocabulary: _Vocabulary, folder: Path, *, adds_bos: bool
) -> list[str]:
    from transformers import PreTrainedTokenizerFast

    ids = special_token_ids(vocabulary.metadata, vocabulary.file)
    named = {f"{name}_token": _token(vocabulary, token_id) for name, token_id in ids.items()}
    adds = {"bos": adds_bos, "eos": False}
    adds = {name: bool(vocabulary.option(f"add_{name}_token", add)) for name, add in adds.items()}
    for name, add in adds.items():
        if add and ids[name] is None:
            raise HeaderError(
                f"the tokenizer adds a `{name}` token, but the metadata names none, "
                f"in `{vocabulary.file}`"
            )
    architecture = vocabulary.metadata.get("general.architecture")
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        **named,
        add_bos_token=adds["bos"],
        add_eos_token=adds["eos"],
        clean_up_tokenization_spaces=False,
        model_max_length=vocabulary.metadata.get(f"{architecture}.context_length"),
    )
    wrapped.chat_template = _chat_templates(vocabulary.metadata)
    saved = [Path(file) for file in wrapped.save_pretrained(folder)]
    # transformers 5 writes a class name that version 4 does not know; this one both know.
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    _write_json(config_file, config)
    return sorted(file.relative_to(folder).as_posix() for file in saved if file.is_file())


def _chat_templates(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template, or all of them by name if there are several."""
    prefix = "tokenizer.chat_template"
    named = {
        key.removeprefix(f"{prefix}."): text
        for key, text in metadata.items()
        if key.startswith(f"{prefix}.")
    }
    default = metadata.get(prefix)
    if not named:
        return default
    return named if default is None else {"default": default} | named


def _write_generation_config(metadata: Mapping[str, Any], file: Path, folder: Path) -> str:
    ids = special_token_ids(metadata, file)
    config: dict[str, Any] = {f"{name}_token_id": ids[name] for name in ("bos", "eos", "pad")}
    ends = [ids["eos"], *(metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eot", "eom"))]
    distinct = list(dict.fromkeys(end for end in ends if end is not None))
    if len(distinct) > 1:
        config["eos_token_id"] = distinct
    _write_json(
        folder / "generation_config.json", {k: v for k, v in config.items() if v is not None}
    )
    return "generation_config.json"


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _copy_from_beside(vocabulary: _Vocabulary, name: str, folder: Path) -> list[str]:
    from tokenizers import Tokenizer

    source = vocabulary.file.parent
    present = [file for file in _TOKENIZER_FILES if (source / file).is_file()]
    if "tokenizer.json" not in present:
        raise UnsupportedVariant(
            f"how tokenizer `{name}` (`tokenizer.ggml.pre`) splits text is not known, expected one "
            f"of {listed(_PRE, limit=20)}, in `{vocabulary.file}`",
            hint="put `tokenizer.json` and `tokenizer_config.json` of the original model beside it",
        )
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    for index, token in enumerate(vocabulary.tokens):
        other = tokenizer.id_to_token(index)
        if other != token and vocabulary.types[index] != _UNUSED:
            raise HeaderError(
                f"`tokenizer.json` belongs to another model: its token `{index}` is `{other}`, "
                f"expected `{token}` as in `{vocabulary.file}`",
                hint="put the original model's tokenizer beside the GGUF file",
            )
    for file in present:
        shutil.copyfile(source / file, folder / file)
    return present
