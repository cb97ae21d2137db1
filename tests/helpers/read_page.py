"""Read a report page back with the standard library's HTML parser."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

_VOID = {"meta", "link", "input", "br", "wbr"}


@dataclass
class Table:
    """A table: texts of its headings, then (text, data-sort) of each cell by row.

    What stands below the first cell's text is in `notes`.
    """

    heads: list[str] = field(default_factory=list)
    rows: list[list[tuple[str, str | None]]] = field(default_factory=list)
    bad: list[bool] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)

    def column(self, head: str) -> dict[str, tuple[str, str | None]]:
        """Cells of a column by the text of the first one in their row."""
        at = self.heads.index(head)
        return {row[0][0]: row[at] for row in self.rows}

    def sort_keys(self, head: str) -> dict[str, float | None]:
        """What a column of numbers is sorted by; None for no number."""
        return {name: float(key) if key else None for name, (_, key) in self.column(head).items()}


class Page(HTMLParser):
    """A page; parsing asserts that its tags are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.text = text
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.sections: dict[str, str] = {}
        self.figures: dict[str, int] = {}
        self.tables: dict[str, Table] = {}
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.ids: dict[str, str] = {}
        self.tags: dict[str, int] = {}
        self._section = ""
        self._table: Table | None = None
        self._id: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.attributes += [(tag, name, value) for name, value in given.items()]
        self.tags[tag] = self.tags.get(tag, 0) + 1
        if tag == "section":
            self._section = given["id"]
            self.sections[self._section] = ""
        if tag == "svg" and "swatch" not in given.get("class", ""):
            self.figures[self._section] = self.figures.get(self._section, 0) + 1
        if tag == "table":
            self._table = self.tables[given["id"]] = Table()
        if tag == "tr" and "tbody" in self.open and self._table is not None:
            self._table.rows.append([])
            self._table.bad.append("bad" in given.get("class", ""))
        if tag == "td" and self._table is not None:
            self._table.rows[-1].append(("", given.get("data-sort")))
        if tag == "th" and self._table is not None:
            self._table.heads.append("")
        if tag not in _VOID:
            self.open.append(tag)
            self._id.append(given.get("id", ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()
        self._id.pop()
        if tag == "section":
            self._section = ""

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
            return
        if self.open and self.open[-1] == "style":
            return
        self.words.append(data)
        if self._section:
            self.sections[self._section] += data
        for name in self._id:
            if name:
                self.ids[name] = self.ids.get(name, "") + data
        if self._table is not None and "td" in self.open and "small" in self.open:
            name = self._table.rows[-1][0][0]
            self._table.notes[name] = self._table.notes.get(name, "") + data
        elif self._table is not None and "td" in self.open:
            text, key = self._table.rows[-1][-1]
            self._table.rows[-1][-1] = (text + data, key)
        elif self._table is not None and "th" in self.open:
            self._table.heads[-1] += data

    @property
    def shown(self) -> str:
        """All text that a reader sees, white space as single spaces."""
        return " ".join(" ".join(self.words).split())


def assert_self_contained(page: Page) -> None:
    """The page asks for nothing from anywhere, and runs its own script only."""
    assert not re.search(r"https?:|//[a-z]|\bsrc=|url\(|@import", page.text)
    assert not [row for row in page.attributes if row[1].startswith("on")]
    references = [value for _, name, value in page.attributes if name in ("href", "src", "action")]
    assert references == ["data:,"]  # the icon
    (script,) = page.scripts
    assert not re.search(r"fetch|XMLHttp|WebSocket|EventSource|import|eval|innerHTML", script)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [value for tag, name, value in page.attributes if "default-src" in value]
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy
