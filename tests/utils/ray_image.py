"""An image with real Ray and the fake engine, made from the sandbox's own two images; the CPU build of vLLM refuses Ray.

python tests/utils/ray_image.py        (the sandbox has to be up: the image goes to its registry)
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ROOT / "roles/sandbox/files/engines"
sys.path.insert(0, str(ENGINES))

from build_engine import LABEL, inputs  # noqa: E402
from registry import Registry, RegistryError  # noqa: E402

BASE = "127.0.0.1:5000/sandbox/vllm-cpu:0.32.0"
REFERENCE = "127.0.0.1:5000/sandbox/fake-ray:1"
SITE = "/opt/vllm/lib/python3.11/site-packages"
# Ray's own start of `ray`, and the fake engine in the place of vLLM's program.
INSTALL = f"""
for wheel in /wheels/*.whl; do python3 -m zipfile -e "$wheel" {SITE}; done
printf '#!/opt/vllm/bin/python3\\nfrom ray.scripts.scripts import main\\nmain()\\n' >/opt/vllm/bin/ray
chmod -R a+rx /opt/vllm/bin/ray {SITE}/ray
cp -r /source /opt/fake-engine
ln -sf /opt/fake-engine/vllm /opt/vllm/bin/vllm
"""


def docker(*words: str) -> str:
    return subprocess.run(["docker", *words], check=True, capture_output=True, text=True, timeout=600).stdout.strip()


def build() -> str:
    """Build and push the image; its reference as the nodes' recipes name it. Raises CalledProcessError without a wheel of Ray."""
    made_of = inputs(ENGINES / "fake-engine", INSTALL)
    registry = Registry(REFERENCE)
    with contextlib.suppress(RegistryError):
        if registry.label(LABEL) == made_of:
            return REFERENCE.split("/", 1)[1]
    with tempfile.TemporaryDirectory(suffix=".gb10-ray") as wheels:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            wheels,
            "--python-version",
            "3.11",
        ]
        subprocess.run([*pip, "--only-binary=:all:", "ray", "msgpack"], check=True, capture_output=True, timeout=600)
        mounts = ["--volume", f"{wheels}:/wheels:ro", "--volume", f"{ENGINES / 'fake-engine'}:/source:ro"]
        made = docker("create", *mounts, "--entrypoint", "bash", BASE, "-ec", INSTALL)
        try:
            docker("start", "--attach", made)
            docker("commit", "--change", f"LABEL gb10.fleet.sandbox=images {LABEL}={made_of}", made, REFERENCE)
        finally:
            docker("rm", "--force", made)
    registry.push(REFERENCE)
    return REFERENCE.split("/", 1)[1]


if __name__ == "__main__":
    print(build())
