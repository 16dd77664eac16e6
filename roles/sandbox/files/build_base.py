#!/usr/bin/env python3
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Make the root file system of the node image with mmdebstrap, from the apt sources that this machine itself uses.

    build_base.py --packages a,b,c --customize HOOK --output rootfs.tar [--suite trixie] [--etc-apt /etc/apt]

Reads one-line lists and deb822 `.sources` alike. Only the distribution's own archives are taken (a suite named after this
machine's release, component main), so a third party's repository on the machine plays no part. Prints the suite.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

POCKETS = ("", "-updates", "-security", "/updates")
# Never needed on a node: half of the image's size.
EXCLUDED = (
    "/usr/share/man/*",
    "/usr/share/doc/*",
    "/usr/share/locale/*",
    "/usr/share/info/*",
    "/usr/share/lintian/*",
    "/usr/share/bash-completion/*",
    "/usr/share/zsh/*",
    "/usr/sbin/dnet",
    "/usr/bin/dnet",
    "/usr/sbin/ovrouter",
    "/usr/bin/ovrouter",
)
# Debian split the client off docker.io with release 13.
SPLIT_CLI = ("trixie", "forky", "sid")
TIMEOUT_S = 900


class NoSourceError(Exception):
    """This machine's apt has no archive of the wanted suite."""


@dataclass(frozen=True)
class Source:
    """One apt source; `options` are deb822 fields such as Signed-By."""

    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...]
    options: dict[str, str] = field(default_factory=dict)


def parse_list(text: str) -> Iterator[Source]:
    """Entries of a one-line list: `deb [arch=amd64 signed-by=/x.gpg] URI suite component...`."""
    names: dict[str, str] = {"arch": "Architectures", "signed-by": "Signed-By", "trusted": "Trusted"}
    for line in text.splitlines():
        found = re.match(r"\s*deb\s+(?:\[([^\]]*)\]\s*)?(\S+)\s+(\S+)\s*([^#]*)", line)
        if not found:
            continue
        pairs = [word.partition("=") for word in (found[1] or "").split()]
        options = {names[key]: value for key, _, value in pairs if key in names}
        yield Source((found[2],), (found[3],), tuple(found[4].split()), options)


def parse_deb822(text: str) -> Iterator[Source]:
    """Stanzas of a `.sources` file; a disabled one is skipped. Comments may stand between fields."""
    for stanza in re.split(r"\n\s*\n", "\n".join(line for line in text.splitlines() if not line.startswith("#"))):
        fields: dict[str, str] = {}
        key = ""
        for line in stanza.splitlines():
            if line[:1] in (" ", "\t") and key:
                fields[key] += "\n" + line
            elif ":" in line:
                key, _, value = line.partition(":")
                key = key.strip().title()
                fields[key] = value.strip()
        if "deb" not in fields.get("Types", "").split() or fields.get("Enabled", "yes").lower() in ("no", "false"):
            continue
        options: dict[str, str] = {
            name: fields[name] for name in ("Architectures", "Signed-By", "Trusted") if name in fields
        }
        yield Source(
            tuple(fields.get("Uris", "").split()),
            tuple(fields.get("Suites", "").split()),
            tuple(fields.get("Components", "").split()),
            options,
        )


def read_sources(etc_apt: Path) -> list[Source]:
    """All sources of this machine, in apt's own order of files."""
    found: list[Source] = []
    files = [etc_apt / "sources.list", *sorted((etc_apt / "sources.list.d").glob("*"))]
    for path in files:
        if path.suffix == ".list" and path.is_file():
            found += parse_list(path.read_text(encoding="utf-8"))
        elif path.suffix == ".sources" and path.is_file():
            found += parse_deb822(path.read_text(encoding="utf-8"))
    return found


def choose(sources: Iterable[Source], codename: str, suite: str) -> list[Source]:
    """The distribution's own archives, with `codename` (this machine's release) replaced by `suite` (the node's)."""
    chosen = []
    for source in sources:
        own = [found for found in source.suites if found in {codename + pocket for pocket in POCKETS}]
        kept = [suite + found.removeprefix(codename) for found in own]
        if kept and "main" in source.components:
            chosen.append(Source(source.uris, tuple(kept), source.components, source.options))
    if not any(suite in source.suites for source in chosen):
        raise NoSourceError(
            f"apt on this machine has no archive of {codename!r} with component main (looked at {len(list(sources))} sources). "
            "Add the distribution's archive to /etc/apt/sources.list.d, or set sandbox_apt_sources to a folder that has one."
        )
    return chosen


def to_deb822(sources: Iterable[Source]) -> str:
    """The chosen sources as mmdebstrap reads them."""
    stanzas = []
    for source in sources:
        lines = ["Types: deb", f"URIs: {' '.join(source.uris)}", f"Suites: {' '.join(source.suites)}"]
        lines.append(f"Components: {' '.join(source.components)}")
        lines += [f"{name}: {value}" for name, value in source.options.items()]
        stanzas.append("\n".join(lines) + "\n")
    return "\n".join(stanzas)


def codename_of(os_release: str) -> str:
    """VERSION_CODENAME of this machine."""
    found = re.search(r'^VERSION_CODENAME="?([a-z]+)"?$', os_release, re.MULTILINE)
    if not found:
        raise NoSourceError("/etc/os-release names no VERSION_CODENAME: the node image is built on Debian or Ubuntu.")
    return found[1]


def available(package: str) -> bool:
    """Whether this machine's apt knows a package."""
    shown = subprocess.run(["apt-cache", "show", package], check=False, capture_output=True, timeout=60)
    return shown.returncode == 0


def command(packages: Iterable[str], customize: str, suite: str, output: str, sources: str) -> list[str]:
    """The mmdebstrap call."""
    argv = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(packages)}"]
    argv += ["--aptopt=APT::Install-Recommends false", "--aptopt=Acquire::Retries 3"]
    argv += [f"--dpkgopt=path-exclude={pattern}" for pattern in EXCLUDED]
    argv += [f'--customize-hook={customize} "$1"', suite, output, sources]
    return argv


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", required=True)
    parser.add_argument("--customize", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--suite", default="")
    parser.add_argument("--etc-apt", default="/etc/apt", type=Path)
    given = parser.parse_args()
    try:
        codename = codename_of(Path("/etc/os-release").read_text(encoding="utf-8"))
        suite = given.suite or codename
        sources = choose(read_sources(given.etc_apt), codename, suite)
    except NoSourceError as error:
        print(error, file=sys.stderr)
        return 1
    packages = given.packages.split(",")
    if suite in SPLIT_CLI or (suite == codename and available("docker-cli")):
        packages.append("docker-cli")
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "node.sources"
        listed.write_text(to_deb822(sources), encoding="utf-8")
        done = subprocess.run(
            command(packages, given.customize, suite, given.output, str(listed)),
            check=False,
            stdout=sys.stderr,
            timeout=TIMEOUT_S,
        )
    if done.returncode:
        print(f"mmdebstrap ended with {done.returncode}; its lines above say why", file=sys.stderr)
        return 1
    print(suite)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
