"""Public bug reports about files: what is written, interrupted, left out, linked, and indexed."""

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_checkpoints as tiny
import torch
from click.testing import CliRunner
from constant_weights import fp8, plain
from converting import converted, plan_of
from fp8_files import opened, write
from int_packing import gptq_tensors, random_parts, values_of
from safetensors import safe_open
from safetensors.torch import load_file

import quantload
from quantload.accuracy.verify import verify_sources
from quantload.cli import main
from quantload.errors import CheckpointError, OutputError, QuantloadError
from quantload.loader import side_files, writer
from quantload.loader.convert import run_plan
from quantload.loader.output_files import OutputTensor, assign_files
from quantload.loader.writer import OutputFiles
from quantload.progress import Silent

LAYER = "model.layers.0"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


def _written(folder, tensors, max_bytes=1 << 20):
    planned = [[OutputTensor(n, t.dtype, tuple(t.shape), n)] for n, t in tensors.items()]
    folder.mkdir()
    out = OutputFiles(folder, assign_files(planned, max_bytes=max_bytes), final=folder)
    out.create()
    for name, tensor in tensors.items():
        out.write(name, tensor)
    out.write_index()
    out.close()
    return folder


def test_br076_index_omits_and_total_size(tmp_path):
    content = tiny.config(layers=1)
    shards = [{**plain("model.layers.0.mlp.up_proj")}, {**plain("lm_head"), **plain("mtp.fc")}]
    folder = tiny.write(tmp_path / "in", content, shards)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    del index["weight_map"]["mtp.fc.weight"]
    file.write_text(json.dumps({**index, "metadata": {"total_size": 1}}))
    done = CliRunner().invoke(main, ["inspect", str(folder), "--json"])
    assert "mtp.fc.weight" in done.stderr
    assert "not listed in the index" in done.stderr
    out = converted(folder, tmp_path / "out", "dense", max_shard_bytes=9000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    tensors = {n: t for f in out.glob("*.safetensors") for n, t in load_file(f).items()}
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    two = {"a": torch.zeros(3), "b": torch.zeros(5, dtype=torch.bfloat16)}
    written = _written(tmp_path / "two", two, max_bytes=1) / "model.safetensors.index.json"
    assert json.loads(written.read_text())["metadata"]["total_size"] == 22


def test_br079_failure_between_weights_and_config(tmp_path, monkeypatch):
    folder = tiny.llama(tmp_path / "in", layers=1)
    (folder / "preprocessor_config.json").write_text("{}")

    def copyfile(source, _target):
        raise PermissionError(errno.EACCES, "Permission denied", str(source))

    monkeypatch.setattr(side_files.shutil, "copyfile", copyfile)
    done = CliRunner().invoke(
        main, ["convert", str(folder), str(tmp_path / "out"), "--scheme=W8A8"]
    )
    assert done.exit_code == 2
    assert "preprocessor_config.json" in done.stderr
    assert _names(tmp_path) == [".out.unfinished", "in"]
    monkeypatch.undo()
    out = converted(folder, tmp_path / "out", "W8A8")
    assert _names(tmp_path) == ["in", "out"]
    assert (out / "preprocessor_config.json").read_text() == "{}"


def test_br079_a_folder_in_place_of_a_file(tmp_path):
    folder = tiny.llama(tmp_path / "in", layers=1)
    (folder / "preprocessor_config.json").mkdir()
    out = opened(converted(folder, tmp_path / "out", "W8A8"))
    assert verify_sources(out, opened(folder), Silent()).passed


def test_br081_quant_method_missing(tmp_path):
    content = tiny.config(layers=1)
    tensors = tiny.tensors(content)
    folder = tiny.write(
        tmp_path / "a", {**content, "quantization_config": {"version": "0.6.0"}}, tensors
    )
    with pytest.raises(QuantloadError, match="quant_method"):
        opened(folder)
    module = f"{LAYER}.mlp.up_proj"
    fields, zeros, scales = random_parts(64, 64, 2, 4)
    zeros[:] = 8
    leaves = gptq_tensors(fields, zeros, scales, bits=4, groups=[k // 32 for k in range(64)])
    stored = {f"{module}.{leaf}": tensor for leaf, tensor in leaves.items()}
    folder = tiny.write(tmp_path / "b", tiny.config(layers=1, dtype=torch.float16), stored)
    beside = {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    (folder / "quantize_config.json").write_text(json.dumps(beside))
    source = opened(folder)
    assert source.format_name == "gptq"
    groups = torch.arange(64) // 32
    expected = values_of(fields, zeros, scales, groups, torch.float16)
    assert torch.equal(source.read_dense(module), expected)


def test_br085_shared_and_strided(tmp_path):
    base = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    tensors = {"t": base.T, "u": base, "v": base[1:]}
    file = _written(tmp_path / "out", tensors) / "model.safetensors"
    read = load_file(file)
    assert read["t"].tolist() == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    assert torch.equal(read["u"], base)
    assert torch.equal(read["v"], base[1:])
    with safe_open(file, "pt") as stored:
        assert stored.metadata() == {"format": "pt"}
    header = int.from_bytes(file.read_bytes()[:8], "little")
    assert file.stat().st_size == 8 + header + sum(t.nbytes for t in tensors.values())


def test_br085_tied_tensors_are_stored_once(tmp_path):
    folder = tiny.llama(tmp_path / "in", layers=1, tied=True)
    stored = load_file(converted(folder, tmp_path / "out", "W8A8") / "model.safetensors")
    assert "model.embed_tokens.weight" in stored
    assert not [name for name in stored if name.startswith("lm_head")]


_KILLED = """
import os, signal, sys
from quantload.cli import main
write, count = os.pwrite, [0]
def dying(*arguments):
    count[0] += 1
    if count[0] == 12:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(*arguments)
os.pwrite = dying
main(["convert", *sys.argv[1:], "--scheme", "W8A8", "--max-shard-size", "20KB", "-q"])
"""


def test_br086_interrupted_save(tmp_path):
    folder, out = tiny.llama(tmp_path / "in"), tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", _KILLED, folder, out], check=False)
    assert done.returncode == -signal.SIGKILL
    assert _names(tmp_path) == [".out.unfinished", "in"]
    with pytest.raises(QuantloadError):
        opened(out)
    again = run_plan(plan_of(folder, "W8A8", max_shard_bytes=20_000), out, Silent())
    assert _names(tmp_path) == ["in", "out"]
    other = converted(folder, tmp_path / "undisturbed", "W8A8", max_shard_bytes=20_000)
    contents = [{f.name: f.read_bytes() for f in where.iterdir()} for where in (again, other)]
    assert contents[0] == contents[1]
    assert len(contents[0]) > 5


_FULL = """
import resource, sys
from quantload.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
main(["convert", *sys.argv[1:], "--scheme", "W8A8", "-q"])
"""


def test_br087_disk_full(tmp_path):
    folder, out = tiny.llama(tmp_path / "in", hidden=128), tmp_path / "out"
    before = {f.name: f.read_bytes() for f in folder.iterdir()}
    needed = plan_of(folder, "W8A8").output_bytes
    done = subprocess.run(
        [sys.executable, "-c", _FULL, folder, out], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert str(out) in done.stderr
    assert f"{needed} bytes" in done.stderr
    assert _names(tmp_path) == ["in"]
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == before


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_br087_disk_full_while_writing(tmp_path, monkeypatch, number):
    plan = plan_of(tiny.llama(tmp_path / "in"), "W8A8")

    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(writer, "_write_at", fail)
    with pytest.raises(OutputError, match=rf"out`.*{plan.output_bytes} bytes"):
        run_plan(plan, tmp_path / "out", Silent())
    assert _names(tmp_path) == ["in"]


@pytest.mark.parametrize("rule", ["keep", "same"])
def test_br089_fp8_pass_through_without_scales(tmp_path, rule):
    tensors = fp8("mtp.fc", 64, 64, scale=torch.full((1, 1), 0.25), leaf="weight_scale_inv")
    body = f"{LAYER}.mlp.up_proj"
    tensors |= fp8(body, 64, 64, scale=torch.full((1, 1), 0.5), leaf="weight_scale_inv")
    config = {**FP8, "weight_block_size": [128, 128]}
    folder = write(tmp_path / "in", tensors, config)
    out = opened(converted(folder, tmp_path / "out", "W4A16:g32", [f"re:mtp.*={rule}"]))
    assert (out.read_dense("mtp.fc") == 0.25).all()
    assert out.weights["mtp.fc"].is_quantized is (rule == "same")
    assert str(out.weights[body].scheme) == "W4A16:g32"


def test_br094_paths(tmp_path, monkeypatch):
    folder = tiny.llama(tmp_path / "m dir" / "é", layers=1)
    monkeypatch.chdir(tmp_path)
    found = [quantload.inspect(name) for name in (folder, str(folder), f"{folder}/", "m dir/é")]
    for source in found:
        assert list(source.weights) == list(found[0].weights)
        assert torch.equal(source.read_dense("lm_head"), found[0].read_dense("lm_head"))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "model-00002-of-00002.safetensors"]
)
def test_br094_dangling_links(tmp_path, name):
    content = tiny.config(layers=1)
    made = tiny.tensors(content)
    folder = tiny.write(tmp_path / "snapshot", content, tiny.halves(made) if "-0" in name else made)
    (folder / name).unlink()
    (folder / name).symlink_to("../../blobs/0123")
    with pytest.raises(CheckpointError, match=rf"`{name}`.*missing blob"):
        opened(folder)


def test_br094_a_dangling_side_file(tmp_path):
    folder = tiny.llama(tmp_path / "snapshot", layers=1)
    (folder / "tokenizer.json").symlink_to("../../blobs/0123")
    assert [w for w in opened(folder).warnings if "`tokenizer.json`" in w and "missing blob" in w]


def test_br107_silent_keep_original(tmp_path):
    content = tiny.config(layers=1)
    tensors = {n: t for i in range(10) for n, t in plain(f"{LAYER}.good.{i}", 32, 64).items()}
    bad = f"{LAYER}.odd_proj"
    tensors |= plain(bad, 64, 410)
    folder, out = tiny.write(tmp_path / "in", content, tensors), tmp_path / "out"
    done = CliRunner().invoke(main, ["convert", str(folder), str(out), "--scheme", "W4A16"])
    assert done.exit_code == 0, done.output
    assert f"`{bad}`" in done.stderr
    assert "W4A16:g64: 10 layers" in done.stdout
    assert "full precision: 1 weights" in done.stdout
    source = opened(out)
    assert source.checkpoint.quantization_config["ignore"] == [bad]
    assert torch.equal(source.read_dense(bad), tensors[f"{bad}.weight"])
    assert sum(weight.is_quantized for weight in source.weights.values()) == 10
    shutil.rmtree(out)
    done = CliRunner().invoke(
        main, ["convert", str(folder), str(out), "--scheme", "W4A16", "--group-size", "64"]
    )
    assert done.exit_code == 2
    assert f"`{bad}`" in done.stderr
    assert not Path(out).exists()


_PEAK = """
import resource, sys
from converting import converted
converted(sys.argv[1], sys.argv[2] + "-warm", "W8A8")
idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
converted(sys.argv[2], sys.argv[2] + "-out", sys.argv[3])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - idle)
"""


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "W4A16:g32"])
def test_br101_peak_host_memory(tmp_path, scheme):
    """Four times the shards, the same peak: less than one of the shards' tensors a thread."""
    small, peaks = tiny.llama(tmp_path / "small", layers=1), []
    for count in (4, 16):
        shards = [
            {f"{LAYER}.m{i}.weight": torch.randn(1024, 2048).bfloat16()} for i in range(count)
        ]
        folder = tiny.write(tmp_path / f"{count}", tiny.config(layers=1), shards)
        done = subprocess.run(
            [sys.executable, "-c", _PEAK, small, folder, scheme],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))  # KiB
    assert max(peaks) < 48 << 10  # the larger source has 64 MiB


def test_br102_slow_network_load(tmp_path, monkeypatch):
    """Each shard is opened for its header and once for its data, and each byte is read once.

    Headers are read by `Path.open`, data by `os.preadv`: the safetensors library is not imported.
    Several threads share one opened file. The report also asks for offsets that never decrease: so
    they are, of all reads of a file.
    """
    content = tiny.config(hidden=256, layers=4)
    made = tiny.tensors(content)
    names = list(made)
    shards = [{name: made[name] for name in names[i : i + 10]} for i in range(0, len(names), 10)]
    folder = tiny.write(tmp_path / "in", content, shards)
    counts = dict.fromkeys(sorted(folder.glob("*.safetensors")), (0, 0))

    class Counted(io.FileIO):
        def readinto(self, buffer):
            self.add(0, got := super().readinto(buffer))
            return got

        def read(self, size=-1):
            self.add(0, len(data := super().read(size)))
            return data

        def add(self, opens, size):
            before = counts[Path(self.name)]
            counts[Path(self.name)] = before[0] + opens, before[1] + size

    usual = Path.open

    def counted(path, mode="r", *rest, **options):
        if path not in counts:
            return usual(path, mode, *rest, **options)
        file = Counted(path, mode.replace("b", ""))
        file.add(1, 0)
        return file

    os_open, preadv, opened, offsets = os.open, os.preadv, {}, {}

    def open_counted(path, *rest, **options):
        descriptor = os_open(path, *rest, **options)
        if path in counts:
            counts[path] = counts[path][0] + 1, counts[path][1]
            opened[descriptor] = path
        return descriptor

    def read_counted(descriptor, buffers, offset):
        got = preadv(descriptor, buffers, offset)
        path = opened[descriptor]
        counts[path] = counts[path][0], counts[path][1] + got
        offsets.setdefault(path, []).append(offset)
        return got

    monkeypatch.setattr(Path, "open", counted)
    monkeypatch.setattr(os, "open", open_counted)
    monkeypatch.setattr(os, "preadv", read_counted)
    quantload.load(folder, device="cpu")
    assert len(counts) == len(offsets) == 4
    for file, (opens, size) in counts.items():
        assert opens == 2, file.name
        assert size <= 1.05 * file.stat().st_size
