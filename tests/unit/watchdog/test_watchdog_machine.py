"""From detection to an end: back-off, giving up, holds of a person, boots, and an end of the watchdog itself at any moment."""

from __future__ import annotations

import pytest
from watched_cluster import Cluster


def test_wd_pair_restart(cluster: Cluster) -> None:
    """Case wd-pair-restart: one rank ended, all start again together; one launch, one incident, its timeline in order."""
    cluster.end("spark-02", 137)
    cluster.looks(5)
    cluster.succeed(60)
    assert len(cluster.launches) == 1
    assert cluster.events == ["recovering", "recovered"]
    incident = cluster.state.last_incident
    assert incident and incident["rule"] == "rank-gone" and incident["outcome"] == "recovered"
    assert [line["what"] for line in incident["timeline"]] == [
        *("detected", "launch", "stopped", "workers up", "head up", "ready")
    ]
    assert incident["downtime_s"] == 65
    assert cluster.state.name == "serving"


def test_a_launch_that_is_quicker_than_two_looks_has_its_timeline(cluster: Cluster) -> None:
    """Seen in the sandbox: stopped and started within 5 s, and the incident said only launch and ready."""
    cluster.end("spark-02", 137)
    cluster.looks(5)
    cluster.serve()
    cluster.looks(5)
    cluster.run = {"rc": 0, "said": "", "log": "/x/stdout"}
    cluster.looks(5)
    assert cluster.state.last_incident
    assert [line["what"] for line in cluster.state.last_incident["timeline"]] == [
        *("detected", "launch", "stopped", "workers up", "head up", "ready")
    ]


def test_broken_recipe_three_launches_then_gave_up(cluster: Cluster) -> None:
    cluster.end("spark-01", 1)
    cluster.looks(5)
    begun = cluster.now
    for dummy in range(3):
        while cluster.run != "running" and cluster.now < begun + 3600:
            cluster.looks(5)
        cluster.fail()
    cluster.looks(20000)
    waits = [round(b - a - 35) for a, b in zip(cluster.launches, cluster.launches[1:], strict=False)]
    assert len(cluster.launches) == 3, "a restart storm"
    assert [wait // 5 * 5 for wait in waits] == [60, 300]
    assert cluster.state.name == "gave_up" and "no room" in cluster.state.why
    assert cluster.events == ["recovering", "recovering", "recovering", "gave_up"]
    assert cluster.state.last_incident and len(cluster.state.last_incident["tries"]) == 3


def test_launches_that_succeed_and_do_not_last_wait_longer_each_time(cluster: Cluster) -> None:
    gaps = []
    for dummy in range(4):
        cluster.end("spark-02", 137)
        begun = cluster.now
        while cluster.run != "running":
            cluster.looks(5)
        gaps.append(cluster.now - begun)
        cluster.succeed(20)
    # A wait counts from the start of the last launch.
    assert gaps[0] == 5
    assert gaps[1] < gaps[2] < gaps[3] <= 900


def test_an_outage_after_ten_minutes_of_service_waits_for_nothing(cluster: Cluster) -> None:
    for dummy in range(4):
        cluster.end("spark-02", 137)
        assert cluster.looks(5).run == "running"
        cluster.succeed(20)
        cluster.looks(610)


def test_gave_up_ends_when_a_person_serves(cluster: Cluster) -> None:
    test_broken_recipe_three_launches_then_gave_up(cluster)
    cluster.launch = {"holder": "launch of alpha"}
    assert cluster.looks(30).state.name == "launching"
    cluster.launch = None
    cluster.serve()
    assert cluster.looks(5).state.name == "serving"


def test_gave_up_ends_when_a_node_was_rebooted(cluster: Cluster) -> None:
    cluster.kernel = {"spark-02": [{"id": "net-cx7-aer", "groups": {}, "line": "AER: Uncorrectable (Fatal) error"}]}
    cluster.end("spark-02", 1)
    cluster.looks(600)
    assert cluster.launches == [] and cluster.state.name == "gave_up"
    assert "needs a reboot" in cluster.state.why
    assert cluster.state.last_incident and cluster.state.last_incident["kernel"]["spark-02"]
    cluster.kernel = {}
    cluster.worker["boot"] = "boot-2"
    assert len(cluster.looks(10).launches) == 1


def test_memory_that_does_not_come_back_ends_the_launches(cluster: Cluster) -> None:
    for free in (110.0, 104.0, 98.0):
        cluster.end("spark-02", 137)
        while cluster.run != "running" and cluster.state.name != "gave_up":
            cluster.looks(5)
        cluster.worker["available_gib"] = free
        cluster.succeed(20)
    assert cluster.state.name in ("serving", "gave_up")
    cluster.end("spark-02", 137)
    cluster.looks(1000)
    assert cluster.state.name == "gave_up"
    assert "110.0 → 104.0 → 98.0 GiB" in cluster.state.why
    assert len(cluster.launches) == 3


def test_a_stop_is_kept_across_a_reboot(cluster: Cluster) -> None:
    cluster.nodes["spark-02"]["holds"] = {"stopped": {"by": "ann", "since": "10:00"}}
    cluster.stop_all()
    cluster.looks(600)
    assert cluster.state.name == "stopped" and "ann" in cluster.state.why
    cluster.kill_watchdog()
    for eye in cluster.nodes.values():
        eye["boot"] = "boot-2"
    cluster.looks(3600)
    assert not cluster.launches
    # The person's next launch takes the note away.
    cluster.worker["holds"] = {}
    cluster.launch = {"holder": "launch of alpha"}
    cluster.looks(30)
    cluster.launch = None
    cluster.serve()
    assert cluster.looks(5).state.name == "serving"
    cluster.end("spark-02")
    assert len(cluster.looks(5).launches) == 1


def test_a_stop_ends_a_launch_of_ours_and_what_it_started(cluster: Cluster) -> None:
    cluster.end("spark-02", 137)
    cluster.looks(10)
    assert cluster.run == "running"
    cluster.head["holds"] = {"stopped": {}}
    cluster.serve()
    cluster.looks(10)
    assert cluster.actions == ["launch", "cancel", "stop"]
    cluster.run = "stopping"
    cluster.looks(60)
    cluster.run = None
    cluster.stop_all()
    cluster.looks(600)
    assert cluster.actions == ["launch", "cancel", "stop"]
    assert cluster.state.name == "stopped"


def test_paused_and_resumed(cluster: Cluster) -> None:
    cluster.head["holds"] = {"paused": {"by": "ann", "since": "10:00"}}
    cluster.end("spark-02")
    assert cluster.looks(3600).state.name == "paused" and not cluster.launches
    cluster.head["holds"] = {}
    assert len(cluster.looks(10).launches) == 1


def test_a_persons_launch_is_not_fought(cluster: Cluster) -> None:
    """serve.yml by hand stops all ranks, loads for ten minutes and fails: the person reads why, and nobody launches over it."""
    cluster.launch = {"holder": "launch of alpha (glm) on laptop"}
    cluster.stop_all()
    cluster.looks(600)
    assert cluster.state.name == "launching"
    cluster.launch = None
    cluster.looks(3600)
    assert cluster.state.name == "left_alone" and not cluster.launches
    assert "serve.yml" in cluster.state.why


def test_nothing_is_launched_that_never_served() -> None:
    cluster = Cluster()
    cluster.stop_all()
    assert cluster.looks(600).state.name == "left_alone" and not cluster.launches


def test_other_settings_are_watched_and_left(cluster: Cluster) -> None:
    for eye in cluster.nodes.values():
        eye["container"]["spec"] = "ccc"
    cluster.end("spark-02")
    assert cluster.looks(600).state.name == "foreign" and not cluster.launches


@pytest.mark.parametrize("first", ["spark-01", "spark-02"])
def test_both_nodes_booted_in_any_order(cluster: Cluster, first: str) -> None:
    cluster.kill_watchdog()
    cluster.stop_all()
    for name, eye in cluster.nodes.items():
        eye["boot"] = "boot-2"
        cluster.silent |= {name} - {first}
    cluster.looks(120)
    assert not cluster.launches and cluster.state.name == "waiting"
    cluster.silent = set()
    cluster.looks(10)
    cluster.succeed()
    cluster.looks(600)
    assert len(cluster.launches) == 1 and cluster.state.name == "serving"


@pytest.mark.parametrize(
    "moment", ["serving", "recovering", "recovering-late", "backoff", "gave_up", "stopped", "paused", "waiting"]
)
def test_kill_9_of_the_watchdog_at_each_state(cluster: Cluster, moment: str) -> None:
    """The same final state as without it, and at most one more launch."""
    final, most = "serving", 1
    if moment == "stopped":
        cluster.head["holds"] = {"stopped": {}}
        final, most = "stopped", 0
    if moment == "paused":
        cluster.head["holds"] = {"paused": {}}
        final, most = "paused", 0
    if moment == "waiting":
        cluster.silent = {"spark-02"}
    if moment != "serving":
        cluster.end("spark-02", 137)
    cluster.looks(30)
    if moment == "recovering-late":
        cluster.serve("late")
        cluster.looks(10)
        most = 1
    if moment == "recovering":
        most = 2
    if moment == "backoff":
        cluster.fail()
        most = 2
    if moment == "gave_up":
        cluster.state.armed = True
        for dummy in range(3):
            while cluster.run != "running" and cluster.state.name != "gave_up":
                cluster.looks(5)
            cluster.fail()
        final, most = "gave_up", 3
    assert cluster.state.name == moment.removesuffix("-late")
    cluster.kill_watchdog()
    cluster.silent = set()
    for dummy in range(400):
        cluster.looks(5)
        if cluster.run == "running":
            cluster.succeed()
    assert cluster.state.name == final
    assert len(cluster.launches) <= most
