"""The shape of the package: who imports whom, how big it is, what imports cost, what is public."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

import quantload
from quantload.cli import main

ROOT = Path(__file__).parent.parent
BASE = {"errors", "arguments", "progress"}
LAYERED = BASE | {"quant", "mappers", "runtime"}
MAY_IMPORT = {
    "__init__": LAYERED | {"loader", "layers", "accuracy", "api"},
    "__main__": {"cli"},
    "errors": set(),
    "arguments": {"errors"},
    "progress": set(),
    "quant": BASE,
    "mappers": {"errors", "arguments", "quant"},
    "runtime": BASE | {"quant"},
    "loader": BASE | {"quant", "mappers"},
    "layers": LAYERED,
    "accuracy": LAYERED | {"loader", "layers"},
    "api": LAYERED | {"loader", "layers", "accuracy"},
    "cli": LAYERED | {"loader", "layers", "accuracy", "api"},
}
COMMAND_LINE = {  # one part, in several files
    *("cli", "cli_options", "cli_convert", "cli_plan", "cli_output", "cli_inspect", "cli_compare"),
    *("cli_bench", "cli_generate"),
    *(
        "cli_allocate",
        "cli_baseline",
        "cli_bisect",
        "cli_baseline_report",
        "pytest_plugin",
        "pytest_plugin_summary",
        "pytest_plugin_tokens",
        "cli_doctor",
        "cli_explain",
        "cli_model",
        "cli_stats",
        "cli_compare_structure",
        "cli_tokens",
    ),
    "cli_tune",
}
# what users call, in several files
PUBLIC = {
    "api",
    "api_allocate",
    "api_baseline",
    "api_bisect",
    "api_explain",
    "api_load",
    "api_plan",
    "api_stats",
    "written_models",
}
PUBLIC |= {"api_bench", "api_cache", "api_generate"}
TRANSFORMERS = (
    "layers/attention.py",
    "layers/attention_proof.py",
    "layers/aux_hidden_states.py",
    "layers/checkpoint_names.py",
    "layers/converters.py",
    "layers/fused_decoder.py",
    "layers/fused_proof.py",
    "layers/fused_recording.py",
    "layers/config_class.py",
    "layers/meta_model.py",
    "layers/registry.py",
    "layers/sampling.py",
    "layers/siblings.py",
    "layers/step_model.py",
    "layers/surgery.py",
    "layers/text.py",
    "loader/gguf_tokenizer.py",
    "loader/model_shapes.py",
)
FENCED = {  # third-party package -> the only places that may import it
    "triton": ("runtime/kernels/",),
    "numba": ("quant/compiled",),
    "llvmlite": ("quant/compiled",),
    "transformers": TRANSFORMERS,
    "tokenizers": ("loader/gguf_tokenizer.py",),
    "safetensors": (),
    "huggingface_hub": ("loader/hub.py", "loader/push.py"),
    "gguf": ("loader/gguf_", "loader/formats/gguf.py"),
    "compressed_tensors": ("loader/formats/compressed_tensors_config.py",),
    "click": ("cli",),
    "jinja2": ("accuracy/html_pages.py",),
    "markupsafe": ("accuracy/html_",),
    "rich": ("cli",),
    "pytest": ("pytest_plugin",),
}
MAX_FILE = 400

PUBLIC_NAMES = [
    "LayerReport",
    "ModelComparison",
    "NameRules",
    "Parallel",
    "Plan",
    "QuantConfig",
    "QuantTensor",
    "QuantloadError",
    "Scheme",
    "TextDecoder",
    "VerifyReport",
    "compare",
    "convert",
    "doctor",
    "explain",
    "generate",
    "inspect",
    "load",
    "load_tokenizer",
    "load_weights",
    "plan",
    "register_model",
    "stats",
    "verify",
]
TOKENS = ("--data", "--token-ids", "--prompt", "--prompts", "--generated", "--max-tokens")
OPTIONS = {
    "bench": {
        *("model", "--synthetic", "--layers", "--batch", "--prompt-tokens", "--new-tokens"),
        *("--kv-cache", "--no-graphs", "--no-fuse", "--device", "--dtype", "--scheme"),
        *("--trust-remote-code", "--json", "--quiet"),
    },
    "allocate": {
        *("source", "output", "--bits", "--schemes", *TOKENS, "--score", "--no-data", "--scores"),
        *("--cost", "--no-verify", "--device", "--dtype", "--overwrite", "--trust-remote-code"),
        *("--json", "--quiet"),
    },
    "baseline": set(),
    "bisect": {
        *("reference", "candidate", "--data", "--token-ids", "--prompt", "--prompts"),
        *("--generated", "--max-tokens", "--by", "--first-tokens", "--top", "--device", "--dtype"),
        *("--markdown", "--trust-remote-code", "--all", "--json", "--quiet"),
    },
    "compare": {
        *("reference", "candidate", *TOKENS, "--all", "--structure", "--weights", "--layers"),
        *("--fail-over", "--trust-remote-code"),
        *("--markdown", "--html", "--json", "--quiet", "--device", "--dtype"),
    },
    "convert": {
        *("source", "output", "--scheme", "--rule", "--config", "--group-size", "--dtype"),
        *("--on-split", "--max-shard-size", "--plan", "--no-verify", "--all", "--lossless"),
        *("--stats", "--input-absmax", "--observer"),
        *("--trust-remote-code", "--json", "--quiet", "--check-tp", "--push", "--private"),
        *("--format", "--layers", "--workers", "--memory", "--device"),
    },
    "doctor": {
        *("output", "--engine", "--tp", "--device", "--all", "--trust-remote-code", "--json"),
    },
    "explain": {
        *("model", "--tokens", "--device", "--dtype", "--scheme", "--rule"),
        *("--trust-remote-code", "--all", "--json", "--quiet"),
    },
    "formats": set(),
    "generate": {
        *("model", "prompts", "--max-new-tokens", "--chat", "--stop", "--sample", "--temperature"),
        *("--top-k", "--top-p", "--min-p", "--repetition-penalty", "--seed", "--stream"),
        *("--device", "--dtype", "--scheme", "--rule", "--trust-remote-code", "--json", "--quiet"),
        "--kv-cache",
    },
    "inspect": {
        *("source", "--all", "--json", "--check-tp", "--explain", "--model", "--tp", "--pp"),
        "--trust-remote-code",
    },
    "schemes": set(),
    "stats": {
        *("source", "output", *TOKENS, "--device", "--dtype"),
        *("--overwrite", "--trust-remote-code", "--json", "--quiet"),
    },
    "tune": {
        *("model", "--shapes", "--schemes", "--tokens", "--seconds", "--again", "--workers"),
        *("--trust-remote-code", "--json", "--quiet"),
    },
    "verify": {"output", "--source", "--nearest", "--all", "--json", "--quiet"},
}


def name(path):
    return path.relative_to(ROOT).as_posix()


def part(path):
    first = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if first in PUBLIC:
        return "api"
    return "cli" if first in COMMAND_LINE else first


SOURCES = sorted(p for p in ROOT.rglob("*.py") if part(p) in MAY_IMPORT)
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))


def imports(path, *, for_types=True):
    """Yield (line, dotted name) of every import, also those inside functions.

    Without `for_types` what stands under `if TYPE_CHECKING` is left out.
    """
    tree = ast.parse(path.read_text())
    unreal = [n for n in ast.walk(tree) if isinstance(n, ast.If) and _is_type_checking(n.test)]
    left_out = set() if for_types else {inner for node in unreal for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name(path)}:{node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def _is_type_checking(test):
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def test_every_root_file_is_in_the_table():
    found = {part(p) for p in ROOT.glob("*.py")}
    folders = {p.parent.name for p in ROOT.glob("*/__init__.py")}
    assert found | folders == set(MAY_IMPORT)


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_imports_point_down(path):
    for line, target in imports(path):
        top, _, rest = target.partition(".")
        where = f"{name(path)}:{line}"
        if top == "quantload":
            to = rest.split(".")[0]
            to = "cli" if to in COMMAND_LINE else "api" if to in PUBLIC else to
            assert to in {part(path), "__version__"} or to in MAY_IMPORT[part(path)], (
                f"{where}: {part(path)} may not import {to}"
            )
    for line, target in imports(path, for_types=False):
        top = target.partition(".")[0]
        where = f"{name(path)}:{line}"
        if top in FENCED:
            assert name(path).startswith(FENCED[top]), f"{where}: {top} may not be imported here"


def test_no_import_cycles():
    modules = {"quantload." + name(p).removesuffix(".py").replace("/", "."): p for p in SOURCES}
    edges = {
        module: {
            other
            for _, target in imports(path)
            for other in (target, target.rpartition(".")[0])
            if other in modules and other != module
        }
        for module, path in modules.items()
    }
    while True:  # take away what imports nothing that is left; a rest is a cycle
        leaves = {module for module, targets in edges.items() if not targets & set(edges)}
        if not leaves:
            break
        edges = {module: targets for module, targets in edges.items() if module not in leaves}
    assert sorted(edges) == []


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_file_is_small_and_tidy(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE
    assert path.stem not in {"utils", "helpers", "misc", "common", "base"}
    assert not re.findall(r"\b(?:TODO|FIXME|XXX)\b(?!\(#\d+\))", text), "write TODO(#issue)"


def test_root_names_shadow_nothing():
    names = {p.stem for p in ROOT.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert not names & set(sys.stdlib_module_names) - {"__init__", "__main__"}


def test_packages_list_equals_folders():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    folders = {"quantload"} | {
        "quantload." + name(p.parent).replace("/", ".") for p in SOURCES if p.parent != ROOT
    }
    assert listed == folders


def _loaded_by(code, candidates):
    """Which of some modules are loaded after running `code` in a new process."""
    ask = f"{code}\nimport sys\nprint(*[m for m in {candidates} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    return out.stdout.split()


def test_bare_import_is_light():
    heavy = ("torch", "triton", "transformers", "numpy", "huggingface_hub", "click")
    assert _loaded_by("import quantload", heavy) == []


def test_the_command_line_starts_light():
    heavy = ("torch", "triton", "transformers", "numpy", "huggingface_hub")
    assert _loaded_by("import quantload.cli", heavy) == []


def test_inspecting_needs_no_transformers():
    assert _loaded_by("import quantload.api", ("transformers", "triton")) == []


def test_the_loader_needs_neither_models_nor_kernels():
    code = "import quantload.loader.convert, quantload.loader.formats, quantload.accuracy.verify"
    heavy = ("transformers", "triton", "compressed_tensors", "huggingface_hub", "numba")
    assert _loaded_by(code, heavy) == []


def test_public_names():
    assert quantload.__all__ == PUBLIC_NAMES
    for public in PUBLIC_NAMES:
        assert getattr(quantload, public) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        quantload.nothing  # noqa: B018


def test_command_line_options():
    found = {
        command: {
            (max(option.opts, key=len) if isinstance(option, click.Option) else option.name)
            for option in main.commands[command].params
        }
        for command in main.commands
    }
    assert found == OPTIONS


def test_every_command_and_option_has_a_help_text():
    for command in main.commands.values():
        assert command.help
        for option in command.params:
            shown = isinstance(option, click.Argument) or option.help or option.name in _PLAIN
            assert shown, f"{command.name} {option.name}"


_PLAIN = {"on_split", "max_shard_size", "max_new_tokens", "max_tokens"}  # the name says it


@pytest.mark.parametrize("path", TESTS, ids=name)
def test_every_test_asserts(path):
    tree = ast.parse(path.read_text())
    checkers = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith("test_")
        and _checks(node, set())
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            where = f"{name(path)}:{node.lineno}: {node.name}"
            assert not isinstance(node.body[0], ast.Return), f"{where} is disabled by return"
            assert _checks(node, checkers), f"{where} checks nothing"


def _checks(node, checkers):
    return any(
        isinstance(n, ast.Assert)
        or (isinstance(n, ast.Attribute) and n.attr in {"raises", "warns", "fail", "assert_close"})
        or (isinstance(n, ast.Name) and (n.id in checkers or n.id.startswith("assert_")))
        for n in ast.walk(node)
    )
