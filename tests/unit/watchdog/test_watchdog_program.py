"""The program itself, with real eyes, against a stand-in Docker socket, engine and ansible-runner. Two nodes, both beside us."""

from __future__ import annotations

import http.server
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from watchdog import eye
from watchdog.outside import NodeEye, Run, post
from watchdog_world import World

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    one = World(tmp_path)
    one.start()
    try:
        one.until(lambda state: state["name"] == "serving")
        yield one
    finally:
        one.close()


def test_worker_killed_while_idle(world: World) -> None:
    """The engine's /health stays 200: the rank says it. One evidence, one launch, one incident, two alerts."""
    world.ranks["rank1"].kill()
    state = world.until(lambda state: bool(state["last_incident"]))
    incident = state["last_incident"]
    assert (incident["rule"], incident["node"], incident["outcome"]) == ("rank-gone", "spark-02", "recovered")
    assert [line.split()[0] for line in world.runs()] == ["evidence", "serve"]
    assert all('"watchdog_acts": true' in line for line in world.runs())
    assert '"serve_restart": true' in world.runs()[1], "an engine that hangs is not asked before it is launched anew"
    files = list((world.folder / "incidents").glob("*.json"))
    assert [json.loads(path.read_text())["outcome"] for path in files] == ["recovered"]
    world.until(lambda state: "recovered" in (world.folder / "alerts").read_text())
    alerts = [json.loads(line) for line in (world.folder / "alerts").read_text().splitlines() if line]
    assert [alert["event"] for alert in alerts] == ["recovering", "recovered"]


def test_worker_frozen(world: World) -> None:
    world.ranks["rank1"].process.send_signal(signal.SIGSTOP)
    state = world.until(lambda state: bool(state["last_incident"]))
    assert state["last_incident"]["rule"] == "rank-frozen"


def test_a_failed_launch_says_what_the_playbook_said(world: World) -> None:
    (world.private / "broken").write_text("spark-02: 98.9 GiB free, 102.2 GiB wanted")
    world.ranks["rank0"].kill()
    state = world.until(lambda state: state["name"] == "backoff")
    assert "102.2 GiB wanted" in state["why"]
    assert state["next_try"] > time.time() + 50


def test_killed_while_it_launches(world: World) -> None:
    world.ranks["rank0"].kill()
    world.until(lambda state: state["name"] == "recovering")
    world.kill()
    world.start()
    state = world.until(lambda state: state["name"] == "backoff")
    assert state["incident"]["rule"] == "rank-gone", "the incident goes on"
    assert len(state["tries"]) == 1, "the launch that was cut counts"


def test_somebody_elses_launch(world: World) -> None:
    record = {
        "kind": "serving",
        "holder": "launch of alpha",
        "controller": "laptop",
        "pid": 7,
        "expires": time.time() + 60,
    }
    (world.folder / "lock").write_text(json.dumps(record))
    world.until(lambda state: state["name"] == "launching")
    world.ranks["rank0"].kill()
    (world.folder / "lock").write_text("")
    world.until(lambda state: state["name"] == "left_alone")
    assert world.runs() == []


def test_stopped_and_term(world: World) -> None:
    (world.folder / "hold").mkdir()
    (world.folder / "hold" / "stopped").write_text('{"by": "ann", "since": "10:00"}')
    world.until(lambda state: state["name"] == "stopped")
    world.ranks["rank0"].kill()
    assert world.watchdog is not None
    world.watchdog.terminate()
    assert world.watchdog.wait(20) == 0
    assert world.runs() == []


def test_counters_of_a_real_page() -> None:
    page = (ROOT / "tests/fixtures/metrics/vllm-single.prom").read_text()
    seen = eye.counters(page)
    wanted = next(line for line in page.splitlines() if line.startswith("vllm:iteration_tokens_total_count"))
    assert seen["iterations"] == float(wanted.split()[-1])
    assert set(seen) == {"iterations", "generated", "running", "waiting"}


def test_an_eye_that_ends_is_started_again(tmp_path: Path) -> None:
    node = NodeEye([], "def main(settings):\n    print('{\"fatal\": []}', flush=True)\n", {})
    node.poll()
    limit = time.monotonic() + 120
    while node.line is None and time.monotonic() < limit:
        time.sleep(0.1)
        node.poll()
    assert node.line == {"fatal": []}
    node.close()


def test_what_a_run_said(tmp_path: Path) -> None:
    run = Run.__new__(Run)
    run.config, run.ident = {"private_dir": str(tmp_path)}, "x"
    assert run.said() == "no task said why"
    events = tmp_path / "artifacts/x/job_events"
    events.mkdir(parents=True)
    for number, said in ((9, "first"), (10, "last")):
        event = {"event": "runner_on_failed", "event_data": {"res": {"msg": said}}}
        (events / f"{number}-a.json").write_text(json.dumps(event))
    assert run.said() == "last"


@pytest.mark.parametrize(("form", "body"), [("slack", '{"text": "alpha: gave_up\\nno room"}'), ("ntfy", "no room")])
def test_webhook(form: str, body: str) -> None:
    got: list[str] = []

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/"
    post({"url": url, "format": form, "cluster": "alpha", "event": "gave_up", "text": "no room"})
    server.shutdown()
    assert got == [body]
