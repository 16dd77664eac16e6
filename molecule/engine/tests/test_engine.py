"""A rank runs as its spec says, under Docker's restart policy "no"."""

from __future__ import annotations

import json
from typing import Any


def inspect(host: Any) -> dict[str, Any]:
    return json.loads(host.check_output("docker inspect gb10-fake"))[0]


def test_the_rank_runs_as_its_spec_says(host: Any) -> None:
    rank = inspect(host)
    number = int(host.check_output("hostname").removeprefix("molecule-")) - 1
    assert rank["State"]["Running"]
    assert rank["Config"]["Labels"]["gb10.fleet.rank"] == str(number)
    assert rank["Config"]["Entrypoint"] == ["vllm"]
    assert rank["Config"]["Cmd"][0] == "serve"
    assert (rank["Config"]["Cmd"][-1] == "--headless") is (number > 0)
    assert rank["HostConfig"]["NetworkMode"] == "host"
    assert rank["HostConfig"]["IpcMode"] == "host"
    assert rank["HostConfig"]["CapAdd"] == ["IPC_LOCK"] or rank["HostConfig"]["CapAdd"] == ["CAP_IPC_LOCK"]
    assert [d["PathOnHost"] for d in rank["HostConfig"]["Devices"]] == ["/dev/infiniband"]


def test_wd_pair_restart(host: Any) -> None:
    """A lone rank never recovers: Docker must not restart it."""
    assert inspect(host)["HostConfig"]["RestartPolicy"]["Name"] == "no"


def test_launch_no_init(host: Any) -> None:
    """Zombies are reaped by an init process in the container."""
    assert inspect(host)["HostConfig"]["Init"] is True
