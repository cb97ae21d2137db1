"""Rules of `doctor` about names: tensors without a place, parameters without a tensor."""

from __future__ import annotations

from collections.abc import Iterator

from quantload.loader.doctor_subject import Finding, Subject
from quantload.loader.joined_experts import JoinedReader


def tensors_have_places(subject: Subject) -> Iterator[Finding]:
    """A tensor that the model does not know stops vLLM; others only say so."""
    for name in subject.placement.unplaced:
        stops = subject.engine.name == "vllm" and not name.endswith(".bias")
        yield Finding(
            rule="unexpected",
            level="error" if stops else "warning",
            layer=name,
            found=f"tensor `{name}`",
            expected="only tensors for which the model has a place",
            hint="leave it out of the files",
            source=subject.source_of("unexpected"),
        )


def names_are_those_of_the_model(subject: Subject) -> Iterator[Finding]:
    """Engines know nothing of wrappers: such tensors have no place, and parameters none of them."""
    if wrappers := subject.checkpoint.wrappers:
        yield Finding(
            rule="unexpected",
            level="error",
            found=f"names of tensors with `{wrappers}`, which a wrapper of the model left there",
            expected="names of the model itself",
            hint="save the model without its wrapper, or convert the checkpoint: what is written "
            "has plain names",
            source=subject.source_of("unexpected"),
        )


def parameters_are_filled(subject: Subject) -> Iterator[Finding]:
    """A parameter without a tensor stops the load, or stays as it was made: at random."""
    for name in subject.placement.unfilled:
        yield Finding(
            rule="missing",
            level="error",
            layer=name.rpartition(".")[0],
            found=f"no tensor for `{name}`",
            expected="a tensor for every parameter of the model",
            hint="a shard may be missing, or `tie_word_embeddings` is not what the model has",
            source=subject.source_of("missing"),
        )


def names_are_whole(subject: Subject) -> Iterator[Finding]:
    """Serving engines do not add the prefix of the base model, as transformers does."""
    names = [name for name in subject.placement.without_prefix if _may_lack(subject, name)]
    if subject.engine.fuses and names:
        yield Finding(
            rule="prefix",
            level="error",
            found=f"{len(names)} names without the prefix `model.`, such as `{names[0]}`",
            expected=f"`model.{names[0]}`",
            hint="save the model with its head: `AutoModelForCausalLM`",
            source=subject.source_of("unexpected"),
        )


def _may_lack(subject: Subject, name: str) -> bool:
    """True for causal models whose base is called `model`; others have tables of their own."""
    named = subject.checkpoint.config.get("architectures")
    causal = isinstance(named, list) and any(str(n).endswith("ForCausalLM") for n in named)
    return causal and name.startswith(("layers.", "embed_tokens.", "norm."))


def weights_are_called_weight(subject: Subject) -> Iterator[Finding]:
    """A weight in full precision has to have the name of the parameter."""
    stored_at = {(e.file, e.start): name for name, e in subject.checkpoint.tensors.items()}
    for weight in subject.source.weights.values() if subject.engine.fuses else ():
        read_as = next(iter(weight.leaves.values()), "")
        entry = subject.source.checkpoint.tensors.get(read_as)
        stored = stored_at.get((entry.file, entry.start), read_as) if entry else read_as
        leaf = weight.parameter_name.rpartition(".")[2]
        if not weight.is_quantized and stored.rpartition(".")[2] not in (leaf, "weight"):
            yield Finding(
                rule="unexpected",
                level="error",
                layer=weight.module,
                found=f"a weight in full precision named `{stored}`",
                expected=f"`{weight.parameter_name}`",
                hint="convert it with `--scheme same`",
                source=subject.source_of("unexpected"),
            )


def experts_are_in_one_parameter(subject: Subject) -> Iterator[Finding]:
    """Single experts that quantload joins are read by no engine: it stops, or leaves them out."""
    reader = subject.source.reader
    if not isinstance(reader, JoinedReader):
        return
    for parameter, modules in reader.modules_of.items():
        yield Finding(
            rule="experts",
            level="error",
            layer=parameter,
            found=f"{len(modules)} modules such as `{modules[0]}`",
            expected=f"all experts in tensors of `{parameter}`",
            hint="serve the checkpoint that this one was made from, or dequantize it: "
            "`convert --scheme dense`",
            source=subject.source_of("experts"),
        )


RULES = (
    experts_are_in_one_parameter,
    names_are_those_of_the_model,
    tensors_have_places,
    parameters_are_filled,
    names_are_whole,
    weights_are_called_weight,
)
__all__ = ["RULES"]
