#!/usr/bin/env python3
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The node's side of the benchmark: make a checkpoint, serve it, fetch it, send raw bytes, look into the page cache.

Runs on a node with the collection's module_utils beside it; prints one line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint import Manifest
from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint_files import Entry, hash_file
from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint_job import Job, items_of, look
from ansible_collections.gb10.fleet.plugins.module_utils._fetch import Progress

REPO, PORT, TOKEN = "bench/model", 18437, "benchmark"


def parameters(folder: str, **more: Any) -> dict[str, Any]:
    item = {"repo": REPO, "revision": None, "layout": "flat", "directory": "model", "include": [], "exclude": []}
    item |= {"licence": None, "non_commercial": False}
    value: dict[str, Any] = {"checkpoints": [item], "models_dir": f"{folder}/models", "state_dir": f"{folder}/state"}
    value |= {"verify": "cached", "endpoint": None, "token_file": None, "accept_non_commercial": False, "source": "hub"}
    value |= {"refresh": False, "client": "direct", "client_dir": None, "streams": 4, "memory_gib": 0, "retries": 3}
    value |= {
        "retry_wait_s": 1,
        "retry_longest_s": 5,
        "stall_s": 60,
        "verify_mib_per_s": 0,
        "peer": None,
        "serve": None,
    }
    return value | {"peer_token": TOKEN, "patience_s": 60} | more


def run(values: dict[str, Any]) -> dict[str, Any]:
    items = items_of(values)
    for item in items:
        look(item, values["verify"])
    job = Job(values, items, Progress(None, "checkpoint"))
    with job.peers():
        begun = time.monotonic()
        job.run()
        seconds = time.monotonic() - begun
        job.serve_out()
    return {"seconds": seconds, "moved": job.progress.moved, "hashed": job.progress.hashed}


def make(folder: str, size_mib: int, shards: int) -> dict[str, Any]:
    """A checkpoint of random bytes, with its manifest."""
    place = Path(folder) / "models/model"
    place.mkdir(parents=True, exist_ok=True)
    data = size_mib // shards << 20
    files = {}
    for number in range(shards):
        header = json.dumps(
            {f"layers.{number}.w": {"dtype": "U8", "shape": [data], "data_offsets": [0, data]}}
        ).encode()
        path = place / f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        with path.open("wb") as stream:
            stream.write(struct.pack("<Q", len(header)) + header)
            for _block in range(data >> 20):
                stream.write(os.urandom(1 << 20))
            stream.flush()
            os.fsync(stream.fileno())
        entry = Entry(path.stat().st_size, None, "0" * 64)
        files[path.name] = Entry(entry.size, None, hash_file(path, entry).hexdigest())
    manifest = Manifest(REPO, "0" * 40, files)
    state = Path(folder) / "state"
    state.mkdir(exist_ok=True)
    (state / "model.manifest.json").write_text(json.dumps(manifest.to_json()))
    run(parameters(folder))
    return {"bytes": manifest.size}


def resident(folder: str) -> dict[str, Any]:
    """Bytes of the checkpoint that are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    cached = total = 0
    for path in Path(folder).rglob("*.safetensors"):
        size = path.stat().st_size
        pages = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
        seen = (ctypes.c_ubyte * pages)()
        with path.open("rb") as stream:
            address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, stream.fileno(), 0)
        libc.mincore(address, size, seen)
        libc.munmap(address, size)
        cached += sum(page & 1 for page in seen) * mmap.PAGESIZE
        total += size
    return {"cached": cached, "bytes": total}


def raw(address: str, size: int) -> dict[str, Any]:
    """Bytes of memory over one TCP connection: what the link gives at best."""
    block = bytes(1 << 20)
    deadline = time.monotonic() + 30
    while True:
        try:
            connection = socket.create_connection((address, PORT + 1), timeout=30)
            break
        except ConnectionRefusedError:  # the other side is still starting
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    with connection:
        begun = time.monotonic()
        for _block in range(size >> 20):
            connection.sendall(block)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
        return {"seconds": time.monotonic() - begun}


def sink(address: str) -> dict[str, Any]:
    view = memoryview(bytearray(1 << 20))
    with socket.create_server((address, PORT + 1)) as listener:
        connection, _peer = listener.accept()
        with connection:
            while connection.recv_into(view):
                pass
            connection.sendall(b"x")
    return {}


def main() -> None:
    what, words = sys.argv[1], sys.argv[2:]
    if what == "make":
        answer = make(words[0], int(words[1]), int(words[2]))
    elif what == "serve":
        answer = run(parameters(words[0], serve={"address": words[1], "port": PORT, "clients": ["worker"]}))
    elif what == "fetch":
        answer = run(parameters(words[0], peer={"name": "head", "address": words[1], "port": PORT, "me": "worker"}))
    elif what == "verify":
        answer = run(parameters(words[0], verify=words[1]))
    elif what == "resident":
        answer = resident(words[0])
    elif what == "raw":
        answer = raw(words[0], int(words[1]))
    else:
        answer = sink(words[0])
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
