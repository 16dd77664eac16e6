"""sysctl_file and swap_file: exactly what is asked, read back, put back; and the arithmetic of vm.min_free_kbytes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gb10.fleet.plugins.module_utils import _command, _kernel
from ansible_collections.gb10.fleet.plugins.modules import swap_file, sysctl_file

Run = Callable[..., dict[str, Any]]
FIXTURES = Path(__file__).parents[2] / "fixtures"
OURS = "/etc/sysctl.d/99-zz-gb10-fleet.conf"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A node's /proc/sys and /etc, with the memory of a GB10 (MemTotal 127600748 kB)."""
    values = {"vm/swappiness": "60\n", "vm/min_free_kbytes": "67584\n", "net/ipv4/tcp_rmem": "4096\t131072\t6291456\n"}
    for name, content in values.items():
        path = tmp_path / "proc/sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (tmp_path / "etc/sysctl.d").mkdir(parents=True)
    # What has to be there for a reserve that costs 6.2 GiB to leave the 98.89 GiB of the report.
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 127600748 kB\nMemAvailable: {int((98.89 + 6.2) * 1048576)} kB\n")
    return tmp_path


@pytest.fixture
def sysctl(root: Path, run_module: Run) -> Run:
    def run(check: bool = False, **args: Any) -> dict[str, Any]:
        journal = str(root / "var/lib/gb10-fleet/sysctl.json")
        return run_module(sysctl_file.main, check, **{"root": str(root), "journal": journal, **args})

    return run


def values(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.glob("proc/sys/*/**/*")) if p.is_file()}


def test_check_then_run_then_run_then_restore(root: Path, sysctl: Run) -> None:
    before = values(root)
    asked = {"vm.swappiness": 10, "net.ipv4.tcp_rmem": "4096 87380 16777216"}
    proposed = sysctl(check=True, settings=asked)
    assert values(root) == before and not (root / OURS[1:]).exists()
    done = sysctl(settings=asked)
    assert done["actions"] == proposed["actions"]
    assert done["actions"][1] == "vm.swappiness: 60 -> 10"
    assert (root / OURS[1:]).read_text().splitlines()[1:] == [
        "net.ipv4.tcp_rmem = 4096 87380 16777216",
        "vm.swappiness = 10",
    ]
    assert (root / "proc/sys/vm/swappiness").read_text() == "10\n"
    for check in (True, False):
        assert sysctl(check=check, settings=asked)["changed"] is False
    # No longer asked: the value from before, and the line is gone.
    assert (
        sysctl(settings={"vm.swappiness": 10})["actions"][0]
        == "net.ipv4.tcp_rmem: 4096 87380 16777216 -> 4096\t131072\t6291456"
    )
    assert (root / OURS[1:]).read_text().splitlines()[1:] == ["vm.swappiness = 10"]
    assert sysctl(state="absent")["changed"] is True
    assert values(root) == before
    assert not (root / OURS[1:]).exists()
    assert sysctl(state="absent")["changed"] is False


def test_the_same_value_written_otherwise_is_no_change(sysctl: Run) -> None:
    assert sysctl(settings={"net.ipv4.tcp_rmem": "4096 131072  6291456"})["actions"] == [f"{OURS}: written"]


def test_unknown_setting(root: Path, sysctl: Run) -> None:
    result = sysctl(settings={"vm.swapiness": 10})
    assert result["msg"] == (
        "vm.swapiness: this kernel has no such setting (/proc/sys/vm/swapiness). Did you mean vm.swappiness?"
    )
    assert not (root / OURS[1:]).exists()


def test_refused_value(root: Path, sysctl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: Any, path: str, content: str) -> None:
        raise OSError(22, "Invalid argument", path)

    monkeypatch.setattr(sysctl_file.Journal, "write", write)
    assert (
        sysctl(settings={"vm.swappiness": 500})["msg"] == "vm.swappiness: the kernel refuses '500': Invalid argument."
    )
    assert not (root / OURS[1:]).exists(), "a value that the kernel refuses must not come back at the next boot"


def test_an_action_is_no_setting(sysctl: Run) -> None:
    assert sysctl(settings={"vm.drop_caches": 3})["msg"].startswith("vm.drop_caches is an action and not a setting")


def test_tune_reboot_lost_a_file_that_wins(root: Path, sysctl: Run) -> None:
    """ "Lost three boots": a value that another file takes back at the next boot is told now."""
    (root / "etc/sysctl.d/10-first.conf").write_text("vm.swappiness=100\n")
    assert sysctl(check=True, settings={"vm.swappiness": 10})["warnings"] == [], "ours comes later and wins"
    (root / "etc/sysctl.d/99-zzz-site.conf").write_text("vm.swappiness=60\n")
    result = sysctl(settings={"vm.swappiness": 10})
    assert result["warnings"] == [
        "vm.swappiness = 60 in /etc/sysctl.d/99-zzz-site.conf wins over ours (10) at the next boot: remove it there, or give "
        "our file a name that sorts later than 99-zzz-site.conf."
    ]


def test_tune_minfree_trap(sysctl: Run) -> None:
    """tonyd2wild GLM-5.3#19: 4 GiB of reserve, and 98.89 GiB were free where 0.84 (102.22 GiB) was wanted."""
    report = (FIXTURES / "cases/tune-minfree-trap.txt").read_text()
    reserve = re.search(r"vm.min_free_kbytes = (\d+)", report)
    error = re.search(r"\(([\d.]+)/([\d.]+) GiB\) .* utilization \(([\d.]+), ([\d.]+) GiB\)", report)
    assert reserve is not None and error is not None
    left, total, utilization, wanted = (float(n) for n in error.groups())
    (warning,) = sysctl(settings={"vm.min_free_kbytes": reserve[1]}, utilization=utilization)["warnings"]
    assert warning == (
        "vm.min_free_kbytes = 4194304 reserves 4.0 GiB and takes about 6.2 GiB from MemAvailable, which vLLM checks at its start. "
        f"{left:.1f} of {total:.1f} GiB are left, 0.84 × {total:.1f} = {wanted:.1f} GiB are wanted: vLLM will refuse to start. "
        "Leave the kernel's own reserve alone."
    )


def test_min_free_that_still_fits_is_a_warning_without_a_verdict() -> None:
    memory = {"MemTotal": 127600748, "MemAvailable": 110205338}
    text = _kernel.min_free_warning(1048576, 67584, memory, 0.80)
    assert "refuse" not in text and "0.8 × 121.7 = 97.4 GiB are wanted." in text
    assert _kernel.min_free_warning(1048576, 1048576, memory, None).endswith(
        "105.1 of 121.7 GiB are left. Leave the kernel's own reserve alone."
    )


def test_sysctl_names() -> None:
    assert _kernel.sysctl_path("vm.swappiness") == "/proc/sys/vm/swappiness"
    assert _kernel.sysctl_path("net.ipv4.conf.eth0/1.rp_filter") == "/proc/sys/net/ipv4/conf/eth0.1/rp_filter"
    assert _kernel.sysctl_path("net/ipv4/conf/eth0.1/rp_filter") == "/proc/sys/net/ipv4/conf/eth0.1/rp_filter"


# --- swap


class FakeSwap:
    """swapon and swapoff that keep /proc/swaps, mkswap that writes the signature."""

    def __init__(self, root: Path) -> None:
        self.root, self.calls = root, []  # type: Path, list[list[str]]
        self.refuse: dict[str, str] = {}
        (root / "proc").mkdir(exist_ok=True)
        self.write([])

    def write(self, paths: list[str]) -> None:
        lines = ["Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority"]
        lines += [f"{path}                              file\t\t65532\t\t0\t\t-2" for path in paths]
        (self.root / "proc/swaps").write_text("\n".join(lines) + "\n")

    def active(self) -> list[str]:
        return [swap.path for swap in _kernel.parse_swaps((self.root / "proc/swaps").read_text())]

    def run(self, argv: Any, timeout_s: float = 10.0, stdin: str | None = None) -> _command.Answer:
        self.calls.append(list(argv))
        tool, path = argv[0], argv[-1]
        if tool in self.refuse:
            return _command.Answer(tuple(argv), 255, err=self.refuse[tool])
        if tool == "mkswap":
            with Path(path).open("r+b") as file:
                file.seek(4086)
                file.write(b"SWAPSPACE2")
        elif tool == "swapon":
            self.write([*self.active(), path])
        else:
            self.write([p for p in self.active() if p != path])
        return _command.Answer(tuple(argv), 0)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSwap:
    tools = FakeSwap(tmp_path)
    monkeypatch.setattr(swap_file._command, "run", tools.run)
    (tmp_path / "etc").mkdir(exist_ok=True)
    (tmp_path / "etc/fstab").write_text("UUID=1 / ext4 defaults 0 1\n/swap.img\tnone\tswap\tsw\t0\t0")
    return tools


@pytest.fixture
def swap(fake: FakeSwap, run_module: Run) -> Run:
    def run(check: bool = False, **args: Any) -> dict[str, Any]:
        common = {"root": str(fake.root), "path": "/swapfile.gb10-fleet", "margin_gib": 0}
        return run_module(swap_file.main, check, **{**common, **args})

    return run


def test_swap_check_run_run_resize_remove(fake: FakeSwap, swap: Run) -> None:
    fstab = (fake.root / "etc/fstab").read_bytes()
    size, file = 0.0078125, fake.root / "swapfile.gb10-fleet"
    proposed = swap(check=True, size_gib=size)
    assert (proposed["changed"], file.exists(), fake.calls) == (True, False, [])
    done = swap(size_gib=size)
    assert done["actions"] == proposed["actions"] == ["make a file of 0.0078125 GiB", "swapon", "add to /etc/fstab"]
    assert (file.stat().st_size, oct(file.stat().st_mode & 0o777)) == (8 * 1024 * 1024, "0o600")
    assert file.stat().st_blocks * 512 >= 8 * 1024 * 1024, "swapon refuses a file with holes"
    assert (fake.root / "etc/fstab").read_text().endswith("sw\t0\t0\n/swapfile.gb10-fleet none swap sw 0 0\n")
    for check in (True, False):
        assert swap(check=check, size_gib=size)["changed"] is False
    # After a reboot without fstab's doing: used again, not made again.
    fake.write([])
    assert swap(size_gib=size)["actions"] == ["swapon"]
    assert swap(size_gib=2 * size)["actions"][:3] == ["swapoff", "remove the file", "make a file of 0.015625 GiB"]
    assert swap(state="absent")["actions"] == ["swapoff", "remove the file", "remove from /etc/fstab"]
    assert (fake.active(), file.exists()) == ([], False)
    assert (fake.root / "etc/fstab").read_bytes() == fstab + b"\n"
    assert swap(state="absent")["changed"] is False


def test_swap_on_a_full_disk(fake: FakeSwap, swap: Run) -> None:
    for check in (True, False):
        result = swap(check=check, size_gib=1000000, margin_gib=5)
        assert re.fullmatch(
            r"/swapfile\.gb10-fleet: 1e\+06 GiB of swap are wanted, / has [\d.]+ GiB free and 5 GiB have to stay free\. "
            r"Ask for less, or put the file on another disk\.",
            result["msg"],
        )
    assert fake.calls == [] and not (fake.root / "swapfile.gb10-fleet").exists()


def test_swap_on_a_disk_that_fills_meanwhile(fake: FakeSwap, swap: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(swap_file.os, "posix_fallocate", full)
    assert swap(size_gib=0.01)["msg"] == "/swapfile.gb10-fleet cannot be made: No space left on device"
    assert not (fake.root / "swapfile.gb10-fleet").exists()


def test_swap_on_a_file_system_that_cannot(fake: FakeSwap, swap: Run) -> None:
    fake.refuse["swapon"] = "swapon: /swapfile.gb10-fleet: swapon failed: Invalid argument\n"
    assert swap(size_gib=0.01)["msg"] == (
        "swapon /swapfile.gb10-fleet: swapon: /swapfile.gb10-fleet: swapon failed: Invalid argument. "
        "This file system cannot hold a swap file."
    )
    assert not (fake.root / "swapfile.gb10-fleet").exists()


def test_swap_never_takes_a_file_of_someone_else(fake: FakeSwap, swap: Run) -> None:
    (fake.root / "swapfile.gb10-fleet").write_text("not swap")
    assert swap(size_gib=0.01)["msg"] == (
        "/swapfile.gb10-fleet exists and is not a swap file of ours. Remove it, or choose another path."
    )
    assert swap(state="absent")["failed"] is True
    assert (fake.root / "swapfile.gb10-fleet").read_text() == "not swap"
    assert swap(size_gib=0)["msg"] == "size_gib is 0, wanted more than 0."


def test_proc_swaps_of_a_spark() -> None:
    text = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n/swap.img                               file\t\t16777212\t0\t\t-2\n"
    assert _kernel.parse_swaps(text) == [_kernel.Swap("/swap.img", 16777212, 0)]
