"""The checkpoint modules against the sandbox's hub: each fault ends right or with its sentence; the next run finishes the job."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from .conftest import REPO, HubHandle, Node, safetensors

SHARD = "model-00002-of-00003.safetensors"


def total(hub: HubHandle) -> int:
    return sum(p.stat().st_size for p in (hub.root / REPO).rglob("*") if p.is_file())


def same(hub: HubHandle, node: Node) -> bool:
    source = hub.root / REPO
    return all((node.flat / p.name).read_bytes() == p.read_bytes() for p in source.iterdir())


def test_fetches_verifies_and_rests(hub: HubHandle, node: Node) -> None:
    first = node.fetch()
    assert not first.get("failed"), first
    assert first["changed"] and first["moved_bytes"] == total(hub) == hub.sent()
    assert same(hub, node)
    assert node.look()["complete"]
    hub.rules()
    second = node.fetch()
    assert not second["changed"] and second["moved_bytes"] == 0 and hub.requests() == []


def test_check_mode_says_the_bytes(hub: HubHandle, node: Node) -> None:
    said = node.look(resolve=True)
    assert said["missing_bytes"] == total(hub) and not said["complete"]
    predicted = node.fetch(check=True)
    assert predicted["changed"] and not node.models.exists()


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"match": "/api/", "status": 404, "headers": {"X-Error-Code": "RepoNotFound"}}, "There is no repository"),
        ({"match": "/api/", "status": 404, "headers": {"X-Error-Code": "RevisionNotFound"}}, "has no revision"),
        ({"match": "/api/", "status": 401}, "set checkpoint_token_file"),
        ({"match": "/api/", "status": 403, "headers": {"X-Error-Code": "GatedRepo"}}, "accept its terms"),
        ({"match": "/api/", "status": 503}, "out of order (503)"),
        (
            {"match": "/api/", "status": 429, "headers": {"Retry-After": "60"}},
            "asks too often (429), and asks to wait 60 s",
        ),
    ],
)
def test_refusals_have_their_sentence(hub: HubHandle, node: Node, rule: dict[str, Any], words: str) -> None:
    hub.rules(rule)
    refused = node.fetch(retries=2)
    assert refused["failed"] and words in refused["msg"]
    hub.rules()
    assert not node.fetch().get("failed") and same(hub, node)


def test_503_three_times_then_fine(hub: HubHandle, node: Node) -> None:
    hub.rules({"match": "/api/", "status": 503, "times": 3})
    assert node.fetch()["moved_bytes"] == total(hub)


def test_ckpt_429(hub: HubHandle, node: Node) -> None:
    """The wait that the hub asks for is kept."""
    hub.rules({"match": "/api/", "status": 429, "headers": {"Retry-After": "1"}, "times": 1})
    done = node.fetch(retry_longest_s=5)
    assert done["changed"] and done["seconds"] >= 1


def test_offline_is_a_sentence(node: Node) -> None:
    node.endpoint = "http://127.0.0.1:9"
    assert "cannot be reached from this node" in node.fetch(retries=1)["msg"]


def test_ckpt_truncated_and_missing_shard(hub: HubHandle, node: Node) -> None:
    node.fetch()
    (node.flat / SHARD).write_bytes((node.flat / SHARD).read_bytes()[:-1000])
    (node.flat / "tokenizer.json").unlink()
    looked = node.look()
    assert looked["checkpoints"][0]["missing"] == [SHARD, "tokenizer.json"]
    hub.rules()
    again = node.fetch()
    lacked = (hub.root / REPO / SHARD).stat().st_size + 2
    assert again["moved_bytes"] == lacked == hub.sent() and same(hub, node)


def test_byte_flipped_on_disk_with_mtime_kept(hub: HubHandle, node: Node) -> None:
    node.fetch()
    target = node.flat / SHARD
    before = target.stat()
    data = bytearray(target.read_bytes())
    data[-1] ^= 0xFF
    target.write_bytes(data)
    os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
    looked = node.look()
    assert not looked["complete"] and looked["unverified_bytes"] == before.st_size
    hub.rules()
    again = node.fetch()
    assert again["changed"] and again["moved_bytes"] == before.st_size == hub.sent() and same(hub, node)


def test_byte_flipped_on_the_wire(hub: HubHandle, node: Node) -> None:
    hub.rules({"match": f"resolve/.*{SHARD}", "flip": 200_000, "times": 1})
    done = node.fetch()
    assert not done.get("failed") and same(hub, node)
    assert hub.sent(SHARD) == 2 * (hub.root / REPO / SHARD).stat().st_size


def test_byte_always_flipped_is_given_up(hub: HubHandle, node: Node) -> None:
    hub.rules({"match": f"resolve/.*{SHARD}", "flip": 200_000})
    assert "arrived 3 times with a wrong content" in node.fetch()["msg"]
    hub.rules()
    assert not node.fetch().get("failed")
    assert hub.sent() == (hub.root / REPO / SHARD).stat().st_size


def test_cut_at_60_percent_continues(hub: HubHandle, node: Node) -> None:
    hub.rules({"match": f"resolve/.*{SHARD}", "cut": 180_000, "times": 1})
    node.fetch()
    assert same(hub, node) and hub.sent() == total(hub)


def test_cut_for_good_keeps_what_came(hub: HubHandle, node: Node) -> None:
    """Every connection ends after 180 kB of a file: given up only when no byte comes any more, and the next run continues."""
    hub.rules({"match": f"resolve/.*{SHARD}", "cut": 180_000, "times": 1}, {"match": f"resolve/.*{SHARD}", "cut": 0})
    stopped = node.fetch(retries=2)
    assert stopped["failed"] and "does not go on" in stopped["msg"]
    hub.rules()
    node.fetch()
    assert same(hub, node) and hub.sent() == (hub.root / REPO / SHARD).stat().st_size - 180_000


def test_include_that_matches_nothing(node: Node) -> None:
    assert "No file of sandbox/tiny-llama matches include ['*.gguf']" in node.fetch(include=["*.gguf"])["msg"]


def test_include_and_exclude(hub: HubHandle, node: Node) -> None:
    node.fetch(include=["*.json"], exclude=["tokenizer*", "*.index.json"])
    assert {p.name for p in node.flat.iterdir() if p.is_file()} == {"config.json"}
    assert "names model-00001-of-00003.safetensors, which is no file" in node.fetch(include=["*.json"])["msg"]


def test_hub_layout(hub: HubHandle, node: Node) -> None:
    done = node.fetch(layout="hub")
    path = Path(done["checkpoints"][0]["path"])
    assert path.parent.name == "snapshots" and path.name == done["checkpoints"][0]["revision"]
    assert (path / SHARD).is_symlink() and (path / SHARD).read_bytes() == (hub.root / REPO / SHARD).read_bytes()
    assert (path.parents[1] / "refs/main").read_text() == path.name
    assert node.look(layout="hub")["complete"] and not node.fetch(layout="hub")["changed"]


def test_ckpt_header_eof(hub: HubHandle, node: Node) -> None:
    """The hash is right and the header is not: the published file itself is broken."""
    (hub.root / REPO / SHARD).write_bytes(b"\0" * 5)
    broken = node.fetch()
    assert (
        broken["failed"]
        and f"{SHARD} holds 5 bytes" in broken["msg"]
        and "is as published, and broken" in broken["msg"]
    )


def test_index_without_its_shard(hub: HubHandle, node: Node) -> None:
    (hub.root / REPO / SHARD).unlink()
    assert f"names {SHARD}, which is no file of this commit" in node.fetch()["msg"]


def test_licence_must_be_accepted(node: Node) -> None:
    refused = node.fetch(non_commercial=True, licence="CC BY-NC-ND 4.0")
    assert "non-commercial purposes only (CC BY-NC-ND 4.0). Accept that with accept_non_commercial" in refused["msg"]
    assert node.fetch(non_commercial=True, accept_non_commercial=True)["changed"]


def test_ckpt_gated(hub: HubHandle, node: Node, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The token comes from a 0600 file, opens the door, and shows nowhere."""
    secret = "hf_abcdefSECRET"
    gate = {"match": ".", "unless_token": secret, "status": 401, "headers": {"X-Error-Code": "GatedRepo"}}
    hub.rules(gate)
    token = tmp_path / "token"
    token.write_text(secret + "\n")
    token.chmod(0o644)
    assert f"Run: chmod 600 {token}" in node.fetch(token_file=str(token))["msg"]
    token.chmod(0o600)
    done = node.fetch(token_file=str(token))
    assert done["changed"]
    shown = json.dumps(done) + capfd.readouterr().err
    shown += "".join(p.read_text(errors="replace") for p in node.state.rglob("*") if p.is_file())
    assert secret not in shown


def test_from_a_directory(hub: HubHandle, node: Node) -> None:
    node.endpoint = "http://127.0.0.1:9"
    done = node.fetch(source=str(hub.root / REPO))
    assert done["client"] == "directory" and same(hub, node) and node.look()["complete"]


def test_full_disk_is_told_before_the_download(hub: HubHandle, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    from ansible_collections.gb10.fleet.plugins.module_utils import _checkpoint_job

    monkeypatch.setattr(_checkpoint_job, "free_bytes", lambda _path: (400_000, 1))
    refused = node.fetch()
    assert "has 390.6 KiB free" in refused["msg"] and hub.sent() == 0


def test_absent(node: Node) -> None:
    node.fetch()
    assert node.fetch(state="absent")["changed"] and not node.flat.exists()
    assert not node.fetch(state="absent")["changed"]


def test_a_file_that_another_tool_brought_is_hashed_not_moved(hub: HubHandle, node: Node) -> None:
    node.flat.mkdir(parents=True)
    for path in (hub.root / REPO).iterdir():
        (node.flat / path.name).write_bytes(path.read_bytes())
    hub.rules()
    done = node.fetch()
    assert not done["changed"] and hub.sent() == 0 and done["hashed_bytes"] == total(hub)
    assert node.look()["complete"]


def test_verify_full_hashes_again(hub: HubHandle, node: Node) -> None:
    node.fetch()
    again = node.fetch(verify="full")
    assert again["hashed_bytes"] == total(hub) and not again["changed"]


def test_manifest_cannot_lead_out_of_the_folder(hub: HubHandle, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    from ansible_collections.gb10.fleet.plugins.module_utils import _checkpoint

    with pytest.raises(_checkpoint.CheckpointError, match="no path inside a checkpoint"):
        _checkpoint.manifest_from_hub("a/b", "0" * 40, [{"type": "file", "path": "../x", "size": 1, "oid": "0"}])


def test_truncated_safetensors() -> None:
    from ansible_collections.gb10.fleet.plugins.module_utils import _safetensors

    data = safetensors({"a": 1000})
    length = _safetensors.header_length(data, len(data))
    text = data[8 : 8 + length]
    assert _safetensors.parse_header(text, len(data)).data_bytes == 1000
    with pytest.raises(_safetensors.SafetensorsError, match="is truncated"):
        _safetensors.parse_header(text, len(data) - 1)
