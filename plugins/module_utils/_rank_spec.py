# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The heart of the collection: (recipe, topology, fabric facts) -> rank spec, and the spec as ``docker run``.

A rank spec says all there is to say about one rank's container:

``image, name, entrypoint, argv, env, mounts, ulimits, devices, gpus, cap_add, network_mode, ipc_mode, shm_size, memory,
memory_swap, init, stop_timeout_s, restart_policy, labels``

Every engine goes through :func:`rank_spec`; ``serve.yml`` starts what it returns, ``render.yml`` prints it.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint import Layout
from ansible_collections.gb10.fleet.plugins.module_utils._plain import plain

# Static NCCL environment of a RoCE fabric, the same on every rank
# (seed "Running GLM-5.3-Flash on two DGX Sparks", step 5).
ROCE_ENV: dict[str, str] = {
    "NCCL_NET": "IB",
    "NCCL_IB_DISABLE": "0",
    "NCCL_IB_ROCE_VERSION_NUM": "2",
    "NCCL_IB_ADDR_FAMILY": "AF_INET",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CROSS_NIC": "0",
    "NCCL_IB_MERGE_NICS": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_IGNORE_CPU_AFFINITY": "1",
    "NCCL_DEBUG": "WARN",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}
SOCKET_ENV: dict[str, str] = {
    "NCCL_IB_DISABLE": "1",
    "NCCL_IGNORE_CPU_AFFINITY": "1",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_DEBUG": "WARN",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}

# A load on unified memory looks like a dead node to Ray: its memory monitor kills workers at 95 % (case guard-ray-memmon), its
# health check gives a silent raylet up, its compiled graph waits ten minutes (seed "GLM-5.2 469B on 3× NVIDIA DGX Spark").
RAY_ENV: dict[str, str] = {
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_health_check_failure_threshold": "600",
    "RAY_health_check_period_ms": "10000",
    "RAY_CGRAPH_get_timeout": "3600",
}

# The only things in which ranks of one cluster may differ. Anything else that differs is an error before a start:
# ranks with different engine arguments deadlock with both GPUs at 100 % (case launch-args-mismatch).
PER_RANK_ENV = frozenset(
    {
        "VLLM_HOST_IP",
        "NCCL_SOCKET_IFNAME",
        "GLOO_SOCKET_IFNAME",
        "TP_SOCKET_IFNAME",
        "MN_IF_NAME",
        "NCCL_IB_HCA",
        "NCCL_IB_GID_INDEX",
    }
)
PER_RANK_FLAGS: dict[str, tuple[str, ...]] = {"tensorfold": ("--rank", "--name", "--host", "--port")}
PER_RANK_LABELS = frozenset({"gb10.fleet.rank", "gb10.fleet.spec"})

LABEL_CLUSTER = "gb10.fleet.cluster"
LABEL_RANK = "gb10.fleet.rank"
LABEL_RECIPE = "gb10.fleet.recipe"
LABEL_PORT = "gb10.fleet.port"
LABEL_ENGINE = "gb10.fleet.engine"
LABEL_SPEC = "gb10.fleet.spec"

# Where mods lie on a node, and where those that are a folder are in the container.
MODS_DIR = "/var/lib/gb10-fleet/mods"
MODS = "/mods"
_PLACE = re.compile(r"\{(model|drafter|rank|size|address|head_address|port|master_port|served_name|image_key)\}")


class RankSpecError(ValueError):
    """The ranks of a cluster cannot be started as asked; the message names rank and field."""


def _flag(name: str, value: Any) -> list[str]:
    """One engine flag as argv words: true is a bare flag, a mapping is JSON, a list repeats its values behind one flag."""
    flag = f"--{name}"
    if value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, Mapping):
        return [flag, json.dumps(value)]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [flag, *(str(v) for v in value)]
    return [flag, str(value)]


def _options(args: Mapping[str, Any]) -> list[str]:
    return [word for name, value in args.items() for word in _flag(name, value)]


def _vllm_words(recipe: Mapping[str, Any], topology: Mapping[str, Any], model: str) -> list[str]:
    """What follows `vllm serve` on a rank."""
    parallel = recipe["parallel"]
    argv = [model]
    argv += _flag("served-model-name", recipe["served_name"])
    argv += _flag("host", recipe["api_host"]) + _flag("port", recipe["port"])
    if parallel["tensor"] > 1:
        argv += _flag("tensor-parallel-size", parallel["tensor"])
    if parallel["pipeline"] > 1:
        argv += _flag("pipeline-parallel-size", parallel["pipeline"])
    argv += _options(recipe["args"])
    if topology["size"] > 1:
        argv += _flag("distributed-executor-backend", parallel["backend"])
    if topology["size"] > 1 and parallel["backend"] == "mp":
        argv += _flag("nnodes", topology["size"]) + _flag("node-rank", topology["rank"])
        argv += _flag("master-addr", topology["head_address"]) + _flag("master-port", recipe["master_port"])
        if topology["rank"] > 0:
            # Last, and on every rank but 0: without it the worker builds a full engine and dies with "collective_rpc
            # should not be called on follower node", and the head waits for ever (case launch-headless).
            argv.append("--headless")
    return argv


def _tensorfold_words(recipe: Mapping[str, Any], topology: Mapping[str, Any], model: str) -> list[str]:
    """What follows `tensorfold serve` on a rank: only rank 0 has a name and a port."""
    argv = [model, *_flag("tp", recipe["parallel"]["tensor"]), *_flag("rank", topology["rank"])]
    argv += _flag("master", topology["head_address"]) + _flag("master-port", recipe["master_port"])
    if topology["rank"] == 0:
        argv += _flag("name", recipe["served_name"]) + _flag("host", recipe["api_host"]) + _flag("port", recipe["port"])
    return argv + _options(recipe["args"])


# The lines around `vllm serve` when Ray carries the ranks. Workers come first and wait for the head's Ray; the head's engine starts
# when all nodes are in: one that is missing shows as "Waiting for creating a placement group" for ever (case launch-ray-pg).
_RAY_HEAD = """ray start --head {start}
echo "[ray] waiting for {size} nodes"
for _ in $(seq 1 {tries}); do
  found=$(ray status 2>/dev/null | sed -n '/^Active:/,/^Pending:/p' | grep -c node_ || true)
  test "$found" -ge {size} && break
  sleep 2
done
ray status
test "$found" -ge {size} || {{ echo "[ray] only $found of {size} nodes joined"; exit 1; }}"""
_RAY_WORKER = """echo "[ray] waiting for the head at {master}"
until (exec 3<>/dev/tcp/{head}/{port}) 2>/dev/null; do sleep 1; done"""
_RAY_TRIES = 300


def _ray(recipe: Mapping[str, Any], topology: Mapping[str, Any], words: list[str]) -> tuple[list[str], list[str]]:
    """Start lines and words of a rank in a Ray cluster: the engine runs on the head, a worker is a Ray node and no more."""
    own = ["--node-ip-address", topology["address"], "--disable-usage-stats", *_options(recipe["parallel"]["ray_args"])]
    head, port = topology["head_address"], recipe["master_port"]
    if topology["rank"] > 0:
        wait = _RAY_WORKER.format(master=f"{head}:{port}", head=head, port=port)
        return [wait], ["ray", "start", "--block", "--address", f"{head}:{port}", *own]
    start = shlex.join(["--port", str(port), *own])
    return [_RAY_HEAD.format(start=start, size=topology["size"], tries=_RAY_TRIES)], words


def _command(recipe: Mapping[str, Any], topology: Mapping[str, Any], model: str) -> tuple[list[str], list[str]]:
    """Entrypoint and arguments. An empty entrypoint keeps the image's own."""
    engine = recipe["engine"]
    if engine == "kit":
        return [], []
    if engine == "tensorfold":
        entrypoint: list[str] = []
        argv = ["tensorfold", "serve", *_tensorfold_words(recipe, topology, model)]
    else:
        # Always explicit: images that start `python -m …api_server` ignore --headless (case launch-apiserver-entrypoint).
        entrypoint, argv = ["vllm", "serve"], _vllm_words(recipe, topology, model)
    lines = []
    for mod in recipe["mods"]:
        if mod["folder"]:
            # Lines of their own: in `a && b && c` a failure of b would not end the shell.
            lines += [f"cd {MODS}/{mod['name']}", mod["run"], "cd /"]
    lines += recipe["start"]
    if recipe["parallel"]["backend"] == "ray" and topology["size"] > 1:
        wait, words = _ray(recipe, topology, [*entrypoint, *argv])
        return ["bash", "-ec"], ["\n".join([*lines, *wait, 'exec "$@"']), "rank", *words]
    if lines:
        return ["bash", "-ec"], ["\n".join([*lines, 'exec "$@"']), "rank", *entrypoint, *argv]
    return entrypoint, argv


def engine_words(spec: Mapping[str, Any]) -> list[str]:
    """The engine's own command in a spec, from its program on: ``vllm serve …``, ``tensorfold serve …``; a Ray worker has none."""
    words = [*spec["entrypoint"], *spec["argv"]]
    if words[:2] == ["bash", "-ec"]:
        words = words[4:]
    return words if words[:2] in (["vllm", "serve"], ["tensorfold", "serve"]) else []


def _env(recipe: Mapping[str, Any], topology: Mapping[str, Any], fabric: Mapping[str, Any]) -> dict[str, str]:
    env: dict[str, str] = {}
    if topology["size"] > 1:
        env["VLLM_HOST_IP"] = topology["address"]
        env.update(ROCE_ENV if recipe["fabric"]["transport"] == "roce" else SOCKET_ENV)
        if recipe["parallel"]["backend"] == "ray":
            env.update(RAY_ENV)
        # An empty NCCL_IB_GID_INDEX means index 0, not "automatic" (case net-gid-drift): empty values are left out.
        env.update({k: str(v) for k, v in (fabric.get("env") or {}).items() if v not in (None, "")})
    env.update(recipe["env"])
    return env


def folder_of(item: Mapping[str, Any], models_dir: str) -> tuple[str, str]:
    """Where a checkpoint lies on a node: (folder to mount, folder that the engine loads)."""
    layout = Layout(item["layout"], models_dir, item["repo"], item["directory"])
    return layout.root, layout.snapshot(item["revision"] or "")


def mod_file(mod: Mapping[str, Any]) -> str:
    """Where a mod lies on a node. The path holds the hash of what it says, so that a changed mod is a changed rank."""
    said = json.dumps(
        [mod["target"], mod["run"], mod["original_sha256"], mod["replace"], mod["digest"]], sort_keys=True
    )
    folder = f"{MODS_DIR}/{mod['name']}-{hashlib.sha256(said.encode()).hexdigest()[:12]}"
    return folder if mod["folder"] else f"{folder}/{posixpath.basename(mod['target'])}"


def _mounts(recipe: Mapping[str, Any], topology: Mapping[str, Any]) -> list[dict[str, Any]]:
    def mount(source: str, target: str, read_only: bool) -> dict[str, Any]:
        return {"source": source, "target": target, "read_only": read_only}

    items = [recipe["checkpoint"], *([recipe["drafter"]] if recipe["drafter"] else [])]
    folders = [folder_of(item, topology["models_dir"])[0] for item in items]
    out = [mount(folder, folder, True) for folder in folders]
    out += [mount(mod_file(mod), mod["target"] or f"{MODS}/{mod['name']}", True) for mod in recipe["mods"]]
    if recipe["container"]["cache_dir"]:
        out.append(mount(recipe["container"]["cache_dir"], "/cache", False))
    return out + [mount(str(source), target, False) for target, source in recipe["container"]["mounts"].items()]


def _filled(value: Any, known: Mapping[str, str]) -> Any:
    """The value with ``{model}``, ``{drafter}`` and the like replaced; any other brace is left alone."""
    if isinstance(value, Mapping):
        return {name: _filled(item, known) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_filled(item, known) for item in value]
    if isinstance(value, str):
        return _PLACE.sub(lambda found: known[found[1]], value)
    return value


def places(recipe: Mapping[str, Any], topology: Mapping[str, Any]) -> dict[str, str]:
    """What a recipe may write as ``{name}`` in args, env, start and container.mounts."""
    drafter = recipe["drafter"]
    return {
        "model": folder_of(recipe["checkpoint"], topology["models_dir"])[1],
        "drafter": folder_of(drafter, topology["models_dir"])[1] if drafter else "none",
        "rank": str(topology["rank"]),
        "size": str(topology["size"]),
        "address": topology["address"],
        "head_address": topology["head_address"],
        "port": str(recipe["port"]),
        "master_port": str(recipe["master_port"]),
        "served_name": recipe["served_name"],
        # Kernels that were compiled for one image must not be loaded by another.
        "image_key": hashlib.sha256(image_name(recipe["image"]).encode()).hexdigest()[:12],
    }


def image_name(image: Mapping[str, Any]) -> str:
    """The reference to pull and run: pinned by digest when the recipe gives one."""
    reference: str = image["reference"]
    if not image.get("digest"):
        return reference
    name, _colon, tag = reference.rpartition(":")
    base = name if name and "/" not in tag else reference
    return f"{base}@{image['digest']}"


def rank_spec(recipe: Mapping[str, Any], topology: Mapping[str, Any], fabric: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rank spec of one rank.

    :param recipe: a normalised recipe (:func:`._recipe.normalise`).
    :param topology: ``cluster`` (str), ``rank`` and ``size`` (int), ``address`` and ``head_address`` (fabric IPv4 of this rank
        and of rank 0), ``models_dir`` (absolute path).
    :param fabric: ``env``: the environment that the fabric role derived for this node (may be empty: NCCL then chooses).
    """
    known = places(recipe, topology)
    recipe = {**recipe, **{key: _filled(recipe[key], known) for key in ("args", "env", "start", "container")}}
    container = recipe["container"]
    entrypoint, argv = _command(recipe, topology, known["model"])
    return {
        "image": image_name(recipe["image"]),
        "name": recipe["container_name"],
        "entrypoint": entrypoint,
        "argv": argv,
        "env": _env(recipe, topology, fabric),
        "mounts": _mounts(recipe, topology),
        "ulimits": {name: _ulimit(value) for name, value in container["ulimits"].items()},
        "devices": list(container["devices"])
        if recipe["fabric"]["transport"] == "roce" and topology["size"] > 1
        else [],
        "gpus": container["gpus"],
        "cap_add": list(container["cap_add"]),
        "network_mode": container["network"],
        "ipc_mode": container["ipc"],
        "shm_size": container["shm_size"],
        "memory": container["memory"],
        "memory_swap": container["memory_swap"],
        "init": container["init"],
        "stop_timeout_s": container["stop_timeout_s"],
        # A lone rank never rejoins (case wd-pair-restart): recovery restarts the whole cluster, Docker never restarts a rank.
        "restart_policy": "no",
        "labels": {
            LABEL_CLUSTER: topology["cluster"],
            LABEL_RANK: str(topology["rank"]),
            LABEL_RECIPE: recipe["name"],
            LABEL_PORT: str(recipe["port"]),
            LABEL_ENGINE: engine_of(recipe),
        },
    }


def _ulimit(value: Any) -> dict[str, int]:
    if isinstance(value, Mapping):
        return {"soft": int(value["soft"]), "hard": int(value["hard"])}
    return {"soft": int(value), "hard": int(value)}


def spec_hash(spec: Mapping[str, Any]) -> str:
    """sha256 of the spec without its own label. Two specs with one hash start the same container."""
    bare = plain(spec)
    bare["labels"] = {k: v for k, v in bare["labels"].items() if k != LABEL_SPEC}
    return hashlib.sha256(json.dumps(bare, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def labelled(spec: Mapping[str, Any], declared_hash: str) -> dict[str, Any]:
    """The spec with the hash label. The hash is that of the *declared* spec: a GID index that drifts restarts nothing."""
    out = plain(spec)
    out["labels"][LABEL_SPEC] = declared_hash
    return out


def engine_of(recipe: Mapping[str, Any]) -> str:
    """``vllm/mp``, ``vllm/ray``, ``tensorfold`` or ``kit``: how the ranks of a cluster work together."""
    return f"vllm/{recipe['parallel']['backend']}" if recipe["engine"] == "vllm" else str(recipe["engine"])


def _without_allowed(spec: Mapping[str, Any]) -> dict[str, Any]:
    out = plain(spec)
    out["env"] = {k: v for k, v in out["env"].items() if k not in PER_RANK_ENV}
    out["labels"] = {k: v for k, v in out["labels"].items() if k not in PER_RANK_LABELS}
    argv, names = [], PER_RANK_FLAGS.get(out["labels"].get(LABEL_ENGINE, ""), ("--node-rank",))
    words = iter(out["argv"])
    for word in words:
        if word in names:
            next(words, None)
        elif word != "--headless":
            argv.append(word)
    out["argv"] = argv
    if out["labels"].get(LABEL_ENGINE) == "vllm/ray":
        # The head runs the engine, the others a node of Ray.
        del out["entrypoint"], out["argv"]
    return out


def check_group(specs: Sequence[Mapping[str, Any]]) -> None:
    """Raise RankSpecError unless the specs (by rank) of one cluster differ only where ranks may differ."""
    for rank, spec in enumerate(specs):
        count = spec["argv"].count("--headless")
        wanted = 1 if rank and spec["labels"].get(LABEL_ENGINE, "vllm/mp") == "vllm/mp" else 0
        if count != wanted:
            raise RankSpecError(f"rank {rank} has --headless {count} times: exactly the ranks above 0 have it, once.")
    reference = _without_allowed(specs[0])
    for rank, spec in enumerate(specs[1:], start=1):
        other = _without_allowed(spec)
        for key in reference:
            if other[key] != reference[key]:
                raise RankSpecError(
                    f"rank {rank} differs from rank 0 in {key}: {_difference(reference[key], other[key])}. "
                    "Ranks with different settings deadlock: give every rank of the cluster the same value."
                )


def _difference(a: Any, b: Any) -> str:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys = [k for k in sorted({*a, *b}) if a.get(k) != b.get(k)]
        return ", ".join(f"{k} is {a.get(k)!r} on rank 0 and {b.get(k)!r} here" for k in keys)
    return f"{a!r} on rank 0 and {b!r} here"


def docker_run_argv(spec: Mapping[str, Any]) -> list[str]:
    """The spec as ``docker run`` words, ready for an argv list or for :func:`docker_run_text`."""
    out = ["docker", "run", "--detach", "--name", spec["name"], "--restart", spec["restart_policy"]]
    if spec["init"]:
        out.append("--init")
    if spec["gpus"]:
        out += ["--gpus", spec["gpus"]]
    out += ["--network", spec["network_mode"]]
    if spec["ipc_mode"]:
        out += ["--ipc", spec["ipc_mode"]]
    out += ["--shm-size", spec["shm_size"]]
    if spec["memory"]:
        out += ["--memory", spec["memory"]]
    if spec["memory_swap"]:
        out += ["--memory-swap", spec["memory_swap"]]
    for name, limit in spec["ulimits"].items():
        out += ["--ulimit", f"{name}={limit['soft']}:{limit['hard']}"]
    for cap in spec["cap_add"]:
        out += ["--cap-add", cap]
    for device in spec["devices"]:
        out += ["--device", f"{device}:{device}"]
    out += ["--stop-timeout", str(spec["stop_timeout_s"])]
    for mount in spec["mounts"]:
        out += ["--volume", f"{mount['source']}:{mount['target']}" + (":ro" if mount["read_only"] else "")]
    for name, value in spec["env"].items():
        out += ["--env", f"{name}={value}"]
    for name, value in spec["labels"].items():
        out += ["--label", f"{name}={value}"]
    # docker run takes one word as entrypoint; the others lead the command.
    if spec["entrypoint"]:
        out += ["--entrypoint", spec["entrypoint"][0]]
    return [*out, spec["image"], *spec["entrypoint"][1:], *spec["argv"]]


def docker_run_text(spec: Mapping[str, Any]) -> str:
    """The ``docker run`` as shell text, one option a line, quoted so that it can be pasted."""
    words = docker_run_argv(spec)
    image_at = len(words) - len(spec["argv"]) - len(spec["entrypoint"][1:]) - 1
    first = next((i for i, word in enumerate(words) if i > image_at and word.startswith("--")), len(words))
    lines = [" ".join(shlex.quote(w) for w in words[:3])]
    lines += _option_lines(words[3:image_at])
    lines.append(" ".join(shlex.quote(w) for w in words[image_at:first]))
    lines += _option_lines(words[first:])
    return " \\\n  ".join(lines)


def _option_lines(words: list[str]) -> list[str]:
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += " " + shlex.quote(word)
    return lines
