"""prepare.yml on two nodes, with the real ``hf``, against a hub that fails in each known way. Every byte of the hub is counted.

The hub runs here, on the nodes' gateway; its rules are those of roles/sandbox/files/hub.py.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gb10.fleet.molecule.fabric import faults

ROOT = Path(__file__).resolve().parents[3]
REPO, FOLDER = "dist/model", "/var/tmp/models/dist-model"
GATEWAY, SHARDS, SIZE = "198.18.0.1", 3, 2_000_000
SHARD = "model-00002-of-00003.safetensors"
SECRET = "hf_molecule0SECRET"
STUB = "#!/bin/sh\necho 'Warning: `huggingface-cli` is deprecated and no longer works. Use `hf` instead.'\nexit 1\n"


def write_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    names = {f"model-{n + 1:05d}-of-{SHARDS:05d}.safetensors": f"model.layers.{n}.w" for n in range(SHARDS)}
    for number, (file, tensor) in enumerate(names.items()):
        text = json.dumps({tensor: {"dtype": "U8", "shape": [SIZE], "data_offsets": [0, SIZE]}}).encode()
        (folder / file).write_bytes(
            struct.pack("<Q", len(text)) + text + os.urandom(1000) * (SIZE // 1000) + bytes(number)
        )
        (folder / file).write_bytes((folder / file).read_bytes()[: 8 + len(text) + SIZE])
    index = {"metadata": {}, "weight_map": {tensor: file for file, tensor in names.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")


class Hub:
    def __init__(self, root: Path) -> None:
        spec = importlib.util.spec_from_file_location("gb10_hub", ROOT / "roles/sandbox/files/hub.py")
        assert spec and spec.loader
        self.program = importlib.util.module_from_spec(spec)
        sys.modules["gb10_hub"] = self.program
        spec.loader.exec_module(self.program)
        self.root = root
        self.server = self.program.Hub((GATEWAY, 0), root, None, None, True)
        self.url = f"http://{GATEWAY}:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def rules(self, *rules: dict[str, Any]) -> None:
        with self.server.guard:
            self.server.rules, self.server.log = [self.program.Rule(**rule) for rule in rules], []

    def sent(self, pattern: str = "resolve/") -> int:
        with self.server.guard:
            return sum(r["sent"] for r in self.server.log if pattern in r["path"] and r["method"] == "GET")

    def size(self, name: str = "") -> int:
        return sum(p.stat().st_size for p in (self.root / REPO).iterdir() if name in p.name)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    root = tmp_path_factory.mktemp("hub")
    write_model(root / REPO)
    hub = Hub(root)
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


@pytest.fixture(scope="module")
def cluster() -> Any:
    cluster = faults.Cluster()
    for node in (cluster.head, cluster.worker):
        node.run(
            f"cat > /usr/local/bin/huggingface-cli <<'SCRIPT'\n{STUB}SCRIPT\nchmod 755 /usr/local/bin/huggingface-cli"
        )
    yield cluster
    for node in (cluster.head, cluster.worker):
        node.run("rm -f /usr/local/bin/huggingface-cli")


@pytest.fixture
def bare(cluster: Any) -> Any:
    """Both nodes without this checkpoint."""
    for node in (cluster.head, cluster.worker):
        node.run(f"rm -rf {FOLDER} /var/lib/gb10-fleet/checkpoints/dist-model.* /var/tmp/models/hub")
    return cluster


def prepare(cluster: Any, hub: Hub, *options: str, **more: Any) -> Any:
    item = {"repo": REPO, "directory": "dist-model", **more.pop("item", {})}
    quick = {
        "checkpoint_retry_wait_s": 0.2,
        "checkpoint_retry_longest_s": 3,
        "checkpoint_patience_s": 10,
        "checkpoint_retries": 4,
    }
    values = {"checkpoint_endpoint": hub.url, "checkpoint_items": [item], "checkpoint_lint": False, **quick, **more}
    return cluster.play("playbooks/prepare.yml", options=options, **values)


def sums(node: Any) -> str:
    return str(node.run(f"cd {FOLDER} && sha256sum *.safetensors *.json"))


def right(cluster: Any, hub: Hub) -> bool:
    done = subprocess.run(
        ["sh", "-c", "sha256sum *.safetensors *.json"], cwd=hub.root / REPO, capture_output=True, text=True, check=True
    )
    return sums(cluster.head) == sums(cluster.worker) == done.stdout


def unchanged(said: Any) -> bool:
    return said.rc == 0 and not re.search(r"changed=[1-9]", said.text)


def test_bytes_leave_the_hub_once_and_a_second_run_moves_none(bare: Any, hub: Hub) -> None:
    hub.rules()
    dry = prepare(bare, hub, "--check")
    assert dry.rc == 0 and hub.sent() == 0, dry.raw
    said = prepare(bare, hub)
    assert said.rc == 0, said.raw
    assert hub.sent() == hub.size() and right(bare, hub)
    hub.rules()
    assert unchanged(prepare(bare, hub))
    assert hub.server.log == []


def test_503_and_429_then_fine_with_a_flipped_byte_and_a_cut(bare: Any, hub: Hub) -> None:
    hub.rules(
        {"match": "GET /api/", "status": 503, "times": 3},
        {"match": "GET /api/", "status": 429, "headers": {"Retry-After": "1"}, "times": 1},
        {"match": f"GET .*resolve/.*{SHARD}", "flip": 700_000, "times": 1},
        {"match": "GET .*resolve/.*model-00003", "cut": 1_200_000, "times": 1},
    )
    said = prepare(bare, hub)
    assert said.rc == 0, said.raw
    assert right(bare, hub)
    # The flipped file is sent twice; of the cut one, hf loses its last unfinished block of 10 MB, here all of it.
    assert hub.sent() == hub.size() + hub.size(SHARD) + 1_200_000


@pytest.mark.parametrize(
    ("rule", "item", "sentence"),
    [
        (
            {"match": "GET /api/", "status": 401, "headers": {"X-Error-Code": "GatedRepo"}},
            {},
            "is gated and no token has no access (401)",
        ),
        ({"match": "GET /api/", "status": 403}, {}, "accept its terms there"),
        (None, {"repo": "dist/none"}, "There is no repository dist/none"),
        (None, {"revision": "f" * 40}, "has no revision " + "f" * 40),
    ],
)
def test_refusals_end_with_their_sentence(bare: Any, hub: Hub, rule: Any, item: Any, sentence: str) -> None:
    hub.rules(*([rule] if rule else []))
    said = prepare(bare, hub, item=item)
    assert said.rc != 0 and sentence in said.text, said.raw
    assert hub.sent() == 0


def test_ckpt_gated_with_a_token_that_shows_nowhere(bare: Any, hub: Hub) -> None:
    hub.rules({"match": ".", "unless_token": SECRET, "status": 401, "headers": {"X-Error-Code": "GatedRepo"}})
    said = prepare(bare, hub, "-vvv", "--diff", checkpoint_token="{{ lookup('env', 'MOLECULE_HUB_TOKEN') }}")
    assert said.rc != 0
    os.environ["MOLECULE_HUB_TOKEN"] = SECRET
    try:
        said = prepare(bare, hub, "-vvv", "--diff", checkpoint_token="{{ lookup('env', 'MOLECULE_HUB_TOKEN') }}")
    finally:
        del os.environ["MOLECULE_HUB_TOKEN"]
    assert said.rc == 0 and right(bare, hub), said.raw[-3000:]
    assert SECRET not in said.raw
    for node in (bare.head, bare.worker):
        assert not node.run(
            f"grep -rl {SECRET} /var/lib/gb10-fleet /run /tmp /root /home /var/log {FOLDER} 2>/dev/null", check=False
        )


def test_killed_download_goes_on(bare: Any, hub: Hub) -> None:
    """kill -9 of ``hf``: the same run finishes. kill -9 of the whole job: the next run does, with what has arrived."""
    hub.rules({"match": "GET .*resolve/.*safetensors", "rate": 400_000})
    started = threading.Thread(target=lambda: results.append(prepare(bare, hub)))
    results: list[Any] = []
    started.start()
    for _try in range(600):
        if pids := bare.head.run("pgrep -f '/opt/gb10-fleet/hf/bin/[h]f download'", check=False).split():
            break
        time.sleep(0.1)
    time.sleep(1.5)
    bare.head.run(f"kill -9 {' '.join(pids)}")
    hub.rules()
    started.join()
    assert results[0].rc == 0 and right(bare, hub), results[0].raw


def test_job_that_was_killed_leaves_what_arrived(bare: Any, hub: Hub) -> None:
    hub.rules({"match": "GET .*resolve/.*safetensors", "rate": 500_000})
    results: list[Any] = []
    started = threading.Thread(target=lambda: results.append(prepare(bare, hub, checkpoint_client="direct")))
    started.start()
    for _try in range(600):
        if hub.sent("resolve") or bare.head.run(f"ls {FOLDER}/.cache/gb10-fleet/*.partial 2>/dev/null", check=False):
            break
        time.sleep(0.1)
    time.sleep(1.5)
    pid = json.loads(bare.head.run("cat /run/gb10-fleet/checkpoint.progress"))["pid"]
    bare.head.run(f"kill -9 {pid}")
    started.join()
    assert results[0].rc != 0 and "what has arrived is kept" in results[0].text, results[0].raw
    held = int(
        bare.head.run(
            f"du -bc {FOLDER}/.cache/gb10-fleet/*.partial {FOLDER}/*.safetensors 2>/dev/null | tail -1", check=False
        ).split()[0]
    )
    assert held > 500_000
    time.sleep(1)
    hub.rules()
    said = prepare(bare, hub, checkpoint_client="direct")
    assert said.rc == 0 and right(bare, hub), said.raw
    assert hub.sent() <= hub.size() - held


def test_worker_mends_from_the_head(cluster: Any, hub: Hub) -> None:
    """A truncated shard, a missing one, and a byte flipped with the mtime kept: only those travel, and none from the hub."""
    assert prepare(cluster, hub).rc == 0
    cluster.worker.run(f"truncate -s -1000 {FOLDER}/{SHARD}; rm {FOLDER}/model-00001-of-00003.safetensors")
    flip = (
        f"f={FOLDER}/model-00003-of-00003.safetensors; t=$(stat -c %y $f); printf X | "
        f"dd of=$f bs=1 seek=900000 conv=notrunc status=none; "
    )
    cluster.worker.run(flip + 'touch -d "$t" $f')
    hub.rules()
    said = prepare(cluster, hub)
    assert said.rc == 0 and right(cluster, hub) and hub.sent() == 0, said.raw
    assert unchanged(prepare(cluster, hub))


def test_full_disk_is_told_before(bare: Any, hub: Hub) -> None:
    for node in (bare.head, bare.worker):
        node.run("mkdir -p /mnt/small && mount -t tmpfs -o size=3m tmpfs /mnt/small")
    try:
        hub.rules()
        said = prepare(bare, hub, checkpoint_models_dir="/mnt/small")
        assert said.rc != 0 and "/mnt/small has 3.0 MiB free, 5.7 MiB are still to come" in said.text, said.raw
        assert hub.sent() == 0
    finally:
        for node in (bare.head, bare.worker):
            node.run("umount /mnt/small; rm -f /var/lib/gb10-fleet/checkpoints/dist-model.*")


def test_ckpt_during_serve(bare: Any, hub: Hub) -> None:
    """While a rank container runs, a fetch is refused with its name; what needs no fetch is not disturbed."""
    node = bare.head
    node.run("mkdir -p /tmp/idle && cp /bin/sleep /tmp/idle/ 2>/dev/null; true")
    image = node.run("docker images -q | head -1").strip()
    node.run(
        "docker run -d --name rank --label gb10.fleet.cluster=alpha --network none "
        "-v /usr:/usr:ro -v /lib:/lib:ro -v /lib64:/lib64:ro "
        f"--entrypoint /usr/bin/sleep {image} 300"
    )
    try:
        hub.rules()
        said = prepare(bare, hub)
        assert said.rc != 0 and "This node serves (container rank of cluster alpha, since 20" in said.text, said.raw
        assert hub.sent() == 0
    finally:
        node.run("docker rm -f rank")


def test_200_files_of_4_gib_rest_in_a_second(bare: Any, hub: Hub) -> None:
    """A second prepare.yml: no byte, no change, at most a second of this role on a node."""
    import hashlib

    size = 4 * (1 << 30) // 200
    digest = hashlib.sha256(bytes(size)).hexdigest()
    names = [f"part-{n:05d}.bin" for n in range(200)]
    manifest = {"version": 1, "repo": REPO, "revision": "a" * 40, "files": {n: [size, None, digest] for n in names}}
    for node in (bare.head, bare.worker):
        node.run(f"mkdir -p {FOLDER} && cd {FOLDER} && truncate -s {size} {' '.join(names)}")
        node.run(
            f"cat > /var/lib/gb10-fleet/checkpoints/dist-model.manifest.json <<'JSON'\n{json.dumps(manifest)}\nJSON"
        )
    hub.rules()
    first = prepare(bare, hub)
    assert first.rc == 0, first.raw
    os.environ["ANSIBLE_CALLBACKS_ENABLED"] = "ansible.posix.profile_tasks"
    try:
        again = prepare(bare, hub)
    finally:
        del os.environ["ANSIBLE_CALLBACKS_ENABLED"]
    assert unchanged(again) and hub.server.log == []
    took = re.search(r"checkpoint : Compare the files with their manifest and the recipe -+ ([\d.]+)s", again.raw)
    assert took, again.raw
    print(f"look at 200 files / 4 GiB on two nodes: {took[1]} s with Ansible's own share")
    where = "/var/lib/gb10-fleet/checkpoints/dist-model.verified.json"
    assert len(json.loads(bare.worker.run(f"cat {where}"))["files"]) == 200
    assert float(took[1]) <= 3.0  # two nodes on two cores, with the start of Ansible's module; idle: 0.4 s
