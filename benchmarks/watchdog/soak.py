"""False restarts in a soak: a watched cluster of stand-ins under load, with what looks like a hang and is none.

    python benchmarks/watchdog/soak.py [--minutes 30]     the sandbox is up, serves sandbox-fake, and watchdog.yml was applied

Four requests at a time with pauses in which nobody asks; before them, while the engine is young, one whose first token takes ten
minutes (kernels that compile without a word); between them prefills of four minutes. Ends with 1 at any launch or incident.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/utils"))

from fleet import ENDPOINT, HEAD, Node, sandbox_nodes, stream_completion, watchdog_state  # noqa: E402

JIT_S, PREFILL_S = 590, 240


def first_token(head: Node, seconds: float) -> None:
    """The stand-in's next first tokens take this long."""
    words = f"printf %s '{f'slow_first_token={seconds}' if seconds else ''}' > /run/fake-engine"
    head.run("docker", "exec", "gb10-fake", "sh", "-c", words)


def ask(limit_s: float) -> str:
    try:
        answer = stream_completion(ENDPOINT, "fake", f"Tell me of {random.random()}", limit_s)
    except OSError as e:
        return type(e).__name__
    return "answered" if answer.strip() else "empty"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    args = parser.parse_args()
    nodes = sandbox_nodes()
    head, end = nodes[HEAD], time.monotonic() + 60 * args.minutes
    before = {name: node.rank_identity() for name, node in nodes.items()}
    incident = watchdog_state(head)["last_incident"]
    said: collections.Counter[str] = collections.Counter()
    names: collections.Counter[str] = collections.Counter()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(5):
            names[watchdog_state(head)["name"]] += 1

    with ThreadPoolExecutor(5) as pool:
        watcher = pool.submit(watch)
        try:
            silence, turn = JIT_S, 0
            while time.monotonic() < end:
                turn += 1
                if silence:
                    first_token(head, silence)
                    said[ask(silence + 120)] += 1
                    first_token(head, 0)
                silence = PREFILL_S if turn % 3 == 0 else 0
                load_until = min(end, time.monotonic() + 90)
                while time.monotonic() < load_until:
                    said.update(pool.map(ask, [120.0] * 4))
                over.wait(min(60, max(0, end - time.monotonic())))  # nobody asks
        finally:
            over.set()
        watcher.result()
    last = watchdog_state(head)["last_incident"]
    after = {name: node.rank_identity() for name, node in nodes.items()}
    print(f"requests {dict(said)}; states seen {dict(names)}; last incident {last and last['id']}")
    quiet = after == before and last == incident and set(names) <= {"serving", "degraded"}
    print("no false restart" if quiet else "the ranks were launched anew, or an incident was written")
    return 0 if quiet else 1


if __name__ == "__main__":
    sys.exit(main())
