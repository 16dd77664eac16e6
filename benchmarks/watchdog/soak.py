"""False restarts in a soak: a watched cluster of stand-ins under load, with what looks like a hang and is none.

    python benchmarks/watchdog/soak.py [--minutes 30]     the sandbox is up, serves sandbox-fake, and watchdog.yml was applied

Four requests at a time with pauses in which nobody asks; before them, while the engine is young, one whose first token takes ten
minutes (kernels that compile without a word); between them prefills of four minutes. Ends with 1 at any launch or incident.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/utils"))

from fleet import ENDPOINT, HEAD, Node, sandbox_nodes, stream_completion  # noqa: E402

STATE = "/var/lib/gb10-fleet/watchdog/alpha/state.json"
JIT_S, PREFILL_S = 590, 240


def first_token(head: Node, seconds: float) -> None:
    """The stand-in's next first tokens take this long."""
    words = f"printf %s '{f'slow_first_token={seconds}' if seconds else ''}' > /run/fake-engine"
    head.run("docker", "exec", "gb10-fake", "sh", "-c", words)


def ask(limit_s: float, said: collections.Counter[str]) -> None:
    try:
        answer = stream_completion(ENDPOINT, "fake", f"Tell me of {random.random()}", limit_s)
        said["answered" if answer.strip() else "empty"] += 1
    except OSError as e:
        said[type(e).__name__] += 1


def together(count: int, limit_s: float, said: collections.Counter[str]) -> None:
    threads = [threading.Thread(target=ask, args=(limit_s, said)) for _n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    args = parser.parse_args()
    nodes = sandbox_nodes()
    head, end = nodes[HEAD], time.monotonic() + 60 * args.minutes
    before = {name: node.rank_identity() for name, node in nodes.items()}
    incident = json.loads(head.run("cat", STATE))["state"]["last_incident"]
    said: collections.Counter[str] = collections.Counter()
    names: collections.Counter[str] = collections.Counter()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(5):
            names[json.loads(head.run("cat", STATE))["state"]["name"]] += 1

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        silence, turn = JIT_S, 0
        while time.monotonic() < end:
            turn += 1
            if silence:
                first_token(head, silence)
                together(1, silence + 120, said)
                first_token(head, 0)
            silence = PREFILL_S if turn % 3 == 0 else 0
            load_until = min(end, time.monotonic() + 90)
            while time.monotonic() < load_until:
                together(4, 120, said)
            over.wait(min(60, max(0, end - time.monotonic())))  # nobody asks
    finally:
        over.set()
        watcher.join()
    state = json.loads(head.run("cat", STATE))["state"]
    after = {name: node.rank_identity() for name, node in nodes.items()}
    print(
        f"requests {dict(said)}; states seen {dict(names)}; last incident {state['last_incident'] and state['last_incident']['id']}"
    )
    quiet = after == before and state["last_incident"] == incident and set(names) <= {"serving", "degraded"}
    print("no false restart" if quiet else "the ranks were launched anew, or an incident was written")
    return 0 if quiet else 1


if __name__ == "__main__":
    sys.exit(main())
