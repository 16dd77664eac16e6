"""What is said about ranks that run: settings of the container, notes of the log, KV cache and block size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils import _failures
from ansible_collections.gb10.fleet.plugins.module_utils import _rank_findings as findings
from ansible_collections.gb10.fleet.plugins.module_utils._rank_state import mismatch
from ansible_collections.gb10.fleet.plugins.modules import rank_info

CASES = Path(__file__).parents[2] / "fixtures" / "cases"


def report(rank: int = 0, **over: Any) -> dict[str, Any]:
    settings = {
        "init": True, "ipc_mode": "host", "network_mode": "host", "shm_size": 67108864, "restart_policy": "no", "memlock": -1,
        "devices": ["/dev/infiniband"], "env": {"VLLM_ENGINE_READY_TIMEOUT_S": "3600"}, **over.pop("settings", {}),
    }  # fmt: skip
    return {
        "host": f"spark-0{rank + 1}",
        "rank": rank,
        "exists": True,
        "settings": settings,
        "notes": {},
        "facts": {},
        **over,
    }


def codes(*args: Any, **kwargs: Any) -> list[str]:
    return [f.code for f in findings.of_rank(*args, **kwargs)]


def test_a_good_rank_has_none() -> None:
    assert findings.of_rank(report(), 2, ready_s=3600) == []


def test_launch_ipc_shm() -> None:
    """A real, healthy container: 64 MiB of shm and no ulimits in the inspect, with --ipc host and one node."""
    text = (CASES / "launch-ipc-shm.txt").read_text(encoding="utf-8").split("\n", 1)[1]
    inspect = json.loads(text)
    said = rank_info.settings(inspect)
    assert (said["ipc_mode"], said["shm_size"], said["devices"]) == ("host", 67108864, [])
    rank = {**report(), "settings": {**said, "init": True}}
    assert codes(rank, 1) == []
    assert codes({**rank, "settings": {**said, "init": True, "ipc_mode": "private"}}, 1) == ["launch-ipc-shm"]


def test_launch_no_init() -> None:
    assert codes(report(settings={"init": False}), 2) == ["launch-no-init"]


def test_wd_pair_restart_policy() -> None:
    assert codes(report(settings={"restart_policy": "unless-stopped"}), 2) == ["wd-pair-restart"]


def test_pre_memlock() -> None:
    """RDMA devices with the daemon's 8 MiB."""
    assert codes(report(settings={"memlock": 8388608}), 2) == ["pre-memlock"]
    assert codes(report(settings={"memlock": None, "devices": []}), 2) == []


def test_launch_ready_timeout() -> None:
    """The engine's own limit is 600 s unless set; a start may take an hour."""
    said = findings.of_rank(report(settings={"env": {}}), 2, ready_s=3600)
    assert [f.code for f in said] == ["launch-ready-timeout"]
    assert "is 600 s, a start may take 3600 s" in said[0].text


def test_launch_stale_script() -> None:
    assert codes(report(spec_matches=False), 2) == ["launch-stale-script"]


def test_net_tcp_fallback_counts_where_rdma_is_wanted() -> None:
    notes = {"net-tcp-fallback": {"groups": {}, "line": "NCCL INFO NET/IB : No device found.", "count": 1}}
    assert codes(report(notes=notes), 2) == ["net-tcp-fallback"]
    assert codes(report(notes=notes), 2, transport="socket") == []


def test_ready_shm_info_is_no_finding() -> None:
    assert codes(report(notes={"ready-shm-info": {"groups": {}, "line": "x", "count": 9}}), 2) == []


def test_guard_nvrm_benign_is_a_note_and_xid_an_error() -> None:
    text = (CASES.parent / "engine_logs" / "synthetic_kernel.log").read_text(encoding="utf-8")
    lines = _failures.kernel_lines(text)
    assert [(line["id"], line["count"]) for line in lines] == [("kernel-xid", 1), ("guard-nvrm-benign", 2)]
    said = findings.of_rank(report(kernel_lines=lines), 2)
    assert [(f.severity, f.code) for f in said] == [("error", "kernel-xid"), ("note", "guard-nvrm-benign")]
    assert "Xid 79" in said[0].text


def test_qual_rank_kv_gap() -> None:
    """Case qual-rank-kv-gap: 8.54 and 5.54 GiB."""
    said = findings.of_cluster(
        [report(0, facts={"kv_available_gib": "8.54"}), report(1, facts={"kv_available_gib": "5.54"})]
    )
    assert [f.code for f in said] == ["qual-rank-kv-gap"]
    assert said[0].text.startswith("spark-02 offers 5.54 GiB of KV cache, spark-01 8.54 GiB")


def test_block_size_against_batch_and_length() -> None:
    """GLM-5.3-Flash: 8192 % 2304 = 1280, so 6912 count and 9216 = 4 x 2304 aligns (facts of the recipe)."""
    said = findings.of_cluster(
        [report(facts={"block_size": "2304", "max_num_batched_tokens": "8192", "max_model_len": "262144"})]
    )
    assert said[0].severity == "note"
    assert "6912 of them count. 9216 aligns." in said[0].text
    assert (
        findings.of_cluster(
            [report(facts={"block_size": "2304", "max_num_batched_tokens": "9216", "max_model_len": "262144"})]
        )
        == []
    )


def test_block_size_that_was_raised() -> None:
    """The engine raised it (qual-prefix-zero: 3584): batch and length may be too small for it."""
    said = findings.of_cluster(
        [report(facts={"block_size": "3584", "max_num_batched_tokens": "2048", "max_model_len": "4096"})]
    )
    assert [f.severity for f in said] == ["warning", "warning"]
    assert "under the block of 3584 tokens" in said[0].text
    assert "Set it to 7168 at least" in said[1].text


def test_launch_kv_pin() -> None:
    said = findings.of_cluster([report(argv=["/m", "--kv-cache-memory-bytes", "64M"])])
    assert [f.code for f in said] == ["launch-kv-pin"]
    assert "28,000 tokens" in said[0].text


def test_kv_cache_memory_is_the_least_of_all_ranks() -> None:
    ranks = [report(0, facts={"kv_cache_memory": 9169698816}), report(1, facts={"kv_cache_memory": 5948473344})]
    assert findings.proposal(ranks) == {"bytes": 5948473344, "ranks": {"spark-01": 9169698816, "spark-02": 5948473344}}
    assert findings.proposal([ranks[0], report(1)]) is None, "a rank that made none may have the least room"


def test_flags_in_any_spelling() -> None:
    assert findings.argument_difference(["/m", "--max_model_len=8"], ["/m", "--max-model-len", "8"]) is None
    assert findings.argument_difference(["/m"], ["/n"]) == "the model /m here, /n there"
    assert (
        findings.argument_difference(["/m", "--enforce-eager"], ["/m"]) == "--enforce-eager set here, is missing there"
    )


def test_the_same_finding_of_two_nodes_is_said_once() -> None:
    both = [
        f
        for r in (report(0, settings={"init": False}), report(1, settings={"init": False}))
        for f in findings.of_rank(r, 2)
    ]
    said = findings.merged(both)
    assert [(f.node, f.code) for f in said] == [("spark-01, spark-02", "launch-no-init")]
    assert said[0].text.startswith("spark-01, spark-02: the container has no init")


def test_the_ranks_of_a_ray_cluster_have_different_commands() -> None:
    """The head runs the engine, a worker is a node of Ray; TensorFold's ranks differ in rank, name and port. No mismatch."""
    ray = {"gb10.fleet.engine": "vllm/ray"}
    head = {
        "host": "a",
        "rank": 0,
        "labels": ray,
        "entrypoint": ["bash", "-ec"],
        "argv": ["x", "rank", "vllm", "serve", "/m"],
    }
    worker = {**head, "host": "b", "rank": 1, "argv": ["y", "rank", "ray", "start", "--block"]}
    assert mismatch([head, worker]) is None
    words = ["tensorfold", "serve", "/m", "--tp", "2", "--rank"]
    head = {
        "host": "a",
        "rank": 0,
        "argv": [*words, "0", "--name", "m", "--host", "0.0.0.0", "--port", "8888"],
        "at": 0.0,
    }
    worker = {"host": "b", "rank": 1, "argv": [*words, "1"], "at": 0.0}
    assert mismatch([head, worker]) is None
    found = mismatch([head, {**worker, "argv": [*words, "1", "--context", "8"]}])
    assert found is not None
    assert found.groups["difference"] == "--context 8 here, is missing there"
