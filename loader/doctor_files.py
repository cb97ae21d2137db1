"""Rules of `doctor` about files, config.json and tied embeddings."""

from __future__ import annotations

from collections.abc import Iterator

from quantload.errors import listed
from quantload.loader.doctor_subject import Finding, Subject
from quantload.loader.model_dtype import config_dtype
from quantload.mappers.dtype_names import plain_name, prefixed_names, unknown_dtypes, what_is_wrong

_TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"),
    *("tekken.json", "tiktoken.model", "tokenizer_config.json"),
)
# Model type, field, its value, end of the tensors that need it, file of vLLM 0.32.0.
_MODEL_FIELDS = (
    (
        *("deepseek_v3", "topk_method", " = `noaux_tc`", ".e_score_correction_bias"),
        "model_executor/models/deepseek_v2.py",
    ),
    ("lfm2", "conv_dim", "", "", "model_executor/models/lfm2.py"),
)


def tokenizer_is_there(subject: Subject) -> Iterator[Finding]:
    """A server needs a tokenizer, unless it is told to do without."""
    checkpoint = subject.checkpoint
    if checkpoint.gguf_file is not None or not subject.engine.fuses:
        return
    if not any((checkpoint.folder / name).exists() for name in _TOKENIZERS):
        yield Finding(
            rule="tokenizer",
            level="warning",
            found="no file of a tokenizer",
            expected=f"one of {listed(_TOKENIZERS, limit=8)}",
            hint="copy it from the source model, or serve with `--skip-tokenizer-init`",
            source=subject.source_of("tokenizer"),
        )


def no_other_weights(subject: Subject) -> Iterator[Finding]:
    """VLLM and SGLang read every safetensors file of a folder that has no index."""
    checkpoint, engine = subject.checkpoint, subject.engine
    if not engine.fuses or checkpoint.gguf_file is not None:
        return
    folder = checkpoint.folder
    if (folder / "model.safetensors.index.json").exists():
        return
    used = {entry.file.name for entry in checkpoint.tensors.values()}
    others = [f.name for f in sorted(folder.glob("*.safetensors")) if f.name not in used]
    if others:
        yield Finding(
            rule="files",
            level="error",
            found=f"other safetensors files beside the model: {listed(others)}",
            expected="only files of the model: the engine reads all of them",
            hint="move them elsewhere",
            source=subject.source_of("files"),
        )


def container_is_read(subject: Subject) -> Iterator[Finding]:
    """Pickles have to have the usual names; transformers reads a GGUF file by name only."""
    files = {entry.file.name for entry in subject.checkpoint.tensors.values()}
    odd = [name for name in files if name.endswith((".pt", ".pth"))]
    if odd:
        yield Finding(
            rule="container",
            level="error",
            found=f"weights in {listed(odd)}",
            expected="safetensors files, or `pytorch_model.bin`",
            hint="convert it with `--scheme same`",
            source=subject.source_of("container"),
        )
    if subject.checkpoint.gguf_file is None:
        return
    if subject.engine.name == "transformers":
        yield Finding(
            rule="container",
            level="warning",
            found="a GGUF file",
            expected="`from_pretrained(FOLDER, gguf_file=NAME)`, with the gguf package",
            source=subject.source_of("container"),
        )


def config_is_complete(subject: Subject) -> Iterator[Finding]:
    """Serving engines choose the model class by `architectures`, transformers by `model_type`."""
    checkpoint = subject.checkpoint
    key = "architectures" if subject.engine.fuses else "model_type"
    if checkpoint.gguf_file is None and not checkpoint.config.get(key):
        is_guessed = subject.engine.name == "vllm" and checkpoint.config.get("model_type")
        yield Finding(
            rule="config-field",
            level="warning" if is_guessed else "error",
            found=f"no `{key}` in config.json",
            expected=f"`{key}`, from which the engine finds the model's class",
            hint=f"copy `{key}` from the source model",
            source=subject.source_of("config-field"),
        )


def config_holds_quantization(subject: Subject) -> Iterator[Finding]:
    """Transformers reads the quantization config in config.json only."""
    checkpoint = subject.checkpoint
    where = checkpoint.quantization_config_file
    if not subject.method_name or where == "config.json" or checkpoint.gguf_file is not None:
        return
    if subject.engine.name == "transformers":
        yield Finding(
            rule="config-field",
            level="error",
            found=f"the quantization config in `{where}`",
            expected="`quantization_config` in config.json: without, weights are read as floats",
            hint=f"copy the content of `{where}` there",
            source=subject.source_of("config-field"),
        )


def dtypes_are_names(subject: Subject) -> Iterator[Finding]:
    """Classes of transformers, which all engines read configs with, look dtypes up in torch."""
    if prefixed := prefixed_names(subject.checkpoint.config):
        plain = listed(sorted({str(plain_name(name)) for name in prefixed}))
        yield Finding(
            rule="config-field",
            level="error",
            found=f"dtype {listed(sorted(set(prefixed)))} in config.json",
            expected=f"{plain}: a name without `torch.`",
            hint="change it there, or convert the checkpoint",
            source=subject.source_of("config-field"),
        )
    for key, value in unknown_dtypes(subject.checkpoint.config):
        found, expected, hint = what_is_wrong(key, value)
        yield Finding(
            rule="config-field",
            level="error",
            found=found,
            expected=expected,
            hint=hint,
            source=subject.source_of("config-field"),
        )


def dtype_is_served(subject: Subject) -> Iterator[Finding]:
    """Kernels of quantized layers want bfloat16 or float16; a float32 model is run narrower."""
    dtype = config_dtype(subject.checkpoint.config)
    if not subject.engine.fuses or not subject.method_name or str(dtype) != "torch.float32":
        return
    yield Finding(
        rule="dtype",
        level="warning",
        found="dtype `float32` in config.json",
        expected="`bfloat16` or `float16`, which the kernels of quantized layers take",
        hint="the engine runs it in 16 bits; say which with `--dtype bfloat16`",
        source=subject.source_of("dtype"),
    )


def tied_head_is_plain(subject: Subject) -> Iterator[Finding]:
    """A head that the config ties takes the embedding's weight: it must not be quantized."""
    source, config = subject.source, subject.text_config
    top = subject.checkpoint.config
    tied = bool(config.get("tie_word_embeddings", top.get("tie_word_embeddings", False)))
    heads = [w for w in source.weights.values() if subject.facts.kinds.get(w.module) == "head"]
    for head in heads:
        if tied and head.is_quantized:
            yield Finding(
                rule="head-tied",
                level="error",
                layer=head.module,
                found="a quantized head, and `tie_word_embeddings` is true",
                expected="`tie_word_embeddings: false`: a tied head takes the embedding's weight",
                hint="set `tie_word_embeddings` to false",
                source=subject.source_of("head-tied"),
            )


def model_fields_are_there(subject: Subject) -> Iterator[Finding]:
    """Some models of vLLM read fields that transformers no longer writes."""
    config, names = subject.text_config, subject.source.plain
    for model_type, field, value, tensor, file in _MODEL_FIELDS:
        if subject.engine.name != "vllm" or config.get("model_type") != model_type:
            continue
        is_concerned = not tensor or any(name.endswith(tensor) for name in names)
        if is_concerned and field not in config:
            yield Finding(
                rule="model-field",
                level="error",
                found=f"no `{field}` in config.json",
                expected=f"`{field}`{value}, which the engine's `{model_type}` reads",
                hint=f"add `{field}` to config.json",
                source=subject.cite(file),
            )


RULES = (
    container_is_read,
    config_is_complete,
    config_holds_quantization,
    tokenizer_is_there,
    no_other_weights,
    dtypes_are_names,
    dtype_is_served,
    tied_head_is_plain,
    model_fields_are_there,
)
__all__ = ["RULES"]
