"""Hub ids: a cache laid out like the hub's, in real offline mode, and every error of the hub."""

import json
import os
import subprocess
import sys

import huggingface_hub
import pytest
import tiny_checkpoints as tiny
import torch
from click.testing import CliRunner
from huggingface_hub import constants
from huggingface_hub import errors as hub_errors

from quantload.cli import main
from quantload.errors import SourceNotFound
from quantload.loader.hub import fetch_snapshot, is_hub_id
from quantload.loader.open import open_checkpoint

try:  # what huggingface_hub 2 speaks with; version 1 has httpx
    import httpx2 as httpx
except ImportError:
    import httpx

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "89abcdef0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("owner/name", True),
        ("owner/name@main", True),
        ("Qwen/Qwen2.5-0.5B_x@refs/pr/1", True),
        ("owner/name@" + COMMIT, True),
        ("name", False),
        ("./model", False),
        ("../model", False),
        ("/owner/name", False),
        ("owner/name/more", False),
        ("owner/", False),
        ("owner/name@", False),
        ("owner/na me", False),
        ("owner/näme", False),
    ],
)
def test_is_hub_id(text, expected):
    assert is_hub_id(text) is expected


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A hub cache that holds two revisions of tiny/llama: `main` and a tag."""
    root = tmp_path / "hub" / "models--tiny--llama"
    for commit, revision, seed in ((COMMIT, "main", 1), (OTHER, "v1.0", 2)):
        made = tiny.llama(tmp_path / f"made-{seed}", layers=1, seed=seed)
        (root / "refs").mkdir(parents=True, exist_ok=True)
        (root / "refs" / revision).write_text(commit)
        snapshot = root / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (root / "blobs").mkdir(exist_ok=True)
        for file in made.iterdir():
            blob = root / "blobs" / f"{seed}-{file.name}"
            file.rename(blob)
            (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    return tmp_path / "hub"


def _inspect_offline(cache, source):
    """Run the command line in a process of its own: huggingface_hub reads its settings once."""
    return subprocess.run(
        [sys.executable, "-m", "quantload", "inspect", source, "--json"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_offline_cache(cache):
    done = _inspect_offline(cache, "tiny/llama")
    assert done.returncode == 0, done.stderr
    assert '"source": "tiny/llama"' in done.stdout
    assert "model.layers.0.self_attn.q_proj" in done.stdout


def test_offline_without_the_repository(cache, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    done = CliRunner().invoke(main, ["inspect", "tiny/nothing@v7"])
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "`tiny/nothing` at `v7` is no folder, not in the hub cache" in done.stderr
    assert "HF_HUB_OFFLINE=1" in done.stderr
    assert "Traceback" not in done.stderr


def test_offline_revisions(cache, monkeypatch):
    assert constants.is_offline_mode(), "conftest.py sets it for all tests"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    weights = {}
    for revision in ("main", "v1.0", OTHER):
        checkpoint = open_checkpoint(f"tiny/llama@{revision}")
        weights[revision] = checkpoint.read("model.norm.weight")
    assert (weights["v1.0"] == weights[OTHER]).all()
    assert (weights["v1.0"] != weights["main"]).any()
    with pytest.raises(SourceNotFound, match=r"`tiny/llama` at `v2.0` is no folder"):
        open_checkpoint("tiny/llama@v2.0")


def test_a_folder_of_the_same_name_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", pytest.fail)
    tiny.llama(tmp_path / "tiny" / "llama", layers=1)
    assert open_checkpoint("tiny/llama").name == "tiny/llama"


def test_what_is_asked_of_the_hub(tmp_path, monkeypatch):
    asked = {}

    def snapshot_download(repo, **options):
        asked.update(options, repo=repo)
        return str(tiny.llama(tmp_path / "m", layers=1))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    open_checkpoint("tiny/llama@refs/pr/3")
    assert (asked["repo"], asked["revision"]) == ("tiny/llama", "refs/pr/3")
    wanted = huggingface_hub.utils.filter_repo_objects(
        [
            *(
                "model.safetensors",
                "config.json",
                "pytorch_model.bin",
                "tokenizer.model",
                "LICENSE",
            ),
            *("original/consolidated.safetensors", "consolidated.safetensors", "a.gguf", "x.h5"),
            *("modeling_x.py", "chat_template.jinja", "model.safetensors.index.json", "README.md"),
        ],
        allow_patterns=asked["allow_patterns"],
        ignore_patterns=asked["ignore_patterns"],
    )
    assert sorted(wanted) == [
        "LICENSE",
        "README.md",
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "modeling_x.py",
        "tokenizer.model",
    ]


def test_a_repository_with_pickled_weights_only(tmp_path, monkeypatch):
    made = tiny.tensors(tiny.config(layers=1))
    asked = []

    def snapshot_download(_repo, **options):
        asked.append(options)
        files = ["config.json", "pytorch_model.bin", "training_args.bin", "consolidated.00.pth"]
        wanted = huggingface_hub.utils.filter_repo_objects(
            files,
            allow_patterns=options["allow_patterns"],
            ignore_patterns=options["ignore_patterns"],
        )
        for name in wanted:
            content = tiny.config(layers=1)
            if name.endswith(".bin"):
                torch.save(made, tmp_path / name)
            else:
                (tmp_path / name).write_text(json.dumps(content))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert set(open_checkpoint("tiny/llama").tensors) == set(made)
    assert len(asked) == 2, "pickles are fetched only where there is nothing else"
    assert sorted(f.name for f in tmp_path.iterdir()) == ["config.json", "pytorch_model.bin"]


def _response(status):
    return httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co/x"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            hub_errors.GatedRepoError("gated", response=_response(403)),
            r"access to `a/b` is gated.*\n\nhint: accept its terms on https://huggingface.co/a/b",
        ),
        (
            hub_errors.RepositoryNotFoundError("404", response=_response(404)),
            r"no folder and no hub repository is called `a/b`\n\nhint: check the name",
        ),
        (
            hub_errors.RevisionNotFoundError("404", response=_response(404)),
            r"`a/b` has no revision `v1`",
        ),
        (
            hub_errors.LocalEntryNotFoundError("x"),
            r"`a/b` at `v1` is no folder, not in the hub cache",
        ),
        (hub_errors.HfHubHTTPError("502", response=_response(502)), r"cannot be fetched.*502"),
        (hub_errors.OfflineModeIsEnabled("offline"), r"cannot be fetched.*offline"),
        (httpx.ReadTimeout("slow"), r"cannot be fetched from the hub: slow"),
        (OSError(28, "No space left on device"), r"cannot be fetched.*No space left"),
        (hub_errors.HFValidationError("bad name"), r"neither a folder nor a hub id: `a/b@v1`"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_of_the_hub(monkeypatch, error, message):
    def snapshot_download(repo, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(SourceNotFound, match=f"(?s){message}"):
        fetch_snapshot("a/b@v1")


def test_a_name_that_the_hub_refuses():
    with pytest.raises(SourceNotFound, match="neither a folder nor a hub id"):
        open_checkpoint("owner/two--dashes")
