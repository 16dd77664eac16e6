"""One decision per cluster: a model is reloaded only for a reason, and each reason names its node."""

from __future__ import annotations

import pytest

from ansible_collections.gb10.fleet.plugins.module_utils._launch import BUSY, LAUNCH, REFUSE, SERVING, decide

NODES = ["spark-01", "spark-02"]
GOOD = {"exists": True, "running": True, "spec_matches": True, "restart_count": 0, "engine_alive": True}
HEAD = {**GOOD, "probe": {"ok": True}}


def test_all_well_is_left_alone() -> None:
    assert decide(NODES, [HEAD, GOOD]).verdict == SERVING


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        ({"exists": False}, "spark-02: no rank container"),
        (
            {**GOOD, "running": False, "status": "exited", "exit_code": 0},
            "spark-02: the rank container is exited (exit code 0)",
        ),
        ({**GOOD, "spec_matches": False, "recipe": "old"}, "spark-02: the rank runs with other settings (recipe old)"),
        ({**GOOD, "restart_count": 2}, "spark-02: the rank was restarted by itself 2 times"),
        ({**GOOD, "engine_alive": False}, "spark-02: the container runs, its engine process does not"),
    ],
)
def test_ready_health_200_is_not_enough(worker: dict, reason: str) -> None:
    """A head that answers says nothing about its workers: each rank is looked at."""
    decision = decide(NODES, [HEAD, worker])
    assert (decision.verdict, decision.reasons) == (LAUNCH, (reason,))


def test_an_endpoint_that_refuses_is_launched() -> None:
    decision = decide(NODES, [{**GOOD, "probe": {"ok": False, "error": "HTTP 500"}}, GOOD])
    assert (decision.verdict, decision.reasons) == (LAUNCH, ("spark-01: the endpoint does not answer (HTTP 500)",))


def test_wd_long_prefill_a_busy_engine_is_never_restarted() -> None:
    """Slow is not dead (public case: a watchdog "confirmed" a hang that was a long prefill)."""
    head = {**GOOD, "probe": {"ok": False, "timed_out": True, "error": "no token within 30 s"}}
    assert decide(NODES, [head, GOOD]).verdict == REFUSE
    assert decide(NODES, [head, GOOD], restart=True).verdict == LAUNCH


def test_a_silent_node_is_named_and_nothing_is_touched() -> None:
    decision = decide(NODES, [HEAD, None], restart=True)
    assert (decision.verdict, decision.reasons) == (REFUSE, ("spark-02: gives no answer",))


def test_a_launch_under_way_is_left_alone() -> None:
    """Its ranks do not answer yet: to a second launch that looks like a reason to start them anew."""
    launch = {"holder": "launch of alpha (glm) on desk", "controller": "desk", "pid": 100, "since_text": "10:00:00"}
    ranks = [{**GOOD, "launch": launch, "probe": {"ok": False, "error": "refused"}}, {**GOOD, "launch": launch}]
    decision = decide(NODES, ranks, restart=True, dead=[100], controller="laptop")
    assert decision.verdict == BUSY
    assert decision.reasons == ("spark-02: launch of alpha (glm) on desk is under way since 10:00:00",)
    assert decide(NODES, ranks, dead=[100], controller="desk").verdict == LAUNCH
