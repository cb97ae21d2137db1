"""Uploads against a hub in a thread: what arrives, what is refused, what a second call sends."""

import json
import os
import subprocess
import sys

import fake_hub
import pytest
import tiny_checkpoints as tiny
from converting import converted
from huggingface_hub import constants
from safetensors.torch import load_file

from quantload.errors import ConfigError, UploadError
from quantload.loader.manifest import MANIFEST
from quantload.loader.push import check_push, push_folder

# huggingface_hub 2 hands its HTTP library files in the old way
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
REPO = "owner/tiny-w8a8"
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    running, stop = fake_hub.start()
    monkeypatch.setattr(constants, "ENDPOINT", running.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", fake_hub.TOKEN)
    yield running
    stop()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("push")
    return converted(tiny.llama(folder / "source"), folder / "out", "W8A8")


@pytest.fixture
def output(tmp_path, finished):
    copy = tmp_path / "out"
    copy.mkdir()
    for file in finished.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def contents(folder):
    return {f.name: f.read_bytes() for f in folder.iterdir() if not f.name.startswith(".")}


def remote(hub, repo=REPO):
    return {k: v for k, v in hub.repositories[repo].files.items() if k != ".gitattributes"}


def refused(folder, repo=REPO, **options):
    with pytest.raises(UploadError) as caught:
        push_folder(folder, repo, **options)
    return str(caught.value)


# -- what arrives ----------------------------------------------------------------------------------


def test_everything_arrives(hub, output):
    (output / ".DS_Store").write_bytes(b"hidden files stay")
    address = push_folder(output, REPO, threads=2, quiet=True)
    assert remote(hub) == contents(output)
    assert {WEIGHTS, "config.json", "README.md", MANIFEST} <= remote(hub).keys()
    (commit,) = hub.repositories[REPO].commits
    assert address == f"{hub.endpoint}/{REPO}/commit/{commit}"
    assert not hub.repositories[REPO].private
    assert hub.count("^PUT /lfs/") == len(hub.repositories[REPO].large) >= 1


def test_git_attributes_of_the_source_arrive(hub, tmp_path):
    folder = tiny.llama(tmp_path / "source", layers=1)
    (folder / ".gitattributes").write_text("*.bin filter=lfs\n")
    push_folder(converted(folder, tmp_path / "out", "W8A8"), REPO)
    assert hub.repositories[REPO].files[".gitattributes"] == b"*.bin filter=lfs\n"


def test_a_private_repository(hub, output):
    push_folder(output, REPO, private=True)
    assert hub.repositories[REPO].private


def test_a_private_one_is_not_replaced_by_a_public_one(hub, output):
    hub.repositories[REPO] = fake_hub.Repository(private=False)
    assert f"`{REPO}` exists and is public" in refused(output, private=True)
    assert hub.repositories[REPO].files == {}


def test_a_second_call_sends_only_what_is_missing(hub, output):
    hub.refusals["POST .*/commit/"] = 500
    message = refused(output)
    assert "refused with 500" in message
    assert "run the same command again" in message
    sent = hub.count("^PUT /lfs/")
    assert sent >= 1
    assert hub.repositories[REPO].commits == []
    hub.refusals.clear()
    push_folder(output, REPO)
    assert hub.count("^PUT /lfs/") == sent
    assert remote(hub) == contents(output)


def test_a_third_call_changes_nothing(hub, output):
    first = push_folder(output, REPO)
    assert push_folder(output, REPO) == first
    assert len(hub.repositories[REPO].commits) == 1


def test_a_file_that_cannot_be_sent(hub, output):
    hub.refusals["PUT /lfs/"] = 403
    message = refused(output)
    assert f"the upload to `{REPO}` failed: Error while uploading" in message
    assert hub.repositories[REPO].commits == []


def test_what_did_not_arrive_is_noticed(hub, output):
    hub.lost.add(WEIGHTS)
    assert f"does not hold what was sent: `{WEIGHTS}`" in refused(output)


def test_in_a_process_of_its_own(hub, output):
    code = "from pathlib import Path; import sys; from quantload.loader.push import push_folder; "
    code += "print(push_folder(Path(sys.argv[1]), sys.argv[2]))"
    env = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    env |= {"HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": fake_hub.TOKEN}
    command = [sys.executable, "-c", code, str(output), REPO]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{hub.endpoint}/{REPO}/commit/")
    assert remote(hub) == contents(output)


# -- what is refused before anything is sent -------------------------------------------------------


def test_a_folder_without_manifest(hub, output):
    (output / MANIFEST).unlink()
    message = refused(output)
    assert f"`{output}` is not a finished output: no `{MANIFEST}` can be read" in message
    assert hub.requests == []


def test_a_changed_file(hub, output):
    data = bytearray((output / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (output / WEIGHTS).write_bytes(data)
    assert f"is not as it was written: `{WEIGHTS}` has changed" in refused(output)
    assert hub.requests == []


def test_a_missing_and_an_extra_file(hub, output):
    (output / "config.json").unlink()
    (output / "model-00002-of-00002.safetensors").write_bytes(b"")
    message = refused(output)
    assert "`config.json` is missing" in message
    assert "`model-00002-of-00002.safetensors` is not in the manifest" in message
    assert hub.requests == []


def test_weights_of_another_model_on_the_hub(hub, output):
    stale = "model-00001-of-00002.safetensors"
    files = {stale: b"x", "picture.png": b"x", "hf_quant_config.json": b"{}"}
    hub.repositories[REPO] = fake_hub.Repository(files=files)
    message = refused(output)
    assert (
        f"another checkpoint, which engines would read too: `hf_quant_config.json`, `{stale}`"
        in (message)
    )
    assert "picture.png" not in message
    assert hub.repositories[REPO].commits == []


def test_no_token(hub, output, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    message = refused(output)
    assert f"cannot upload to `{REPO}`: there is no token" in message
    assert "hf auth login" in message
    assert hub.requests == []


def test_offline(hub, output, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "huggingface_hub is in offline mode" in refused(output)
    assert hub.requests == []


def test_a_wrong_token(hub, output, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(UploadError, match="does not know the token"):
        check_push(REPO)
    assert "token" in refused(output)
    assert hub.repositories == {}


def test_a_token_that_may_not_write(hub, output):
    hub.refusals["POST /api/repos/create"] = 403
    message = refused(output)
    assert f"the token may not write `{REPO}`" in message
    assert "permission to write" in message
    assert hub.repositories == {}


def test_a_token_that_may_only_read_a_repository(hub, output):
    hub.repositories[REPO] = fake_hub.Repository()
    hub.refusals["/preupload/"] = 403
    assert f"the token may not write `{REPO}`" in refused(output)


def test_nobody_answers(hub, output, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UploadError, match=f"the upload to `{REPO}` failed: "):
        check_push(REPO)


@pytest.mark.parametrize("repo", ["name", "owner/name@main", "./out", "owner/na me", ""])
def test_not_a_name(hub, output, repo):
    with pytest.raises(ConfigError, match="expected `OWNER/NAME`"):
        push_folder(output, repo)
    assert hub.requests == []


def test_what_is_on_the_hub_is_the_model(hub, output, tmp_path):
    push_folder(output, REPO)
    back = tmp_path / "back"
    back.mkdir()
    for name, data in remote(hub).items():
        (back / name).write_bytes(data)
    assert load_file(back / WEIGHTS).keys() == load_file(output / WEIGHTS).keys()
    listed = json.loads((back / MANIFEST).read_text())["files"]
    assert {name: entry["bytes"] for name, entry in listed.items()} == {
        name: len(data) for name, data in remote(hub).items() if name != MANIFEST
    }
