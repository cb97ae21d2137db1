"""Public bug reports about the hub: offline, revisions, gated repositories, their cache."""

import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import modelopt_encoder
import pytest
import tiny_checkpoints as tiny
import torch
from huggingface_hub import constants
from int_packing import gptq_tensors, quantized_llama, random_parts, values_of

import quantload

MODULE = "model.layers.0.mlp.up_proj"
MAIN, OTHER = "a" * 40, "b" * 40


def _snapshot(cache, made, commit, *, revision=None):
    """Move a folder into a hub cache as one commit of tiny/llama."""
    root = cache / "models--tiny--llama"
    (root / "refs").mkdir(parents=True, exist_ok=True)
    if revision is not None:
        (root / "refs" / revision).write_text(commit)
    snapshot = root / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir(exist_ok=True)
    for file in made.iterdir():
        blob = root / "blobs" / f"{commit[:4]}-{file.name}"
        file.rename(blob)
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


def test_br091_offline_detection(tmp_path, monkeypatch):
    made = modelopt_encoder.write(
        tmp_path / "made",
        {MODULE: modelopt_encoder.encoded("NVFP4", 32, 64)},
        None,
        side_file={
            "producer": {"name": "modelopt"},
            "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": []},
        },
    )
    online = quantload.inspect(made)
    expected = online.read_dense(MODULE)
    _snapshot(tmp_path / "hub", made, MAIN, revision="main")

    def connect(*_):
        raise AssertionError("a connection is tried")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert constants.is_offline_mode()
    source = quantload.inspect("tiny/llama")
    assert source.format_name == "modelopt"
    assert source.weights == online.weights
    assert torch.equal(source.read_dense(MODULE), expected)


def _pack(_module, rows, columns):
    fields, zeros, scales = random_parts(rows, columns, columns // 32, 4)
    zeros[:] = 8
    groups = torch.arange(columns) // 32
    values = values_of(fields, zeros, scales, groups, torch.float16)
    return gptq_tensors(fields, zeros, scales, bits=4, groups=groups), values


def test_br092_revision_ignored(tmp_path, monkeypatch):
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    values = quantized_llama(tmp_path / "gptq", _pack, config)
    _snapshot(tmp_path / "hub", tiny.llama(tmp_path / "main", layers=1), MAIN, revision="main")
    _snapshot(tmp_path / "hub", tmp_path / "gptq", OTHER)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    opened = []
    sys.addaudithook(lambda event, data: opened.append(data[0]) if event == "open" else None)
    source = quantload.inspect(f"tiny/llama@{OTHER}")
    assert source.format_name == "gptq"
    for module, expected in values.items():
        assert torch.equal(source.read_dense(module), expected)
    inside = [str(name) for name in opened if str(tmp_path / "hub") in str(name)]
    assert [name for name in inside if OTHER in name or f"{OTHER[:4]}-" in name]
    assert not [name for name in inside if MAIN in name or f"{MAIN[:4]}-" in name]
    assert all(OTHER in str(entry.file) for entry in source.checkpoint.tensors.values())


class _GatedHub(BaseHTTPRequestHandler):
    """A hub with one gated repository: 401 unless the request carries the token T."""

    folder: Path
    tokens: list

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._answer(with_body=False)

    def do_GET(self):
        self._answer(with_body=True)

    def _answer(self, *, with_body):
        token = self.headers.get("authorization")
        self.tokens.append((self.command, self.path, token))
        body, headers = b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "restricted"}
        status = 401
        if token == "Bearer T":
            status, body, headers = self._found()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def _found(self):
        if self.path.startswith("/api/models/tiny/llama"):
            content = {"id": "tiny/llama", "sha": MAIN, "siblings": [], "gated": "auto"}
            if "/tree/" in self.path:
                content = [
                    {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": f.name}
                    for f in self.folder.iterdir()
                ]
            return 200, json.dumps(content).encode(), {"Content-Type": "application/json"}
        file = self.folder / self.path.rpartition("/")[2]
        if not file.is_file():
            return 404, b"{}", {"X-Error-Code": "EntryNotFound"}
        return 200, file.read_bytes(), {"ETag": f'"{file.name}"', "X-Repo-Commit": MAIN}


@pytest.fixture
def gated_hub(tmp_path):
    """Runs the hub on loopback; yields (environment of a client, tokens that it was sent)."""
    handler = type("Handler", (_GatedHub,), {"folder": tmp_path / "made", "tokens": []})
    tiny.llama(handler.folder, layers=1)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = tmp_path / "home"
    home.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(home)}
    environment |= {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_XET": "1"}
    yield environment, handler.tokens
    server.shutdown()
    server.server_close()


def _convert(output, environment):
    command = [sys.executable, "-m", "quantload", "convert", "tiny/llama", str(output)]
    return subprocess.run(
        [*command, "--scheme", "W8A8", "-q"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_br093_gated_token(tmp_path, gated_hub):
    environment, tokens = gated_hub
    done = _convert(tmp_path / "out", environment)
    assert done.returncode == 2, done.stderr
    assert "`tiny/llama`" in done.stderr
    assert "gated" in done.stderr
    assert "hf auth login" in done.stderr
    assert not (tmp_path / "out").exists()
    tokens.clear()
    (Path(environment["HF_HOME"]) / "token").write_text("T\n")
    done = _convert(tmp_path / "out", environment)
    assert done.returncode == 0, done.stderr
    of_repository = [sent for sent in tokens if "tiny/llama" in sent[1]]
    assert len(of_repository) > 3
    assert [sent for sent in of_repository if sent[2] != "Bearer T"] == []
    assert quantload.verify(tmp_path / "out", tmp_path / "made").passed
