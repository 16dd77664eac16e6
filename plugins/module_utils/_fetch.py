# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Moving the files of a checkpoint: resumable streams that hash what they write, and the hub's own client under supervision."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint import (
    CheckpointError,
    Entry,
    Manifest,
    client_resumes,
    gib,
    orphans,
)
from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint_files import (
    Checkpoint,
    digest_start,
    hash_file,
    in_use,
    write_json,
)
from ansible_collections.gb10.fleet.plugins.module_utils._hf_hub import Hub, HubError, patiently, waits
from ansible_collections.gb10.fleet.plugins.module_utils._peer import PeerClient

_BLOCK = 1 << 20
# Written bytes after which a stream waits for the disk and drops its pages: dirty pages are memory that the GPU cannot have.
_WINDOW = 1 << 27
_WRONG_TIMES = 3
_TIMEOUT_S = 60


class Progress:
    """Counts bytes and tells them to a file that the controller reads."""

    def __init__(self, path: Path | None, what: str, every_s: float = 0.5) -> None:
        self.path, self.what, self.every_s = path, what, every_s
        self.lock = threading.Lock()
        self.done = self.total = self.moved = self.hashed = 0
        self.begun = self.written = time.monotonic()
        self.marks: list[tuple[float, int]] = [(self.begun, 0)]
        self.text = ""
        self.write()

    def expect(self, size: int) -> None:
        with self.lock:
            self.total += size

    def add(self, size: int, hashed: bool = False) -> None:
        """``size`` more bytes arrived (or were hashed on the disk)."""
        with self.lock:
            self.done += size
            if hashed:
                self.hashed += size
            else:
                self.moved += size
            due = time.monotonic() - self.written > self.every_s
        if due:
            self.write()

    def note(self, text: str) -> None:
        self.text = text
        self.write()

    def write(self) -> None:
        if self.path is None:
            return
        with self.lock:
            now = time.monotonic()
            self.written = now
            self.marks = [*self.marks[-40:], (now, self.done)]
            then, before = next((m for m in self.marks if now - m[0] < 10), self.marks[-1])
            rate = (self.done - before) / (now - then) if now > then else 0.0
            value = {
                "what": self.what,
                "done": self.done,
                "total": self.total,
                "rate": rate,
                "note": self.text,
                "pid": os.getpid(),
            }
        with contextlib.suppress(OSError):
            write_json(self.path, value)


class Source(Protocol):
    """Where streams read from."""

    def ready(self) -> set[str] | None:
        """Paths that can be had now; None for all. Raises CheckpointError when there will be no more."""

    def open(self, path: str, entry: Entry, offset: int) -> tuple[Any, int]:
        """A readable object and the offset at which it begins. Raises OSError, HTTPException, CheckpointError."""


class HubSource:
    """The hub, file by file."""

    def __init__(self, hub: Hub, manifest: Manifest) -> None:
        self.hub, self.manifest = hub, manifest

    def ready(self) -> set[str] | None:
        return None

    def open(self, path: str, entry: Entry, offset: int) -> tuple[Any, int]:
        url = self.hub.file_url(self.manifest.repo, self.manifest.revision, path)
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        answer = self.hub.open(url, self.manifest.repo, self.manifest.revision, headers)
        return answer, offset if answer.status == 206 else 0


class DirectorySource:
    """A folder of this node that holds the files already (a disk from outside, an earlier download)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def ready(self) -> set[str] | None:
        return None

    def open(self, path: str, entry: Entry, offset: int) -> tuple[Any, int]:
        try:
            stream = (self.folder / path).open("rb", buffering=0)
        except FileNotFoundError:
            raise CheckpointError(
                f"{self.folder / path} is missing. Copy the whole checkpoint there, or use another source."
            ) from None
        stream.seek(offset)
        return stream, offset


class PeerSource:
    """Another rank; it offers what it has verified so far."""

    def __init__(self, client: PeerClient, repo: str) -> None:
        self.client, self.repo = client, repo
        self.paths: set[str] = set()
        self.asked_at = 0.0
        self.lock = threading.Lock()

    def ready(self) -> set[str] | None:
        with self.lock:
            if time.monotonic() - self.asked_at > 0.2:
                answer = self.client.ask(self.repo)
                if answer is not None:
                    self.paths = set(answer["ready"])
                self.asked_at = time.monotonic()
            return self.paths

    def open(self, path: str, entry: Entry, offset: int) -> tuple[Any, int]:
        connection = self.client.connect(_TIMEOUT_S)
        url = f"/file/{quote(self.repo, safe='')}/{quote(path)}"
        connection.request(
            "GET", url, headers={**self.client.headers, "Range": f"bytes={offset}-", "Connection": "close"}
        )
        answer = connection.getresponse()
        if answer.status != 206:
            connection.close()
            raise http.client.HTTPException(f"answers {answer.status} for {path}")
        return answer, offset


class Streams:
    """Fetches files with several streams. Each hashes what it writes; an interrupted file is continued, also by a later run."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        manifest: Manifest,
        source: Source,
        progress: Progress,
        streams: int = 4,
        retries: int = 6,
        first_s: float = 1,
        longest_s: float = 60,
        arrived: Callable[[str], None] = lambda _path: None,
    ) -> None:
        self.checkpoint, self.manifest, self.source, self.progress = checkpoint, manifest, source, progress
        self.streams, self.retries, self.first_s, self.longest_s = streams, retries, first_s, longest_s
        self.arrived = arrived
        self.lock = threading.Lock()
        self.todo: set[str] = set()
        self.busy: set[str] = set()
        self.stop: BaseException | None = None

    def fetch(self, paths: Iterable[str]) -> None:
        """All of them, or the first error."""
        self.todo = set(paths)
        Path(self.checkpoint.layout.scratch).mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(min(self.streams, max(1, len(self.todo)))) as pool:
            for future in [pool.submit(self._stream) for _number in range(min(self.streams, len(self.todo)))]:
                future.exception()
        if self.stop:
            raise self.stop

    def _next(self) -> str | None:
        """The largest file that can be had now; None when nothing is left."""
        while not self.stop:
            ready = self.source.ready()
            with self.lock:
                if not self.todo:
                    return None
                now = self.todo if ready is None else self.todo & ready
                # Two paths may have one content, and unfinished files are named after their content.
                now = {path for path in now if self.manifest.files[path].hash not in self.busy}
                if now:
                    path = max(now, key=lambda p: (self.manifest.files[p].size, p))
                    self.todo.discard(path)
                    self.busy.add(self.manifest.files[path].hash)
                    return path
            time.sleep(0.1)
        return None

    def _stream(self) -> None:
        try:
            while path := self._next():
                self._file(path)
                with self.lock:
                    self.busy.discard(self.manifest.files[path].hash)
                self.arrived(path)
        except BaseException as exc:  # noqa: BLE001 - the caller raises it
            self.stop = self.stop or exc

    def _file(self, path: str) -> None:
        entry = self.manifest.files[path]
        partial = Path(self.checkpoint.layout.scratch) / f"{entry.hash}.partial"
        for _try in range(_WRONG_TIMES):
            if self._bytes(path, entry, partial):
                self._settle(path, entry, partial)
                return
            partial.unlink()
        raise CheckpointError(
            f"{path} arrived {_WRONG_TIMES} times with a wrong content ({'sha256' if entry.sha256 else 'git hash'} differs). "
            "Something between the source and this node changes bytes: check the proxy "
            "or mirror in between, and the memory of this node."
        )

    def _bytes(self, path: str, entry: Entry, partial: Path) -> bool:
        """Bring the unfinished file to its full size; whether its hash is right."""
        held = partial.stat().st_size if partial.exists() else 0
        if held > entry.size:
            partial.unlink()
            held = 0
        digest = hash_file(partial, entry, held) if held else digest_start(entry)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            offset, pauses = held, waits(self.retries, self.first_s, self.longest_s)
            while offset < entry.size:
                before = offset
                try:
                    offset, digest = self._read(path, entry, descriptor, offset, digest)
                    error: Exception | None = None
                except (OSError, http.client.HTTPException, HubError) as exc:
                    offset = os.fstat(descriptor).st_size
                    if isinstance(exc, HubError) and not exc.passing:
                        raise
                    if isinstance(exc, OSError) and exc.errno == 28:
                        raise CheckpointError(
                            f"The disk under {partial.parent} is full. Free space, then run this again."
                        ) from exc
                    error = exc
                    if offset != before:
                        digest = hash_file(partial, entry, offset)
                if offset > before:
                    pauses = waits(self.retries, self.first_s, self.longest_s)
                if offset < entry.size:
                    self._pause(path, pauses, error, offset)
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        return bool(digest.hexdigest() == entry.hash)

    def _pause(self, path: str, pauses: Iterator[float], error: Exception | None, offset: int) -> None:
        if self.stop:
            raise CheckpointError("Another stream failed.")
        wait = next(pauses, None)
        if wait is None:
            if isinstance(error, CheckpointError):
                raise error
            raise CheckpointError(
                f"{path} stopped at {gib(offset)} and does not go on ({error or 'the connection was cut'}). Run this again."
            )
        if isinstance(error, HubError) and error.retry_after_s:
            wait = min(max(wait, error.retry_after_s), self.longest_s)
        time.sleep(wait)

    def _read(self, path: str, entry: Entry, descriptor: int, offset: int, digest: Any) -> tuple[int, Any]:
        """Read until the source ends. Returns the new offset and the hash object."""
        source, start = self.source.open(path, entry, offset)
        with contextlib.closing(source):
            if start != offset:  # it does not know ranges
                os.ftruncate(descriptor, 0)
                offset, digest = start, digest_start(entry)
            os.lseek(descriptor, offset, os.SEEK_SET)
            view = memoryview(bytearray(_BLOCK))
            synced = offset
            while offset < entry.size and (count := source.readinto(view[: min(_BLOCK, entry.size - offset)])):
                block = view[:count]
                while block:
                    block = block[os.write(descriptor, block) :]
                digest.update(view[:count])
                offset += count
                self.progress.add(count)
                if offset - synced >= _WINDOW:
                    os.fdatasync(descriptor)
                    os.posix_fadvise(descriptor, synced, offset - synced, os.POSIX_FADV_DONTNEED)
                    synced = offset
                if self.stop:
                    break
        return offset, digest

    def _settle(self, path: str, entry: Entry, partial: Path) -> None:
        """Give a verified file its name."""
        target = Path(self.checkpoint.layout.data(path, entry))
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.replace(target)
        self.checkpoint.link(self.manifest, path)
        self.checkpoint.remember(path, entry, target)


# --- the hub's own client ---


@dataclass(frozen=True)
class Cli:
    """A working command: ``hf``, or an older ``huggingface-cli``."""

    argv: tuple[str, ...]
    version: str

    @property
    def resumes(self) -> bool:
        return client_resumes(self.version)


def find_cli(folder: Path) -> Cli | None:
    """The client in an environment of ours. One on PATH is never used: it may be a stub (case ckpt-hfcli-removed)."""
    for name in ("hf", "huggingface-cli"):
        program = folder / "bin" / name
        if not program.exists():
            continue
        try:
            done = subprocess.run(  # pylint: disable=ansible-bad-function
                [str(program), "version"], capture_output=True, text=True, timeout=60, check=False, env=_environment()
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        version = next((w for w in done.stdout.replace(":", " ").split() if w[:1].isdigit()), "")
        if done.returncode == 0 and version and "no longer works" not in done.stdout + done.stderr:
            return Cli((str(program),), version)
    return None


def _environment() -> dict[str, str]:
    """The environment of the client: nothing of the caller's own hub settings, and no token."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    return {
        **env,
        "LC_ALL": "C.UTF-8",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_COLOR": "1",
    }


class CliDownload:
    """Runs the client until every file is there and right. Its exit code is never believed."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        manifest: Manifest,
        cli: Cli,
        hub: Hub,
        progress: Progress,
        workers: int = 4,
        memory_gib: float = 0,
        retries: int = 6,
        first_s: float = 2,
        longest_s: float = 300,
        stall_s: float = 300,
        arrived: Callable[[str], None] = lambda _path: None,
    ) -> None:
        self.checkpoint, self.manifest, self.cli, self.hub, self.progress = checkpoint, manifest, cli, hub, progress
        self.workers, self.memory_gib, self.stall_s = workers, memory_gib, stall_s
        self.retries, self.first_s, self.longest_s = retries, first_s, longest_s
        self.arrived = arrived
        self.wrong: Counter[str] = Counter()
        self.xet = True
        self.said = ""

    def sweep(self, missing: Sequence[str]) -> int:
        """Remove what a dead download left and no later one will use. Returns the bytes."""
        paths = self.checkpoint.incompletes()
        complete = set(self.manifest.files) - set(missing)
        doomed = set(map(Path, orphans([str(p) for p in paths], self.manifest, complete, self.cli.resumes)))
        size = 0
        for path in doomed - in_use(doomed):
            with contextlib.suppress(OSError):
                size += path.stat().st_size
                path.unlink()
        return size

    def fetch(self, paths: Iterable[str]) -> None:
        missing = set(paths)
        pauses = waits(self.retries, self.first_s, self.longest_s)
        while True:
            # The client says nothing useful when the hub refuses; the hub itself does.
            patiently(self._ask, self.retries, self.first_s, self.longest_s, self.progress.note)
            self.sweep(sorted(missing))
            before = self._held(missing)
            left = self._attempt(missing)
            worst = self.wrong.most_common(1)
            if worst and worst[0][1] >= _WRONG_TIMES:
                raise CheckpointError(
                    f"{worst[0][0]} arrived {_WRONG_TIMES} times with a wrong content. "
                    f"Something between {self.hub.endpoint} and this node "
                    "changes bytes: check the proxy or mirror in between, and the memory of this node."
                )
            if not left:
                return
            if self._held(left) > 0 or len(left) < len(missing) or before != self._held(missing):
                pauses = waits(self.retries, self.first_s, self.longest_s)
            missing = left
            wait = next(pauses, None)
            if wait is None:
                raise CheckpointError(
                    f"{len(left)} files still lack after {self.retries} tries, for example "
                    f"{min(left)}. The client last said: {self.said or 'nothing'}"
                )
            self.progress.note(f"tries again in {wait:.0f} s: {self.said or 'files are missing'}"[:200])
            time.sleep(wait)

    def _ask(self) -> str:
        return self.hub.resolve(self.manifest.repo, self.manifest.revision)

    def _held(self, missing: Iterable[str]) -> int:
        """Bytes of the wanted files on the disk, finished or not."""
        size = 0
        for path in missing:
            with contextlib.suppress(OSError):
                size += Path(self.checkpoint.layout.data(path, self.manifest.files[path])).stat().st_size
        for place in self.checkpoint.incompletes():
            with contextlib.suppress(OSError):
                size += place.stat().st_size
        return size

    def argv(self, missing: set[str]) -> list[str]:
        layout = self.checkpoint.layout
        place = ["--cache-dir", str(Path(layout.root).parent)] if layout.kind == "hub" else ["--local-dir", layout.root]
        words = [
            *self.cli.argv,
            "download",
            self.manifest.repo,
            *sorted(missing),
            "--revision",
            self.manifest.revision,
            *place,
        ]
        # A client that outlives its supervisor would write beside the next one.
        leash = [program, "--pdeathsig", "TERM", "--"] if (program := shutil.which("setpriv")) else []
        return [*leash, *self._cap(), *words, "--max-workers", str(self.workers)]

    def _cap(self) -> list[str]:
        """A memory cap: the client's buffers grow with the machine (24 GiB of 128), and so does the page cache that it fills."""
        if not self.memory_gib or os.geteuid() != 0 or not Path("/run/systemd/system").is_dir():
            return []
        words = [
            "systemd-run",
            "--scope",
            "--quiet",
            "--collect",
            "-p",
            f"MemoryMax={int(self.memory_gib * 1024)}M",
            "--",
        ]
        try:
            subprocess.run([*words, "true"], check=True, capture_output=True, timeout=20)  # pylint: disable=ansible-bad-function
        except (OSError, subprocess.SubprocessError):
            return []
        return words

    def _env(self, home: str) -> dict[str, str]:
        env = {**_environment(), "HF_HOME": home, "HF_HUB_DOWNLOAD_TIMEOUT": "30", "HF_XET_CHUNK_CACHE_SIZE_BYTES": "0"}
        # The path of the token, never the token: an environment is readable in /proc.
        env["HF_TOKEN_PATH"] = self.hub.token_file or f"{home}/no-token"
        if self.hub.endpoint != "https://huggingface.co":
            env["HF_ENDPOINT"] = self.hub.endpoint
        if not self.xet:
            env["HF_HUB_DISABLE_XET"] = "1"
        return env

    def _attempt(self, missing: set[str]) -> set[str]:
        """One run of the client. Files are verified as they appear; returns those that still lack."""
        Path(self.checkpoint.layout.root).mkdir(parents=True, exist_ok=True)
        left = set(missing)
        start = self._held(missing)
        with tempfile.TemporaryDirectory(prefix="gb10-hf-") as home, tempfile.TemporaryFile() as output:
            process = subprocess.Popen(  # pylint: disable=ansible-bad-function
                self.argv(missing),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._env(home),
                start_new_session=True,
            )
            try:
                self._watch(process, left, start)
            finally:
                _end(process)
            self._absorb(left)
            output.seek(max(0, output.seek(0, os.SEEK_END) - 4000))
            lines = [line.strip() for line in output.read().decode("utf-8", "replace").splitlines() if line.strip()]
            self.said = self._clean(lines[-1] if lines else "")
        return left

    def _clean(self, text: str) -> str:
        return text.replace(self.hub.token, "***") if self.hub.token else text

    def _watch(self, process: subprocess.Popen[bytes], left: set[str], start: int) -> None:
        missing = set(left)
        seen, seen_at = start, time.monotonic()
        while process.poll() is None:
            held = self._held(missing)
            if held > seen:
                self.progress.add(held - seen)
            if held != seen:
                seen, seen_at = held, time.monotonic()
            elif time.monotonic() - seen_at > self.stall_s:
                # Case ckpt-stuck: the process lives, no byte comes. The next try goes without xet.
                self.xet = False
                _end(process)
                return
            if not self._absorb(left):
                time.sleep(0.1 if time.monotonic() - self.progress.begun < 10 else 0.5)
        self.progress.add(max(0, self._held(missing) - seen))

    def _absorb(self, left: set[str]) -> bool:
        """Verify what has appeared; a wrong file goes at once. Whether there was anything."""
        worked = False
        for path in sorted(left):
            entry = self.manifest.files[path]
            status = self.checkpoint.stat(self.manifest, path)
            if status is None or status.st_size != entry.size:
                continue
            worked = True
            if self.checkpoint.verify_file(self.manifest, path):
                left.discard(path)
                self.arrived(path)
            else:
                self.checkpoint.remove_file(self.manifest, path)
                self.wrong[path] += 1
        return worked


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the client with all its children: 10 s to finish, then by force."""
    if process.poll() is not None:
        return
    for number, wait in ((signal.SIGTERM, 10), (signal.SIGKILL, 5)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait)
            return
