# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""CPU frequency policies: what each can do, what is wanted of it, and what has to be written for that.

A GB10 has fast cores (Cortex-X925, about 3.9 GHz) and slow ones (Cortex-A725, about 2.8 GHz), and cpu0 is a slow one: whoever
reads only cpu0 never sees the cores that make the heat (seed "GLM-5.3-Flash on 2x NVIDIA DGX Spark"). So everything here goes
policy by policy, from what the policy itself says it can do. Only ``scaling_governor`` and ``scaling_max_freq`` are ever written:
CPPC autonomous selection (``auto_sel``) is worth a factor of three in memory bandwidth and stays as it is.

Standard library only, and nothing of Ansible: the programs that stay on a node ship a copy of this file beside themselves.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ansible_collections.gb10.fleet.plugins.module_utils._journal import Journal

CPUFREQ = "/sys/devices/system/cpu/cpufreq"
GOVERNOR = "scaling_governor"
MAX_FREQ = "scaling_max_freq"
AUTO_GOVERNOR = "schedutil"
# cpuinfo_cur_freq on a GB10 once read 5.56 GHz on a 4.0 GHz core (Arm learning path, GB10 lscpu): such a reading is no reading.
_PLAUSIBLE = 1.2


class CpuFrequencyError(Exception):
    """The setting cannot be made; the message is a sentence that says why and what to do."""


class Policy(NamedTuple):
    """One cpufreq policy. Frequencies in kHz, as the kernel gives them; None when the kernel does not say."""

    name: str
    cpus: tuple[int, ...]
    governor: str
    governors: tuple[str, ...]
    current_khz: int | None
    scaling_max_khz: int
    hardware_min_khz: int
    hardware_max_khz: int
    frequencies_khz: tuple[int, ...]

    def path(self, attribute: str) -> str:
        """Path of one of this policy's files, below the node's root."""
        return f"{CPUFREQ}/{self.name}/{attribute}"

    @property
    def where(self) -> str:
        """``policy5 (CPUs 5-9)``."""
        return f"{self.name} (CPU{'s' if len(self.cpus) != 1 else ''} {ranges(self.cpus)})"


class Change(NamedTuple):
    """One file to write. ``before`` and ``after`` are raw contents, line ends included."""

    path: str
    before: str
    after: str


def ranges(cpus: Sequence[int]) -> str:
    """``(0, 1, 2, 5)`` -> ``0-2,5``."""
    out: list[list[int]] = []
    for cpu in sorted(cpus):
        if out and cpu == out[-1][-1] + 1:
            out[-1][1:] = [cpu]
        else:
            out.append([cpu])
    return ",".join("-".join(map(str, part)) for part in out) or "none"


def _cpus(text: str) -> tuple[int, ...]:
    cpus: list[int] = []
    for part in text.replace(",", " ").split():
        first, dummy, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)


def read_policies(root: str = "/") -> list[Policy]:
    """Every cpufreq policy of this node, in the order of their numbers.

    Raises CpuFrequencyError when the kernel runs no cpufreq driver (a virtual machine, or ``cppc_cpufreq`` missing).
    """
    base = root.rstrip("/") + CPUFREQ
    try:
        names = [name for name in os.listdir(base) if name.startswith("policy") and name[6:].isdigit()]  # noqa: PTH208
    except FileNotFoundError:
        names = []
    if not names:
        raise CpuFrequencyError(
            f"{CPUFREQ} has no policy: this kernel runs no cpufreq driver. "
            "Load one (cppc_cpufreq on a GB10), or leave the CPU settings out."
        )
    return [_read_policy(base, name) for name in sorted(names, key=lambda n: int(n[6:]))]


def _read_policy(base: str, name: str) -> Policy:
    def word(attribute: str) -> str | None:
        try:
            with open(f"{base}/{name}/{attribute}", encoding="ascii", errors="replace") as file:  # noqa: PTH123
                return file.read().strip()
        except OSError:
            return None

    def khz(attribute: str) -> int | None:
        text = word(attribute) or ""
        return int(text) if text.isdigit() else None

    needed = {attribute: khz(attribute) for attribute in ("cpuinfo_max_freq", "cpuinfo_min_freq", MAX_FREQ)}
    missing = [attribute for attribute, value in needed.items() if value is None]
    governor = word(GOVERNOR)
    if missing or governor is None:
        raise CpuFrequencyError(
            f"{CPUFREQ}/{name} does not give {', '.join(missing or [GOVERNOR])}: the cpufreq driver of this kernel is not one "
            "that can be tuned. Leave the CPU settings out."
        )
    current = khz("scaling_cur_freq") or khz("cpuinfo_cur_freq")
    hardware_max = needed["cpuinfo_max_freq"] or 0
    return Policy(
        name=name,
        cpus=_cpus(word("affected_cpus") or word("related_cpus") or ""),
        governor=governor,
        governors=tuple((word("scaling_available_governors") or "").split()),
        current_khz=current if current is not None and current <= hardware_max * _PLAUSIBLE else None,
        scaling_max_khz=needed[MAX_FREQ] or 0,
        hardware_min_khz=needed["cpuinfo_min_freq"] or 0,
        hardware_max_khz=hardware_max,
        frequencies_khz=tuple(int(f) for f in (word("scaling_available_frequencies") or "").split() if f.isdigit()),
    )


def wanted_values(policies: Iterable[Policy], governor: str | None, cap_mhz: int | None) -> dict[str, str]:
    """Path -> value (without line end) for what is asked.

    :param governor: a name; ``auto`` is schedutil for the policies that have it, the others keep theirs; None leaves all alone.
    :param cap_mhz: highest frequency of the policies whose hardware goes above it; slower policies are not touched.
    Raises CpuFrequencyError for a governor that a policy lacks and for a cap below a policy's minimum.
    """
    out: dict[str, str] = {}
    for policy in policies:
        if governor == "auto":
            if AUTO_GOVERNOR in policy.governors:
                out[policy.path(GOVERNOR)] = AUTO_GOVERNOR
        elif governor is not None:
            if governor not in policy.governors:
                raise CpuFrequencyError(
                    f"{policy.where}: governor {governor} is not available here. "
                    f"Available: {', '.join(policy.governors) or 'none that the kernel tells'}."
                )
            out[policy.path(GOVERNOR)] = governor
        if cap_mhz is not None and policy.hardware_max_khz > cap_mhz * 1000:
            if policy.hardware_min_khz > cap_mhz * 1000:
                raise CpuFrequencyError(
                    f"{policy.where}: a cap of {cap_mhz} MHz is below its minimum of {policy.hardware_min_khz // 1000} MHz "
                    f"(it goes up to {policy.hardware_max_khz // 1000} MHz)."
                )
            out[policy.path(MAX_FREQ)] = str(_held(policy, cap_mhz * 1000))
    return out


def _held(policy: Policy, cap_khz: int) -> int:
    """What the kernel will hold for a cap: a driver with a table of frequencies rounds down to one of them."""
    below = [f for f in policy.frequencies_khz if f <= cap_khz]
    return max(below) if below else cap_khz


def plan(policies: Iterable[Policy], wanted: Mapping[str, str], journal: Journal) -> list[Change]:
    """What has to be written: the wanted values that differ, and the values of ours that are no longer asked for.

    :param wanted: of :func:`wanted_values`; empty to put everything back.
    A policy of the journal that is gone (its CPUs are offline) is left out: the kernel makes it anew with its defaults.
    """
    changes = []
    for policy in policies:
        for attribute in (GOVERNOR, MAX_FREQ):
            path = policy.path(attribute)
            if path in wanted:
                now, after = journal.read(path), wanted[path] + "\n"
                if now.strip() != wanted[path]:
                    changes.append(Change(path, now, after))
            elif path in journal.before:
                now, after = journal.read(path), journal.before[path]
                if now != after:
                    changes.append(Change(path, now, after))
    return changes


def carry_out(changes: Iterable[Change], wanted: Mapping[str, str], journal: Journal) -> None:
    """Write the changes, each one read back; the journal is saved before the first and cleared of what was put back.

    Raises CpuFrequencyError for what the kernel refuses or does not hold, JournalError when the journal cannot be written.
    """
    changes = list(changes)
    for change in changes:
        if change.path in wanted:
            journal.remember(change.path, change.before)
    journal.save()
    for change in changes:
        _write(change, journal)
    for path in [p for p in journal.before if p.startswith(CPUFREQ + "/") and p not in wanted]:
        del journal.before[path]
    journal.save()


def short(path: str) -> str:
    """``policy5/scaling_governor``."""
    return path[len(CPUFREQ) + 1 :] if path.startswith(CPUFREQ + "/") else path


def _write(change: Change, journal: Journal) -> None:
    value = change.after.strip()
    try:
        journal.write(change.path, change.after)
        now = journal.read(change.path).strip()
    except OSError as exc:
        hint = " Run as root." if exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else ""
        raise CpuFrequencyError(f"{short(change.path)}: the kernel refuses {value}: {exc.strerror}.{hint}") from exc
    if now != value:
        raise CpuFrequencyError(
            f"{short(change.path)}: {value} was written, the kernel holds {now}. "
            "Another program or the firmware limits this policy."
        )
