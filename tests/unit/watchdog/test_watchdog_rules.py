"""Each rule fires when it must, and no rule fires on what only looks like a failure."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from watchdog import rules
from watched_cluster import Cluster

SECOND_LINE = "(EngineCore pid=12) ERROR 11-29 12:38:22 [core.py:1] EngineCore encountered a fatal error."


def worker_killed(c: Cluster) -> None:
    """fixtures mn2: /health, /v1/models and /metrics stay 200 with a dead worker."""
    c.end("spark-02", 137)


def worker_exits_zero(c: Cluster) -> None:
    """facts: a headless worker that ends exits with 0."""
    c.end("spark-02", 0)


def worker_frozen(c: Cluster) -> None:
    c.worker["stopped"] = True


def worker_removed(c: Cluster) -> None:
    c.worker["container"] = None


def worker_replaced(c: Cluster) -> None:
    c.worker["container"] = c.container("spark-02", "other")


def head_killed(c: Cluster) -> None:
    c.end("spark-01", 137)


def health_503(c: Cluster) -> None:
    c.head["http"]["health"] = 503


def health_refused(c: Cluster) -> None:
    c.head["http"]["health"] = "refused"


def fatal(c: Cluster) -> None:
    c.head["fatal"] = [SECOND_LINE]


@pytest.mark.parametrize(
    ("breaks", "rule", "node", "within_s"),
    [
        (worker_killed, "rank-gone", "spark-02", 5),
        (worker_exits_zero, "rank-gone", "spark-02", 5),
        (worker_removed, "rank-gone", "spark-02", 5),
        (worker_replaced, "rank-replaced", "spark-02", 5),
        (worker_frozen, "rank-frozen", "spark-02", 10),
        (head_killed, "rank-gone", "spark-01", 5),
        (fatal, "fatal-line", "spark-01", 5),
        (health_503, "health", "spark-01", 15),
        (health_refused, "health", "spark-01", 15),
    ],
)
def test_noticed_within(
    cluster: Cluster, breaks: Callable[[Cluster], None], rule: str, node: str, within_s: float
) -> None:
    breaks(cluster)
    begun = cluster.now
    cluster.looks(60)
    assert cluster.launches, "nothing was noticed"
    assert cluster.launches[0] - begun <= within_s
    incident = cluster.state.incident
    assert incident and (incident["rule"], incident["node"]) == (rule, node)


@pytest.mark.parametrize("health", ["timeout", 404, "gaierror"])
def test_a_late_answer_is_no_failure(cluster: Cluster, health: object) -> None:
    cluster.head["http"]["health"] = health
    assert not cluster.looks(300).launches


def test_health_needs_three_looks_in_a_row(cluster: Cluster) -> None:
    for dummy in range(10):
        cluster.head["http"]["health"] = 503
        cluster.looks(10)
        cluster.head["http"]["health"] = 200
        cluster.looks(5)
    assert not cluster.launches


def generate(c: Cluster, power: float | None = None) -> None:
    c.head["http"].update(iterations=100, running=1)
    c.head["gpu"] = None if power is None else {"power_w": power, "util_percent": 95}


def test_wd_util_vs_power(cluster: Cluster) -> None:
    """Case wd-util-vs-power: tokens frozen at 120344, 1 request, 95 % utilization; 45.1 W at first, then 22.0 and 21.8 W."""
    generate(cluster, 45.1)
    assert not cluster.looks(1200).launches
    generate(cluster, 22.0)
    assert not cluster.looks(295).launches
    assert cluster.looks(15).launches
    assert cluster.state.incident and cluster.state.incident["rule"] == "tokens-frozen"


def test_wd_long_prefill(cluster: Cluster) -> None:
    """Case wd-long-prefill: frozen 180 s, 1 request, 46 W: a prefill."""
    generate(cluster, 46)
    assert not cluster.looks(180).launches
    generate(cluster, 46)
    assert not cluster.looks(3600).launches


@pytest.mark.parametrize("sign", ["working", "compiling"])
def test_wd_long_prefill_jit(cluster: Cluster, sign: str) -> None:
    """Case wd-long-prefill: a jit_monitor or autotune line, or a compiler at work, on any rank; the GPU idles meanwhile."""
    generate(cluster, 15)
    cluster.worker[sign] = True
    assert not cluster.looks(1800).launches


def test_wd_long_prefill_silent_jit_of_ten_minutes(cluster: Cluster) -> None:
    """No word, no compiler process, no power figure: an engine younger than 10 min has 600 s."""
    for name, eye in cluster.nodes.items():
        eye["container"] = {**cluster.container(name), "started_at": "2027-01-15T08:00:00Z"}
    cluster.marks.clear()
    generate(cluster)
    assert not cluster.looks(600).launches
    assert cluster.looks(10).launches


def test_tokens_that_stand_still_without_requests_are_idle(cluster: Cluster) -> None:
    assert not cluster.looks(7200).launches


def test_an_engine_without_the_counter_is_not_judged_by_it(cluster: Cluster) -> None:
    del cluster.head["http"]["iterations"]
    cluster.head["http"]["running"] = 3
    assert not cluster.looks(3600).launches


def test_wd_no_autopower(cluster: Cluster) -> None:
    """Case wd-no-autopower: no launch against a node that is off; a person is told what it needs, twice, not for ever."""
    cluster.silent = {"spark-02"}
    cluster.looks(4000)
    assert not cluster.launches
    assert cluster.state.name == "waiting"
    assert "waiting for spark-02 since" in cluster.state.why and "AC power" in cluster.state.why
    assert cluster.events == ["degraded", "degraded"]
    cluster.silent = set()
    cluster.worker.update(container=None, boot="boot-2")
    cluster.looks(10)
    assert len(cluster.launches) == 1


def test_a_lost_management_link_alone_restarts_nothing(cluster: Cluster) -> None:
    cluster.silent = {"spark-02"}
    cluster.looks(20)
    cluster.head["canary"] = {"ok": True, "error": None, "at": cluster.now}
    cluster.looks(600)
    assert not cluster.launches and cluster.state.name == "degraded"
    assert cluster.state.why == "spark-02 gives no answer, and the cluster still serves"
    cluster.silent = set()
    assert cluster.looks(5).state.name == "serving"


def test_a_canary_counts_once_however_often_it_is_seen(cluster: Cluster) -> None:
    cluster.head["canary"] = {"ok": False, "error": "answered 500", "at": 1.0}
    assert not cluster.looks(600).launches
    cluster.head["canary"] = {"ok": False, "error": "answered 500", "at": 2.0}
    assert cluster.looks(5).launches


def test_docker_restart_is_no_missing_rank(cluster: Cluster) -> None:
    cluster.worker.update(container=None, docker="ConnectionRefusedError")
    assert not cluster.looks(60).launches
    assert cluster.state.name == "waiting"
    cluster.worker.update(container={**cluster.container("spark-02"), "running": False, "exit_code": 0}, docker=None)
    assert cluster.looks(5).launches


@pytest.mark.parametrize(
    ("line", "needs"),
    [
        ({"id": "net-cx7-aer", "groups": {}}, "reboot"),
        ({"id": "kernel-soft-lockup", "groups": {}}, "AC power cycle"),
        ({"id": "kernel-xid", "groups": {"xid": "79"}}, "reboot"),
        ({"id": "kernel-xid", "groups": {"xid": "13"}}, None),
        ({"id": "kernel-oom-killer", "groups": {}}, None),
        ({"id": "guard-nvrm-benign", "groups": {}}, None),
    ],
)
def test_net_cx7_aer_and_other_kernel_evidence(line: dict[str, object], needs: str | None) -> None:
    said = rules.pointless({"spark-02": [line]})
    assert (needs is None) == (said is None)
    if needs and said:
        assert needs in said and said.startswith("spark-02")
