"""The evidence bundle: complete, without a secret, the newest ten, and never a failure of its own."""

from __future__ import annotations

import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.errors import AnsibleConnectionFailure

from ansible_collections.gb10.fleet.plugins.action import evidence_bundle, evidence_collect
from ansible_collections.gb10.fleet.plugins.module_utils import _evidence
from ansible_collections.gb10.fleet.plugins.modules import evidence_collect as node

LOGS = Path(__file__).parents[2] / "fixtures" / "engine_logs"
SECRETS = [
    "planted-api-key-1",
    "planted-hub-token-2",
    "planted-in-argv-3",
    "hf_plantedplantedplanted4",
    "planted-receipt-5",
]
SPEC = {
    "entrypoint": ["vllm"], "argv": ["serve", "/m"], "env": {"NCCL_IB_GID_INDEX": "3", "VLLM_API_KEY": SECRETS[0]}, "mounts": [],
    "image": "vllm:1", "network_mode": "host", "ipc_mode": "host", "init": True, "restart_policy": "no",
}  # fmt: skip


def collect(docker: Any, tmp_path: Path, **over: Any) -> tuple[node.Collector, dict[str, Any]]:
    params = {
        "container": "x",
        "spec": SPEC,
        "units": [],
        "folders": [tmp_path / "state"],
        "log_mib": 1,
        "docker_socket": docker.path,
        **over,
    }
    params["docker_socket"] = str(params["docker_socket"])
    collector = node.Collector(params)
    return collector, collector.run()


def plant(docker: Any, tmp_path: Path) -> None:
    """Secrets where they were seen: environment, arguments, the engine's first line, a request's header, a receipt."""
    config = {
        "Image": "vllm:1",
        "Labels": {},
        "Entrypoint": ["vllm"],
        "Cmd": ["serve", "/m", "--api-key", SECRETS[2]],
        "Env": [f"VLLM_API_KEY={SECRETS[0]}", f"HF_TOKEN={SECRETS[1]}", "NCCL_IB_GID_INDEX=4"],
    }
    docker.container(Config=config, State={"Running": False, "Status": "exited", "ExitCode": 1})
    lines = [
        f"(APIServer pid=1) INFO 11-29 12:48:19 [api_utils.py:286] non-default args: {{'api_key': ['{SECRETS[2]}'], 'port': 8000}}",
        f"(APIServer pid=1) INFO 11-29 12:48:20 [x.py:1] downloading with {SECRETS[3]}",
        f"(APIServer pid=1) INFO 11-29 12:48:21 [x.py:1] header Authorization: Bearer {SECRETS[1]}",
        *(line for line in (LOGS / "load_error_worker.log").read_text().replace("\r", "").splitlines() if line),
        f"(EngineCore pid=9) ERROR 11-29 13:21:07 [x.py:1] could not log in as {SECRETS[0]}",
    ]
    docker.messages = [(f"2026-11-29T12:49:00.{i:03d}000000Z", line) for i, line in enumerate(lines)]
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "receipt.json").write_text(f'{{"password": "{SECRETS[4]}", "bytes": 7}}')


def test_no_secret_comes_out(docker: Any, tmp_path: Path) -> None:
    plant(docker, tmp_path)
    collector, said = collect(docker, tmp_path)
    collector.pack(str(tmp_path / "e.tar.gz"))
    texts = [repr(said)]
    with tarfile.open(tmp_path / "e.tar.gz") as archive:
        names = archive.getnames()
        for item in archive:
            content = archive.extractfile(item)
            assert content
            texts.append(content.read().decode())
    everything = "\n".join(texts)
    assert [secret for secret in SECRETS if secret in everything] == []
    assert "<removed>" in everything
    for name in ("engine.log", "inspect.json", "spec.json", "spec-difference.txt", "proc/meminfo", "proc/buddyinfo", "proc/vmstat",
                 "network/gids.txt", "processes.txt", "missing.txt"):  # fmt: skip
        assert name in names
    assert any(name.endswith("receipt.json") for name in names)
    assert (tmp_path / "e.tar.gz").stat().st_mode & 0o777 == 0o600


def test_short_form(docker: Any, tmp_path: Path) -> None:
    plant(docker, tmp_path)
    _, said = collect(docker, tmp_path)
    assert said["state"]["status"] == "exited"
    assert said["state"]["stage"] == "load"
    assert "FileNotFoundError" in said["state"]["first_error"]["line"]
    assert "env NCCL_IB_GID_INDEX: 3 wanted, 4 found" in said["differences"]
    assert any("unexpected --api-key <removed>" in text for text in said["differences"])


def test_without_a_container(docker: Any, tmp_path: Path) -> None:
    collector, said = collect(docker, tmp_path)
    assert said["state"]["status"] == "absent"
    assert said["differences"] == ["there is no container"]
    assert "there is no container x" in said["missing"]
    assert "proc/meminfo" in collector.files


def test_without_docker(docker: Any, tmp_path: Path) -> None:
    _, said = collect(docker, tmp_path, docker_socket="/nonexistent.sock")
    assert any("Docker does not run here" in text for text in said["missing"])


def stamp(number: int) -> str:
    return f"2026-11-29T12:{50 + number // 60000}:{number // 1000 % 60:02d}.{number % 1000:03d}000000Z"


def test_a_long_log_keeps_its_beginning_and_its_end(docker: Any, tmp_path: Path) -> None:
    docker.container()
    docker.messages = [(f"{stamp(i)}", f"line {i} " + "x" * 80) for i in range(20000)]
    collector, _ = collect(docker, tmp_path)
    log = collector.files["engine.log"]
    assert "line 0 " in log
    assert "line 19999 " in log
    assert "bytes left out" in log
    assert len(log) < (1 << 20) + 200


def test_gid_tables(tmp_path: Path) -> None:
    """Case net-gid-empty-errno61: what a person compares, and without the empty entries."""
    port = tmp_path / "rocep1s0f0/ports/1"
    for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (port / folder).mkdir(parents=True)
    entries = {
        0: "fe80:0000:0000:0000:0000:0000:0000:0001",
        3: "0000:0000:0000:0000:0000:ffff:c633:640b",
        4: "0000:" * 7 + "0000",
    }
    for index, gid in entries.items():
        (port / "gids" / str(index)).write_text(gid + "\n")
        (port / "gid_attrs/types" / str(index)).write_text("RoCE v2\n")
        (port / "gid_attrs/ndevs" / str(index)).write_text("enp1s0f0np0\n")
    assert node.gid_tables(tmp_path).splitlines() == [
        "rocep1s0f0 1 0 fe80:0000:0000:0000:0000:0000:0000:0001 RoCE v2 enp1s0f0np0",
        "rocep1s0f0 1 3 0000:0000:0000:0000:0000:ffff:c633:640b RoCE v2 enp1s0f0np0",
    ]
    assert node.gid_tables(tmp_path / "none") == "no RDMA device\n"


# --- on the controller ----------------------------------------------------------------------------------------------------
CONNECTION = SimpleNamespace(_shell=SimpleNamespace(tmpdir="/x"))


def variables(host: str, evidence: dict[str, Any]) -> dict[str, Any]:
    return {
        "inventory_hostname": host,
        "topology_cluster": "alpha",
        "topology_members": ["spark-01", "spark-02"],
        "ansible_play_hosts": list(evidence),
        "hostvars": {h: {"ev": evidence.get(h, {})} for h in ("spark-01", "spark-02")},
    }


def bundle(tmp_path: Path, host: str, evidence: dict[str, Any], **args: Any) -> dict[str, Any]:
    arguments = {"stage_dir": str(tmp_path / "stage"), "dest_dir": str(tmp_path / "bundles"), "report": "ev", **args}
    task = SimpleNamespace(args=arguments, async_val=0, check_mode=False, action="x", diff=False)
    action = evidence_bundle.ActionModule(task, CONNECTION, None, None, None, None)
    return action.run(task_vars=variables(host, evidence))


def stage(tmp_path: Path, host: str) -> None:
    (tmp_path / "stage").mkdir(exist_ok=True)
    (tmp_path / "engine.log").write_text(f"log of {host}")
    with tarfile.open(tmp_path / "stage" / f"{host}.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "engine.log", "engine.log")


DIAGNOSIS = {
    "node": "spark-02",
    "rank": 1,
    "id": "rank-killed",
    "cause": "the rank was killed",
    "fix": "look",
    "doing": "loading weights",
}


def test_one_bundle_with_a_page_on_top(tmp_path: Path) -> None:
    stage(tmp_path, "spark-01")
    evidence = {
        "spark-01": {"evidence": {"state": {"status": "running", "stage": "load", "memory": {"free_kib": 22334668}}}}
    }
    result = bundle(tmp_path, "spark-01", evidence, diagnosis=DIAGNOSIS)
    with tarfile.open(result["path"]) as archive:
        names = [name.split("/", 1)[1] for name in archive.getnames()]
    assert names == ["summary.md", "spark-01/engine.log"]
    assert "**spark-02 (rank 1), loading weights: the rank was killed.**" in result["summary"]
    assert "Nothing could be collected: the node is out of this run (unreachable)" in result["summary"]
    assert not (tmp_path / "stage").exists()
    assert len(result["summary"].splitlines()) < 60, "one page"


def test_the_first_rank_that_is_left_packs(tmp_path: Path) -> None:
    """The head became unreachable: its worker makes the bundle."""
    stage(tmp_path, "spark-02")
    evidence = {"spark-02": {"evidence": {"state": {"status": "running"}}}}
    assert bundle(tmp_path, "spark-02", evidence)["path"]


def test_others_do_nothing(tmp_path: Path) -> None:
    evidence: dict[str, Any] = {"spark-01": {}, "spark-02": {}}
    assert bundle(tmp_path, "spark-02", evidence)["skipped"]


def test_the_newest_ten_stay() -> None:
    names = [_evidence.bundle_name("alpha", f"2026112{i // 10}T16150{i % 10}Z") for i in range(13)]
    others = [_evidence.bundle_name("beta", "20201129T161508Z"), "notes.txt", "alpha-old.tar.gz"]
    assert _evidence.surplus([*reversed(names), *others], 10) == names[:3]


def test_a_full_disk_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "bundles").write_text("a file where the folder should be")
    result = bundle(tmp_path, "spark-01", {"spark-01": {"evidence": {}}})
    assert "could not be packed" in result["warnings"][0]


def test_a_node_without_an_answer_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    task = SimpleNamespace(args={"stage_dir": "/x"}, async_val=0, check_mode=False, action="x", diff=False)
    action = evidence_collect.ActionModule(task, CONNECTION, None, None, None, None)

    def gone(*_args: Any, **_kwargs: Any) -> dict[str, Any]:
        raise AnsibleConnectionFailure("No route to host")

    monkeypatch.setattr(action, "_execute_module", gone)
    result = action.run(task_vars={"inventory_hostname": "spark-02"})
    assert not result.get("failed")
    assert result["evidence"]["error"] == "No route to host"


def test_spec_difference() -> None:
    env = ["NCCL_IB_GID_INDEX=3", "VLLM_API_KEY=x", "PATH=/bin"]
    inspect: dict[str, Any] = {
        "Config": {"Image": "vllm:1", "Entrypoint": ["vllm"], "Cmd": ["serve", "/m"], "Env": env},
        "HostConfig": {"NetworkMode": "host", "IpcMode": "host", "Init": True, "RestartPolicy": {"Name": "no"}},
        "Mounts": [],
    }
    assert _evidence.spec_difference(SPEC, inspect) == ["env VLLM_API_KEY: <removed> wanted, another value found"]
    inspect["HostConfig"]["RestartPolicy"] = {"Name": "always"}
    assert "restart policy: no wanted, always found" in _evidence.spec_difference(SPEC, inspect)
