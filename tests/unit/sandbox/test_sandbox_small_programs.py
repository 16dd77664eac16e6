"""swapon/swapoff of a node, and the descriptions that nodes get."""

from __future__ import annotations

import json
import subprocess

import pytest


@pytest.fixture
def swap(program, tmp_path, monkeypatch):
    module = program("node/swap")
    monkeypatch.setattr(module, "SWAPS", tmp_path / "swaps")
    (tmp_path / "swaps").write_text(module.render({}))
    return module


def swap_file(path, signature=b"SWAPSPACE2"):
    path.write_bytes(b"\0" * 4086 + signature + b"\0" * (1 << 20))
    return str(path)


def test_swapon_and_swapoff(swap, tmp_path, capsys):
    path = swap_file(tmp_path / "swapfile")
    assert swap.main(["swapon", path]) == 0
    assert swap.main(["swapon", path]) == 255
    assert "Device or resource busy" in capsys.readouterr().err
    assert swap.main(["swapon", "--show", "--noheadings"]) == 0
    assert capsys.readouterr().out.split()[:2] == [path, "file"]
    assert swap.main(["swapoff", path]) == 0
    assert swap.entries((tmp_path / "swaps").read_text()) == {}
    assert swap.main(["swapoff", path]) == 255


def test_swapon_refuses_what_the_kernel_refuses(swap, tmp_path, capsys):
    assert swap.main(["swapon", str(tmp_path / "none")]) == 255
    assert swap.main(["swapon", swap_file(tmp_path / "plain", b"\0" * 10)]) == 255
    errors = capsys.readouterr().err
    assert "No such file or directory" in errors
    assert "read swap header failed" in errors


def test_swap_of_fstab(swap):
    text = "# a comment\n/swapfile2 none swap sw 0 0\n/dev/sda2 none swap noauto 0 0\n/dev/sda1 / ext4 defaults 0 1\n"
    assert swap.from_fstab(text) == ["/swapfile2"]


@pytest.fixture
def plan():
    return [
        {
            "name": f"spark-0{n}",
            "container": f"gb10-sandbox-spark-0{n}",
            "management": {"interface": "enP7s7", "address": f"198.18.0.1{n}"},
            "rails": [{"interface": "enp1s0f0np0", "address": f"198.51.100.1{n}"}, {"interface": "enp1s0f1np1"}],
        }
        for n in (1, 2)
    ]


def test_nodes_are_described_once(program, plan, tmp_path):
    module = program("describe_nodes")
    assert module.describe(plan, tmp_path, "gb10-sandbox") == {"changed": True, "new_key": True}
    assert module.describe(plan, tmp_path, "gb10-sandbox") == {"changed": False, "new_key": False}
    folder = tmp_path / "nodes/gb10-sandbox-spark-02"
    assert json.loads((folder / "node.json").read_text()) == plan[1]
    assert (folder / "authorized_keys").read_text() == (tmp_path / "id_ed25519.pub").read_text()
    assert (tmp_path / "id_ed25519").stat().st_mode & 0o777 == 0o600
    assert (folder / "ssh_host_ed25519_key").stat().st_mode & 0o777 == 0o600


def test_ssh_itself_reads_what_was_written(program, plan, tmp_path):
    program("describe_nodes").describe(plan, tmp_path, "gb10-sandbox")
    found = subprocess.run(
        ["ssh-keygen", "-F", "198.51.100.12", "-f", str(tmp_path / "known_hosts")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (tmp_path / "nodes/gb10-sandbox-spark-02/ssh_host_ed25519_key.pub").read_text().split()[1] in found.stdout
    shown = subprocess.run(
        ["ssh", "-F", str(tmp_path / "ssh_config"), "-G", "spark-02"], capture_output=True, text=True, check=True
    )
    assert "hostname 198.18.0.12\n" in shown.stdout
    assert f"identityfile {tmp_path}/id_ed25519\n" in shown.stdout


def test_prefixes_keep_to_their_own_block(program, plan, tmp_path):
    module = program("describe_nodes")
    module.describe(plan, tmp_path, "gb10-sandbox")
    before = (tmp_path / "known_hosts").read_text()
    module.describe([{**plan[0], "name": "molecule-1", "container": "gb10-molecule-1"}], tmp_path, "gb10")
    assert (tmp_path / "known_hosts").read_text().startswith(before)
    assert (tmp_path / "known_hosts").read_text().count("# BEGIN gb10\n") == 1


def test_with_block_removes_an_empty_one(program):
    module = program("describe_nodes")
    text = module.with_block("mine\n", "a", "1\n")
    assert text == "mine\n# BEGIN a\n1\n# END a\n"
    assert module.with_block(text, "a", "") == "mine\n"
