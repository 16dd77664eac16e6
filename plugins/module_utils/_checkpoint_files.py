# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A checkpoint on the disk of this node: what is there, what of it was verified, and the reading that verifies.

Hashing reads with FADV_DONTNEED behind itself: a checkpoint left in the page cache is what starves the GPU's allocator at the next
load (cases guard-pagecache-frag, ckpt-during-serve).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils import _safetensors
from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint import (
    CheckpointError,
    Entry,
    Layout,
    Manifest,
    manifest_from_cli,
    manifest_from_json,
)

_BLOCK = 1 << 22
CONFIG = "config.json"


def write_atomic(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace a file in one step; after a power cut the old or the new content is there, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.new")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        partial.chmod(mode)
        partial.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()


def write_json(path: Path, value: Any, mode: int = 0o644) -> None:
    write_atomic(path, json.dumps(value, separators=(",", ":"), sort_keys=True).encode() + b"\n", mode)


def read_json(path: Path) -> Any:
    """The content, or None when there is no such file or no JSON in it."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def digest_start(entry: Entry) -> Any:
    """A hash object for a file of this size: sha256 of the content, or git's blob id."""
    if entry.sha256:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % entry.size, usedforsecurity=False)


class Pace:
    """Keeps readers together below a number of bytes per second; 0 is no limit."""

    def __init__(self, bytes_per_s: float = 0) -> None:
        self.rate = bytes_per_s
        self.lock = threading.Lock()
        self.free_at = time.monotonic()

    def took(self, size: int) -> None:
        if not self.rate:
            return
        with self.lock:
            self.free_at = max(self.free_at, time.monotonic()) + size / self.rate
            wait = self.free_at - time.monotonic()
        if wait > 0:
            time.sleep(wait)


def hash_file(
    path: Path, entry: Entry, length: int | None = None, read: Callable[[int], None] | None = None, digest: Any = None
) -> Any:
    """Feed a file (its first ``length`` bytes) to a hash and drop its pages from the page cache behind the reader."""
    digest = digest or digest_start(entry)
    buffer = bytearray(_BLOCK)
    view = memoryview(buffer)
    left = entry.size if length is None else length
    with path.open("rb", buffering=0) as stream:
        descriptor, offset = stream.fileno(), 0
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while left and (count := stream.readinto(view[: min(left, _BLOCK)])):
            digest.update(view[:count])
            os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_DONTNEED)
            offset += count
            left -= count
            if read:
                read(count)
        # Read-ahead went past what was read; dirty pages of a fresh file are kept until they are written.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return digest


def signature(status: os.stat_result, entry: Entry) -> list[Any]:
    """What must be unchanged for a verification to hold. ctime catches a byte that was flipped with the mtime put back."""
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, entry.hash]


@dataclass
class Found:
    """What a look at the files says. Lists hold paths of the manifest."""

    verified: list[str] = field(default_factory=list)
    unverified: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return not (self.unverified or self.missing or self.faults)


class Checkpoint:
    """One checkpoint in its place on this node, with its manifest and its cache of verifications in ``state_dir``."""

    def __init__(self, layout: Layout, state_dir: Path) -> None:
        self.layout = layout
        self.manifest_file = state_dir / f"{layout.name}.manifest.json"
        self.cache_file = state_dir / f"{layout.name}.verified.json"
        self.lock = threading.Lock()
        cache = read_json(self.cache_file)
        self.cache: dict[str, Any] = cache if isinstance(cache, dict) and cache.get("version") == 1 else {}
        self.signatures: dict[str, Any] = dict(self.cache.get("files") or {})

    # --- manifest ---

    def known_manifest(self, revision: str | None) -> Manifest | None:
        """The manifest kept on this node, if it is of this commit (of any, for None); else what the CLI left beside the files."""
        data = read_json(self.manifest_file)
        if data is not None:
            with contextlib.suppress(CheckpointError):
                manifest = manifest_from_json(data)
                if manifest.repo == self.layout.repo and revision in (None, manifest.revision):
                    return manifest
        return self._cli_manifest(revision)

    def _cli_manifest(self, revision: str | None) -> Manifest | None:
        if self.layout.kind != "flat":
            return None
        trees = Path(self.layout.root, ".cache/huggingface/trees")
        files = sorted(trees.glob("*.json"), key=lambda p: p.stat().st_mtime) if trees.is_dir() else []
        wanted = [p for p in files if revision in (None, p.stem)]
        data = read_json(wanted[-1]) if wanted else None
        try:
            return manifest_from_cli(self.layout.repo, wanted[-1].stem, data) if data else None
        except (KeyError, TypeError, ValueError, AttributeError, CheckpointError):
            return None

    def keep_manifest(self, manifest: Manifest) -> None:
        if read_json(self.manifest_file) != manifest.to_json():
            write_json(self.manifest_file, manifest.to_json())

    # --- looking ---

    def path(self, manifest: Manifest, path: str) -> Path:
        return Path(self.layout.file(manifest.revision, path))

    def stat(self, manifest: Manifest, path: str) -> os.stat_result | None:
        try:
            return self.path(manifest, path).stat()
        except OSError:
            return None

    def look(self, manifest: Manifest, verify: str = "cached") -> Found:
        """Presence and exact size of every file, and which of them were verified before and not touched since. Reads no content.

        With ``verify`` ``size`` that is enough; with ``full`` no earlier verification counts.
        """
        found = Found()
        for path, entry in manifest.files.items():
            status = self.stat(manifest, path)
            if status is None or status.st_size != entry.size:
                found.missing.append(path)
            elif verify == "size" or (verify == "cached" and self.signatures.get(path) == signature(status, entry)):
                found.verified.append(path)
            else:
                found.unverified.append(path)
        return found

    # --- verifying ---

    def verify_file(self, manifest: Manifest, path: str, read: Callable[[int], None] | None = None) -> bool:
        """Hash one file; remember it when it is right."""
        entry = manifest.files[path]
        target = self.path(manifest, path)
        before = target.stat()
        if before.st_size != entry.size or hash_file(target, entry, read=read).hexdigest() != entry.hash:
            return False
        self.remember(path, entry, target)
        return signature(before, entry) == self.signatures[path]

    def remember(self, path: str, entry: Entry, target: Path) -> None:
        """Call right after the content was seen to be right."""
        with self.lock:
            self.signatures[path] = signature(target.stat(), entry)

    def header_faults(self, manifest: Manifest, paths: Iterable[str]) -> list[str]:
        """What the safetensors headers and the index say against each other. Fills :attr:`tensors` for the lint."""
        faults: list[str] = []
        names: dict[str, list[str]] = {}
        present = set(paths)
        size = 0
        for path in sorted(p for p in present if p.endswith(_safetensors.SUFFIX)):
            try:
                header = _safetensors.read_header(self.path(manifest, path))
            except _safetensors.SafetensorsError as exc:
                faults.append(f"{path} {exc}")
                continue
            except OSError as exc:
                faults.append(f"{path} cannot be read ({exc.strerror})")
                continue
            names[path] = list(header.tensors)
            size += header.data_bytes
        if _safetensors.INDEX in present:
            index = read_json(self.path(manifest, _safetensors.INDEX))
            weight_map = index.get("weight_map") if isinstance(index, Mapping) else None
            if not isinstance(weight_map, Mapping):
                faults.append(f"{_safetensors.INDEX} has no weight_map")
            else:
                lost = sorted(set(weight_map.values()) - set(manifest.files))
                if lost:
                    faults.append(
                        f"{_safetensors.INDEX} names {lost[0]}, which is no file of this commit or was excluded"
                    )
                in_index = {path: tensors for path, tensors in names.items() if path in set(weight_map.values())}
                faults += _safetensors.index_faults(weight_map, in_index)
        layers = sorted(
            {n for tensors in names.values() for n in tensors if "mtp" in n.lower() or "nextn" in n.lower()}
        )
        self.cache["tensors"] = {"bytes": size, "files": len(names), "mtp": layers[:4], "layers": _layers(names)}
        return faults

    def summary(self) -> dict[str, Any]:
        """Of the headers, from the last complete verification: ``bytes``, ``files``, ``mtp``, ``layers``."""
        return dict(self.cache.get("tensors") or {})

    def save(self, manifest: Manifest) -> None:
        """Keep the verifications that still belong to a file of the manifest."""
        kept = {path: self.signatures[path] for path in manifest.files if path in self.signatures}
        value = {"version": 1, "revision": manifest.revision, "files": kept, "tensors": self.cache.get("tensors") or {}}
        if value != self.cache:
            self.cache = value
            write_json(self.cache_file, value)

    def config(self, manifest: Manifest) -> dict[str, Any]:
        data = read_json(self.path(manifest, CONFIG)) if CONFIG in manifest.files else None
        return data if isinstance(data, dict) else {}

    # --- hub layout ---

    def link(self, manifest: Manifest, path: str) -> None:
        """In the hub layout, let the snapshot's path point to the blob."""
        if self.layout.kind != "hub":
            return
        place = self.path(manifest, path)
        target = os.path.relpath(self.layout.data(path, manifest.files[path]), place.parent)
        place.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            if place.readlink() == Path(target):
                return
        with contextlib.suppress(FileNotFoundError):
            place.unlink()
        place.symlink_to(target)

    # --- unfinished files ---

    def incompletes(self) -> list[Path]:
        """Files of the hub's client that were not finished."""
        root = Path(self.layout.root)
        places = [root / "blobs"] if self.layout.kind == "hub" else [root / ".cache/huggingface/download"]
        return [p for place in places if place.is_dir() for p in place.rglob("*.incomplete")]

    def remove_file(self, manifest: Manifest, path: str) -> None:
        """A file whose content is wrong, with all that could make a downloader believe in it."""
        root = Path(self.layout.root)
        doomed = [Path(self.layout.data(path, manifest.files[path])), self.path(manifest, path)]
        doomed.append(root / ".cache/huggingface/download" / f"{path}.metadata")
        for place in doomed:
            with contextlib.suppress(FileNotFoundError):
                place.unlink()
        with self.lock:
            self.signatures.pop(path, None)


def _layers(names: Mapping[str, Iterable[str]]) -> int:
    """Number of decoder layers that the tensor names show."""
    numbers = set()
    for tensors in names.values():
        for tensor in tensors:
            words = tensor.split(".")
            for before, word in itertools.pairwise(words):
                if before == "layers" and word.isdigit():
                    numbers.add(int(word))
                    break
    return len(numbers)


def in_use(paths: Iterable[Path]) -> set[Path]:
    """Those of the files that a process of this node has open (as far as we may look)."""
    wanted = {str(path): path for path in paths}
    found: set[Path] = set()
    if not wanted:
        return found
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):  # noqa: PTH208 - names are enough, and links may vanish meanwhile
                with contextlib.suppress(OSError):
                    target = os.readlink(folder / name)  # noqa: PTH115
                    if target in wanted:
                        found.add(wanted[target])
    return found


def free_bytes(path: Path) -> tuple[int, int]:
    """Free bytes for root and the number of the file system that a (future) path is on."""
    while not path.exists():
        path = path.parent
    usage = os.statvfs(path)
    return usage.f_bavail * usage.f_frsize, path.stat().st_dev
