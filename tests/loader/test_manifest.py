"""The manifest: every file by its sha256, the same for the same conversion, and every damage."""

import json
import shutil
import subprocess

import pytest
import tiny_checkpoints as tiny
from converting import converted, plan_of

from quantload import __version__
from quantload.errors import CheckpointError, OutputError
from quantload.loader.manifest import (
    MANIFEST,
    check_files,
    describes,
    manifest,
    read_manifest,
    sha256_of,
)

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny.llama(tmp_path_factory.mktemp("manifest") / "tiny-llama")


@pytest.fixture(scope="module")
def finished(source):
    (source / "README.md").write_text("---\nlicense: mit\n---\nThe source.")
    (source / "code").mkdir()
    (source / "code" / "inner.py").write_text("x = 1\n")
    return converted(source, source.parent / "out", "W8A8", ["lm_head=W4A16:g32"])


@pytest.fixture
def output(tmp_path, finished):
    return shutil.copytree(finished, tmp_path / "out")


def problems(folder):
    check = check_files(folder, threads=2)
    assert check.passed == (not check.problems)
    return check.problems


def test_every_file_with_what_sha256sum_says(finished):
    content = read_manifest(finished)
    on_disk = {f.relative_to(finished).as_posix() for f in finished.rglob("*") if f.is_file()}
    assert content["files"].keys() == on_disk - {MANIFEST}
    assert {WEIGHTS, "config.json", "README.md", "code/inner.py"} <= content["files"].keys()
    command = ["sha256sum", *content["files"]]
    lines = subprocess.run(command, cwd=finished, capture_output=True, text=True, check=True)
    digests = {line.split()[1]: line.split()[0] for line in lines.stdout.splitlines()}
    assert {name: entry["sha256"] for name, entry in content["files"].items()} == digests
    sizes = {name: (finished / name).stat().st_size for name in content["files"]}
    assert {name: entry["bytes"] for name, entry in content["files"].items()} == sizes


def test_what_it_says_of_the_conversion(source, finished):
    content = read_manifest(finished)
    assert content["quantload"] == __version__
    assert content["source"]["name"] == "tiny-llama"
    assert content["source"]["format"] == "dense"
    assert content["decisions"]["scheme"] == "W8A8"
    assert content["decisions"]["rules"] == ["lm_head = W4A16:g32"]
    assert content["decisions"]["options"]["max_shard_bytes"] is None
    assert content["modules"] == {"W4A16:g32": 1, "W8A8": 14, "full precision": 1}
    assert content["command"] == (
        "quantload convert tiny-llama OUTPUT --scheme W8A8 --rule lm_head=W4A16:g32"
    )
    tensors = (source / WEIGHTS).read_bytes()
    header = 8 + int.from_bytes(tensors[:8], "little")
    counted = content["source_bytes"]
    assert counted["total"] == len(tensors) - header
    assert (
        sum(counted[use] for use in ("quantized", "copied", "decoded", "dropped"))
        == (counted["total"])
    )
    embedding = 96 * 64 * 2
    assert counted["copied"] == embedding + 5 * 64 * 2
    assert str(source.parent) not in (finished / MANIFEST).read_text()


def test_the_same_again_has_the_same_bytes(source, finished, tmp_path):
    moved = shutil.copytree(source, tmp_path / "elsewhere" / "tiny-llama")
    again = converted(moved, tmp_path / "another name", "W8A8", ["lm_head=W4A16:g32"])
    assert (again / MANIFEST).read_bytes() == (finished / MANIFEST).read_bytes()
    plan = plan_of(source, "W8A8", ["lm_head=W4A16:g32"])
    assert manifest(plan, finished, threads=3) == manifest(plan, finished) == read_manifest(again)


def test_it_knows_its_plan(source, finished, tmp_path):
    assert describes(finished, plan_of(source, "W8A8", ["lm_head=W4A16:g32"]))
    assert not describes(finished, plan_of(source, "W8A8"))
    assert not describes(finished, plan_of(source, "W8A8", ["lm_head=W4A16:g64"]))
    other = tiny.llama(tmp_path / "tiny-llama", layers=1)
    assert not describes(finished, plan_of(other, "W8A8", ["lm_head=W4A16:g32"]))
    assert not describes(tmp_path, plan_of(source, "W8A8"))


# -- checks ----------------------------------------------------------------------------------------


def test_nothing_is_wrong(output):
    check = check_files(output)
    assert check.problems == ()
    assert check.num_files == len(read_manifest(output)["files"])
    assert check.num_bytes == sum(
        f.stat().st_size for f in output.rglob("*") if f.is_file() and f.name != MANIFEST
    )


@pytest.mark.parametrize("place", [0, 100, -1])
def test_one_bit(output, place):
    data = bytearray((output / WEIGHTS).read_bytes())
    data[place] ^= 4
    (output / WEIGHTS).write_bytes(data)
    (problem,) = problems(output)
    expected = read_manifest(output)["files"][WEIGHTS]["sha256"]
    assert problem.startswith(f"`{WEIGHTS}` has changed: its sha256 is `")
    assert problem.endswith(f"the manifest says `{expected}`")


def test_sizes_missing_and_extra(output):
    (output / WEIGHTS).write_bytes((output / WEIGHTS).read_bytes()[:-1])
    (output / "config.json").unlink()
    (output / "code" / "new.py").write_text("")
    (output / ".gitattributes").write_text("hidden files do not count")
    size = read_manifest(output)["files"][WEIGHTS]["bytes"]
    assert problems(output) == (
        "`config.json` is missing",
        "`code/new.py` is not in the manifest",
        f"`{WEIGHTS}` has {size - 1} bytes, the manifest says {size}",
    )


def test_git_attributes_of_the_source(tmp_path):
    """Without the manifest's word nobody would see them change, and `--push` would leave them."""
    folder = tiny.llama(tmp_path / "source", layers=1)
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    (folder / ".env").write_text("secret")
    output = converted(folder, tmp_path / "out", "W8A8")
    assert ".gitattributes" in read_manifest(output)["files"]
    assert ".env" not in read_manifest(output)["files"]
    assert problems(output) == ()
    (output / ".gitattributes").write_text("*.safetensors filter=own\n")
    (problem,) = problems(output)
    assert problem.startswith("`.gitattributes` has changed")
    (output / ".gitattributes").unlink()
    assert problems(output) == ("`.gitattributes` is missing",)


def test_a_link_to_the_bytes_is_the_file(output, tmp_path):
    (output / WEIGHTS).rename(tmp_path / "blob")
    (output / WEIGHTS).symlink_to(tmp_path / "blob")
    assert problems(output) == ()
    (tmp_path / "blob").unlink()
    assert problems(output) == (f"`{WEIGHTS}` is missing",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is damaged"),
        ("[1]", "expected `1`"),
        ('{"quantload_manifest": 2, "files": {}}', "has `quantload_manifest` = `2`, expected `1`"),
        ('{"quantload_manifest": 1}', "lists no files"),
        ('{"quantload_manifest": 1, "files": {}}', "lists no files"),
        ('{"quantload_manifest": 1, "files": {"a": {"bytes": 1}}}', "lists no files"),
        ('{"quantload_manifest": 1, "files": {"../a": {"bytes": 1, "sha256": ""}}}', "lists no"),
        ('{"quantload_manifest": 1, "files": {"/a": {"bytes": 1, "sha256": ""}}}', "lists no"),
        ("[" * 100_000, "is damaged"),
    ],
)
def test_a_manifest_that_is_not_sound_is_a_failed_check(tmp_path, text, message):
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError) as caught:
        read_manifest(tmp_path)
    assert message in caught.value.message
    check = check_files(tmp_path)
    assert not check.passed
    assert check.problems == (caught.value.message,)


def test_without_a_manifest_there_is_nothing_to_check(tmp_path):
    with pytest.raises(CheckpointError, match=r"no `quantload-manifest\.json` can be read"):
        check_files(tmp_path)


def test_progress_counts_every_byte(output):
    class Counter:
        total = done = 0

        def start(self, phase, *, total, unit):
            assert (phase, unit) == ("sha256", "B")
            self.total = total

        def advance(self, amount, *, note=""):
            self.done += amount

        def finish(self):
            assert self.done == self.total

    counter = Counter()
    check = check_files(output, threads=4, progress=counter)
    assert counter.done == check.num_bytes > 0


def test_files_larger_than_a_read(tmp_path):
    sizes = {"empty": 0, "one": 1, "just": 1 << 23, "over": (1 << 23) + 1}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(b"\xa5" * size)
    names = list(sizes)
    found = sha256_of([tmp_path / name for name in names], threads=3)
    done = subprocess.run(["sha256sum", *names], cwd=tmp_path, capture_output=True, check=True)
    digests = [line.split()[0].decode() for line in done.stdout.splitlines()]
    assert found == list(zip(sizes.values(), digests, strict=True))


def test_a_file_that_cannot_be_read(source, tmp_path, monkeypatch):
    (tmp_path / "a").write_text("x")

    def broken(*_, **__):
        raise OSError(5, "Input/output error", str(tmp_path / "a"))

    monkeypatch.setattr("quantload.loader.manifest.sha256_of", broken)
    with pytest.raises(OutputError, match=r"cannot read `.*a` back: Input"):
        manifest(plan_of(source, "W8A8"), tmp_path)
    listing = {"quantload_manifest": 1, "files": {"a": {"bytes": 1, "sha256": "0"}}}
    (tmp_path / MANIFEST).write_text(json.dumps(listing))
    assert problems(tmp_path) == (f"`{tmp_path / 'a'}` cannot be read: Input/output error",)
