"""Tiny vocabularies as GGUF metadata, and the tokenizers made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_gguf import write_metadata_only
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from quantload.loader.gguf_tokenizer import write_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BYTES = list(bytes_to_unicode().values())
MERGES = ["Ġ Ġ", "ĠĠ Ġ", "Ġ 1", "1 2", "h i", "Ġ hi"]
SPECIAL = ["<unk>", "<s>", "</s>"]
CORPUS = "the cat sat on the mat and the dog sat on the log; then the rat ran at the cat. " * 9
TEXTS = [
    "hi hi",
    "   12",
    "x\n\n   42",
    "12345 1,000.5",
    "don't I'LL we'Re",
    " a  b\t\n c \n",
    "é中文ⅫＡ½ 안녕",
    "if x==1:\n    return(x)\r\n",
]


def byte_level(pre="gpt-2", merges=MERGES, added=(), **options):
    """Metadata of a byte-level vocabulary; `added` is further tokens with their types."""
    tokens = [*BYTES, *(merge.replace(" ", "") for merge in merges)]
    types = [NORMAL] * len(tokens) + [kind for _, kind in added]
    tokens += [token for token, _ in added]
    metadata = {
        "llama.context_length": 77,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": list(merges),
    }
    return metadata | {f"tokenizer.{key}": value for key, value in options.items()}


def pieces(tokens, scores, types, **options):
    """Metadata of a SentencePiece vocabulary."""
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
    } | {f"tokenizer.{key}": value for key, value in options.items()}


def write_tokenizer_of(metadata: dict[str, Any], folder: Path) -> list[str]:
    """Write a GGUF file `a.gguf` with this metadata and the tokenizer made of it, beside it."""
    return write_tokenizer(write_metadata_only(folder / "a.gguf", metadata), folder)


def load_tokenizer_of(metadata: dict[str, Any], folder: Path, model_type: str | None = None):
    """Return the tokenizer of this metadata as transformers loads it, beside a config if named."""
    folder.mkdir(parents=True)
    write_tokenizer_of(metadata, folder)
    if model_type:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return AutoTokenizer.from_pretrained(folder)


def train_sentencepiece(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return a small SentencePiece model, and the metadata that llama.cpp makes of it."""
    import sentencepiece

    (folder / "corpus.txt").write_text(CORPUS + "\nHello World, naïve café\n" * 3)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "model"),
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(str(folder / "model.model"))
    size = range(model.vocab_size())
    kinds = {UNKNOWN: model.is_unknown, CONTROL: model.is_control, BYTE: model.is_byte}
    types = [
        next((kind for kind, is_kind in kinds.items() if is_kind(index)), NORMAL) for index in size
    ]
    tokens, scores = [model.id_to_piece(i) for i in size], [model.get_score(i) for i in size]
    return model, pieces(tokens, scores, types)
