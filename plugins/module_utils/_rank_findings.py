# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is worth saying about ranks that is no reason to end them, and what must never differ between them. Pure functions.

A *report* is what rank_info says of a rank, with ``host`` and ``rank``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils import _failures
from ansible_collections.gb10.fleet.plugins.module_utils._findings import ERROR, NOTE, WARNING, Finding
from ansible_collections.gb10.fleet.plugins.module_utils._rank_spec import LABEL_ENGINE

# What the engine wants in /dev/shm at least (fixture shm_too_small_head.log).
SHM_BYTES = 160 << 20
KV_GAP_GIB = 1.0
# Flags in which the ranks of a cluster differ by their nature.
PER_RANK_FLAGS = ("node-rank", "rank", "headless", "host", "name", "port")
# The ranks of a Ray cluster have different commands: the head runs the engine, the others a node of Ray.
DIFFERENT_COMMANDS = "vllm/ray"
READY_TIMEOUT = "VLLM_ENGINE_READY_TIMEOUT_S"
READY_TIMEOUT_DEFAULT_S = 600


def flags(argv: Sequence[str]) -> dict[str, str]:
    """Engine arguments by flag, in one spelling (``--max_model_len=8`` and ``--max-model-len 8`` are one)."""
    out: dict[str, str] = {}
    name = ""
    for word in argv:
        if word.startswith("--"):
            flag, dummy, value = word[2:].partition("=")
            name = flag.replace("_", "-")
            out[name] = value
        elif name:
            out[name] = f"{out[name]} {word}".strip()
        else:
            out.setdefault("", "")
            out[""] = f"{out['']} {word}".strip()
    return out


def argument_difference(mine: Sequence[str], others: Sequence[str]) -> str | None:
    """How the engine arguments of two ranks differ where they must not: ``--max-num-seqs 4 here, 6 there``. None if they agree."""
    here, there = flags(mine), flags(others)
    for name in sorted(here.keys() | there.keys()):
        if name in PER_RANK_FLAGS or here.get(name) == there.get(name):
            continue
        shown = f"--{name}" if name else "the model"
        return f"{shown} {here.get(name, 'is missing') or 'set'} here, {there.get(name, 'is missing') or 'set'} there"
    return None


def comparable(report: Mapping[str, Any]) -> bool:
    """Whether this rank's command is known, and has to be that of the other ranks."""
    return bool(report.get("argv")) and (report.get("labels") or {}).get(LABEL_ENGINE) != DIFFERENT_COMMANDS


def command_words(report: Mapping[str, Any]) -> list[str]:
    """Entrypoint and arguments of a rank: ``vllm`` + ``serve /m`` and ``vllm serve`` + ``/m`` start the same."""
    return [*(report.get("entrypoint") or []), *(report.get("argv") or [])]


def entrypoint_ignores_headless(report: Mapping[str, Any]) -> str | None:
    """The words of an entrypoint that starts a whole server on a worker (case launch-apiserver-entrypoint), else None."""
    words = command_words(report)
    return " ".join(words[:4]) if any("api_server" in word for word in words[:4]) and report["rank"] > 0 else None


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


# --- one rank -------------------------------------------------------------------------------------------------------------
def of_rank(report: Mapping[str, Any], size: int, transport: str = "roce", ready_s: float = 0) -> list[Finding]:
    """Findings about one rank.

    :param size: number of ranks. :param transport: ``roce`` when RDMA is wanted. :param ready_s: budget of a start in seconds.
    """
    if not report.get("exists"):
        return []
    out = [*_settings(report, size, ready_s), *_log(report, transport), *_kernel(report)]
    if report.get("spec_matches") is False:
        text = f"{report['host']}: the rank runs with other settings than recipe and inventory say. Run playbooks/serve.yml."
        out.append(Finding(WARNING, "launch-stale-script", report["host"], text))
    return out


def _settings(report: Mapping[str, Any], size: int, ready_s: float) -> list[Finding]:
    node, settings = report["host"], report.get("settings") or {}
    out = []

    def warn(code: str, text: str) -> None:
        out.append(Finding(WARNING, code, node, f"{node}: {text}"))

    if settings and not settings["init"]:
        warn(
            "launch-no-init", "the container has no init, so dead workers stay as zombies. Set container.init to true."
        )
    if settings.get("restart_policy", "no") != "no":
        policy = settings["restart_policy"]
        warn(
            "wd-pair-restart",
            f"restart policy {policy}: one rank alone never joins again. Set none; the watchdog restarts all ranks.",
        )
    if settings and settings["ipc_mode"] != "host" and (settings["shm_size"] or 0) < SHM_BYTES:
        # With --ipc host Docker ignores the shm size, and 64 MiB in the inspect is no fault (case launch-ipc-shm).
        have = (settings["shm_size"] or 0) >> 20
        warn(
            "launch-ipc-shm",
            f"{have} MiB of shared memory, 160 MiB wanted. Raise container.shm_size or set container.ipc to host.",
        )
    rdma = any(str(device).startswith("/dev/infiniband") for device in settings.get("devices") or [])
    if rdma and settings.get("memlock") not in (-1,):
        have = "the daemon's default" if settings.get("memlock") is None else f"{settings['memlock']} bytes"
        warn("pre-memlock", f"memlock of the container is {have}; RDMA wants -1. Set container.ulimits.memlock to -1.")
    if size > 1 and settings and ready_s:
        limit = _number(settings["env"].get(READY_TIMEOUT)) or READY_TIMEOUT_DEFAULT_S
        if limit < ready_s:
            warn(
                "launch-ready-timeout",
                f"{READY_TIMEOUT} is {limit:.0f} s, a start may take {ready_s:.0f} s: the engine would give itself up. "
                f"Set it to {ready_s:.0f} in env of the recipe.",
            )
    return out


def _log(report: Mapping[str, Any], transport: str) -> list[Finding]:
    node = report["host"]
    out = []
    for name, note in (report.get("notes") or {}).items():
        if name == "ready-shm-info" or (name == "net-tcp-fallback" and transport != "roce"):
            continue
        said = _failures.explain(name, note["groups"], note["line"])
        fix = said["fix"]
        out.append(Finding(WARNING, name, node, f"{node}: {said['cause']}. {fix[:1].upper()}{fix[1:]}."))
    return out


def _kernel(report: Mapping[str, Any]) -> list[Finding]:
    node = report["host"]
    out = []
    for line in report.get("kernel_lines") or []:
        said = _failures.explain(line["id"], line["groups"], line["line"])
        times = f" ({line['count']} times)" if line.get("count", 1) > 1 else ""
        hard = line["severity"] == "hard"
        fix = f" {said['fix'][:1].upper()}{said['fix'][1:]}." if hard else ""
        out.append(Finding(ERROR if hard else NOTE, line["id"], node, f"{node}: kernel: {said['cause']}{times}.{fix}"))
    return out


# --- all ranks --------------------------------------------------------------------------------------------------------------
def of_cluster(reports: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Findings about the ranks together: arguments, KV cache, block size. ``reports`` by rank."""
    return [*_arguments(reports), *_kv_gap(reports), *_block(reports[0] if reports else {}), *_kv_pin(reports)]


def _arguments(reports: Sequence[Mapping[str, Any]]) -> list[Finding]:
    out = []
    there = [r for r in reports if comparable(r)]
    for report in there[1:]:
        if difference := argument_difference(command_words(report), command_words(there[0])):
            said = _failures.explain("launch-args-mismatch", {"other": there[0]["host"], "difference": difference})
            text = f"{report['host']}: {said['cause']}. {said['fix'][:1].upper()}{said['fix'][1:]}."
            out.append(Finding(ERROR, "launch-args-mismatch", report["host"], text))
    return out


def _kv_gap(reports: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Case qual-rank-kv-gap: the pool is the smallest rank's."""
    offers = [
        (r["host"], n) for r in reports if (n := _number((r.get("facts") or {}).get("kv_available_gib"))) is not None
    ]
    if len(offers) < 2:
        return []
    least, most = min(offers, key=lambda o: o[1]), max(offers, key=lambda o: o[1])
    if most[1] - least[1] < KV_GAP_GIB:
        return []
    text = (
        f"{least[0]} offers {least[1]:.2f} GiB of KV cache, {most[0]} {most[1]:.2f} GiB; the smaller one counts for all ranks. "
        f"Look for what else holds memory on {least[0]}."
    )
    return [Finding(NOTE, "qual-rank-kv-gap", least[0], text)]


def _block(head: Mapping[str, Any]) -> list[Finding]:
    """The block of the prefix cache against the two settings that have to fit to it (facts of hybrid models)."""
    facts = head.get("facts") or {}
    block = _number(facts.get("block_size")) or _number(flags(head.get("argv") or []).get("block-size"))
    batched, length = _number(facts.get("max_num_batched_tokens")), _number(facts.get("max_model_len"))
    if not block:
        return []
    node, out = head["host"], []
    if batched and batched < block:
        text = f"{node}: max-num-batched-tokens {batched:.0f} is under the block of {block:.0f} tokens. Set it to that at least."
        out.append(Finding(WARNING, "qual-prefix-zero", node, text))
    elif batched and batched % block:
        whole = batched - batched % block
        text = (
            f"{node}: max-num-batched-tokens {batched:.0f} is no multiple of the block of {block:.0f} tokens; {whole:.0f} of them "
            f"count. {whole + block:.0f} aligns."
        )
        out.append(Finding(NOTE, "qual-prefix-zero", node, text))
    if length and length < 2 * block:
        text = (
            f"{node}: max-model-len {length:.0f} is under two blocks of {block:.0f} tokens, so the prefix cache can never hit. "
            f"Set it to {2 * block:.0f} at least."
        )
        out.append(Finding(WARNING, "qual-prefix-zero", node, text))
    return out


def _kv_pin(reports: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Case launch-kv-pin: a pinned pool leaves nothing for activations; only a long prompt shows it."""
    for report in reports[:1]:
        given = flags(report.get("argv") or [])
        name = next((n for n in given if n.startswith("kv-cache-memory")), None)
        if name:
            text = (
                f"{report['host']}: --{name} {given[name]} is pinned; the engine then reserves nothing for activations. "
                "Prove it with a prompt of 28,000 tokens before you rely on it (playbooks/qualify.yml)."
            )
            return [Finding(NOTE, "launch-kv-pin", report["host"], text)]
    return []


def merged(found: Sequence[Finding]) -> list[Finding]:
    """The same finding of several nodes as one, with all of their names in front."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for one in found:
        groups.setdefault((one.severity, one.code, one.text.removeprefix(f"{one.node}: ")), []).append(one)
    out = []
    for (severity, code, words), same in groups.items():
        if len(same) == 1:
            out.append(same[0])
        else:
            nodes = ", ".join(one.node for one in same)
            out.append(Finding(severity, code, nodes, f"{nodes}: {words}"))
    return out


def proposal(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The engine's own proposal for --kv-cache-memory: ``{bytes, ranks}``, the least over all ranks; None unless each made one."""
    made = {r["host"]: int(n) for r in reports if (n := (r.get("facts") or {}).get("kv_cache_memory"))}
    if not made or len(made) != len(reports):
        return None
    return {"bytes": min(made.values()), "ranks": made}
