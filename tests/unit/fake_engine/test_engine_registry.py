"""Pushing an image without `docker push`: what the registry holds afterwards is the image, layer for layer."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import sys
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import registry

CONFIG = json.dumps({"config": {"Labels": {"gb10.fleet.inputs": "abc"}}, "rootfs": {"diff_ids": []}}).encode()


def test_gzip_of_many_pieces_is_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "PIECE", 1000)
    data = os.urandom(10_500) + b"a" * 3000
    packed = b"".join(registry.squeezed(io.BytesIO(data)))
    assert gzip.decompress(packed) == data
    assert packed == b"".join(registry.squeezed(io.BytesIO(data))), "the same layer has the same digest"
    assert b"".join(registry.squeezed(io.BytesIO(packed))) == packed, "gzip stays as it is"
    assert gzip.decompress(b"".join(registry.squeezed(io.BytesIO(b"")))) == b""


class Store(BaseHTTPRequestHandler):
    """As much of the registry's API as a push needs; digests are checked."""

    blobs: dict[str, bytes]
    manifests: dict[str, bytes]
    uploads: list[str]

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, text in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        held = self.blobs if "/blobs/" in self.path else self.manifests
        body = held.get(self.path.rsplit("/", 1)[1])
        self.answer(200 if body is not None else 404, body or b"")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.answer(202, Location=f"http://{self.headers['Host']}/v2/upload/1?state=x")

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if "/manifests/" in self.path:
            self.manifests[self.path.rsplit("/", 1)[1]] = body
            self.answer(201)
            return
        digest = self.path.rsplit("digest=", 1)[1]
        good = digest == f"sha256:{hashlib.sha256(body).hexdigest()}" and "state=x" in self.path
        if good:
            self.blobs[digest] = body
            self.uploads.append(digest)
        self.answer(201 if good else 400)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def store() -> Iterator[tuple[str, type[Store]]]:
    kept: Any = type("Kept", (Store,), {"blobs": {}, "manifests": {}, "uploads": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kept)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}", kept
    server.shutdown()
    server.server_close()


def saved(layers: dict[str, bytes], config: str, extra: dict[str, bytes]) -> bytes:
    """What `docker save` writes."""
    listed = json.dumps([{"Config": config, "Layers": list(layers)}]).encode()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in {**layers, **extra, config: CONFIG, "manifest.json": listed}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def docker_that_saves(archive: bytes, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "archive").write_bytes(archive)
    script = folder / "docker"
    text = f"import sys\nassert sys.argv[1] == 'save'\nsys.stdout.buffer.write(open({str(folder / 'archive')!r}, 'rb').read())\n"
    script.write_text(f"#!{sys.executable}\n{text}")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


@pytest.mark.parametrize("layout", ["old", "oci"])
def test_push(layout: str, store: tuple[str, type[Store]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker 20.10's layout and that of 25 and later; the second push uploads nothing."""
    monkeypatch.setattr(registry, "SMALL", 500)
    host, kept = store
    big, little = os.urandom(2000), b"tiny"
    names = (
        ("1/layer.tar", "2/layer.tar", "c.json")
        if layout == "old"
        else ("blobs/sha256/1", "blobs/sha256/2", "blobs/sha256/3")
    )
    docker_that_saves(saved({names[0]: big, names[1]: little}, names[2], {"VERSION": b"1.0"}), tmp_path, monkeypatch)
    target = registry.Registry(f"{host}/sandbox/engine:1")
    assert target.label("gb10.fleet.inputs") == ""
    target.push(f"{host}/sandbox/engine:1")
    assert target.label("gb10.fleet.inputs") == "abc"
    manifest = json.loads(kept.manifests["1"])
    assert [gzip.decompress(kept.blobs[layer["digest"]]) for layer in manifest["layers"]] == [big, little]
    assert [layer["size"] for layer in manifest["layers"]] == [
        len(kept.blobs[layer["digest"]]) for layer in manifest["layers"]
    ]
    assert manifest["config"]["digest"] == f"sha256:{hashlib.sha256(CONFIG).hexdigest()}"
    before = len(kept.uploads)
    target.push(f"{host}/sandbox/engine:1")
    assert len(kept.uploads) == before


def test_no_registry() -> None:
    with pytest.raises(registry.RegistryError, match=r"no registry answers at 127\.0\.0\.1:1 "):
        registry.Registry("127.0.0.1:1/sandbox/engine:1").label("x")


def test_a_save_that_fails(store: tuple[str, type[Store]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host, _kept = store
    script = tmp_path / "docker"
    script.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('Error: No such image')\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(registry.RegistryError, match="docker save"):
        registry.Registry(f"{host}/sandbox/engine:1").push("gone")
