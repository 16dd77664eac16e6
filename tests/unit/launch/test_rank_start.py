"""One container per spec and image, started with the words that render.yml prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.gb10.fleet.plugins.module_utils import _rank_spec
from ansible_collections.gb10.fleet.plugins.modules import rank_start

IMAGE = "sha256:8c1f"


class Node:
    """What the engine says of this node, a ``docker`` that writes down its words, and the module on it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capfd = folder, capfd
        self.said: dict[str, Any] = {"/images/vllm:1/json": {"Id": IMAGE}}
        self.words = folder / "words"
        self.cli("echo c0ffee")
        monkeypatch.setenv("PATH", str(folder), prepend=":")
        monkeypatch.setattr(rank_start, "Docker", lambda path: self)
        (folder / "model").mkdir()
        self.spec = {
            **{
                "name": "vllm_glm53",
                "image": "vllm:1",
                "entrypoint": ["vllm"],
                "argv": ["serve", "/model"],
                "env": {"A": "b c"},
            },
            **{"ulimits": {}, "devices": [], "gpus": "", "cap_add": [], "network_mode": "host", "ipc_mode": "host"},
            **{
                "shm_size": "64m",
                "memory": "",
                "memory_swap": "",
                "init": True,
                "stop_timeout_s": 60,
                "restart_policy": "no",
            },
            "mounts": [{"source": str(folder / "model"), "target": "/model", "read_only": True}],
            "labels": {_rank_spec.LABEL_SPEC: "abc"},
        }

    def cli(self, last: str) -> None:
        program = self.folder / "docker"
        program.write_text(f'#!/bin/sh\nfor word; do printf "%s\\n" "$word"; done >> {self.words}\n{last}\n')
        program.chmod(0o755)

    def find(self, path: str) -> Any:
        return self.said.get(path)

    def holds(self, status: str = "running", image: str = IMAGE, spec: str = "abc") -> None:
        labels = {_rank_spec.LABEL_SPEC: spec}
        self.said["/containers/vllm_glm53/json"] = {
            "Id": "dead", "Image": image, "State": {"Status": status}, "Config": {"Image": "vllm:1", "Labels": labels}
        }  # fmt: skip

    def start(self, **more: Any) -> dict[str, Any]:
        with patch_module_args({"spec": self.spec, **more}), pytest.raises(SystemExit):
            rank_start.main()
        return dict(json.loads(self.capfd.readouterr().out))

    def ran(self) -> list[str]:
        return self.words.read_text().splitlines() if self.words.exists() else []


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Node:
    return Node(tmp_path, monkeypatch, capfd)


def test_it_runs_what_render_prints(node: Node) -> None:
    result = node.start()
    assert (result["changed"], result["container_id"]) == (True, "c0ffee")
    assert ["docker", *node.ran()] == _rank_spec.docker_run_argv(node.spec) == result["argv"]


def test_a_rank_that_runs_as_asked_is_left_alone(node: Node) -> None:
    node.holds()
    result = node.start()
    assert (result["changed"], result["container_id"], node.ran()) == (False, "dead", [])


@pytest.mark.parametrize(
    "found", [{"status": "exited"}, {"status": "created"}, {"image": "sha256:old"}, {"spec": "def"}]
)
def test_one_that_ended_or_differs_is_replaced(node: Node, found: dict[str, str]) -> None:
    node.holds(**found)
    assert node.start()["changed"]
    assert node.ran()[:4] == ["rm", "--force", "dead", "run"]


def test_check_mode_says_what_would_run_and_runs_nothing(node: Node) -> None:
    node.holds(spec="def")
    node.said.pop("/images/vllm:1/json")
    result = node.start(_ansible_check_mode=True)
    assert (result["changed"], result["container_id"], node.ran()) == (True, None, [])
    assert result["diff"]["before"] == "vllm_glm53: running, of vllm:1\n"
    assert result["diff"]["after"] == _rank_spec.docker_run_text(node.spec) + "\n"


def test_a_checkpoint_that_is_not_there_is_named_before_anything_is_removed(node: Node) -> None:
    """Docker's --volume would put an empty folder in its place, and the engine would say something else."""
    (node.folder / "model").rmdir()
    node.holds(spec="def")
    assert node.start()["msg"].startswith(f"{node.folder}/model is not on this node, and vllm_glm53 reads it.")
    assert node.ran() == []


def test_an_image_that_is_not_there_is_not_pulled(node: Node) -> None:
    node.said.clear()
    assert "The image vllm:1 is not on this node" in node.start()["msg"]
    assert node.ran() == []


def test_what_docker_says_is_handed_on(node: Node) -> None:
    """As Docker 28 answers a device that is not there."""
    said = 'docker: Error response from daemon: error gathering device information while adding custom device "/dev/infiniband"'
    node.cli(f"echo '{said}' >&2; exit 125")
    assert node.start()["msg"] == f"`docker run` of vllm_glm53 failed: {said}"


def test_a_daemon_that_hangs_is_not_waited_for(node: Node) -> None:
    node.cli("exec sleep 60")
    assert node.start(timeout_s=1)["msg"] == "`docker run` gave no answer within 1 s. Run: systemctl status docker"
