#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: image
short_description: Bring an image to a node
version_added: "0.1.0"
description:
  - Pulls from the registry, from another rank over the fabric, loads an archive, or builds.
  - The platform is checked before a pull begins. A pull may take as long as bytes come; layers that are complete are kept, so that
    a pull that was cut continues.
  - Afterwards, old images of the same repository are removed, except O(keep) and what a container uses.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
  idempotent:
    support: partial
    details: With O(refresh) the registry is asked for a newer content each time.
options:
  name:
    description: Reference of the image as containers use it, with its digest if it is pinned.
    type: str
    required: true
  source:
    description: Where the image comes from.
    type: str
    choices: [registry, peer, archive, build]
    default: registry
  platform:
    description: Platform to pull, C(os/architecture); the engine's own by default.
    type: str
  refresh:
    description: Pull although the image is there, since a tag may have moved.
    type: bool
    default: false
  archive:
    description: File on the node that C(docker save) wrote, for O(source=archive).
    type: path
  build:
    description: What to build, for O(source=build).
    type: dict
    suboptions:
      context: {description: Folder on the node., type: path, required: true}
      dockerfile: {description: Path of the Dockerfile in the context., type: str, default: Dockerfile}
      args: {description: Build arguments., type: dict, default: {}}
      inputs: {description: Hash of all inputs; the image carries it as a label., type: str, required: true}
      timeout_s: {description: Seconds that the build may take., type: int, default: 14400}
  size_gib:
    description: Size of the image, to check the free space for. 0 if unknown.
    type: float
    default: 0
  keep:
    description: Images of this repository to keep, the current one included. 0 keeps all.
    type: int
    default: 0
  retries:
    description: Tries again after a cut, a rate limit or an unreachable registry.
    type: int
    default: 5
  retry_wait_s:
    description: Seconds before the first retry; doubled each time, up to five minutes.
    type: float
    default: 5
  stall_s:
    description: Seconds without any sign of a pull after which it is tried again.
    type: float
    default: 600
  serve:
    description: Where other ranks pull this image from this one - C(address), C(port), C(clients).
    type: dict
    suboptions:
      address: {description: Fabric address of this node., type: str, required: true}
      port: {description: Port to listen on., type: int, required: true}
      clients: {description: Names of the ranks., type: list, elements: str, required: true}
  peer:
    description: The rank to pull from, for O(source=peer).
    type: dict
    suboptions:
      name: {description: Name of the rank., type: str, required: true}
      address: {description: Its fabric address., type: str, required: true}
      port: {description: Its port., type: int, required: true}
      me: {description: Name of this rank., type: str, required: true}
  peer_token:
    description: One-time token between the ranks.
    type: str
  patience_s:
    description: Seconds of silence after which another rank is given up; the rank that serves may first pull or build for hours.
    type: float
    default: 120
  lock:
    description: What to do while this node serves or another fetch runs.
    type: str
    choices: [fail, queue]
    default: fail
  lock_wait_s:
    description: Seconds to wait with O(lock=queue).
    type: float
    default: 3600
  while_serving:
    description: Fetch although this node serves.
    type: bool
    default: false
  lock_file:
    description: The lock that staging and serving share.
    type: path
    default: /run/gb10-fleet/serving.lock
  progress_file:
    description: Where to write the progress, for M(gb10.fleet.follow).
    type: path
  state_dir:
    description: Folder for what is known of images, and for the archive while it is served.
    type: path
    default: /var/lib/gb10-fleet/images
  docker_socket:
    description: The socket of the Docker engine.
    type: path
    default: /var/run/docker.sock
seealso:
  - module: gb10.fleet.image_identity
"""

EXAMPLES = r"""
- name: Pull the image
  gb10.fleet.image:
    name: ghcr.io/tonyd2wild/vllm-glm53-flash:sm121-v8
    platform: linux/arm64
    size_gib: 25
"""

RETURN = r"""
image:
  description: The image, as M(gb10.fleet.image_identity) reports it.
  returned: success
  type: dict
moved_bytes:
  description: Bytes that came over the network.
  returned: success
  type: int
  sample: 12884901888
layers:
  description: Layers that were new to this node.
  returned: success
  type: int
  sample: 12
built:
  description: Whether the image was built now.
  returned: success
  type: bool
  sample: false
pruned:
  description: Ids of old images that were removed.
  returned: success
  type: list
  elements: str
  sample: []
seconds:
  description: How long it took.
  returned: success
  type: float
  sample: 324.1
"""

import contextlib
import http.client
import os
import pwd
import subprocess
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint import CheckpointError, gib, space_fault
from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint_files import free_bytes
from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint_job import running_rank
from ansible_collections.gb10.fleet.plugins.module_utils._fetch import Progress
from ansible_collections.gb10.fleet.plugins.module_utils._hf_hub import waits
from ansible_collections.gb10.fleet.plugins.module_utils._image import (
    LABEL_IMAGE,
    LABEL_INPUTS,
    Engine,
    EngineError,
    PullProgress,
    Receipts,
    auth_header,
    describe,
    fault,
    host_of,
    platform_fault,
    registry_auth,
    split_reference,
    to_prune,
)
from ansible_collections.gb10.fleet.plugins.module_utils._image_peer import USER, Archive, ImageRegistry, Tunnel
from ansible_collections.gb10.fleet.plugins.module_utils._staging_lock import Held, StagingLock

ARGUMENT_SPEC: dict[str, Any] = {
    "name": {"type": "str", "required": True},
    "source": {"type": "str", "choices": ["registry", "peer", "archive", "build"], "default": "registry"},
    "platform": {"type": "str"},
    "refresh": {"type": "bool", "default": False},
    "archive": {"type": "path"},
    "build": {
        "type": "dict",
        "options": {
            "context": {"type": "path", "required": True},
            "dockerfile": {"type": "str", "default": "Dockerfile"},
            "args": {"type": "dict", "default": {}},
            "inputs": {"type": "str", "required": True},
            "timeout_s": {"type": "int", "default": 14400},
        },
    },
    "size_gib": {"type": "float", "default": 0},
    "keep": {"type": "int", "default": 0},
    "retries": {"type": "int", "default": 5},
    "retry_wait_s": {"type": "float", "default": 5},
    "stall_s": {"type": "float", "default": 600},
    "serve": {
        "type": "dict",
        "options": {
            "address": {"type": "str", "required": True},
            "port": {"type": "int", "required": True},
            "clients": {"type": "list", "elements": "str", "required": True},
        },
    },
    "peer": {
        "type": "dict",
        "options": {
            "name": {"type": "str", "required": True},
            "address": {"type": "str", "required": True},
            "port": {"type": "int", "required": True},
            "me": {"type": "str", "required": True},
        },
    },
    "peer_token": {"type": "str", "no_log": True},
    "patience_s": {"type": "float", "default": 120},
    "lock": {"type": "str", "choices": ["fail", "queue"], "default": "fail"},
    "lock_wait_s": {"type": "float", "default": 3600},
    "while_serving": {"type": "bool", "default": False},
    "lock_file": {"type": "path", "default": "/run/gb10-fleet/serving.lock"},
    "progress_file": {"type": "path"},
    "state_dir": {"type": "path", "default": "/var/lib/gb10-fleet/images"},
    "docker_socket": {"type": "path", "default": "/var/run/docker.sock"},
}


class ImageError(Exception):
    """The image cannot be brought here; the message is a sentence or two for the user."""


def homes() -> list[Path]:
    """Where somebody may have logged in to a registry: the user that runs this, and the one who became it."""
    names = [os.environ.get("SUDO_USER"), None]
    found = []
    for name in names:
        with contextlib.suppress(KeyError):
            found.append(Path(pwd.getpwnam(name).pw_dir if name else pwd.getpwuid(os.geteuid()).pw_dir))
    return found


class Manager:
    """Brings one image here, notes it, serves it to others, and removes old ones."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module, self.params = module, module.params
        self.engine = Engine(self.params["docker_socket"], max(60.0, self.params["stall_s"]))
        self.receipts = Receipts(Path(self.params["state_dir"]))
        self.name: str = self.params["name"]
        self.moved = self.layers = 0
        self.built = False
        self.progress = Progress(None, "image")

    def look(self) -> dict[str, Any]:
        found = self.engine.image(self.name)
        if found is None and (known := self.receipts.id_of(self.name)):
            found = self.engine.image(known)
        return describe(self.name, found)

    def wanted(self, image: dict[str, Any]) -> bool:
        """Whether there is anything to bring."""
        if self.params["source"] == "build":
            return bool(self.params["refresh"] or image["inputs"] != self.params["build"]["inputs"])
        return bool(self.params["refresh"] or not image["present"])

    def run(self) -> dict[str, Any]:
        begun = time.monotonic()
        before = self.look()
        pruned: list[str] = []
        gave_up: list[str] = []
        if self.module.check_mode:
            after = before
            changed = self.wanted(before)
        else:
            file = self.params["progress_file"]
            self.progress = Progress(Path(file) if file else None, "image")
            after, pruned, gave_up = self.bring(before)
            changed = before["id"] != after["id"] or bool(pruned)
        return {
            "changed": changed,
            "image": after,
            "moved_bytes": self.moved,
            "layers": self.layers,
            "built": self.built,
            "pruned": pruned,
            "gave_up": gave_up,
            "seconds": round(time.monotonic() - begun, 2),
            "diff": {"before": f"{before['id'] or ''}\n", "after": f"{after['id'] or ''}\n"},
        }

    def bring(self, image: dict[str, Any]) -> tuple[dict[str, Any], list[str], list[str]]:
        lock = StagingLock(self.params["lock_file"], running_rank)
        gave_up: list[str] = []
        with self.serving() as registry:
            if self.wanted(image):
                wait_s = self.params["lock_wait_s"] if self.params["lock"] == "queue" else 0
                holder = f"fetch of image {self.name}, pid {os.getpid()}"
                with lock.staging(holder, wait_s, self.params["while_serving"], self.progress.note):
                    {"registry": self.pull, "peer": self.copy, "archive": self.load, "build": self.build}[
                        self.params["source"]
                    ]()
                image = self.look()
                if not image["present"]:
                    raise ImageError(f"{self.name} is still not here. Look at `docker images` on this node.")
            self.receipts.keep(self.name, image["id"])
            if registry is not None:
                gave_up = self.serve_out(registry, image)
        return image, self.prune(image["id"]), gave_up

    # --- the ways ---

    def pull(self) -> None:
        reference = self.name
        platform = self.params["platform"] or self.own_platform()
        headers = {}
        auth = registry_auth(host_of(reference), homes())
        if auth:
            headers["X-Registry-Auth"] = auth
        self.check_platform(reference, platform, headers)
        self.check_space()
        self.patiently(reference, platform, lambda: self.pull_once(reference, self.params["platform"], headers))

    def own_platform(self) -> str:
        version = self.engine.get("/version")
        return f"{version.get('Os', 'linux')}/{version.get('Arch', '')}"

    def check_platform(self, reference: str, platform: str, headers: dict[str, str]) -> None:
        """A registry that cannot say is left to the pull itself."""
        with contextlib.suppress(EngineError, ValueError):
            with Engine(self.params["docker_socket"], 60).request(
                "GET", f"/distribution/{reference}/json", headers=headers
            ) as answer:
                import json

                wrong = platform_fault(json.loads(answer.read()), reference, platform)
            if wrong:
                raise ImageError(wrong)

    def check_space(self) -> None:
        need = int(self.params["size_gib"] * (1 << 30))
        if need:
            root = Path(str(self.engine.get("/info").get("DockerRootDir") or "/var/lib/docker"))
            wrong = space_fault(str(root), need, free_bytes(root)[0])
            if wrong:
                raise ImageError(
                    wrong.replace(" there, or set models_dir to a larger disk.", " there, or move Docker's data-root.")
                )

    def pull_once(self, reference: str, platform: str | None, headers: dict[str, str]) -> None:
        name, tag, digest = split_reference(reference)
        query = {"fromImage": name, "tag": digest or tag or "latest", **({"platform": platform} if platform else {})}
        events = PullProgress()
        before = self.progress.done
        with self.engine.request("POST", "/images/create", query, headers=headers) as answer:
            self.follow(answer, events, before)
        self.moved += events.done
        self.layers += len(events.new)
        if events.error:
            raise EngineError(events.error)

    def follow(self, answer: Any, events: PullProgress, before: int) -> None:
        import json

        try:
            for line in answer:
                if line.strip():
                    events.take(json.loads(line))
                    self.progress.total = max(before + events.expected, int(self.params["size_gib"] * 0))
                    self.progress.add(max(0, before + events.done - self.progress.done))
        except TimeoutError:
            raise EngineError(f"no byte came for {self.params['stall_s']:g} s") from None
        except (OSError, http.client.HTTPException, ValueError) as exc:
            raise EngineError(f"the connection broke ({exc})") from None

    def patiently(self, reference: str, platform: str, act: Callable[[], None]) -> None:
        """Try again where that can help: what is complete is kept by the engine."""
        for wait in [*waits(self.params["retries"], self.params["retry_wait_s"], 300), None]:
            try:
                act()
                return
            except EngineError as exc:
                _kind, sentence, again = fault(str(exc), reference, platform)
                if not again or wait is None:
                    raise ImageError(sentence) from None
                self.progress.note(f"tries again in {wait:.0f} s: {exc}"[:200])
                time.sleep(wait)

    def tag(self, image_id: str) -> None:
        name, tag, digest = split_reference(self.name)
        self.receipts.keep(self.name, image_id)
        if digest and not tag:
            return  # a digest cannot be given to an image; containers start by its id
        self.engine.request("POST", f"/images/{image_id}/tag", {"repo": name, "tag": tag or "latest"}).close()

    def load(self) -> None:
        path = Path(self.params["archive"] or "")
        if not path.is_file():
            raise ImageError(
                f"image archive {path} is not on this node. Copy it there (docker save -o FILE {self.name})."
            )
        size = path.stat().st_size
        self.progress.expect(size)
        with path.open("rb") as stream:
            headers = {"Content-Type": "application/x-tar", "Content-Length": str(size)}
            with self.engine.request("POST", "/images/load", {"quiet": "1"}, body=stream, headers=headers) as answer:
                text = answer.read().decode("utf-8", "replace")
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self.progress.add(size)
        self.moved += size
        loaded = text.rpartition("Loaded image")[2]
        names = [
            word.strip('\\n"}, ')
            for word in loaded.replace("\\n", " ").split()
            if "sha256:" in word or "/" in word or ":" in word.strip(":")
        ]
        found = self.engine.image(names[0]) if names else None
        if found is None and self.engine.image(self.name) is None:
            raise ImageError(f"{path} holds no image that could be loaded ({text.strip()[:200]}).")
        if found is not None:
            self.tag(str(found["Id"]))

    def copy(self) -> None:
        """Pull from the registry that another rank opens for this."""
        peer = self.params["peer"]
        self.await_peer(peer)
        with Tunnel(peer["address"], peer["port"]) as tunnel:
            reference = f"127.0.0.1:{tunnel.port}/rank/image:current"
            headers = {"X-Registry-Auth": auth_header(USER, self.params["peer_token"], f"127.0.0.1:{tunnel.port}")}
            self.patiently(reference, "", lambda: self.pull_once(reference, None, headers))
            found = self.engine.image(reference)
            if found is None:
                raise ImageError(f"The image of {peer['name']} arrived, and is not here.")
            self.tag(str(found["Id"]))
            self.engine.request("DELETE", f"/images/{reference}", {"noprune": "1"}).close()
        self.ask_peer(peer, "POST", f"/done/{peer['me']}")

    def ask_peer(self, peer: dict[str, Any], method: str, path: str) -> dict[str, Any] | None:
        import json

        token = b64encode(f"{USER}:{self.params['peer_token']}".encode()).decode()
        connection = http.client.HTTPConnection(peer["address"], peer["port"], timeout=10)
        try:
            connection.request(method, path, headers={"Authorization": f"Basic {token}"})
            answer = connection.getresponse()
            data: dict[str, Any] = json.loads(answer.read() or b"{}")
            return data if answer.status == 200 else None
        except (OSError, http.client.HTTPException, ValueError):
            return None
        finally:
            connection.close()

    def await_peer(self, peer: dict[str, Any]) -> None:
        heard = time.monotonic()
        while True:
            state = self.ask_peer(peer, "GET", "/state")
            if state is not None:
                heard = time.monotonic()
                if state["failure"]:
                    raise ImageError(f"{peer['name']}, which this node pulls from, gave up: {state['failure']}")
                if state["ready"]:
                    return
            if time.monotonic() - heard > self.params["patience_s"]:
                raise ImageError(
                    f"{peer['name']}, which this node pulls from, does not answer on {peer['address']} port {peer['port']} "
                    f"({self.params['patience_s']:.0f} s waited). Look at its own error, or open that port between the ranks."
                )
            time.sleep(0.2)

    def build(self) -> None:
        """With the docker command: what a Dockerfile may ask for, only it knows."""
        build = self.params["build"]
        name, tag, _digest = split_reference(self.name)
        argv = [
            "docker",
            "build",
            "--tag",
            f"{name}:{tag or 'latest'}",
            "--label",
            f"{LABEL_INPUTS}={build['inputs']}",
            "--label",
            f"{LABEL_IMAGE}={self.name}",
        ]
        for key, value in sorted(build["args"].items()):
            argv += ["--build-arg", f"{key}={value}"]
        argv += ["--file", str(Path(build["context"], build["dockerfile"])), build["context"]]
        self.progress.note("builds")
        try:
            done = subprocess.run(  # pylint: disable=ansible-bad-function
                argv, capture_output=True, text=True, timeout=build["timeout_s"], check=False, errors="replace"
            )
        except FileNotFoundError:
            raise ImageError("There is no docker command on this node. Install the Docker engine's client.") from None
        except subprocess.TimeoutExpired:
            raise ImageError(
                f"The build of {self.name} took longer than {build['timeout_s']} s. Raise image.build.timeout_s."
            ) from None
        if done.returncode:
            lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            raise ImageError(f"The build of {self.name} failed: {' | '.join(lines[-5:])[:800]}")
        self.built = True
        found = self.engine.image(f"{name}:{tag or 'latest'}")
        if found:
            self.receipts.keep(self.name, str(found["Id"]))

    # --- serving ---

    @contextlib.contextmanager
    def serving(self) -> Iterator[ImageRegistry | None]:
        serve = self.params["serve"]
        if not serve or not serve["clients"]:
            yield None
            return
        try:
            registry = ImageRegistry(serve["address"], serve["port"], self.params["peer_token"], serve["clients"])
        except OSError as exc:
            raise ImageError(
                f"The other ranks cannot pull from here: {serve['address']} port "
                f"{serve['port']} cannot be listened on ({exc.strerror}). "
                "Set image_peer_port to a free port."
            ) from None
        with registry:
            try:
                yield registry
            except BaseException as exc:
                registry.failure = str(exc)
                registry.wait(5, 5)
                raise

    def serve_out(self, registry: ImageRegistry, image: dict[str, Any]) -> list[str]:
        folder = Path(self.params["state_dir"])
        folder.mkdir(parents=True, exist_ok=True)
        spool = folder / f"{image['id'].rpartition(':')[2][:16]}.tar"
        wrong = space_fault(str(folder), int(image["size_bytes"] or 0), free_bytes(folder)[0])
        if wrong:
            raise ImageError(wrong.replace("set models_dir to a larger disk", "use image_distribution: each"))
        try:
            self.progress.note(f"writes {gib(image['size_bytes'] or 0)} for {', '.join(sorted(registry.waiting_for))}")
            with self.engine.request("GET", f"/images/{image['id']}/get") as answer, spool.open("wb") as stream:
                view = memoryview(bytearray(1 << 20))
                while count := answer.readinto(view):
                    stream.write(view[:count])
            registry.archive = Archive(spool)
            self.progress.note("serves " + ", ".join(sorted(registry.waiting_for)))
            registry.heard_at = time.monotonic()
            return registry.wait(self.params["patience_s"], self.params["patience_s"])
        finally:
            spool.unlink(missing_ok=True)

    # --- old images ---

    def prune(self, current: str) -> list[str]:
        if not self.params["keep"]:
            return []
        used = {str(c.get("ImageID")) for c in self.engine.get("/containers/json", {"all": "1"})}
        images = self.engine.get("/images/json")
        removed = []
        for image_id in to_prune(images, used, self.name, current, self.params["keep"]):
            with contextlib.suppress(EngineError):  # another image stands on it
                self.engine.request("DELETE", f"/images/{image_id}", {"force": "1"}).close()
                removed.append(image_id)
        self.receipts.forget(set(removed))
        return removed


def main() -> None:
    module = AnsibleModule(
        argument_spec=ARGUMENT_SPEC,
        required_if=[
            ("source", "peer", ["peer", "peer_token"]),
            ("source", "archive", ["archive"]),
            ("source", "build", ["build"]),
        ],
        supports_check_mode=True,
    )
    try:
        result = Manager(module).run()
    except (ImageError, EngineError, CheckpointError, Held) as exc:
        module.fail_json(msg=str(exc))
    except OSError as exc:
        module.fail_json(
            msg=f"{exc.filename or module.params['state_dir']} cannot be used ({exc.strerror or exc}). Run with become."
        )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
