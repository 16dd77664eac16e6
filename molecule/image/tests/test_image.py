"""The role image between two nodes: built once, copied over the fabric, compared, refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gb10.fleet.molecule.fabric import faults

NAME = "gb10-molecule/built:1"


@pytest.fixture(scope="module")
def cluster() -> Any:
    cluster = faults.Cluster()
    yield cluster
    for node in (cluster.head, cluster.worker):
        node.run("docker images -q gb10-molecule/built | xargs -r docker rmi -f; docker image prune -f", check=False)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("context")
    (folder / "Dockerfile").write_text("FROM scratch\nARG WHO\nCOPY big /big\nCOPY small /small\nLABEL who=$WHO\n")
    (folder / "big").write_bytes(os.urandom(5_000_000))
    (folder / "small").write_text("one\n")
    return folder


def bring(cluster: Any, *options: str, name: str = NAME, **variables: Any) -> Any:
    values = {"image_name": name, "checkpoint_items": [], "checkpoint_lint": False, "image_patience_s": 20, **variables}
    return cluster.play("playbooks/prepare.yml", options=("-v", *options), **values)


def image(node: Any, name: str = NAME) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(node.run(f"docker inspect {name}"))[0]
    return found


def test_built_once_and_the_same_on_both_ranks(cluster: Any, context: Path) -> None:
    build = {"context": str(context), "args": {"WHO": "molecule"}}
    first = bring(cluster, image_build=build)
    assert first.rc == 0 and first.raw.count('"built": true') == 1, first.raw
    head, worker = image(cluster.head), image(cluster.worker)
    assert head["Id"] == worker["Id"] and head["RootFS"] == worker["RootFS"]
    again = bring(cluster, image_build=build)
    assert again.rc == 0 and '"built": true' not in again.raw and "changed=0" in again.text, again.raw
    (context / "small").write_text("two\n")
    third = bring(cluster, image_build=build)
    assert third.rc == 0 and third.raw.count('"built": true') == 1, third.raw
    now = image(cluster.worker)
    assert now["Id"] == image(cluster.head)["Id"] != head["Id"]
    # The layer of 5 MB was there: only the small one travelled.
    assert '"layers": 1' in third.raw or now["RootFS"]["Layers"][0] == worker["RootFS"]["Layers"][0]


def test_img_digest_mismatch(cluster: Any) -> None:
    for node, text in ((cluster.head, "a"), (cluster.worker, "b")):
        node.run(
            f"mkdir -p /tmp/odd && cd /tmp/odd && echo {text} > f && printf 'FROM scratch\\nCOPY f /f\\n' > Dockerfile"
        )
        node.run("docker build -q -t gb10-molecule/built:odd /tmp/odd")
    said = bring(cluster, name="gb10-molecule/built:odd")
    assert said.rc != 0 and "The ranks have different content under gb10-molecule/built:odd" in said.text, said.raw
    assert "prepare.yml -e image_refresh=true" in said.text
    for node in (cluster.head, cluster.worker):
        assert f"{node.name} has " in said.text


def test_peer_copies_what_the_other_rank_has(cluster: Any) -> None:
    cluster.worker.run("docker rmi -f gb10-molecule/built:odd; rm -f /var/lib/gb10-fleet/images/images.json")
    said = bring(cluster, name="gb10-molecule/built:odd", image_distribution="peer")
    assert said.rc == 0, said.raw
    assert (
        image(cluster.head, "gb10-molecule/built:odd")["Id"] == image(cluster.worker, "gb10-molecule/built:odd")["Id"]
    )
    again = bring(cluster, name="gb10-molecule/built:odd", image_distribution="peer")
    assert again.rc == 0 and "changed=0" in again.text and "changed=1" not in again.text
    assert not cluster.head.run("ls /var/lib/gb10-fleet/images/*.tar 2>/dev/null", check=False)


def test_archive_for_air_gaps(cluster: Any) -> None:
    cluster.head.run("docker save -o /var/tmp/built.tar gb10-molecule/built:odd")
    data = cluster.head.run("base64 -w0 /var/tmp/built.tar")
    cluster.worker.run("docker rmi -f gb10-molecule/built:odd; rm -f /var/lib/gb10-fleet/images/images.json")
    cluster.worker.run(f"echo {data} | base64 -d > /var/tmp/built.tar")
    said = bring(
        cluster, name="gb10-molecule/built:odd", image_distribution="archive", image_archive="/var/tmp/built.tar"
    )
    assert said.rc == 0, said.raw
    again = bring(
        cluster, name="gb10-molecule/built:odd", image_distribution="archive", image_archive="/var/tmp/built.tar"
    )
    assert again.rc == 0 and "changed=1" not in again.text


def test_missing_image_has_its_sentence(cluster: Any) -> None:
    said = bring(cluster, name="198.18.0.2:5000/gb10-molecule/nowhere:1", image_retries=1, image_retry_wait_s=0.1)
    assert said.rc != 0 and "198.18.0.2:5000 has no 198.18.0.2:5000/gb10-molecule/nowhere:1" in said.text, said.raw
