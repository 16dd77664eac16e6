"""Copies between ranks: real server, real clients, on loopback."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint import CheckpointError
from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint_job import COMMON_SPEC, Job, items_of, look
from ansible_collections.gb10.fleet.plugins.module_utils._fetch import Progress
from ansible_collections.gb10.fleet.plugins.modules.checkpoint import ARGUMENT_SPEC

from .conftest import REPO, HubHandle

TOKEN = "one-time-token"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def params(folder: Path, endpoint: str, **more: Any) -> dict[str, Any]:
    base = {name: option.get("default") for name, option in {**COMMON_SPEC, **ARGUMENT_SPEC}.items()}
    item = {"repo": REPO, "revision": None, "layout": "flat", "directory": "tiny", "include": [], "exclude": []}
    item |= {"licence": None, "non_commercial": False}
    base |= {
        "checkpoints": [item],
        "models_dir": str(folder / "models"),
        "state_dir": str(folder / "state"),
        "endpoint": endpoint,
    }
    base |= {
        "client": "direct",
        "retries": 3,
        "retry_wait_s": 0.05,
        "retry_longest_s": 0.3,
        "patience_s": 2,
        "peer_token": TOKEN,
    }
    return base | more


class Rank(threading.Thread):
    """One rank's job, as the module runs it."""

    def __init__(self, folder: Path, endpoint: str, **more: Any) -> None:
        super().__init__(daemon=True)
        self.values = params(folder, endpoint, **more)
        self.folder = folder
        self.error: BaseException | None = None
        self.gave_up: list[str] = []
        self.progress = Progress(None, "checkpoint")

    def run(self) -> None:
        try:
            items = items_of(self.values)
            for item in items:
                look(item, self.values["verify"])
            job = Job(self.values, items, self.progress)
            with job.peers():
                job.run()
                self.gave_up = job.serve_out()
        except BaseException as exc:  # noqa: BLE001 - the test looks at it
            self.error = exc

    def finish(self) -> Rank:
        self.start()
        return self.end()

    def end(self) -> Rank:
        self.join(30)
        assert not self.is_alive()
        return self

    @property
    def files(self) -> dict[str, bytes]:
        folder = self.folder / "models/tiny"
        return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def peer(name: str, port: int, me: str) -> dict[str, Any]:
    return {"name": name, "address": "127.0.0.1", "port": port, "me": me}


def serve(port: int, *clients: str) -> dict[str, Any]:
    return {"address": "127.0.0.1", "port": port, "clients": list(clients)}


def original(hub: HubHandle) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in (hub.root / REPO).iterdir()}


def test_two_ranks_take_one_checkpoint_from_the_hub(hub: HubHandle, tmp_path: Path) -> None:
    port = free_port()
    head = Rank(tmp_path / "1", hub.url, serve=serve(port, "spark-02"))
    worker = Rank(tmp_path / "2", "http://127.0.0.1:9", peer=peer("spark-01", port, "spark-02"))
    worker.start()
    head.start()
    head.end()
    worker.end()
    assert head.error is None and worker.error is None and head.gave_up == []
    whole = original(hub)
    assert head.files == worker.files == whole
    assert hub.sent() == sum(map(len, whole.values())) == worker.progress.moved


def test_chain_of_four_passes_files_on(hub: HubHandle, tmp_path: Path) -> None:
    """The hub is slow: the last rank has its first file long before the first rank has its last."""
    hub.rules({"match": "resolve/.*safetensors", "rate": 600_000})
    ports = [free_port() for _n in range(4)]
    names = ["spark-01", "spark-02", "spark-03", "spark-04"]
    ranks = []
    for n, _name in enumerate(names):
        more: dict[str, Any] = {"streams": 1}
        if n:
            more["peer"] = peer(names[n - 1], ports[n - 1], names[n])
        if n < 3:
            more["serve"] = serve(ports[n], names[n + 1])
        ranks.append(Rank(tmp_path / str(n), hub.url, **more))
    for rank in ranks:
        rank.start()
    last, first = tmp_path / "3/models/tiny", tmp_path / "0/models/tiny"
    deadline = time.monotonic() + 20
    while not list(last.glob("*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(list(first.glob("*.safetensors"))) < 3
    for rank in ranks:
        rank.end()
    assert [rank.error for rank in ranks] == [None] * 4
    assert all(rank.files == original(hub) for rank in ranks)
    assert hub.sent() == sum(map(len, original(hub).values()))


def test_interrupted_copy_moves_only_what_is_missing(hub: HubHandle, tmp_path: Path) -> None:
    head = Rank(tmp_path / "1", hub.url).finish()
    port = free_port()
    worker_folder = tmp_path / "2"
    first = Rank(tmp_path / "1", hub.url, serve=serve(port, "spark-02"))
    worker = Rank(worker_folder, hub.url, peer=peer("spark-01", port, "spark-02"))
    first.start()
    worker.finish()
    first.end()
    assert head.error is worker.error is None
    name = "model-00001-of-00003.safetensors"
    data = (worker_folder / "models/tiny" / name).read_bytes()
    (worker_folder / "models/tiny" / name).unlink()
    manifest = json.loads((worker_folder / "state/tiny.manifest.json").read_text())
    scratch = worker_folder / "models/tiny/.cache/gb10-fleet"
    scratch.mkdir(parents=True)
    (scratch / f"{manifest['files'][name][2]}.partial").write_bytes(data[:200_000])
    port = free_port()
    second = Rank(tmp_path / "1", hub.url, serve=serve(port, "spark-02"))
    again = Rank(worker_folder, hub.url, peer=peer("spark-01", port, "spark-02"))
    second.start()
    again.finish()
    second.end()
    assert again.error is None and again.progress.moved == len(data) - 200_000
    assert again.files == original(hub)


def test_byte_flipped_on_the_disk_of_the_source_is_not_served(hub: HubHandle, tmp_path: Path) -> None:
    """The source hashes first: a file that changed under it is fetched anew before anybody gets it."""
    Rank(tmp_path / "1", hub.url).finish()
    target = tmp_path / "1/models/tiny/model-00003-of-00003.safetensors"
    data = bytearray(target.read_bytes())
    data[-1] ^= 1
    target.write_bytes(data)
    port = free_port()
    head = Rank(tmp_path / "1", hub.url, serve=serve(port, "spark-02"))
    worker = Rank(tmp_path / "2", hub.url, peer=peer("spark-01", port, "spark-02"))
    head.start()
    worker.finish()
    head.end()
    assert worker.error is None and worker.files == original(hub) == head.files


def test_failure_of_the_source_reaches_those_who_wait(hub: HubHandle, tmp_path: Path) -> None:
    hub.rules({"match": "/api/", "status": 404, "headers": {"X-Error-Code": "RepoNotFound"}})
    port = free_port()
    head = Rank(tmp_path / "1", hub.url, serve=serve(port, "spark-02"))
    worker = Rank(tmp_path / "2", hub.url, peer=peer("spark-01", port, "spark-02"))
    worker.start()
    head.finish()
    worker.end()
    assert isinstance(worker.error, CheckpointError)
    assert "spark-01, which this node copies from, gave up: There is no repository sandbox/tiny-llama" in str(
        worker.error
    )


def test_source_that_never_comes(tmp_path: Path) -> None:
    worker = Rank(
        tmp_path / "2", "http://127.0.0.1:9", peer=peer("spark-01", free_port(), "spark-02"), patience_s=0.3
    ).finish()
    assert "spark-01, which this node copies from, does not answer on 127.0.0.1" in str(worker.error)


def test_wrong_token_gets_nothing(hub: HubHandle, tmp_path: Path) -> None:
    port = free_port()
    head = Rank(tmp_path / "1", hub.url, serve=serve(port, "spark-02"), patience_s=1)
    worker = Rank(tmp_path / "2", hub.url, peer=peer("spark-01", port, "spark-02"), peer_token="other", patience_s=1)
    head.start()
    worker.finish()
    head.end()
    assert "refuses to be copied from (403)" in str(worker.error)
    assert head.error is None and head.gave_up == ["spark-02"]


def test_port_in_use_has_its_sentence(hub: HubHandle, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        head = Rank(tmp_path / "1", hub.url, serve=serve(taken.getsockname()[1], "spark-02")).finish()
    assert "cannot be listened on" in str(head.error) and "checkpoint_peer_port" in str(head.error)


def test_nothing_stays_in_the_page_cache(hub: HubHandle, tmp_path: Path) -> None:
    """At most 1 % of what was hashed (case guard-pagecache-frag)."""
    import ctypes
    import mmap
    import os

    name = "model-00001-of-00001.safetensors"
    from .conftest import write_repo

    write_repo(hub.root, "sandbox/one", shards=1, shard_size=64 << 20)
    values = {
        "repo": "sandbox/one",
        "revision": None,
        "layout": "flat",
        "directory": "tiny",
        "include": [],
        "exclude": [],
    }
    item = {**values, "licence": None, "non_commercial": False}
    Rank(tmp_path / "1", hub.url, checkpoints=[item]).finish()
    target = tmp_path / "1/models/tiny" / name
    with target.open("rb") as stream:
        os.fsync(stream.fileno())
        while stream.read(1 << 22):
            pass
    assert Rank(tmp_path / "1", hub.url, checkpoints=[item], verify="full").finish().error is None
    libc = ctypes.CDLL(None, use_errno=True)
    with (
        target.open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE) as area,
    ):
        pages = (len(area) + 4095) // 4096
        seen = (ctypes.c_ubyte * pages)()
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        address = libc.mmap(None, len(area), mmap.PROT_READ, mmap.MAP_SHARED, stream.fileno(), 0)
        assert libc.mincore(address, len(area), seen) == 0
    assert sum(page & 1 for page in seen) <= pages // 100


@pytest.mark.parametrize(
    "path", ["/file/sandbox%2Ftiny-llama/..%2F..%2Fetc%2Fpasswd", "/file/sandbox%2Ftiny-llama/unverified"]
)
def test_only_verified_files_are_served(hub: HubHandle, tmp_path: Path, path: str) -> None:
    import http.client

    port = free_port()
    head = Rank(tmp_path / "1", hub.url, serve=serve(port, "spark-02"), patience_s=1)
    head.start()
    time.sleep(0.3)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", path, headers={"Authorization": f"Bearer {TOKEN}"})
    assert connection.getresponse().status == 404
    head.end()


def test_file_larger_than_the_sockets_buffers_comes_in_one_piece(hub: HubHandle, tmp_path: Path) -> None:
    """Without a single retry. (A timeout on the server's socket once made sendfile stop when the buffer was full.)"""
    from .conftest import write_repo

    write_repo(hub.root, "sandbox/one", shards=1, shard_size=64 << 20)
    item = {
        "repo": "sandbox/one",
        "revision": None,
        "layout": "flat",
        "directory": "tiny",
        "include": [],
        "exclude": [],
    }
    items = [{**item, "licence": None, "non_commercial": False}]
    port = free_port()
    head = Rank(tmp_path / "1", hub.url, checkpoints=items, serve=serve(port, "spark-02"))
    worker = Rank(tmp_path / "2", hub.url, checkpoints=items, peer=peer("spark-01", port, "spark-02"), retries=0)
    head.start()
    worker.finish()
    head.end()
    assert worker.error is None and worker.progress.moved > 64 << 20
