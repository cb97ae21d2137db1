"""A hub in a thread: the few routes that an upload takes, over real HTTP, with its own checks.

Routes and payloads as huggingface_hub 1.x and 2.x send them, with git LFS's batch protocol for
large files (https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md). Uploaded objects are
held against the digest that was announced for them.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_fake"
LARGE = 1000  # bytes from which on a file goes through LFS


@dataclass
class Repository:
    """One model repository: its files on the main branch."""

    private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)
    commits: list[str] = field(default_factory=list)


@dataclass
class FakeHub:
    """The hub's state, and what it was asked.

    Args:
        endpoint: Its address.
        repositories: By OWNER/NAME.
        objects: Large files by sha256, whether committed or not.
        requests: "METHOD path" of every request.
        refusals: Status of the answer to requests whose "METHOD path" a pattern finds.
    """

    endpoint: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    refusals: dict[str, int] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)  # files that a commit forgets

    def count(self, pattern):
        """How many requests a pattern finds."""
        return sum(re.search(pattern, request) is not None for request in self.requests)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self):
        return self.server.hub

    def log_message(self, *_):
        pass

    def _serve(self):
        path = self.path.partition("?")[0]
        line = f"{self.command} {path}"
        self.hub.requests.append(line)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = self._chunks()
        for pattern, status in self.hub.refusals.items():
            if re.search(pattern, line):
                return self._answer({"error": f"refused with {status}"}, status)
        if not path.startswith("/lfs/") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer({"error": "Invalid credentials in Authorization header"}, 401)
        for pattern, route in _ROUTES:
            if match := re.fullmatch(pattern, line):
                return self._answer(*route(self.hub, body, *match.groups()))
        return self._answer({"error": f"no route for {line}"}, 404)

    do_GET = do_POST = do_PUT = do_HEAD = _serve

    def _chunks(self):
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, content, status=200):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _whoami(hub, body):
    return {"type": "user", "name": "owner", "orgs": [], "auth": {"type": "access_token"}}, 200


def _create(hub, body):
    asked = json.loads(body)
    name = f"{asked['organization']}/{asked['name']}"
    answer = {"url": f"{hub.endpoint}/{name}"}
    if name in hub.repositories:
        return {**answer, "error": "You already created this model repo"}, 409
    is_private = asked.get("private") is True or asked.get("visibility") == "private"
    hub.repositories[name] = Repository(
        private=is_private, files={".gitattributes": b"*.safetensors filter=lfs\n"}
    )
    return answer, 200


def _info(hub, body, name):
    if name not in hub.repositories:
        return {"error": "Repository not found"}, 404
    repository = hub.repositories[name]
    siblings = [{"rfilename": path} for path in repository.files]
    sha = repository.commits[-1] if repository.commits else "0" * 40
    answer = {"_id": "1", "id": name, "modelId": name, "sha": sha, "private": repository.private}
    return {**answer, "tags": [], "downloads": 0, "likes": 0, "siblings": siblings}, 200


def _oid(repository, path):
    data = repository.files[path]
    if path in repository.large:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _tree(hub, body, name):
    repository = hub.repositories[name]
    found = []
    for path, data in repository.files.items():
        entry = {"type": "file", "path": path, "size": len(data), "oid": "1" * 40}
        if path in repository.large:
            digest = hashlib.sha256(data).hexdigest()
            entry["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 130}
        found.append(entry)
    return found, 200


def _validate(hub, body):
    assert json.loads(body)["content"].startswith("---\n")
    return {"errors": [], "warnings": []}, 200


def _preupload(hub, body, name):
    repository = hub.repositories[name]
    answer = []
    for file in json.loads(body)["files"]:
        mode = "lfs" if file["size"] >= LARGE else "regular"
        path = file["path"]
        oid = _oid(repository, path) if path in repository.files else None
        answer.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    return {"files": answer}, 200


def _batch(hub, body, name):
    objects = []
    for asked in json.loads(body)["objects"]:
        entry = {"oid": asked["oid"], "size": asked["size"]}
        if asked["oid"] not in hub.objects:
            address = f"{hub.endpoint}/lfs/{asked['oid']}"
            entry["actions"] = {"upload": {"href": address, "header": {}}}
        objects.append(entry)
    return {"transfer": "basic", "objects": objects}, 200


def _put(hub, body, oid):
    if hashlib.sha256(body).hexdigest() != oid:
        return {"error": "these bytes have another digest"}, 400
    hub.objects[oid] = body
    return {}, 200


def _commit(hub, body, name):
    repository = hub.repositories[name]
    for line in body.splitlines():
        item = json.loads(line)
        value = item["value"]
        if item["key"] == "header" or value["path"] in hub.lost:
            continue
        if item["key"] == "lfsFile":
            if value["oid"] not in hub.objects:
                return {"error": f"no object for {value['path']}"}, 400
            repository.files[value["path"]] = hub.objects[value["oid"]]
            repository.large.add(value["path"])
        else:
            assert item["key"] == "file", item["key"]
            repository.files[value["path"]] = base64.b64decode(value["content"])
    oid = hashlib.sha1(body).hexdigest()
    repository.commits.append(oid)
    address = f"{hub.endpoint}/{name}/commit/{oid}"
    return {"commitUrl": address, "commitOid": oid, "success": True}, 200


_NAME = r"([\w.-]+/[\w.-]+)"
_ROUTES = [
    ("GET /api/whoami-v2", _whoami),
    ("POST /api/repos/create", _create),
    (f"GET /api/models/{_NAME}/tree/main", _tree),
    (f"GET /api/models/{_NAME}(?:/revision/main)?", _info),
    ("POST /api/validate-yaml", _validate),
    (f"POST /api/models/{_NAME}/preupload/main", _preupload),
    (rf"POST /{_NAME}\.git/info/lfs/objects/batch", _batch),
    ("PUT /lfs/([0-9a-f]+)", _put),
    (f"POST /api/models/{_NAME}/commit/main", _commit),
]


def start():
    """Start a hub on a free port; returns it and the function that ends it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.hub = FakeHub(endpoint=f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()

    def stop():
        server.shutdown()
        thread.join()
        server.server_close()

    return server.hub, stop
