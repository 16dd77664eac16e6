"""The hub's client under supervision, with stand-ins for its known ways to fail. The real one runs in molecule/checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ansible_collections.gb10.fleet.plugins.module_utils._fetch import find_cli

from .conftest import REPO, ROOT, HubHandle, Node
from .test_checkpoint_module import SHARD, same, total

CASES = ROOT / "tests/fixtures/cases"
# Downloads like the real one: reads HF_ENDPOINT, writes <place>.incomplete, renames; SPOILS what a test adds.
CLIENT = """#!/usr/bin/env python3
import json, os, sys, time, urllib.request
words = sys.argv[1:]
if words == ["version"]:
    print("1.16.4"); sys.exit()
log = os.path.join(os.path.dirname(__file__), "calls.json")
with open(log, "a") as stream:
    json.dump({"argv": sys.argv, "env": dict(os.environ)}, stream); stream.write("\\n")
repo, names = words[1], words[2:words.index("--revision")]
revision, place = words[words.index("--revision") + 1], words[words.index("--local-dir") + 1]
token = None
if os.path.exists(os.environ["HF_TOKEN_PATH"]):
    token = open(os.environ["HF_TOKEN_PATH"]).read().strip()
calls = sum(1 for _ in open(log))
%s
for name in names:
    request = urllib.request.Request(f"{os.environ['HF_ENDPOINT']}/{repo}/resolve/{revision}/{name}")
    if token:
        request.add_header("Authorization", "Bearer " + token)
    data = urllib.request.urlopen(request).read()
    with open(os.path.join(place, name + ".new"), "wb") as stream:
        stream.write(data)
    os.rename(os.path.join(place, name + ".new"), os.path.join(place, name))
"""


def client(folder: Path, spoil: str = "", name: str = "hf", text: str | None = None) -> str:
    program = folder / "venv/bin" / name
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(text if text is not None else CLIENT % spoil)
    program.chmod(0o755)
    return str(folder / "venv")


def calls(folder: Path) -> list[dict[str, dict[str, str]]]:
    return [json.loads(line) for line in (folder / "venv/bin/calls.json").read_text().splitlines()]


def test_downloads_and_verifies(hub: HubHandle, node: Node, tmp_path: Path) -> None:
    done = node.fetch(client="auto", client_dir=client(tmp_path))
    assert done["client"] == "hf 1.16.4" and same(hub, node) and hub.sent() == total(hub)


def test_exit_code_0_without_a_file_is_not_believed(node: Node, tmp_path: Path) -> None:
    """Both clients exit with 0 after a 404, a 503 and offline when the folder is not empty."""
    refused = node.fetch(client="hf", client_dir=client(tmp_path, "print('Fetched'); sys.exit(0)"), retries=2)
    assert "8 files still lack" in refused["msg"] or "6 files still lack" in refused["msg"]
    assert "The client last said: Fetched" in refused["msg"]


def test_killed_client_is_started_again_for_what_is_missing(hub: HubHandle, node: Node, tmp_path: Path) -> None:
    spoil = "if calls == 1: names = names[:2] + ['kill']\n"
    spoil += "class Names(list):\n    def __iter__(self):\n        for n in list.__iter__(self):\n"
    spoil += "            if n == 'kill': os.kill(os.getpid(), 9)\n            yield n\nnames = Names(names)"
    done = node.fetch(client="hf", client_dir=client(tmp_path, spoil))
    assert not done.get("failed") and same(hub, node) and hub.sent() == total(hub)
    assert (
        len(calls(tmp_path)) == 2
        and len([w for w in calls(tmp_path)[1]["argv"] if "json" in w or "safetensors" in w]) == 4
    )


def test_ckpt_stuck(hub: HubHandle, node: Node, tmp_path: Path) -> None:
    """No byte for a while although the process lives: it is ended and goes on without xet."""
    assert "-> STALLED" in (CASES / "ckpt-stuck.txt").read_text()
    done = node.fetch(client="hf", client_dir=client(tmp_path, "if calls == 1: time.sleep(60)"), stall_s=4)
    assert same(hub, node) and done["seconds"] < 50
    first, second = calls(tmp_path)
    assert "HF_HUB_DISABLE_XET" not in first["env"] and second["env"]["HF_HUB_DISABLE_XET"] == "1"


def test_orphans_of_dead_downloads_are_swept(hub: HubHandle, node: Node, tmp_path: Path) -> None:
    place = node.flat / ".cache/huggingface/download"
    place.mkdir(parents=True)
    orphan = place / f"{SHARD}.abc123.7f0a2d1e-uuid.incomplete"
    orphan.write_bytes(b"x" * 1000)
    node.fetch(client="hf", client_dir=client(tmp_path))
    assert not orphan.exists() and same(hub, node)


def test_ckpt_hfcli_removed(hub: HubHandle, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stub, in our environment or on PATH, is never taken for a client; the files come by streams."""
    line = (CASES / "ckpt-hfcli-removed.txt").read_text().splitlines()[1]
    stub = f"#!/bin/sh\necho '{line}'\nexit 1\n"
    folder = client(tmp_path, name="huggingface-cli", text=stub)
    monkeypatch.setenv("PATH", f"{folder}/bin:/usr/bin:/bin")
    assert find_cli(Path(folder)) is None
    done = node.fetch(client="auto", client_dir=folder)
    assert done["client"] == "direct" and same(hub, node)


def test_older_cli_that_works_is_used(node: Node, tmp_path: Path) -> None:
    text = (CLIENT % "").replace('print("1.16.4")', 'print("huggingface_hub version: 0.34.4")')
    done = node.fetch(client="auto", client_dir=client(tmp_path, name="huggingface-cli", text=text))
    assert done["client"] == "hf 0.34.4"


def test_token_goes_by_file_only(hub: HubHandle, node: Node, tmp_path: Path) -> None:
    secret = "hf_abcdefSECRET"
    hub.rules({"match": ".", "unless_token": secret, "status": 401})
    token = tmp_path / "token"
    token.write_text(secret)
    token.chmod(0o600)
    done = node.fetch(client="hf", client_dir=client(tmp_path), token_file=str(token))
    assert done["changed"] and same(hub, node)
    for call in calls(tmp_path):
        assert secret not in json.dumps(call)
        assert not {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"} & set(call["env"])


def test_wrong_bytes_are_fetched_again(hub: HubHandle, node: Node, tmp_path: Path) -> None:
    hub.rules({"match": f"GET .*resolve/.*{SHARD}", "flip": 200_000, "times": 1})
    done = node.fetch(client="hf", client_dir=client(tmp_path))
    assert not done.get("failed") and same(hub, node)
    assert hub.sent(SHARD) == 2 * (hub.root / REPO / SHARD).stat().st_size
