"""Images: what a pull's failure means, which content is the same, what is pruned, and a registry out of one archive."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import socket
import tarfile
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any

import pytest

from ansible_collections.gb10.fleet.plugins.lookup.build_inputs import inputs
from ansible_collections.gb10.fleet.plugins.module_utils import _image
from ansible_collections.gb10.fleet.plugins.module_utils._distribution import image_plan
from ansible_collections.gb10.fleet.plugins.module_utils._image_peer import USER, Archive, ImageRegistry, Tunnel
from ansible_collections.gb10.fleet.plugins.modules import image as image_module

from .conftest import ROOT, _run

CASES = ROOT / "tests/fixtures/cases"
NAME = "ghcr.io/owner/vllm:tag"
INSPECT = {
    "Id": "sha256:" + "a" * 64,
    "Os": "linux",
    "Architecture": "arm64",
    "Size": 26_843_545_600,
    "Created": "2026-10-01T10:00:00Z",
    "RootFS": {"Type": "layers", "Layers": ["sha256:1", "sha256:2"]},
    "Config": {"Env": ["A=1"], "Entrypoint": ["vllm", "serve"], "Hostname": "", "Labels": {}},
}


# --- sentences ---


@pytest.mark.parametrize(
    ("text", "kind", "words", "again"),
    [
        (
            "no matching manifest for linux/arm64/v8 in the manifest list entries.",
            "platform",
            "has no image for linux/arm64",
            False,
        ),
        ("toomanyrequests: You have reached your pull rate limit.", "rate", "pulls too often", True),
        ("denied: requested access to the resource is denied", "denied", "docker login ghcr.io", False),
        (
            "x509: certificate has expired or is not yet valid: current time 2019-01-01",
            "clock",
            "timedatectl set-ntp true",
            False,
        ),
        ("x509: certificate signed by unknown authority", "tls", "/etc/docker/certs.d/ghcr.io/ca.crt", False),
        ("http: server gave HTTP response to HTTPS client", "http", "insecure-registries", False),
        ("unexpected EOF", "cut", "complete layers are kept", True),
        ("write /var/lib/docker/tmp/x: no space left on device", "space", "Remove old images", False),
        (
            "manifest for ghcr.io/owner/vllm:tag not found: manifest unknown",
            "missing",
            "Correct image.reference",
            False,
        ),
        ("dial tcp: lookup ghcr.io: no such host", "offline", "cannot be reached from this node", True),
        ("something new", "other", "cannot be pulled: something new", False),
    ],
)
def test_each_failure_of_a_pull_has_its_sentence(text: str, kind: str, words: str, again: bool) -> None:
    found, sentence, retry = _image.fault(text, NAME, "linux/arm64")
    assert (found, retry) == (kind, again) and words in sentence


def test_img_arm64() -> None:
    """The public case: its line is understood, and what the registry lists is judged before anything is pulled."""
    line = (CASES / "img-arm64.txt").read_text().splitlines()[1]
    assert _image.fault(line, NAME, "linux/arm64")[0] == "platform"
    listed = {"Platforms": [{"os": "linux", "architecture": "amd64"}, {"os": "unknown", "architecture": "unknown"}]}
    said = _image.platform_fault(listed, NAME, "linux/arm64")
    assert (
        said == f"{NAME} is built for linux/amd64, this node needs linux/arm64. Choose an image that is built for it."
    )
    assert _image.platform_fault(listed, NAME, "linux/amd64") is None
    assert _image.platform_fault({}, NAME, "linux/arm64") is None


# --- identity ---


def test_identity_is_content_not_name_or_store() -> None:
    loaded = {
        **INSPECT,
        "Id": "sha256:" + "b" * 64,
        "RepoDigests": [],
        "Config": {**INSPECT["Config"], "Hostname": "x", "Labels": None},
    }
    assert _image.identity(loaded) == _image.identity(INSPECT)
    assert _image.identity({**INSPECT, "RootFS": {"Layers": ["sha256:1", "sha256:3"]}}) != _image.identity(INSPECT)
    assert _image.identity({**INSPECT, "Config": {**INSPECT["Config"], "Env": ["A=2"]}}) != _image.identity(INSPECT)


def host(name: str, **image: Any) -> dict[str, Any]:
    found = {
        "name": NAME,
        "present": True,
        "id": "sha256:" + "a" * 64,
        "identity": "i1",
        "inputs": None,
        "created": "2026-10-01",
        **image,
    }
    return {"inventory_hostname": name, "__image_found": {"image": found}}


def test_img_digest_mismatch() -> None:
    """Ranks with different content under one name are refused, with both identities and what mends it."""
    plan = image_plan([host("spark-01"), host("spark-02", identity="i2", id="sha256:" + "b" * 64)], "spark-01")
    said = plan["failure"]
    assert "spark-01 has i1 (sha256:aaaaaaaaaaaa" in said and "spark-02 has i2 (sha256:bbbbbbbbbbbb" in said
    assert "prepare.yml -e image_refresh=true" in said and "pin image.digest" in said


def test_img_not_rebuilt() -> None:
    """An image that was built from other inputs counts as missing: one rank builds, the others take its build."""
    old, other = [host("spark-01", inputs="old"), host("spark-02", inputs="old")], {"spark-01": "198.51.100.11"}
    first = image_plan(old, "spark-01", addresses=other, inputs="new")
    second = image_plan(old, "spark-02", addresses=other, inputs="new")
    assert first["asks"] and first["serve"]["clients"] == ["spark-02"] and not second["asks"]
    assert second["peer"] == {"name": "spark-01", "address": "198.51.100.11", "port": 18438, "me": "spark-02"}
    same = [host("spark-01", inputs="new"), host("spark-02", inputs="new")]
    assert not image_plan(same, "spark-01", inputs="new")["needed"]
    line = (CASES / "img-not-rebuilt.txt").read_text()
    assert (
        "['DFlash2DraftModel'] are not supported" in line
    )  # what the engine says of a stale image; the diagnosis knows it


def test_image_plan_peer_and_silence() -> None:
    hosts = [host("spark-01"), host("spark-02", present=False, identity=None)]
    assert not image_plan(hosts, "spark-01", "each")["needed"] and image_plan(hosts, "spark-02", "each")["asks"]
    assert image_plan(hosts, "spark-01", "peer")["serve"]["clients"] == ["spark-02"]
    assert "spark-02 did not say" in image_plan([hosts[0], {"inventory_hostname": "spark-02"}], "spark-01")["failure"]


# --- old images ---


def test_prune_keeps_current_used_and_foreign() -> None:
    images = [{"Id": f"i{n}", "Created": n, "RepoTags": [f"ghcr.io/owner/vllm:{n}"]} for n in range(5)]
    images += [
        {"Id": "other", "Created": 0, "RepoTags": ["ghcr.io/owner/vllm-x:1"]},
        {"Id": "none", "Created": 0, "RepoTags": None},
    ]
    images += [{"Id": "built", "Created": 0, "RepoTags": [], "Labels": {"gb10.fleet.image": "ghcr.io/owner/vllm:1"}}]
    assert set(_image.to_prune(images, {"i1"}, NAME, "i4", 2)) == {"i2", "i0", "built"}
    assert set(_image.to_prune(images, set(), NAME, "i0", 1)) == {"i1", "i2", "i3", "i4", "built"}


# --- the engine ---


class FakeEngine(ThreadingUnixStreamServer):
    """Docker's API as far as a pull uses it. ``pulls``: a list of event lists, one per try."""

    daemon_threads = True

    def __init__(self, path: Path) -> None:
        self.images: dict[str, dict[str, Any]] = {}
        self.pulls: list[list[dict[str, Any]]] = []
        self.platforms: list[dict[str, str]] = []
        self.requests: list[str] = []
        super().__init__(str(path), FakeEngineHandler)
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()


class FakeEngineHandler(BaseHTTPRequestHandler):
    server: FakeEngine

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def address_string(self) -> str:
        return "unix"

    def answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.server.requests.append(f"GET {self.path}")
        path = self.path.split("?")[0]
        values = {
            "/version": {"Os": "linux", "Arch": "arm64"},
            "/info": {"DockerRootDir": "/"},
            "/containers/json": [],
            "/images/json": [],
        }
        if path in values:
            return self.answer(200, json.dumps(values[path]).encode())
        if path.startswith("/distribution/"):
            return self.answer(200, json.dumps({"Platforms": self.server.platforms}).encode())
        name = path.removeprefix("/images/").removesuffix("/json")
        if name in self.server.images:
            return self.answer(200, json.dumps(self.server.images[name]).encode())
        return self.answer(404, b'{"message": "No such image"}')

    def do_POST(self) -> None:
        self.server.requests.append(f"POST {self.path}")
        events = self.server.pulls.pop(0)
        if not any("error" in event for event in events):
            self.server.images[NAME] = INSPECT
        self.answer(200, b"".join(json.dumps(event).encode() + b"\r\n" for event in events))


GOOD = [
    {"status": "Pulling from owner/vllm", "id": "tag"},
    {"status": "Pulling fs layer", "id": "l1"},
    {"status": "Downloading", "id": "l1", "progressDetail": {"current": 400, "total": 1000}},
    {"status": "Downloading", "id": "l1", "progressDetail": {"current": 900, "total": 1000}},
    {"status": "Download complete", "id": "l1"},
    {"status": "Pull complete", "id": "l1"},
]
CUT = [*GOOD[:3], {"error": "unexpected EOF", "errorDetail": {"message": "unexpected EOF"}}]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(image_module, "running_rank", lambda: None)
    server = FakeEngine(tmp_path / "docker.sock")
    yield server
    server.shutdown()
    server.server_close()


def pull(engine: FakeEngine, tmp_path: Path, capfd: Any, check: bool = False, **more: Any) -> dict[str, Any]:
    arguments = {
        "name": NAME,
        "docker_socket": str(engine.server_address),
        "state_dir": str(tmp_path / "state"),
        "retry_wait_s": 0.01,
    }
    return _run(image_module, {**arguments, "lock_file": str(tmp_path / "lock"), **more}, check, capfd)


def test_img_pull_timeout(engine: FakeEngine, tmp_path: Path, capfd: Any) -> None:
    """A pull that is cut goes on from the layers that are complete; nothing ends it while bytes come."""
    engine.pulls = [CUT, CUT, GOOD]
    done = pull(engine, tmp_path, capfd)
    assert done["changed"] and done["image"]["present"] and done["moved_bytes"] == 400 + 400 + 1000
    engine.requests.clear()
    assert not pull(engine, tmp_path, capfd)["changed"] and not any(r.startswith("POST") for r in engine.requests)


def test_pull_gives_up_with_a_sentence(engine: FakeEngine, tmp_path: Path, capfd: Any) -> None:
    engine.pulls = [CUT] * 3
    assert "was cut several times" in pull(engine, tmp_path, capfd, retries=2)["msg"]


def test_denied_is_not_tried_again(engine: FakeEngine, tmp_path: Path, capfd: Any) -> None:
    engine.pulls = [[{"error": "denied: requested access to the resource is denied"}]]
    assert "docker login ghcr.io" in pull(engine, tmp_path, capfd)["msg"]


def test_wrong_platform_is_told_before_the_pull(engine: FakeEngine, tmp_path: Path, capfd: Any) -> None:
    engine.platforms = [{"os": "linux", "architecture": "amd64"}]
    assert "is built for linux/amd64, this node needs linux/arm64" in pull(engine, tmp_path, capfd)["msg"]
    assert not any(r.startswith("POST") for r in engine.requests)


def test_check_mode_pulls_nothing(engine: FakeEngine, tmp_path: Path, capfd: Any) -> None:
    assert pull(engine, tmp_path, capfd, check=True)["changed"] and not any(
        r.startswith("POST") for r in engine.requests
    )


def test_login_of_the_node_is_used_and_not_shown(tmp_path: Path) -> None:
    (tmp_path / ".docker").mkdir()
    auth = base64.b64encode(b"me:secret").decode()
    (tmp_path / ".docker/config.json").write_text(json.dumps({"auths": {"ghcr.io": {"auth": auth}}}))
    header = _image.registry_auth("ghcr.io", [tmp_path])
    assert header and json.loads(base64.urlsafe_b64decode(header)) == {
        "username": "me",
        "password": "secret",
        "serveraddress": "ghcr.io",
    }
    assert _image.registry_auth("docker.io", [tmp_path]) is None


# --- from rank to rank ---


def saved(path: Path, layers: list[bytes]) -> bytes:
    """An archive as `docker save` of an engine before 25 writes it. Returns the configuration."""
    ids = ["sha256:" + hashlib.sha256(layer).hexdigest() for layer in layers]
    config = json.dumps(
        {"architecture": "arm64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": ids}}
    ).encode()
    name = hashlib.sha256(config).hexdigest() + ".json"
    files = {name: config, **{f"{n}/layer.tar": layer for n, layer in enumerate(layers)}}
    files["manifest.json"] = json.dumps(
        [{"Config": name, "RepoTags": [NAME], "Layers": [f"{n}/layer.tar" for n in range(len(layers))]}]
    ).encode()
    with tarfile.open(path, "w") as tar:
        for file, data in files.items():
            member = tarfile.TarInfo(file)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return config


def get(url: str, token: str) -> bytes:
    request = urllib.request.Request(url)
    request.add_header("Authorization", "Basic " + base64.b64encode(f"{USER}:{token}".encode()).decode())
    with urllib.request.urlopen(request, timeout=5) as answer:
        data: bytes = answer.read()
        return data


def test_archive_is_a_registry_through_a_tunnel(tmp_path: Path) -> None:
    layers = [b"first" * 1000, b"second" * 300_000]
    config = saved(tmp_path / "image.tar", layers)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ImageRegistry("127.0.0.1", port, "t0ken", ["spark-02"]) as registry, Tunnel("127.0.0.1", port) as tunnel:
        url = f"http://127.0.0.1:{tunnel.port}"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            get(f"{url}/v2/", "wrong")
        registry.archive = Archive(tmp_path / "image.tar")
        manifest = json.loads(get(f"{url}/v2/rank/image/manifests/current", "t0ken"))
        assert get(f"{url}/v2/rank/image/blobs/{manifest['config']['digest']}", "t0ken") == config
        for listed, layer in zip(manifest["layers"], layers, strict=True):
            assert get(f"{url}/v2/rank/image/blobs/{listed['digest']}", "t0ken") == layer
            assert listed["digest"] == "sha256:" + hashlib.sha256(layer).hexdigest()
        urllib.request.urlopen(
            urllib.request.Request(
                f"{url}/done/spark-02",
                data=b"",
                headers={"Authorization": "Basic " + base64.b64encode(b"rank:t0ken").decode()},
            )
        ).close()
        assert registry.wait(1, 1) == []


# --- what is built ---


def test_inputs_change_with_content_commit_and_arguments(tmp_path: Path) -> None:
    (tmp_path / "ctx").mkdir()
    (tmp_path / "ctx/Dockerfile").write_text("FROM scratch\n")
    (tmp_path / "ctx/patch.py").write_text("x = 1\n")
    build: dict[str, Any] = {"context": "ctx", "args": {"A": 1}}
    first = inputs(build, tmp_path)
    assert inputs(build, tmp_path) == first and len(first) == 64
    (tmp_path / "ctx/patch.py").touch()
    assert inputs(build, tmp_path) == first
    (tmp_path / "ctx/patch.py").write_text("x = 2\n")
    assert inputs(build, tmp_path) != first
    assert inputs({**build, "args": {"A": 2}}, tmp_path) != inputs(build, tmp_path)
    commit = {"repository": "https://example.com/a.git", "commit": "0" * 40}
    assert inputs(commit, tmp_path) != inputs({**commit, "commit": "1" * 40}, tmp_path)
    with pytest.raises(Exception, match="wanted a full commit"):
        inputs({**commit, "commit": "main"}, tmp_path)
    with pytest.raises(Exception, match="Set context to a folder with a Dockerfile"):
        inputs({"context": "nowhere"}, tmp_path)
