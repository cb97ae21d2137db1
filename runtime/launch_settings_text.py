"""The JSON text of a table of launch settings, short enough to be compared line by line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import metadata
from typing import Any

__all__ = ["installed_version", "table_text"]


def installed_version(package: str) -> str:
    """Return the version of a package, "?" if it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "?"


def table_text(table: Mapping[str, Any]) -> str:
    """Return JSON with one line for each kernel and shape."""
    lines = []
    for name, value in table.items():
        if name in ("kernels", "us"):
            kernels = []
            for kernel, shapes in sorted(value.items()):
                of_shapes = [
                    f"   {json.dumps(shape)}: "
                    + json.dumps({str(t): shapes[shape][t] for t in sorted(shapes[shape])})
                    for shape in sorted(shapes)
                ]
                kernels.append(f"  {json.dumps(kernel)}: {{\n" + ",\n".join(of_shapes) + "}")
            body = "{\n" + ",\n".join(kernels) + "}" if kernels else "{}"
            lines.append(f" {json.dumps(name)}: {body}")
        else:
            lines.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "}\n"
