"""Sweep faults over real checkpoints: open, read and load each, and say what became of it.

A result is right if every weight and every plain tensor has the values of the sound checkpoint, and
if the loaded model holds the same tensors under the same schemes. As a program it sweeps the
folders that match a glob pattern and prints a table; see --help.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import copy
import logging
import re
import shutil
import tempfile
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fault_layouts import INDEX, layout_mutations
from faults import mutations
from gguf_faults import gguf_mutations
from torch import Tensor
from truth import CHECKPOINTS

import quantload
from quantload.errors import QuantloadError
from quantload.layers import meta_model, siblings
from quantload.layers.experts import FusedExperts
from quantload.layers.inputs import StaticInput
from quantload.layers.linear import QuantLinear
from quantload.layers.stack import StackView
from quantload.loader.formats import open_source
from quantload.loader.open import open_checkpoint
from quantload.loader.source import FLOAT_DTYPES, Source
from quantload.quant.qtensor import QuantTensor

Same = Callable[[Any, Any], bool]
OUTCOMES = ("open", "read", "load", "right", "told", "hidden", "wrong", "crash")
HIDDEN = ("swap", "turn", "zero")  # kinds that nothing in a header contradicts
_LAYER = re.compile(r"^(.*?(?:^|\.)(?:layers|h|blocks|blk|layer)\.)(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass
class Sweep:
    """What became of the faults in one checkpoint.

    Args:
        name: tool/folder.
        skipped: Why there is nothing to damage; "" if there is.
        loads: True if the sound checkpoint can be loaded as a model.
        counts: Number of faults by outcome, see `OUTCOMES`.
        found: Descriptions of faults that are wrong, crash, or cannot be seen, by outcome.
    """

    name: str
    skipped: str = ""
    loads: bool = True
    counts: Counter[str] = field(default_factory=Counter)
    found: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def sweepable(pattern: str = "*/*") -> list[Path]:
    """Return folders with one safetensors file, and GGUF files."""
    found = []
    for folder in sorted(path for path in CHECKPOINTS.glob(pattern) if path.is_dir()):
        files = [f for f in folder.glob("*.safetensors") if not f.name.startswith("expected")]
        found += [folder] if len(files) == 1 else sorted(folder.glob("*.gguf"))
    return found


def sweep(place: Path, *, names: str = "", step: int = 1) -> Sweep:
    """Damage the tensors of one layer, and those outside of layers, one at a time.

    Args:
        place: A folder or a GGUF file.
        names: Regular expression, searched in names, of the tensors to damage.
        step: Every so many faults one is tried.
    """
    folder = place if place.is_dir() else place.parent
    result = Sweep("/".join(folder.parts[-2:]))
    torch.set_num_threads(1)
    try:
        sound = _observe(place, load=True)
    except QuantloadError as error:
        result.skipped = str(error).splitlines()[0]
        return result
    result.loads = sound.model is not None
    scratch = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=scratch) as temporary:
        for description, damaged in _faults(place, Path(temporary), names, step):
            outcome, detail = _outcome(damaged, sound, description)
            if outcome == "wrong" and _is_hidden(description, sound):
                outcome = "hidden"
            result.counts[outcome] += 1
            if outcome in ("wrong", "crash", "hidden", "told", "right"):
                result.found[outcome].append(f"{description}: {detail}")
            shutil.rmtree(damaged if damaged.is_dir() else damaged.parent)
    return result


def _is_hidden(description: str, sound: _Seen) -> bool:
    """True for other values under the same header, which no reader can know to be wrong.

    GGUF has no word for tied embeddings: without an output matrix they are. NaN written into packed
    codes that are stored as floats are other codes. Factors of inputs may be folded into what comes
    before, layer by layer; one model layer has no like to be compared with.
    """
    kind, name = description.split()[:2]
    is_tied = description == "delete output.weight"
    is_tied |= kind == "delete" and name.endswith(".pre_quant_scale")
    return kind in HIDDEN or is_tied or (kind == "nan" and name in sound.codes)


def _faults(place: Path, temporary: Path, names: str, step: int) -> Iterator[tuple[str, Path]]:
    def choose(found: Collection[str]) -> set[str]:
        return {name for name in chosen(found) if re.search(names, name)}

    if place.is_file():
        yield from gguf_mutations(place, temporary, choose, step=step)
        return
    found = open_checkpoint(place).tensors
    if (place / INDEX).exists() or not any(place.glob("*.safetensors")):
        yield from layout_mutations(place, temporary, only=choose(found), step=step)
        return
    yield from mutations(place, temporary, only=choose(found), hidden=True, step=step)


def chosen(names: Collection[str]) -> set[str]:
    """Return the tensors outside of layers, and those of the layer that has most of them.

    Of many experts the first and the last are taken.
    """
    layers: dict[str, Counter[str]] = defaultdict(Counter)
    experts = {int(m[1]) for name in names if (m := _EXPERT.search(name))}
    ends = {min(experts), max(experts)} if experts else set()
    for name in names:
        if m := _LAYER.search(name):
            layers[m[1]][m[2]] += 1
    largest = {prefix: counts.most_common(1)[0][0] for prefix, counts in layers.items()}
    taken = set()
    for name in names:
        m, expert = _LAYER.search(name), _EXPERT.search(name)
        if (m is None or largest[m[1]] == m[2]) and (expert is None or int(expert[1]) in ends):
            taken.add(name)
    return taken


# -- what one checkpoint is ------------------------------------------------------------------------


@dataclass
class _Seen:
    """The values of a checkpoint.

    Args:
        weights: Dequantized weights and what goes with them, by "module part".
        plain: Other tensors by name.
        schemes: What is done to weights and inputs, as text.
        model: Tensors of the loaded model by path; None if the sound one does not load.
        told: Warnings.
        codes: Names of packed codes that are stored as floats.
    """

    weights: dict[str, Tensor]
    plain: dict[str, Tensor]
    schemes: dict[str, str]
    model: dict[str, Any] | None
    told: set[str]
    codes: set[str]


class _Refused(Exception):
    def __init__(self, stage: str) -> None:
        self.stage = stage


def _outcome(place: Path, sound: _Seen, description: str) -> tuple[str, str]:
    """Return one of `OUTCOMES`, and what differs; a warning has to name the tensor."""
    try:
        seen = _observe(place, load=sound.model is not None, staged=True)
    except _Refused as error:
        return error.stage, ""
    except Exception as error:  # noqa: BLE001 - a crash is what is looked for
        return "crash", f"{type(error).__name__}: {error}"
    if description.startswith("widen"):
        wrong = _differences(seen, sound, same=_nearly)
    else:
        wrong = _differences(seen, sound)
    if not wrong:
        return "right", ""
    name = description.split()[1]
    told = any(f"`{name}`" in note or f" {name}" in note for note in seen.told - sound.told)
    return ("told" if told else "wrong"), "; ".join(wrong[:3])


def _observe(place: Path, *, load: bool, staged: bool = False) -> _Seen:
    """Open, and read or load; refusals of ours become `_Refused` if `staged`."""
    stage = "open"
    weights, plain, model = {}, {}, None
    with _Told() as told, torch.no_grad():
        try:
            source = open_source(open_checkpoint(place))
            stage = "load" if load else "read"
            if load:
                model = _model(source, staged=staged)
            if not load or model is None:
                weights = _weights(source)
                plain = {name: source.read_plain(name) for name in source.plain}
        except QuantloadError as error:
            if not staged:
                raise
            frames = traceback.walk_tb(error.__traceback__)
            is_read = any(frame.f_code.co_name == "decode" for frame, _ in frames)
            raise _Refused("read" if is_read else stage) from error
    schemes = {module: str(weight.scheme) for module, weight in source.weights.items()}
    schemes["cache"] = str(source.reader.cache_scheme)
    where = str(source.checkpoint.folder)
    notes = {note.replace(where, "") for note in (*source.warnings, *told.messages)}
    quantized = [weight for weight in source.weights.values() if weight.is_quantized]
    stored = [source.checkpoint.tensors.get(w.leaves.get("weight", "")) for w in quantized]
    codes = {entry.name for entry in stored if entry is not None and entry.dtype in FLOAT_DTYPES}
    return _Seen(weights, plain, schemes, model, notes, codes)


def _weights(source: Source) -> dict[str, Tensor]:
    found = {}
    for module in source.weights:
        value = source.read_weight(module)
        if isinstance(value, QuantTensor):
            found[f"{module} weight"] = value.dequantize()
            for part in ("input_scale", "input_zero"):
                if (tensor := getattr(value, part)) is not None:
                    found[f"{module} {part}"] = tensor
        else:
            found[f"{module} weight"] = value
    return found


def _model(source: Source, *, staged: bool) -> dict[str, Any] | None:
    try:
        with _built_once():
            model = quantload.load(source, device="cpu", dtype=torch.float32)
    except QuantloadError:
        if staged:
            raise
        return None
    layers = [report.module for report in quantload.explain(model)]
    inside = tuple(f"{path}." for path, m in model.named_modules() if isinstance(m, QuantLinear))
    found: dict[str, Any] = {}
    for path in layers:
        block, _, parameter = path.rpartition(".")
        experts = model.get_submodule(block)
        if isinstance(experts, FusedExperts) or parameter in experts._parameters:
            found[path] = getattr(experts, parameter)  # all experts of a block
            continue
        layer = model.get_submodule(path)
        owner = layer._stack if isinstance(layer, StackView) else layer
        found[f"{path} input"] = owner.scheme.input if isinstance(owner, QuantLinear) else None
        found[f"{path}.weight"] = layer.weight
        found[f"{path}.bias"] = layer.bias
        found |= {f"{path} {part}": tensor for part, tensor in _static_input(layer).items()}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        if not name.startswith(inside):
            found.setdefault(name, tensor)
    return found


def _static_input(layer: Any) -> dict[str, Tensor]:
    """Return the fixed scale and zero point of the input of a layer of the model."""
    gemm = layer
    if isinstance(layer, StackView):
        stack = layer._stack
        gemm = stack if stack.separate is None else stack.separate[layer.slot]
    while not isinstance(gemm, StaticInput):
        gemm = getattr(gemm, "gemm", None)
        if gemm is None:
            return {}
    is_zero = gemm.zero is None or not bool(gemm.zero.any())
    found = {"scale": gemm.scale.reshape(-1)}
    return found if is_zero else {**found, "zero": gemm.zero.reshape(-1)}


def _differences(seen: _Seen, sound: _Seen, same: Same | None = None) -> list[str]:
    """Say what of the loaded model differs, or, where none can be loaded, of the source."""
    parts = ("schemes", "weights", "plain") if sound.model is None else ("model",)
    wrong = []
    for part in parts:
        one, two = getattr(sound, part), getattr(seen, part)
        for name in sorted(one.keys() | two.keys()):
            if not (same or _same)(one.get(name), two.get(name)):
                wrong.append(f"{part} {name}")
    return wrong


def _same(one: Any, two: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        return type(one) is type(two) and one == two
    return one.shape == two.shape and torch.equal(one.double(), two.double())


def _nearly(one: Any, two: Any) -> bool:
    """Scales of a wider dtype are multiplied in it: values may differ by a rounding of bfloat16."""
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        return _same(one, two)
    return one.shape == two.shape and torch.allclose(
        one.double(), two.double(), rtol=2**-7, atol=2**-7 * float(one.double().abs().max())
    )


class _Told(logging.Handler):
    """Collects what is logged and warned."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> _Told:
        logger = logging.getLogger("quantload")
        logger.addHandler(self)
        self._propagated, logger.propagate = logger.propagate, False
        self._warnings = warnings.catch_warnings(record=True)
        self._caught = self._warnings.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._warnings.__exit__(*raised)
        self.messages += [str(each.message) for each in self._caught or ()]
        logger = logging.getLogger("quantload")
        logger.removeHandler(self)
        logger.propagate = self._propagated


@contextmanager
def _built_once() -> Iterator[None]:
    """Build and probe the model of each config once: most of the time of loading a tiny one."""
    build, find = meta_model.build_on_meta, siblings.find_siblings

    def built(config: Any, folder: Path, **options: Any) -> Any:
        key = f"{config} {options}"
        if key not in _BUILT:
            _BUILT[key] = build(config, folder, **options)
        return copy.deepcopy(_BUILT[key])

    def found(model: Any) -> Any:
        key = f"{type(model)} {model.config}"
        if key not in _PROBED:
            _PROBED[key] = find(model)
        return _PROBED[key]

    meta_model.build_on_meta, siblings.find_siblings = built, found
    try:
        yield
    finally:
        meta_model.build_on_meta, siblings.find_siblings = build, find


_BUILT: dict[str, Any] = {}
_PROBED: dict[str, Any] = {}


# -- the table -------------------------------------------------------------------------------------


def table(sweeps: list[Sweep]) -> str:
    """Return a Markdown table: a row for each tool, then the sum."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for each in sweeps:
        tool = each.name.split("/")[0]
        for row in (tool, "all"):
            rows[row] += each.counts
            rows[row]["folders"] += not each.skipped
    order = [*sorted(rows.keys() - {"all"}), "all"]
    head = ("tool", "folders", "tried", *OUTCOMES)
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    for row in order:
        counts = rows[row]
        tried = sum(counts[outcome] for outcome in OUTCOMES)
        cells = (row, counts["folders"], tried, *(counts[outcome] for outcome in OUTCOMES))
        lines.append(" | ".join(map(str, cells)))
    return "\n".join(lines)


def main() -> None:
    """Sweep the folders that match the pattern of the command line."""
    parser = argparse.ArgumentParser(description="Sweep faults over real checkpoints.")
    parser.add_argument("pattern", nargs="?", default="*/*", help="such as 'hqq-*/*'")
    parser.add_argument("--part", default="0/1", help="this one of so many runs, from 0")
    parser.add_argument("--step", type=int, default=1, help="every so many faults one is tried")
    options = parser.parse_args()
    first, parts = map(int, options.part.split("/"))
    done = []
    for each in sweepable(options.pattern)[first::parts]:
        done.append(result := sweep(each, step=options.step))
        print(f"{result.name}: {dict(result.counts)} {result.skipped}", flush=True)
        if not result.loads:
            print("    does not load as a model")
        for outcome, lines in result.found.items():
            for line in lines:
                print(f"    {outcome:6} {line}")
    print(table(done))


if __name__ == "__main__":
    main()
