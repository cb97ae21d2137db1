"""Scores of a checkpoint's layers under each scheme, with all that a budget needs; kept in a file.

    {"quantload_scores": 1,
     "score": "gradient", "source_sha256": "...", "token_ids_sha256": "...", "num_tokens": 1024,
     "groups": [["...q_proj", "...k_proj", "...v_proj"], ...],
     "modules": {"...q_proj": {"elements": 331776, "active": 1.0,
                               "bits": {"W4A16:g64": 1410048.0, ...},
                               "scores": {"W4A16:g64": 0.00123, ...}}, ...}}

Another budget is solved from the file alone. Scores are in nats a token where `score` is "gradient"
or "kl"; those of "weights" have no unit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from quantload.accuracy.plain_choices import Group, Sizes, bits_of
from quantload.errors import ConfigError, listed
from quantload.quant.allocation import Option, allocate, budget_curve

Score = Literal["gradient", "kl", "weights"]
Cost = Literal["stored", "active"]
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """One weight.

    Args:
        elements: N * K.
        active: Share of the tokens that meet it: top-k / E of an expert, else 1.
        bits: Stored bits, scales included, by scheme.
        scores: What each scheme costs.
        estimated: Why its score is told from its weights; "" if it was measured.
    """

    elements: int
    active: float
    bits: Mapping[str, float]
    scores: Mapping[str, float]
    estimated: str = ""


@dataclass(frozen=True, kw_only=True)
class ScoreTable:
    """What `allocate` knows of a checkpoint.

    Args:
        score: How it was scored.
        source_sha256: Digest of config and headers.
        token_ids_sha256: Digest of the tokens that scored; "" if none did.
        num_tokens: How many.
        groups: Modules that have one scheme, in the order of the checkpoint.
        rows: Of all modules.
    """

    score: Score
    source_sha256: str
    token_ids_sha256: str
    num_tokens: int
    groups: tuple[Group, ...]
    rows: Mapping[str, Row] = field(repr=False)

    @property
    def schemes(self) -> tuple[str, ...]:
        """Names of the schemes."""
        return tuple(next(iter(self.rows.values())).bits)

    def only(self, schemes: Iterable[str]) -> ScoreTable:
        """Return a table of some of its schemes.

        Raises:
            ConfigError: It has no scores of one of them.
        """
        wanted = list(dict.fromkeys(schemes))
        unknown = [name for name in wanted if name not in self.schemes]
        if unknown:
            raise ConfigError(
                f"the scores are of {listed(self.schemes)}, expected {listed(unknown)} too",
                hint="score again: give `--scores` another file",
            )
        rows = {
            module: Row(
                elements=row.elements,
                active=row.active,
                bits={name: row.bits[name] for name in wanted},
                scores={name: row.scores[name] for name in wanted},
                estimated=row.estimated,
            )
            for module, row in self.rows.items()
        }
        return ScoreTable(**{**vars(self), "rows": rows})

    # -- budgets -------------------------------------------------------------------------------

    def sizes(self, cost: Cost) -> dict[str, Sizes]:
        """Return the size of each weight; with "active", that of the tokens that meet it."""
        found = {}
        for module, row in self.rows.items():
            share = row.active if cost == "active" else 1.0
            bits = {name: value * share for name, value in row.bits.items()}
            found[module] = Sizes(row.elements * share, bits)
        return found

    def options(self, cost: Cost) -> dict[str, list[Option]]:
        """Return what each group may become, by its first module."""
        sizes = self.sizes(cost)
        return {
            group[0]: [
                Option(
                    scheme=name,
                    bits=sum(sizes[module].bits[name] for module in group),
                    cost=sum(self.rows[module].scores[name] for module in group),
                )
                for name in self.schemes
            ]
            for group in self.groups
        }

    def solve(self, bits: float, cost: Cost = "stored") -> dict[str, str]:
        """Return the schemes with the least sum of scores that take `bits` bits a weight.

        Raises:
            ConfigError: The smallest schemes take more.
        """
        elements = sum(size.elements for size in self.sizes(cost).values())
        chosen = allocate(self.options(cost), bits * elements)
        return {module: chosen[group[0]].scheme for group in self.groups for module in group}

    def curve(self, cost: Cost = "stored") -> list[tuple[float, float]]:
        """Return (bits a weight, sum of scores) of all budgets that are spent to the last bit."""
        elements = sum(size.elements for size in self.sizes(cost).values())
        return [(bits / elements, score) for bits, score in budget_curve(self.options(cost))]

    def bits_per_weight(self, schemes: Mapping[str, str], cost: Cost = "stored") -> float:
        """Return the bits a weight of some choice."""
        sizes = self.sizes(cost)
        return bits_of(schemes, sizes) / sum(size.elements for size in sizes.values())

    def predicted(self, schemes: Mapping[str, str]) -> float:
        """Return the sum of the scores of a choice."""
        return sum(self.rows[module].scores[scheme] for module, scheme in schemes.items())

    # -- the file ------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Return the content of the file, the same for the same table."""
        modules = {
            module: {
                "elements": row.elements,
                "active": row.active,
                "bits": dict(row.bits),
                "scores": dict(row.scores),
                **({"estimated": row.estimated} if row.estimated else {}),
            }
            for module, row in self.rows.items()
        }
        content = {
            "quantload_scores": _VERSION,
            "score": self.score,
            "source_sha256": self.source_sha256,
            "token_ids_sha256": self.token_ids_sha256,
            "num_tokens": self.num_tokens,
            "groups": [list(group) for group in self.groups],
            "modules": modules,
        }
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, name: str) -> ScoreTable:
        """Read the content of a file.

        Args:
            text: Its content.
            name: What messages call it.

        Raises:
            ConfigError: It is no such file, or damaged.
        """
        try:
            content = json.loads(text)
            version = content["quantload_scores"]
            if version != _VERSION:
                raise ConfigError(
                    f"`{name}` has version `{version}` of scores, expected {_VERSION}",
                    hint="score again with this version of quantload",
                )
            rows = {module: _row(of) for module, of in content["modules"].items()}
            table = cls(
                score=content["score"],
                source_sha256=content["source_sha256"],
                token_ids_sha256=content["token_ids_sha256"],
                num_tokens=content["num_tokens"],
                groups=tuple(tuple(group) for group in content["groups"]),
                rows=rows,
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"`{name}` is no file of scores: {type(error).__name__} {error}",
                hint="`quantload allocate --scores FILE` writes one where FILE is not there",
            ) from error
        grouped = [module for group in table.groups for module in group]
        is_whole = sorted(grouped) == sorted(rows) and rows
        if not is_whole or any(set(row.bits) != set(table.schemes) for row in rows.values()):
            raise ConfigError(f"`{name}` is damaged: its groups are not those of its modules")
        return table


def _row(content: Mapping[str, Any]) -> Row:
    bits = {str(name): float(value) for name, value in content["bits"].items()}
    scores = {name: float(content["scores"][name]) for name in bits}
    numbers = (*bits.values(), *scores.values(), float(content["active"]))
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise ValueError("a number is negative or not finite")
    return Row(
        elements=int(content["elements"]),
        active=float(content["active"]),
        bits=bits,
        scores=scores,
        estimated=str(content.get("estimated", "")),
    )


__all__ = ["Cost", "Row", "Score", "ScoreTable"]
