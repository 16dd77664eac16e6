#!/usr/bin/env python3
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Write the fake engine's root file system to standard output, as a tar; runs inside a container of the sandbox's base image.

    pack.py SOURCE >rootfs.tar

Only what the fake engine needs of that image: Python and its library, a shell and a few small tools, the shared libraries
that these load. 60 MB instead of 360, without another package download.
"""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

TOOLS = "sh dash bash env cat chmod cp date echo grep head id kill ls mkdir mv ps rm sed sleep sort stat tail test touch true wc"
TOP = ("/bin", "/sbin", "/lib", "/lib64")
FILES = ("/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/os-release", "/usr/lib/os-release", "/usr/lib/ssl")
EMPTY = ("/dev", "/proc", "/sys", "/run", "/root", "/tmp", "/var/tmp")  # noqa: S108
# Of Python's library.
LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "ensurepip", "tkinter", "turtledemo", "distutils", "pydoc_data"}
INSTALLED = "/opt/fake-engine"


def libraries(files: list[str]) -> set[str]:
    """Shared libraries, and the loader, that these programs and modules load."""
    out = set()
    for file in files:
        listed = subprocess.run(["ldd", file], capture_output=True, text=True, timeout=30, check=False).stdout
        out |= {word for line in listed.splitlines() for word in line.split() if word.startswith("/")}
    return out


def main() -> int:
    source = Path(sys.argv[1])
    python = os.path.realpath(sys.executable)
    tools = {found for name in TOOLS.split() if (found := shutil.which(name, path="/usr/bin"))}
    standard = Path(sysconfig.get_path("stdlib"))
    modules = [str(path) for path in (standard / "lib-dynload").glob("*.so")]
    keep = {*tools, python, "/usr/bin/python3", *libraries([*tools, python, *modules])}
    keep |= {path for path in (*TOP, *FILES) if os.path.lexists(path)}
    # /lib/x/libz.so.1 is under /usr where /lib is a link; a name that is a link needs what it points to.
    paths = {str(Path(path).parent.resolve() / Path(path).name) for path in keep}
    paths |= {os.path.realpath(path) for path in paths if not Path(path).is_dir()}
    with tempfile.TemporaryDirectory() as work, tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as out:
        for path in sorted(paths):
            out.add(path, arcname=path.lstrip("/"), recursive=False)
        out.add(
            str(standard),
            arcname=str(standard).lstrip("/"),
            filter=lambda entry: None if LEFT_OUT & set(Path(entry.name).parts[3:]) else entry,
        )
        engine = Path(work) / "fake-engine"
        shutil.copytree(source, engine, ignore=shutil.ignore_patterns("pack.py", "__pycache__", "*.txt"))
        compileall.compile_dir(str(engine), quiet=1, stripdir=str(engine), prependdir=INSTALLED)
        out.add(str(engine), arcname=INSTALLED.lstrip("/"))
        for name in ("vllm", "tensorfold"):
            link = tarfile.TarInfo(f"usr/bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, f"{INSTALLED}/{name}"
            out.addfile(link)
            # Its modules, so that its parser can be asked without it.
            out.add(str(engine / "shims" / name), arcname=f"usr/lib/python3/dist-packages/{name}")
        out.add(str(engine / "kit"), arcname="opt/glm53")
        for path in EMPTY:
            folder = tarfile.TarInfo(path.lstrip("/"))
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if "tmp" in path else 0o755
            out.addfile(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
