"""After serve.yml: the head answers, the worker has no port, and nothing of the launch is left running."""

from __future__ import annotations

import json
from typing import Any


def rank_of(host: Any) -> int:
    return int(host.check_output("hostname").removeprefix("molecule-")) - 1


def test_both_ranks_run(host: Any) -> None:
    state = json.loads(host.check_output("docker inspect gb10-fake"))[0]["State"]
    assert state["Running"]
    assert state["Pid"] > 0


def test_only_the_head_answers(host: Any) -> None:
    answer = host.run("curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:8000/v1/models").stdout
    assert answer == ("200" if rank_of(host) == 0 else "000")


def test_the_checkpoint_is_there_and_verified(host: Any) -> None:
    assert host.file("/var/tmp/models/tiny-llama/config.json").exists
    assert host.file("/var/tmp/models/tiny-llama/model.safetensors").size > 100_000
