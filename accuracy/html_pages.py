"""What the pages of reports share: one self-contained file each, that loads nothing.

The templates lie in `pages/`. They escape every value, since names of layers come from files; what
is markup already comes from `svg_charts.py`, which escapes its texts. A content security policy
allows no request at all and runs one script only, the page's own, named by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from quantload.accuracy.svg_charts import NARROW, WIDE, Size
from quantload.errors import printable

_PAGES = Path(__file__).parent / "pages"


def render(template: str, **values: Any) -> str:  # noqa: ANN401 - what a template shows
    """Fill a template of `pages/`; it gets the style sheet and the script too."""
    style, script = ((_PAGES / name).read_text("utf-8") for name in ("report.css", "report.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = _environment().get_template(template)
    return page.render(
        style=Markup(style),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        **values,
    )


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_PAGES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    made.filters |= {"dotted": dotted}
    return made


def _shown(value: object) -> object:
    """Write out what would turn the direction of a text from a file; markup stays."""
    return printable(value) if type(value) is str else value


def dotted(name: str) -> Markup:
    """Return a name that may be broken after its dots."""
    return Markup("<wbr>").join(part for part in re.split(r"(?<=\.)", printable(name)))


def number(value: float | None, form: str = ".2f", unit: str = "") -> str:
    """Return a number for people; "" for what is none."""
    return "" if value is None or not math.isfinite(value) else f"{value:{form}}{unit}"


def percent(value: float | None, digits: int = 3) -> str:
    """Return a fraction in percent; "" for what is no number."""
    return "" if value is None else number(100 * value, f".{digits}f", " %")


def sortable(value: float | None) -> str:
    """Return a number for sorting, all digits of it; "" for what is none."""
    return "" if value is None or math.isnan(value) else repr(float(value))


def chart(draw: Callable[[Size], str], *, wide_size: Size = WIDE) -> Markup:
    """Draw a chart for wide screens and for narrow ones; the style sheet shows one of them."""
    wide, narrow = draw(wide_size), draw(NARROW)
    return Markup(f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>')


def drawn(svg: str) -> Markup:
    """Take what a function of `svg_charts.py` returned as markup."""
    return Markup(svg)


def short(name: str, *, most: int = 60) -> str:
    """Return a name that fits above a chart, cut in the middle."""
    return name if len(name) <= most else f"{name[: most // 2]}...{name[-most // 2 :]}"


def listed_all(names: Sequence[str], *, limit: int = 8) -> str:
    """Return names in one sentence, and how many more there are."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


__all__ = ["chart", "drawn", "listed_all", "number", "percent", "render", "short", "sortable"]
