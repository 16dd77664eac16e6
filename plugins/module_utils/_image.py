# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Images: the engine's API with streamed answers, the identity of an image, and a sentence for each way in which a pull fails."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint_files import read_json, write_json

SOCKET = "/var/run/docker.sock"


class EngineError(Exception):
    """The engine refused or gave no answer. ``status`` is 0 without an answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class _Unix(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("docker", timeout=timeout_s)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


class Engine:
    """The Docker engine of this node. ``timeout_s`` bounds the wait between two pieces of an answer, never the whole."""

    def __init__(self, path: str = SOCKET, timeout_s: float = 60) -> None:
        self.path, self.timeout_s = path, timeout_s

    def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> http.client.HTTPResponse:
        """An answer to read from. Raises EngineError."""
        connection = _Unix(self.path, self.timeout_s)
        target = path + (f"?{urlencode(query)}" if query else "")
        try:
            connection.request(method, target, body=body, headers=dict(headers or {}))
            answer = connection.getresponse()
            if answer.status >= 400:
                text = answer.read(65536)
                try:
                    message = str(json.loads(text)["message"])
                except (ValueError, KeyError, TypeError):
                    message = text.decode("utf-8", "replace").strip()
                raise EngineError(message, answer.status)
        except PermissionError:
            raise EngineError(
                f"This user may not use {self.path}. Add it to the group docker and log in anew, or connect with become."
            ) from None
        except FileNotFoundError:
            raise EngineError(
                f"{self.path} is missing: Docker does not run here. Run: systemctl start docker"
            ) from None
        except TimeoutError:
            raise EngineError(
                f"The Docker engine gave no answer within {self.timeout_s:g} s. Run: systemctl status docker"
            ) from None
        except (OSError, http.client.HTTPException) as exc:
            raise EngineError(f"The Docker engine does not answer ({exc}). Run: systemctl status docker") from None
        return answer

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        with self.request("GET", path, query) as answer:
            return json.loads(answer.read())

    def events(self, method: str, path: str, query: Mapping[str, str], body: Any = None) -> Iterator[dict[str, Any]]:
        """The lines of a streamed answer (pull, load). Raises EngineError when the stream breaks."""
        with self.request(method, path, query, body) as answer:
            try:
                for line in answer:
                    if line.strip():
                        yield json.loads(line)
            except TimeoutError:
                raise EngineError(f"no byte came for {self.timeout_s:g} s") from None
            except (OSError, http.client.HTTPException, ValueError) as exc:
                raise EngineError(f"the connection to the Docker engine broke ({exc})") from None

    def image(self, name: str) -> dict[str, Any] | None:
        """What the engine knows of an image, or None."""
        try:
            found: dict[str, Any] = self.get(f"/images/{name}/json")
        except EngineError as exc:
            if exc.status == 404:
                return None
            raise
        return found


def identity(image: Mapping[str, Any]) -> str:
    """sha256 over layers and configuration: equal on two nodes exactly when the same content would run.

    The id differs between storage drivers, and digests of a registry vanish with save and load.
    """
    config = {k: v for k, v in (image.get("Config") or {}).items() if v not in (None, "", [], {}, False)}
    for name in ("Hostname", "Image", "Domainname"):  # traces of the build container
        config.pop(name, None)
    value = {
        "layers": (image.get("RootFS") or {}).get("Layers") or [],
        "config": config,
        "platform": [image.get("Os"), image.get("Architecture")],
    }
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def split_reference(reference: str) -> tuple[str, str | None, str | None]:
    """Repository, tag and digest: ``host:5000/a/b:tag@sha256:…``."""
    name, dummy, digest = reference.partition("@")
    head, dummy, tail = name.rpartition(":")
    if head and "/" not in tail:
        return head, tail, digest or None
    return name, None, digest or None


class PullProgress:
    """Adds up the events of a pull: bytes per layer, downloaded and announced."""

    def __init__(self) -> None:
        self.current: dict[str, int] = {}
        self.total: dict[str, int] = {}
        self.new: set[str] = set()
        self.error: str | None = None

    def take(self, event: Mapping[str, Any]) -> None:
        if event.get("error") or event.get("errorDetail"):
            self.error = str((event.get("errorDetail") or {}).get("message") or event.get("error"))
            return
        layer, status = str(event.get("id") or ""), str(event.get("status") or "")
        if status == "Pulling fs layer":
            self.new.add(layer)
        if status in ("Downloading", "Loading layer"):
            detail = event.get("progressDetail") or {}
            self.current[layer] = int(detail.get("current") or 0)
            self.total[layer] = int(detail.get("total") or 0)
        elif status == "Download complete" and layer in self.total:
            self.current[layer] = self.total[layer]

    @property
    def done(self) -> int:
        return sum(self.current.values())

    @property
    def expected(self) -> int:
        return sum(self.total.values())


# Class, pattern of the engine's text, sentence. The first that matches counts; `{host}`, `{name}`, `{platform}` are filled in.
_FAULTS: tuple[tuple[str, str, str], ...] = (
    (
        "platform",
        r"no matching manifest|does not match the (specified|detected)",
        "{name} has no image for {platform}. Choose one that is built for it.",
    ),
    (
        "space",
        r"no space left on device",
        "The disk of Docker is full. Remove old images (image_keep), or move Docker's data-root to a larger disk.",
    ),
    (
        "rate",
        r"toomanyrequests|rate limit|429",
        "{host} says that this address pulls too often. Log in to it on the node (docker login), or wait.",
    ),
    (
        "clock",
        r"certificate (has expired|is not yet valid)|not yet valid",
        "The certificate of {host} is not valid at this node's time. Set the clock: timedatectl set-ntp true.",
    ),
    (
        "http",
        r"server gave HTTP response to HTTPS client",
        "{host} speaks plain HTTP. Add it to insecure-registries in /etc/docker/daemon.json, if you trust that network.",
    ),
    (
        "tls",
        r"x509|certificate|tls: ",
        "The certificate of {host} is not accepted by this node. Install its authority in /etc/docker/certs.d/{host}/ca.crt.",
    ),
    (
        "denied",
        r"denied|unauthorized|no basic auth|authentication required|403 Forbidden|401",
        "{host} refuses {name}. Log in to it on the node (docker login {host}), or correct the name.",
    ),
    (
        "missing",
        r"manifest unknown|manifest for .* not found|name unknown|not found: |does not exist",
        "{host} has no {name}. Correct image.reference or image.digest in the recipe.",
    ),
    (
        "cut",
        r"EOF|connection reset|broken pipe|broke|no byte came",
        "The pull from {host} was cut several times. Run again: complete layers are kept.",
    ),
    (
        "offline",
        r"no such host|connection refused|i/o timeout|network is unreachable|no route to host|Client\.Timeout|deadline exceeded"
        r"|server misbehaving",
        "{host} cannot be reached from this node. Give the node a route or a proxy, or use image_distribution: archive.",
    ),
)
_AGAIN = ("rate", "cut", "offline")


def fault(text: str, reference: str, platform: str) -> tuple[str, str, bool]:
    """Class, sentence and whether trying again can help, for what the engine said of a pull."""
    name, _tag, _digest = split_reference(reference)
    first, dummy, rest = name.partition("/")
    host = first if rest and ("." in first or ":" in first or first == "localhost") else "docker.io"
    for kind, pattern, sentence in _FAULTS:
        if re.search(pattern, text, re.IGNORECASE):
            said = " ".join(text.split())
            return (
                kind,
                f"{sentence.format(host=host, name=reference, platform=platform)} (Docker: {said[:200]})",
                kind in _AGAIN,
            )
    return "other", f"{reference} cannot be pulled: {' '.join(text.split())[:300]}", False


# --- what is known of images ---

LABEL_INPUTS = "gb10.fleet.inputs"
LABEL_IMAGE = "gb10.fleet.image"


def describe(name: str, found: Mapping[str, Any] | None) -> dict[str, Any]:
    """The answer of the engine about one image, as our modules report it."""
    if found is None:
        return {"name": name, "present": False, "id": None, "identity": None, "inputs": None}
    config = found.get("Config") or {}
    return {
        "name": name,
        "present": True,
        "id": found.get("Id"),
        "identity": identity(found),
        "platform": f"{found.get('Os')}/{found.get('Architecture')}",
        "size_bytes": found.get("Size"),
        "created": found.get("Created"),
        "inputs": (config.get("Labels") or {}).get(LABEL_INPUTS),
        "entrypoint": config.get("Entrypoint") or [],
    }


class Receipts:
    """Which image id a reference stands for, for images that did not come from their registry: a digest cannot be given to them."""

    def __init__(self, state_dir: Path) -> None:
        self.file = state_dir / "images.json"

    def _read(self) -> dict[str, str]:
        data = read_json(self.file)
        return data if isinstance(data, dict) else {}

    def id_of(self, name: str) -> str | None:
        return self._read().get(name)

    def keep(self, name: str, image_id: str) -> None:
        known = self._read()
        if known.get(name) != image_id:
            write_json(self.file, {**known, name: image_id})

    def forget(self, image_ids: set[str]) -> None:
        known = self._read()
        kept = {name: image_id for name, image_id in known.items() if image_id not in image_ids}
        if kept != known:
            write_json(self.file, kept)


def registry_auth(host: str, homes: Iterable[Path]) -> str | None:
    """The X-Registry-Auth header for a registry that somebody logged in to on this node (``docker login``)."""
    keys = ("https://index.docker.io/v1/", "docker.io") if host == "docker.io" else (host, f"https://{host}")
    for home in homes:
        auths = (read_json(home / ".docker/config.json") or {}).get("auths") or {}
        for key in keys:
            text = (auths.get(key) or {}).get("auth")
            if text:
                user, dummy, password = base64.b64decode(text).decode("utf-8", "replace").partition(":")
                return auth_header(user, password, host)
    return None


def auth_header(user: str, password: str, host: str) -> str:
    value = {"username": user, "password": password, "serveraddress": host}
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode()


def host_of(reference: str) -> str:
    first, dummy, rest = reference.partition("/")
    return first if rest and ("." in first or ":" in first or first == "localhost") else "docker.io"


def platform_fault(distribution: Mapping[str, Any], reference: str, platform: str) -> str | None:
    """A sentence when a registry's listing of an image has nothing for this platform (case img-arm64)."""
    offered = []
    for item in distribution.get("Platforms") or []:
        name = f"{item.get('os')}/{item.get('architecture')}"
        if item.get("os") not in (None, "", "unknown"):
            offered.append(name)
    wanted = "/".join(platform.split("/")[:2])
    if not offered or wanted in offered:
        return None
    return (
        f"{reference} is built for {', '.join(sorted(set(offered)))}, this node "
        f"needs {wanted}. Choose an image that is built for it."
    )


def to_prune(images: Iterable[Mapping[str, Any]], used: set[str], name: str, current: str, keep: int) -> list[str]:
    """Ids of old images of the same repository beyond the ``keep`` newest: never the current one, never one that a container uses.

    An image that was built anew loses its name to its successor; it is known by the label that our builds give it.

    :param images: the engine's list (``/images/json``). :param used: image ids of all containers, running or not.
    """
    repository = split_reference(name)[0]
    mine = []
    for image in images:
        names = [*(image.get("RepoTags") or []), *(image.get("RepoDigests") or [])]
        built = (image.get("Labels") or {}).get(LABEL_IMAGE)
        if any(split_reference(n)[0] == repository for n in [*names, *([built] if built else [])]):
            mine.append((int(image.get("Created") or 0), str(image["Id"])))
    old = [image_id for _created, image_id in sorted(mine, reverse=True) if image_id != current]
    return [image_id for image_id in old[max(0, keep - 1) :] if image_id not in used]
