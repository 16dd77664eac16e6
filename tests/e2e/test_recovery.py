"""The watchdog before real vLLM: each fault once, a stream of requests running through it, and what a person wants is kept."""

from __future__ import annotations

import collections
import contextlib
import http.client
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import docker.errors
import pytest
from fleet import (
    ENDPOINT,
    HEAD,
    ROOT,
    SANDBOX,
    WORKER,
    Node,
    run_playbook,
    stream_completion,
    wait_until,
    watchdog_state,
)

OURS = {"watchdog_wheels": f"{ROOT}/.cache/watchdog-wheels", "watchdog_settings": {"interval_s": 5, "settled_s": 20}}
VARS = ("-e", "@molecule/watchdog/vars/watchdog.yml", "-e", json.dumps(OURS))
LIMIT_S = 60
# A look into a node costs a tenth of a second of CPU, which a load is short of.
LOOK_S = 3


def ask(number: int) -> str:
    """How one short stream ended."""
    body = {"model": "tiny", "max_tokens": 200, "stream": True, "ignore_eos": True}
    body["messages"] = [{"role": "user", "content": f"Request {number}"}]
    connection = http.client.HTTPConnection(ENDPOINT.removeprefix("http://"), timeout=LIMIT_S)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            return f"HTTP {answer.status}"
        lines = answer.read().split(b"\n\n")
        pieces = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        if any("error" in piece for piece in pieces):
            return "an error ends the stream"
        ends = [choice["finish_reason"] for piece in pieces for choice in piece.get("choices", [])]
        assert len({piece["id"] for piece in pieces}) == 1 and sum(map(bool, ends)) <= 1, "answered twice"
        return "answered" if any(ends) else "cut off"
    except (OSError, http.client.HTTPException, json.JSONDecodeError) as e:
        return type(e).__name__
    finally:
        connection.close()


@contextlib.contextmanager
def requests(asks: bool = True) -> Iterator[list[tuple[str, float]]]:
    """One stream after the other, each with LIMIT_S of silence: (outcome, seconds). What is wrong with one fails the block."""
    outcomes: list[tuple[str, float]] = []
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            begin = time.monotonic()
            outcomes.append((ask(len(outcomes)), time.monotonic() - begin))
            if outcomes[-1][0] != "answered":
                over.wait(2)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run) if asks else None
        try:
            if running:
                until_answered(outcomes)
            yield outcomes
            if running:
                until_answered(outcomes)
        finally:
            over.set()
        if running:
            running.result(LIMIT_S + 60)


def until_answered(outcomes: list[tuple[str, float]]) -> None:
    done = len(outcomes)
    wait_until("a request is answered", lambda: any(outcome == "answered" for outcome, _s in outcomes[done:]), 900)


def counted(outcomes: list[tuple[str, float]]) -> str:
    found = collections.Counter(outcome for outcome, _seconds in outcomes)
    return f"requests {dict(sorted(found.items()))}, longest {max((s for _o, s in outcomes), default=0):.1f} s"


def state(nodes: dict[str, Node]) -> dict[str, Any]:
    """What the watchdog has on disk; {} while its node is down."""
    try:
        return watchdog_state(nodes[HEAD])
    except (docker.errors.APIError, AssertionError, ValueError):
        return {}


def serves(nodes: dict[str, Node]) -> bool:
    """And has so for long enough: the next outage waits for nothing."""
    found = state(nodes)
    return found.get("name") == "serving" and (not found["tries"] or bool(found["tries"][-1].get("settled")))


def outage(
    nodes: dict[str, Node], name: str, fault: Callable[[], object], idle: bool = False, launches: int = 1
) -> dict[str, Any]:
    """The incident of a fault, after it serves again with no more launches than these."""
    wait_until("the watchdog serves", lambda: serves(nodes), 900, LOOK_S)
    before = (state(nodes)["last_incident"] or {}).get("id")

    def over() -> bool:
        found = state(nodes)
        return found.get("name") == "serving" and (found["last_incident"] or {}).get("id") not in (None, before)

    with requests(asks=not idle) as outcomes:
        begin = time.time()
        fault()
        wait_until(f"{name}: it serves again", over, 1800, LOOK_S)
    incident: dict[str, Any] = state(nodes)["last_incident"]
    at = {line["what"]: line["at"] - begin for line in incident["timeline"]}
    load = at["ready"] - at["workers up"]
    print(
        f"\n{name}: {incident['rule']} of {incident['node']}; noticed {at['detected']:.1f} s, ready {at['ready']:.1f} s, "
        f"load {load:.1f} s, so {at['ready'] - load:+.1f} s; {len(incident['tries'])} launch; {counted(outcomes)}"
    )
    assert incident["outcome"] == "recovered"
    assert len(incident["tries"]) <= launches
    assert stream_completion(ENDPOINT, "tiny").strip()
    return incident


@pytest.fixture(scope="module")
def watched(nodes) -> Iterator[dict[str, Node]]:
    done = run_playbook("../molecule/watchdog/prepare", "localhost,", *VARS)
    assert done.returncode == 0, done.stdout[-3000:]
    for name in ("serve", "watchdog"):
        done = run_playbook(name, SANDBOX, *VARS)
        assert done.returncode == 0, done.stdout[-4000:]
    yield nodes
    done = run_playbook("watchdog", SANDBOX, *VARS, "-e", "watchdog_state=absent")
    assert done.returncode == 0, done.stdout[-3000:]
    run_playbook("stop", SANDBOX)


def power(nodes: dict[str, Node], *names: str) -> None:
    """Power cut of these nodes, then power: the first is up before the next one has it."""
    containers = [nodes[name].client.containers.get(nodes[name].prefix + name) for name in names]
    for one in containers:
        one.kill()
    for name, one in zip(names, containers, strict=True):
        one.start()
        wait_until(f"{name} is up", lambda one=one: one.exec_run(["systemctl", "is-active", "ssh"]).exit_code == 0)


def test_a_worker_killed_while_nobody_asks(watched) -> None:
    """/health stays 200 (fixture worker_killed_midserve): the container tells."""
    incident = outage(watched, "worker killed", lambda: watched[WORKER].run("docker", "kill", "gb10-tiny"), idle=True)
    assert (incident["rule"], incident["node"]) == ("rank-gone", WORKER)


def test_a_frozen_worker(watched) -> None:
    def freeze() -> None:
        rows = watched[WORKER].run("docker", "top", "gb10-tiny", "-eo", "pid,args").splitlines()
        watched[WORKER].run("kill", "-STOP", *[row.split()[0] for row in rows if "VLLM::Worker" in row])

    incident = outage(watched, "worker frozen", freeze)
    assert (incident["rule"], incident["node"]) == ("rank-frozen", WORKER)


def test_a_killed_head(watched) -> None:
    incident = outage(watched, "head killed", lambda: watched[HEAD].run("docker", "kill", "gb10-tiny"))
    assert (incident["rule"], incident["node"]) == ("rank-gone", HEAD)


def test_both_ranks_killed(watched) -> None:
    def kill() -> None:
        for node in watched.values():
            node.run("docker", "kill", "gb10-tiny")

    assert outage(watched, "both killed", kill)["rule"] == "rank-gone"


@pytest.mark.parametrize("name", [WORKER, HEAD])
def test_a_docker_daemon_that_restarts(watched, name) -> None:
    # The ranks' end is seen before the daemon's: the first launch may find no Docker, and says so.
    incident = outage(
        watched, f"dockerd of {name}", lambda: watched[name].run("systemctl", "restart", "docker"), launches=2
    )
    assert incident["rule"] in ("rank-gone", "docker-silent", "fatal-line")


@pytest.mark.parametrize("order", [(WORKER,), (HEAD,), (HEAD, WORKER), (WORKER, HEAD)], ids="-".join)
def test_a_power_cut(watched, order) -> None:
    outage(watched, f"power cut of {', '.join(order)}", lambda: power(watched, *order))


def test_a_fabric_that_is_cut_for_a_minute(watched) -> None:
    """TCP outlives it: nothing is launched, requests wait and finish, or end at their limit."""
    wait_until("the watchdog serves", lambda: serves(watched), 900, LOOK_S)
    before = state(watched)["last_incident"]
    links = json.loads(watched[WORKER].run("ip", "-json", "address"))
    fabric = next(a["ifname"] for a in links if any(i.get("local") == "198.51.100.12" for i in a["addr_info"]))
    with requests() as outcomes:
        watched[WORKER].run("ip", "link", "set", fabric, "down")
        time.sleep(60)  # the fault itself lasts so long
        watched[WORKER].run("ip", "link", "set", fabric, "up")
    print(f"\nfabric cut: {counted(outcomes)}")
    wait_until("the watchdog serves", lambda: state(watched).get("name") == "serving", 900)
    assert state(watched)["last_incident"] == before
    assert stream_completion(ENDPOINT, "tiny").strip()


def test_what_a_person_wants_is_kept_across_a_reboot(watched) -> None:
    wait_until("the watchdog serves", lambda: serves(watched), 900, LOOK_S)
    assert run_playbook("pause", SANDBOX).returncode == 0
    watched[WORKER].run("docker", "kill", "gb10-tiny")
    wait_until("paused", lambda: state(watched)["name"] == "paused", 60)
    assert run_playbook("stop", SANDBOX).returncode == 0
    power(watched, HEAD, WORKER)
    wait_until("stopped", lambda: state(watched).get("name") == "stopped", 300)
    looked = state(watched)["since"]
    assert all(node.ranks() == [] for node in watched.values())
    done = run_playbook("status", SANDBOX)
    assert "stopped" in done.stdout
    assert state(watched)["since"] == looked
    assert run_playbook("serve", SANDBOX).returncode == 0
    assert run_playbook("resume", SANDBOX).returncode == 0
    wait_until("serving", lambda: state(watched)["name"] == "serving", 120)


def test_a_broken_recipe_three_tries_then_gave_up(watched) -> None:
    """A misspelt flag on the watchdog's side: refused by the engine's parser each time; nothing is started, and it ends."""
    wait_until("the watchdog serves", lambda: serves(watched), 900, LOOK_S)
    recipe = "/var/lib/gb10-watchdog/alpha/recipes/sandbox-tiny.yml"
    assert "max-model-len" in watched[HEAD].run("cat", recipe)
    watched[HEAD].run("sed", "-i", "s/max-model-len/max-modl-len/", recipe)
    before = watched[HEAD].rank_identity()
    watched[WORKER].run("docker", "kill", "gb10-tiny")
    wait_until("gave up", lambda: state(watched).get("name") == "gave_up", 1800, LOOK_S)
    found = state(watched)
    incident = found["last_incident"]
    starts = [one["started"] for one in incident["tries"]]
    gaps = [b - a for a, b in itertools.pairwise(starts)]
    print(f"\nbroken recipe: launches {gaps} s apart; {found['why']}; evidence {incident['evidence']}")
    assert len(starts) == 3 and 60 <= gaps[0] < 300 <= gaps[1]
    assert "max-modl-len" in found["why"]
    watched[HEAD].run("test", "-e", incident["evidence"])
    assert watched[HEAD].rank_identity() == before, "nothing was stopped or started"
    for name in ("watchdog", "serve"):
        assert run_playbook(name, SANDBOX, *VARS).returncode == 0
    wait_until("serving", lambda: state(watched)["name"] == "serving", 300, LOOK_S)
