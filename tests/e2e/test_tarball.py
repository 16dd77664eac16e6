"""The collection as its users install it: a tarball, in another place, without the clone's ansible.cfg."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fleet import HEAD, ROOT, SANDBOX, WORKER, recap

BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed collection and copies of the inventories, nothing else of the clone."""
    place = tmp_path_factory.mktemp("installed")
    # In a folder of its own, or the clone would answer that it is installed already.
    galaxy = [str(BIN / "ansible-galaxy"), "collection"]
    subprocess.run([*galaxy, "build", str(ROOT)], cwd=place, env=environment(place), check=True, timeout=300)
    (tarball,) = place.glob("gb10-fleet-*.tar.gz")
    install = [*galaxy, "install", str(tarball), "--no-deps", "-p", str(place / "collections")]
    subprocess.run(install, cwd=place, env=environment(place), check=True, timeout=300)
    for name in ("spark", "sandbox"):
        shutil.copytree(ROOT / "inventories" / name, place / "inventories" / name)
    (place / ".sandbox").symlink_to(ROOT / ".sandbox")
    return place


def environment(place: Path) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("ANSIBLE_")}
    return {**env, "ANSIBLE_COLLECTIONS_PATH": str(place / "collections"), "ANSIBLE_NOCOLOR": "1", "COLUMNS": "100"}


def run(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [str(BIN / "ansible-playbook"), *words]
    return subprocess.run(
        argv, cwd=place, env=environment(place), capture_output=True, text=True, timeout=1800, check=False
    )


def test_the_tarball_holds_no_test_and_no_set_up(installed: Path) -> None:
    root = installed / "collections/ansible_collections/gb10/fleet"
    assert (root / "recipes/glm-5.3-flash-nvfp4.yml").exists()
    assert (root / "playbooks/serve.yml").exists()
    for name in ("tests", "molecule", "benchmarks", ".venv", "collections", "ansible.cfg", "Makefile", ".sandbox"):
        assert not (root / name).exists(), name


def test_render(installed: Path) -> None:
    done = run(installed, "gb10.fleet.render", "-i", "inventories/spark")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("--headless") == 1


def test_serve(installed: Path) -> None:
    """Against the sandbox: launched or already serving, it ends with every rank alive."""
    done = run(installed, "gb10.fleet.serve", "-i", SANDBOX)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert {host: counters["failed"] for host, counters in recap(done.stdout).items()} == {HEAD: 0, WORKER: 0}
    assert "2 of 2 ranks alive" in done.stdout
