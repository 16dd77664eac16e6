# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Put an image into the sandbox's registry (plain HTTP), faster than `docker push`: gzip level 1 on all cores.

The vLLM image on two cores: 18 s of CPU time instead of 50, spread over both; 0.50 GB instead of 0.43.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import json
import os
import subprocess
import tarfile
import tempfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any
from urllib.parse import urlsplit

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = "application/vnd.docker.container.image.v1+json"
LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
GZIP = b"\x1f\x8b"
PIECE = 8 << 20
# What `docker save` writes beside layers is small: configuration, manifests.
SMALL = 4 << 20
TIMEOUT_S = 300


class RegistryError(Exception):
    """A sentence: what the registry was asked and what it said."""


def pieces(source: IO[bytes]) -> Iterator[bytes]:
    while piece := source.read(PIECE):
        yield piece


def squeezed(source: IO[bytes]) -> Iterator[bytes]:
    """`source` as gzip, one member per piece (a valid stream); as it is when it is gzip already."""
    parts = pieces(source)
    first = next(parts, b"")
    if first[:2] == GZIP:
        yield first
        yield from parts
        return
    workers = os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as pool:
        going: deque[Future[bytes]] = deque()

        def begin(part: bytes) -> None:
            going.append(pool.submit(gzip.compress, part, 1, mtime=0))

        begin(first)
        for part in parts:
            begin(part)
            if len(going) > workers:
                yield going.popleft().result()
        while going:
            yield going.popleft().result()


class Registry:
    """One repository of a registry."""

    def __init__(self, reference: str) -> None:
        self.host, _slash, rest = reference.partition("/")
        self.name, _colon, self.tag = rest.rpartition(":")

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (lower case) and body of an answer."""
        connection = http.client.HTTPConnection(self.host, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
            answer = connection.getresponse()
            return answer.status, {name.lower(): text for name, text in answer.getheaders()}, answer.read()
        except OSError as error:
            text = f"no registry answers at {self.host} ({error}); the sandbox's registry has to run first"
            raise RegistryError(text) from error
        finally:
            connection.close()

    def label(self, name: str) -> str:
        """A label of the image that the registry has under this reference, "" when there is none."""
        status, _headers, body = self.ask("GET", f"/v2/{self.name}/manifests/{self.tag}", Accept=MANIFEST)
        if status != 200:
            return ""
        digest = json.loads(body).get("config", {}).get("digest", "")
        status, _headers, body = self.ask("GET", f"/v2/{self.name}/blobs/{digest}")
        labels = (json.loads(body).get("config") or {}).get("Labels") or {} if status == 200 else {}
        return str(labels.get(name, ""))

    def upload(self, data: IO[bytes] | bytes, digest: str, size: int) -> None:
        """A blob, unless it is there."""
        if self.ask("HEAD", f"/v2/{self.name}/blobs/{digest}")[0] == 200:
            return
        status, headers, body = self.ask("POST", f"/v2/{self.name}/blobs/uploads/", b"", Content_Length="0")
        if status == 202:
            target = urlsplit(headers["location"])
            query = f"{target.query}&" if target.query else ""
            path = f"{target.path}?{query}digest={digest}"
            kind = {"Content_Type": "application/octet-stream", "Content_Length": str(size)}
            status, _headers, body = self.ask("PUT", path, data, **kind)
        if status != 201:
            raise RegistryError(f"{self.host} refused a layer of {self.name}: {status} {body[:300]!r}")

    def layer(self, source: IO[bytes]) -> dict[str, Any]:
        """Upload a layer's tar; its entry in the manifest."""
        digest = hashlib.sha256()
        with tempfile.TemporaryFile() as file:
            for part in squeezed(source):
                digest.update(part)
                file.write(part)
            size = file.tell()
            file.seek(0)
            name = f"sha256:{digest.hexdigest()}"
            self.upload(file, name, size)
        return {"mediaType": LAYER, "size": size, "digest": name}

    def push(self, reference: str) -> None:
        """The local engine's image `reference` under this reference, of `docker save` (old layout and OCI's)."""
        layers: dict[str, dict[str, Any]] = {}
        small: dict[str, bytes] = {}
        with subprocess.Popen(["docker", "save", reference], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as saving:
            assert saving.stdout and saving.stderr
            try:
                with tarfile.open(fileobj=saving.stdout, mode="r|") as archive:
                    for member in archive:
                        content = archive.extractfile(member) if member.isfile() else None
                        if content and member.size > SMALL:
                            layers[member.name] = self.layer(content)
                        elif content:
                            small[member.name] = content.read()
            except tarfile.TarError as error:
                raise RegistryError(f"docker save {reference} wrote no image: {error}") from error
            finally:
                saving.stdout.close()
                words = saving.stderr.read().decode(errors="replace").strip()
        if saving.returncode or "manifest.json" not in small:
            raise RegistryError(f"docker save {reference} ended {saving.returncode}: {words[-500:]}")
        image = json.loads(small["manifest.json"])[0]
        for name in image["Layers"]:
            if name not in layers:
                layers[name] = self.layer(io.BytesIO(small[name]))
        config = small[image["Config"]]
        digest = f"sha256:{hashlib.sha256(config).hexdigest()}"
        self.upload(config, digest, len(config))
        manifest: dict[str, Any] = {"schemaVersion": 2, "mediaType": MANIFEST}
        manifest["config"] = {"mediaType": CONFIG, "size": len(config), "digest": digest}
        manifest["layers"] = [layers[name] for name in image["Layers"]]
        path = f"/v2/{self.name}/manifests/{self.tag}"
        status, _headers, body = self.ask("PUT", path, json.dumps(manifest).encode(), Content_Type=MANIFEST)
        if status != 201:
            raise RegistryError(f"{self.host} refused the manifest of {self.name}: {status} {body[:300]!r}")
