"""The sandbox's own model hub on loopback, with its fault injection, and the checkpoint module run as Ansible runs it."""

from __future__ import annotations

import importlib.util
import json
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.gb10.fleet.plugins.modules import checkpoint, checkpoint_verify

ROOT = Path(__file__).parents[3]
REPO = "sandbox/tiny-llama"


def _load(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


hub_program = _load("gb10_sandbox_hub", ROOT / "roles/sandbox/files/hub.py")


def safetensors(tensors: dict[str, int], seed: int = 0) -> bytes:
    """A file of U8 tensors of the given sizes, the same bytes for the same seed."""
    header, offset, data = {}, 0, b""
    for number, (name, size) in enumerate(tensors.items()):
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [offset, offset + size]}
        data += bytes((seed + number + i * 7) % 251 for i in range(251)) * (size // 251) + b"\x01" * (size % 251)
        offset += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_repo(root: Path, name: str = REPO, shards: int = 3, shard_size: int = 300_000) -> Path:
    """A repository with sharded weights, as the hub's root holds it."""
    folder = root / name
    folder.mkdir(parents=True)
    names = [f"model-{n + 1:05d}-of-{shards:05d}.safetensors" for n in range(shards)]
    weight_map = {}
    for number, file in enumerate(names):
        tensor = f"model.layers.{number}.mlp.weight"
        weight_map[tensor] = file
        (folder / file).write_bytes(safetensors({tensor: shard_size}, number))
    index = {"metadata": {"total_size": shards * shard_size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"num_attention_heads": 4, "num_hidden_layers": shards}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


class HubHandle:
    """The running hub, for tests."""

    def __init__(self, root: Path, token: str | None = None) -> None:
        self.root = root
        self.server = hub_program.Hub(("127.0.0.1", 0), root, None, token, True)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def rules(self, *rules: dict[str, Any]) -> None:
        with self.server.guard:
            self.server.rules = [hub_program.Rule(**rule) for rule in rules]
            self.server.log = []

    def sent(self, pattern: str = "resolve/") -> int:
        """Body bytes of the files that were sent since the last :meth:`rules`."""
        with self.server.guard:
            return sum(r["sent"] for r in self.server.log if pattern in r["path"] and r["method"] == "GET")

    def requests(self) -> list[dict[str, Any]]:
        with self.server.guard:
            return list(self.server.log)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubHandle]:
    root = tmp_path / "hub"
    write_repo(root)
    handle = HubHandle(root)
    yield handle
    handle.close()


Run = Callable[..., dict[str, Any]]


def _run(module: Any, arguments: dict[str, Any], check: bool, capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capfd.readouterr()
    with patch_module_args({**arguments, "_ansible_check_mode": check}), pytest.raises(SystemExit):
        module.main()
    result: dict[str, Any] = json.loads(capfd.readouterr().out.splitlines()[-1])
    return result


class Node:
    """One node: its own models, state and lock folders."""

    def __init__(self, folder: Path, endpoint: str | None, capfd: pytest.CaptureFixture[str]) -> None:
        self.models = folder / "models"
        self.state = folder / "state"
        self.lock = folder / "run" / "serving.lock"
        self.endpoint = endpoint
        self.capfd = capfd
        self.flat = self.models / "tiny"

    def arguments(self, **more: Any) -> dict[str, Any]:
        item = {"repo": more.pop("repo", REPO), "directory": "tiny"}
        item.update(
            {
                k: more.pop(k)
                for k in list(more)
                if k in ("revision", "layout", "include", "exclude", "licence", "non_commercial")
            }
        )
        return {
            "checkpoints": [item],
            "models_dir": str(self.models),
            "state_dir": str(self.state),
            "lock_file": str(self.lock),
            "endpoint": self.endpoint,
            **more,
        }

    def fetch(self, check: bool = False, **more: Any) -> dict[str, Any]:
        quick = {"retry_wait_s": 0.05, "retry_longest_s": 0.4, "client": "direct", "patience_s": 3}
        return _run(checkpoint, self.arguments(**{**quick, **more}), check, self.capfd)

    def look(self, **more: Any) -> dict[str, Any]:
        return _run(checkpoint_verify, self.arguments(**more), False, self.capfd)


@pytest.fixture
def node(tmp_path: Path, hub: HubHandle, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Node:
    for module in (checkpoint, checkpoint_verify):
        monkeypatch.setattr(module, "running_rank", lambda: None)
    return Node(tmp_path / "node", hub.url, capfd)
