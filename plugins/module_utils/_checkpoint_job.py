# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Looking at the checkpoints of a recipe on one node, and making them complete. What both checkpoint modules share."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint import (
    COMMIT,
    CheckpointError,
    Entry,
    Layout,
    Manifest,
    gib,
    space_fault,
)
from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint_files import (
    Checkpoint,
    Found,
    Pace,
    free_bytes,
    write_atomic,
)

# What describes one checkpoint; the same keys as in a recipe.
ITEM_SPEC: dict[str, Any] = {
    "repo": {"type": "str", "required": True},
    "revision": {"type": "str"},
    "layout": {"type": "str", "choices": ["flat", "hub"], "default": "flat"},
    "directory": {"type": "str"},
    "include": {"type": "list", "elements": "str", "default": []},
    "exclude": {"type": "list", "elements": "str", "default": []},
    "licence": {"type": "str"},
    "non_commercial": {"type": "bool", "default": False},
}
COMMON_SPEC: dict[str, Any] = {
    "checkpoints": {"type": "list", "elements": "dict", "required": True, "options": ITEM_SPEC},
    "models_dir": {"type": "path", "required": True},
    "state_dir": {"type": "path", "default": "/var/lib/gb10-fleet/checkpoints"},
    "verify": {"type": "str", "choices": ["cached", "full", "size"], "default": "cached"},
    "endpoint": {"type": "str"},
    "token_file": {"type": "path", "no_log": False},
    "accept_non_commercial": {"type": "bool", "default": False},
}


@dataclass
class Item:
    """One checkpoint of the list."""

    spec: Mapping[str, Any]
    checkpoint: Checkpoint
    manifest: Manifest | None = None
    found: Found = field(default_factory=Found)

    @property
    def repo(self) -> str:
        return str(self.spec["repo"])

    @property
    def revision(self) -> str | None:
        return self.spec["revision"]

    @property
    def missing_bytes(self) -> int | None:
        """Bytes still to move; None without a manifest. An unverified file may turn out wrong; it counts as present."""
        if self.manifest is None:
            return None
        return sum(self.manifest.files[path].size for path in self.found.missing)

    @property
    def unverified_bytes(self) -> int:
        return sum(self.manifest.files[path].size for path in self.found.unverified) if self.manifest else 0

    def report(self) -> dict[str, Any]:
        manifest = self.manifest
        return {
            "repo": self.repo,
            "revision": manifest.revision if manifest else None,
            "path": self.checkpoint.layout.snapshot(manifest.revision) if manifest else self.checkpoint.layout.root,
            "files": len(manifest.files) if manifest else None,
            "size_bytes": manifest.size if manifest else None,
            "complete": manifest is not None and self.found.complete,
            "missing": self.found.missing,
            "missing_bytes": self.missing_bytes,
            "unverified_bytes": self.unverified_bytes,
        }


def items_of(params: Mapping[str, Any]) -> list[Item]:
    """The list of the module's parameters, licences and names checked. Raises CheckpointError."""
    items = []
    for spec in params["checkpoints"]:
        if spec["revision"] and not COMMIT.match(spec["revision"]):
            raise CheckpointError(
                f"revision of {spec['repo']} is {spec['revision']}, wanted a full commit of 40 hexadecimal digits."
            )
        if spec["non_commercial"] and not params["accept_non_commercial"]:
            licence = f" ({spec['licence']})" if spec["licence"] else ""
            raise CheckpointError(
                f"{spec['repo']} may be used for non-commercial purposes only{licence}. "
                f"Accept that with accept_non_commercial: true, "
                "or choose a recipe without it."
            )
        directory = spec["directory"] or spec["repo"].rsplit("/", 1)[-1]
        layout = Layout(spec["layout"], params["models_dir"], spec["repo"], directory)
        items.append(Item({**spec, "directory": directory}, Checkpoint(layout, Path(params["state_dir"]))))
    names = [item.checkpoint.layout.root for item in items]
    for name in names:
        if names.count(name) > 1:
            raise CheckpointError(f"Two checkpoints would lie in {name}: give each a directory of its own.")
    return items


def look(item: Item, verify: str) -> None:
    """With what this node knows: the manifest of the wanted commit, and which of its files are here."""
    manifest = item.checkpoint.known_manifest(item.revision)
    if manifest is not None:
        take_manifest(item, manifest, verify)


def take_manifest(item: Item, manifest: Manifest, verify: str) -> None:
    item.manifest = manifest.selected(item.spec["include"], item.spec["exclude"])
    item.found = item.checkpoint.look(item.manifest, verify)


def manifest_of_directory(item: Item, folder: Path) -> Manifest:
    """The manifest of a folder that was brought here: what the CLI left in it, else its files as they are now."""
    if not folder.is_dir():
        raise CheckpointError(
            f"checkpoint_source {folder} is no folder of this node. Copy the checkpoint there, or use another source."
        )
    brought = Checkpoint(Layout("flat", str(folder.parent), item.repo, folder.name), folder / ".cache" / "none")
    manifest = brought.known_manifest(item.revision)
    if manifest is not None:
        return manifest
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if not name.startswith((".cache/", ".git/")):
            digest = hashlib.sha256()
            with path.open("rb") as stream:
                while block := stream.read(1 << 22):
                    digest.update(block)
            files[name] = Entry(path.stat().st_size, None, digest.hexdigest())
    if not files:
        raise CheckpointError(
            f"checkpoint_source {folder} holds no files. Copy the checkpoint there, or use another source."
        )
    text = "\n".join(f"{entry.sha256} {name}" for name, entry in files.items())
    commit = item.revision or hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    return Manifest(item.repo, commit, files)


class Job:
    """Makes all checkpoints of one node complete. Needs the lock (the caller holds it)."""

    def __init__(self, params: Mapping[str, Any], items: list[Item], progress: Any) -> None:
        self.params, self.items, self.progress = params, items, progress
        self.client = ""
        self.removed = 0
        self.server: Any = None
        self.upstream: Any = None

    # --- peers ---

    @contextlib.contextmanager
    def peers(self) -> Iterator[None]:
        """Serve those who copy from here, from the first verified file on until the last of them has everything."""
        from ansible_collections.gb10.fleet.plugins.module_utils._peer import PeerClient, PeerServer

        serve, source = self.params["serve"], self.params["peer"]
        if source:
            self.upstream = PeerClient(
                source["name"], source["address"], source["port"], self.params["peer_token"], source["me"],
                self.params["patience_s"], self.params["patience_s"] * 2,
            )  # fmt: skip
        if not serve or not serve["clients"]:
            yield
            return
        with PeerServer(serve["address"], serve["port"], self.params["peer_token"], serve["clients"]) as self.server:
            try:
                yield
            except BaseException as exc:
                self.server.fail(str(exc), 10)
                raise

    def serve_out(self) -> list[str]:
        """Wait for those who copy from here. Returns those who fell silent."""
        if self.server is None:
            return []
        self.progress.note("serves " + ", ".join(sorted(self.server.waiting_for)))
        return list(self.server.wait(self.params["patience_s"], self.params["patience_s"] * 2))

    # --- one checkpoint ---

    def run(self) -> None:
        for item in self.items:
            self.identify(item)
        for item in self.items:
            self.check_space(item)
            self.complete(item)
        if self.upstream is not None:
            self.upstream.done()

    def identify(self, item: Item) -> None:
        """Know the commit and its manifest, and what of it is here."""
        manifest = self._manifest(item)
        take_manifest(item, manifest, self.params["verify"])
        item.checkpoint.keep_manifest(manifest)
        if item.manifest is None:
            raise AssertionError(item)
        self.progress.expect((item.missing_bytes or 0) + item.unverified_bytes)
        self.offer(item)

    def offer(self, item: Item) -> None:
        """Let others copy what is verified."""
        if self.server is not None and item.manifest is not None:
            from ansible_collections.gb10.fleet.plugins.module_utils._peer import Offer

            selected = item.manifest
            self.server.offer(
                item.repo, Offer(selected, lambda path: item.checkpoint.path(selected, path), set(item.found.verified))
            )

    def offer_all(self) -> None:
        for item in self.items:
            self.offer(item)

    def _manifest(self, item: Item) -> Manifest:
        if self.upstream is not None:
            manifest: Manifest = self.upstream.manifest(item.repo)
            if item.revision not in (None, manifest.revision):
                raise CheckpointError(
                    f"{self.upstream.name} has {item.repo} at {manifest.revision}, wanted {item.revision}."
                )
            return manifest
        known = item.checkpoint.known_manifest(item.revision)
        if known is not None and not self.params["refresh"]:
            return known
        if self.params["source"] != "hub":
            return manifest_of_directory(item, Path(self.params["source"]))
        hub, patient = self.hub(), self.patient
        commit = item.revision or patient(lambda: hub.resolve(item.repo))
        return patient(lambda: hub.manifest(item.repo, commit))

    def hub(self) -> Any:
        from ansible_collections.gb10.fleet.plugins.module_utils._hf_hub import Hub

        return Hub(self.params["endpoint"], self.params["token_file"])

    def patient(self, ask: Callable[[], Any]) -> Any:
        from ansible_collections.gb10.fleet.plugins.module_utils._hf_hub import patiently

        return patiently(
            ask, self.params["retries"], self.params["retry_wait_s"], self.params["retry_longest_s"], self.progress.note
        )

    def check_space(self, item: Item) -> None:
        root = Path(item.checkpoint.layout.root)
        scratch = Path(item.checkpoint.layout.scratch)
        held = sum(p.stat().st_size for p in scratch.glob("*.partial")) if scratch.is_dir() else 0
        held += sum(p.stat().st_size for p in item.checkpoint.incompletes())
        free, _device = free_bytes(root)
        fault = space_fault(str(root.parent), max(0, (item.missing_bytes or 0) - held), free)
        if fault:
            raise CheckpointError(fault)

    def complete(self, item: Item) -> None:
        manifest, checkpoint = item.manifest, item.checkpoint
        if manifest is None:
            raise AssertionError(item)
        for path in item.found.verified:
            checkpoint.link(manifest, path)
        self._verify(item)
        rounds = 0
        while item.found.missing:
            rounds += 1
            self._move(item, list(item.found.missing))
            item.found = checkpoint.look(manifest, "size" if self.params["verify"] == "size" else "cached")
            if item.found.unverified:
                self._verify(item)
            if rounds == 3 and item.found.missing:
                raise CheckpointError(
                    f"{len(item.found.missing)} files of {item.repo} vanish after their "
                    f"download, for example {item.found.missing[0]}."
                )
        faults = checkpoint.header_faults(manifest, manifest.files)
        checkpoint.save(manifest)
        if faults:
            raise CheckpointError(
                f"{item.repo} at {manifest.revision} is as published, and broken: {'; '.join(faults[:3])}."
            )
        if checkpoint.layout.kind == "hub":
            write_atomic(Path(checkpoint.layout.root, "refs", "main"), manifest.revision.encode())
        shutil.rmtree(checkpoint.layout.scratch, ignore_errors=True)

    def _arrived(self, item: Item) -> Callable[[str], None]:
        """What to do with each file that is complete: let others copy it, and remember it in case this job dies."""
        saved = [time.monotonic()]

        def arrived(path: str) -> None:
            if self.server is not None:
                self.server.offers[item.repo].verified.add(path)
            if time.monotonic() - saved[0] > 10 and item.manifest is not None:
                saved[0] = time.monotonic()
                item.checkpoint.save(item.manifest)

        return arrived

    def _verify(self, item: Item) -> None:
        """Hash what was not hashed yet. A wrong file is removed and counts as missing."""
        manifest, checkpoint, arrived = item.manifest, item.checkpoint, self._arrived(item)
        if manifest is None:
            raise AssertionError(item)
        pace = Pace(self.params["verify_mib_per_s"] * (1 << 20))

        def read(count: int) -> None:
            self.progress.add(count, hashed=True)
            pace.took(count)

        def one(path: str) -> bool:
            right = checkpoint.verify_file(manifest, path, read)
            if right:
                checkpoint.link(manifest, path)
                arrived(path)
            return right

        unverified = sorted(item.found.unverified, key=lambda path: -manifest.files[path].size)
        with ThreadPoolExecutor(max(1, min(self.params["streams"], os.cpu_count() or 1))) as pool:
            for path, right in zip(unverified, pool.map(one, unverified)):  # noqa: B905 - both are of one length
                if right:
                    item.found.verified.append(path)
                else:
                    checkpoint.remove_file(manifest, path)
                    self.removed += 1
                    item.found.missing.append(path)
                    self.progress.expect(manifest.files[path].size)
        item.found.unverified = []
        if unverified:
            checkpoint.save(manifest)

    def _move(self, item: Item, paths: list[str]) -> None:
        from ansible_collections.gb10.fleet.plugins.module_utils import _fetch

        manifest, params = item.manifest, self.params
        if manifest is None:
            raise AssertionError(item)
        arrived = self._arrived(item)
        source: Any
        if self.upstream is not None:
            source, self.client = _fetch.PeerSource(self.upstream, item.repo), "peer"
        elif params["source"] != "hub":
            source, self.client = _fetch.DirectorySource(Path(params["source"])), "directory"
        else:
            cli = (
                _fetch.find_cli(Path(params["client_dir"]))
                if params["client"] != "direct" and params["client_dir"]
                else None
            )
            if cli is None and params["client"] == "hf":
                raise CheckpointError(
                    f"There is no working hf in {params['client_dir']}/bin. Install huggingface_hub there, or use client: direct."
                )
            if cli is not None:
                self.client = f"hf {cli.version}"
                download = _fetch.CliDownload(
                    item.checkpoint, manifest, cli, self.hub(), self.progress, params["streams"], params["memory_gib"],
                    params["retries"], params["retry_wait_s"], params["retry_longest_s"], params["stall_s"], arrived,
                )  # fmt: skip
                download.fetch(paths)
                return
            source, self.client = _fetch.HubSource(self.hub(), manifest), "direct"
        _fetch.Streams(
            item.checkpoint, manifest, source, self.progress, params["streams"],
            params["retries"], params["retry_wait_s"], params["retry_longest_s"], arrived,
        ).fetch(paths)  # fmt: skip


def running_rank() -> dict[str, Any] | None:
    """The rank container that runs on this node, as a lock record."""
    from ansible_collections.gb10.fleet.plugins.module_utils._image import Engine, EngineError

    try:
        containers = Engine(timeout_s=5).get(
            "/containers/json", {"filters": '{"label":["gb10.fleet.cluster"],"status":["running"]}'}
        )
    except EngineError:
        return None
    for container in containers:
        labels = container.get("Labels") or {}
        name = (container.get("Names") or ["?"])[0].lstrip("/")
        return {
            "kind": "serving",
            "holder": f"container {name} of cluster {labels.get('gb10.fleet.cluster')}",
            "since": container.get("Created"),
        }
    return None


def remove(item: Item) -> int:
    """Remove a checkpoint and what we know of it. Returns the bytes that were freed."""
    root = Path(item.checkpoint.layout.root)
    size = sum(p.lstat().st_size for p in root.rglob("*") if p.is_file() and not p.is_symlink()) if root.is_dir() else 0
    if root.is_dir():
        shutil.rmtree(root)
    for path in (item.checkpoint.manifest_file, item.checkpoint.cache_file):
        path.unlink(missing_ok=True)
    return size


def exists(item: Item) -> bool:
    return Path(item.checkpoint.layout.root).exists() or item.checkpoint.manifest_file.exists()


def describe(items: list[Item]) -> str:
    """``RedHatAI/GLM-5.3-Flash-NVFP4: 172.3 GiB missing``"""
    parts = []
    for item in items:
        size = item.missing_bytes
        parts.append(f"{item.repo}: {'all' if size is None else gib(size)} missing")
    return ", ".join(parts)
