"""What a qualification costs: the sampler's share of a core, and what the client adds to the time to first token.

    python benchmarks/qualify/bench.py [SECONDS]

The client is held against a stub in a process of its own that knows the truth: when it took the connection and when it sent the
first token, by the same monotonic clock. The sampler runs on this machine, with the sandbox's stand-in for nvidia-smi, a
Python program that costs as much as the real one or more. Needs no GPU and no engine.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "collections"))

from ansible_collections.gb10.fleet.plugins.module_utils._openai_client import Deadline, Endpoint  # noqa: E402

EVENT = b'data: {"choices": [{"delta": {"content": "Hello"}, "finish_reason": null}]}\n\n'
LAST = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}\n\ndata: [DONE]\n\n'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def stub(port: Connection, prefill_s: float) -> None:
    """Answers one connection after the other and tells how long the first token took, from accept to send."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port.send(server.getsockname()[1])
        while True:
            connection, _ = server.accept()
            taken = time.monotonic()
            with connection, connection.makefile("rb") as reader:
                length = 0
                while (line := reader.readline().strip()) not in (b"", None):
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                if not length:
                    return
                reader.read(length)
                time.sleep(prefill_s)
                connection.sendall(HEAD + EVENT)
                port.send(time.monotonic() - taken)
                connection.sendall(LAST)


def bare(port: int, body: bytes) -> float:
    """Seconds to the first token by nothing but a socket: what no client can go below on this machine, under this load."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: stub\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    begun = time.monotonic()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head + body)
        said = b""
        while b"Hello" not in said:
            said += connection.recv(65536)
        return time.monotonic() - begun


def client(words: int, count: int, prefill_s: float = 0.05) -> tuple[list[float], list[float]]:
    """Milliseconds that our client, and a bare socket in turn with it, say more than the stub, for each request."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=stub, args=(theirs, prefill_s), daemon=True)
    process.start()
    port, prompt = ours.recv(), "word " * words
    endpoint, body = Endpoint(f"http://127.0.0.1:{port}"), json.dumps({"prompt": prompt}).encode()
    added: tuple[list[float], list[float]] = ([], [])
    for _ in range(count):
        said = endpoint.chat("stub", prompt, 8, Deadline(10))
        added[0].append((said["ttft_s"] - ours.recv()) * 1000)
        took = bare(port, body)
        added[1].append((took - ours.recv()) * 1000)
    process.terminate()
    process.join()
    return added


def sampler(seconds: float) -> dict[str, float]:
    """The sampler's own account of a run, and the same seen from outside."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        for source in ("roles/qualify/files/qualify_sampler.py", "plugins/module_utils/_nvidia_smi.py"):
            shutil.copy(ROOT / source, folder)
        smi = folder / "nvidia-smi"
        smi.write_text(f'#!/bin/sh\nexec {sys.executable} -S {ROOT}/roles/sandbox/files/node/nvidia_smi.py "$@"\n')
        smi.chmod(0o755)
        argv = [sys.executable, "-S", str(folder / "qualify_sampler.py"), str(folder / "out"), "--limit", str(seconds)]
        subprocess.run([*argv, "--nvidia-smi", str(smi)], check=True)
        rows = [json.loads(line) for line in (folder / "out").read_text().splitlines()]
        cost = dict(rows[-1]["cost"])
        return {
            **cost,
            "samples": len(rows) - 2,
            "gpu_samples": sum("temp" in row for row in rows),
            "seconds": rows[-1]["seconds"],
        }


def main() -> int:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    for words, what in ((8, "short prompt"), (8_000, "8,000 words"), (262_144, "262,144 words (1.3 MB)")):
        ours, socket_alone = map(sorted, client(words, 60))
        middle, floor = statistics.median(ours), statistics.median(socket_alone)
        print(
            f"client, {what}: says {middle:.2f} ms more than the stub (p95 {ours[int(len(ours) * 0.95)]:.2f}), a bare socket "
            f"{floor:.2f}: the client adds {middle - floor:.2f} ms (at most 1 wanted)"
        )
    cost = sampler(seconds)
    itself = cost["cpu_s"] / cost["seconds"] * 100
    print(
        f"sampler, {cost['seconds']:.0f} s, {cost['samples']} samples, {cost['gpu_samples']} of the GPU: "
        f"{cost['percent_of_a_core']:.3f} % of a core (itself {itself:.3f} %, the rest nvidia-smi; at most 0.5 wanted), "
        f"{cost['major_faults']} major faults, {cost['rss_mib']:.1f} MiB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
