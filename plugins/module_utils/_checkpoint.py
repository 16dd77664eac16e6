# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checkpoints: manifests, layouts and the plan of who takes what from whom. Pure functions; ``_checkpoint_files.py`` does I/O.

A manifest is what the hub says of one commit: every file with its size and its hash (sha256 for large files, git's blob id for
small ones). Nothing counts as complete that was not compared with it.
"""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GIB = 1 << 30
MANIFEST_VERSION = 1
COMMIT = re.compile(r"^[0-9a-f]{40}$")
# What both of our own tools and the CLI keep beside the files of a flat checkpoint.
CACHE = ".cache"


class CheckpointError(Exception):
    """The checkpoint cannot be made complete; the message is a sentence or two for the user, without the node's name."""


@dataclass(frozen=True)
class Entry:
    """One file of a commit. ``oid`` is git's blob id; ``sha256`` is set for files that git keeps as LFS pointers."""

    size: int
    oid: str | None = None
    sha256: str | None = None

    @property
    def hash(self) -> str:
        return self.sha256 or self.oid or ""


@dataclass(frozen=True)
class Manifest:
    """Files of one commit by path, in the order of their names."""

    repo: str
    revision: str
    files: Mapping[str, Entry]

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.files.values())

    def to_json(self) -> dict[str, Any]:
        files = {path: [e.size, e.oid, e.sha256] for path, e in sorted(self.files.items())}
        return {"version": MANIFEST_VERSION, "repo": self.repo, "revision": self.revision, "files": files}

    def selected(self, include: Sequence[str], exclude: Sequence[str]) -> Manifest:
        """Only the files that the patterns want. Raises CheckpointError when that is none."""
        names = select(self.files, include, exclude)
        if not names:
            raise CheckpointError(
                f"No file of {self.repo} matches include {list(include)} and exclude "
                f"{list(exclude)}. Correct the patterns in the recipe."
            )
        return Manifest(self.repo, self.revision, {name: self.files[name] for name in names})


def safe_path(path: str) -> str:
    """The path, or CheckpointError when it leads out of the checkpoint's folder or into what we keep there."""
    normal = posixpath.normpath(path)
    if path != normal or path.startswith("/") or normal.split("/")[0] in ("..", ".", CACHE) or "\0" in path:
        raise CheckpointError(f"The manifest names a file {path!r}, which is no path inside a checkpoint.")
    return path


def manifest_from_json(data: Mapping[str, Any]) -> Manifest:
    """The reverse of :meth:`Manifest.to_json`. Raises CheckpointError."""
    try:
        if data["version"] != MANIFEST_VERSION:
            raise CheckpointError(f"The manifest has version {data['version']}, wanted {MANIFEST_VERSION}.")
        files = {safe_path(path): Entry(int(e[0]), e[1], e[2]) for path, e in data["files"].items()}
        return Manifest(str(data["repo"]), str(data["revision"]), files)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as exc:
        raise CheckpointError(f"The manifest cannot be read ({exc}). Delete it and run again.") from exc


def manifest_from_hub(repo: str, revision: str, tree: Iterable[Mapping[str, Any]]) -> Manifest:
    """From the answers of the hub's ``/api/models/<repo>/tree/<commit>?recursive=true``."""
    files = {}
    for item in tree:
        if item.get("type") != "file":
            continue
        lfs = item.get("lfs") or {}
        files[safe_path(str(item["path"]))] = Entry(
            int(lfs.get("size") or item["size"]), item.get("oid"), lfs.get("oid")
        )
    return Manifest(repo, revision, dict(sorted(files.items())))


def manifest_from_cli(repo: str, revision: str, data: Mapping[str, Any]) -> Manifest:
    """From the file that ``hf`` 1.22 and later leave in ``.cache/huggingface/trees/<commit>.json``."""
    files = {}
    for path, item in data["files"].items():
        size = int(item.get("lfs_size") or item["size"])
        files[safe_path(str(path))] = Entry(size, item.get("blob_id"), item.get("lfs_sha256"))
    return Manifest(repo, revision, dict(sorted(files.items())))


def select(names: Iterable[str], include: Sequence[str], exclude: Sequence[str]) -> list[str]:
    """Names that the patterns want, as the hub's own client selects: a pattern that ends with ``/`` means all below it."""

    def matches(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, p + "*" if p.endswith("/") else p) for p in patterns)

    return [n for n in names if (not include or matches(n, include)) and not matches(n, exclude)]


# --- layouts ---


@dataclass(frozen=True)
class Layout:
    """Where the files of a checkpoint lie.

    ``flat``: ``<models_dir>/<directory>/<path>``. ``hub``: as in the cache of the hub's client,
    ``<models_dir>/hub/models--owner--name`` with ``blobs/<hash>`` and ``snapshots/<commit>/<path>`` linking there.
    """

    kind: str
    models_dir: str
    repo: str
    directory: str

    @property
    def root(self) -> str:
        """The folder that holds everything of this checkpoint, and is removed with it."""
        if self.kind == "hub":
            return posixpath.join(self.models_dir, "hub", "models--" + self.repo.replace("/", "--"))
        return posixpath.join(self.models_dir, self.directory)

    def snapshot(self, revision: str) -> str:
        """The folder that an engine loads."""
        return posixpath.join(self.root, "snapshots", revision) if self.kind == "hub" else self.root

    def file(self, revision: str, path: str) -> str:
        """Where a reader finds a file."""
        return posixpath.join(self.snapshot(revision), path)

    def data(self, path: str, entry: Entry) -> str:
        """Where the bytes of a file are written."""
        return posixpath.join(self.root, "blobs", entry.hash) if self.kind == "hub" else posixpath.join(self.root, path)

    @property
    def scratch(self) -> str:
        """Our own folder for unfinished files."""
        return posixpath.join(self.root, CACHE, "gb10-fleet")

    @property
    def name(self) -> str:
        """A name for state files: one checkpoint of one place."""
        return re.sub(r"[^\w.-]+", "--", ("hub/" + self.repo if self.kind == "hub" else self.directory).strip("/"))


# --- unfinished files of the hub's client ---


def orphans(paths: Iterable[str], manifest: Manifest, complete: Iterable[str], resumes: bool) -> list[str]:
    """Those ``*.incomplete`` files that no later download will use.

    Clients up to 1.17 name them ``<hash of the name>.<hash of the content>.incomplete`` and continue them; from 1.18 on the name
    holds a random part, and a killed download leaves its bytes behind for good (huggingface_hub#4196, case ckpt-no-resume).

    :param complete: paths of the manifest that need no download.
    :param resumes: whether the client that will run next continues an unfinished file.
    """
    wanted = {entry.hash for path, entry in manifest.files.items() if path not in set(complete)}
    found = []
    for path in paths:
        words = posixpath.basename(path).split(".")
        named = words[1] if len(words) == 3 else words[0] if len(words) == 2 else ""
        if not resumes or named not in wanted:
            found.append(path)
    return found


def client_resumes(version: str) -> bool:
    """Whether this version of huggingface_hub continues a killed download (measured: 0.34 to 1.17 do, 1.18 and later do not)."""
    numbers = [int(n) for n in re.findall(r"\d+", version)[:2]]
    return tuple(numbers) < (1, 18) if len(numbers) == 2 else False


# --- who takes from whom ---


def wanted_revision(pinned: str | None, known: Sequence[str | None]) -> str | None:
    """The commit that all ranks shall have: the recipe's, else the one of the lowest rank that has one, else None (ask the hub)."""
    return pinned or next((revision for revision in known if revision), None)


@dataclass(frozen=True)
class Step:
    """What one rank does. ``source``: None (it has all), ``hub``, or the rank that it copies from; ``clients`` copy from it."""

    source: str | None
    clients: tuple[str, ...] = ()

    @property
    def idle(self) -> bool:
        return self.source is None and not self.clients


def fan_out(missing: Mapping[str, int | None], distribution: str) -> dict[str, Step]:
    """The plan of one cluster, by name.

    ``each``: every rank that lacks something asks the hub. ``peer``: the bytes leave the hub once. Ranks that have all are sources;
    else the rank that lacks least (the lowest of equals) asks the hub. The others form chains: each copies from the one before it
    while that one is still receiving, so that n ranks take hardly longer than two, and no link carries the checkpoint twice.

    :param missing: by name, in the order of ranks: bytes that the rank lacks, 0 for none, None when it has no manifest yet.
    """
    lacking = [name for name, size in missing.items() if size != 0]
    if distribution == "each":
        return {name: Step("hub" if name in lacking else None) for name in missing}
    whole = [name for name in missing if name not in lacking]
    order = list(missing)
    lacking.sort(key=lambda name: (missing[name] is None, missing[name] or 0, order.index(name)))
    source: dict[str, str | None] = dict.fromkeys(whole)
    if not whole and lacking:
        source[lacking[0]] = "hub"
        whole = [lacking.pop(0)]
    tails = list(whole)
    for number, name in enumerate(lacking):
        chain = number % len(tails)
        source[name] = tails[chain]
        tails[chain] = name
    return {name: Step(source[name], tuple(o for o in order if source[o] == name)) for name in order}


# --- words ---


def gib(size: float) -> str:
    """``172.3 GiB``, ``12.0 MiB``, ``97 B``."""
    for unit, factor in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} B"


def duration(seconds: float) -> str:
    """``45 s``, ``4 min 20 s``, ``2 h 05 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def progress_line(progress: Mapping[str, Any]) -> str:
    """One line of a running job: ``checkpoint: 12.4 of 172.3 GiB, 612 MB/s, 4 min 20 s left``, or its own ``line``."""
    if progress.get("line"):
        return str(progress["line"])
    done, total, rate = progress.get("done", 0), progress.get("total", 0), progress.get("rate", 0.0)
    words = (
        f"{progress.get('what', '')}: {gib(done)} of {gib(total)}"
        if total
        else f"{progress.get('what', '')}: {gib(done)}"
    )
    if rate:
        words += f", {rate / 1e6:.0f} MB/s"
        if total > done:
            words += f", {duration((total - done) / rate)} left"
    if progress.get("note"):
        words += f" ({progress['note']})"
    return words


def space_fault(path: str, wanted: int, free: int, also: str = "") -> str | None:
    """A sentence when ``wanted`` more bytes do not fit, with 1 % and 1 GiB of room for the file system."""
    need = wanted + wanted // 100 + (GIB if wanted > GIB else 0)
    if need <= free:
        return None
    return (
        f"{path} has {gib(free)} free, {gib(wanted)} are still to come{also}. Free "
        f"{gib(need - free)} there, or set models_dir to a larger disk."
    )
