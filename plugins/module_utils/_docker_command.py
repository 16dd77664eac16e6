# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The ``docker`` command, for what changes a container. Questions go to the engine's socket (``_docker_api``), 50 ms cheaper.

Standard library only, and nothing of Ansible.
"""

from __future__ import annotations

from collections.abc import Sequence

from ansible_collections.gb10.fleet.plugins.module_utils._command import run
from ansible_collections.gb10.fleet.plugins.module_utils._docker_api import DockerError, DockerNotFound


def docker(argv: Sequence[str], timeout_s: float, name: str | None = None) -> str:
    """What ``argv`` printed. Raises DockerNotFound where there is no such container, DockerError for all else.

    :param name: of the container; messages then show the first two words in place of a long ``argv``.
    """
    answer = run(argv, timeout_s)
    shown, whose = (" ".join(argv), "") if name is None else (" ".join(argv[:2]), f" of {name}")
    if answer.missing:
        raise DockerError("There is no docker command on this node. Install the Docker engine.")
    if answer.timed_out:
        raise DockerError(f"`{shown}` gave no answer within {timeout_s:.0f} s. Run: systemctl status docker")
    if answer.ok:
        return answer.out.strip()
    said = (answer.err.strip() or answer.out.strip()).removesuffix("See 'docker run --help'.").strip()
    kind = DockerNotFound if "No such container" in answer.err else DockerError
    raise kind(f"`{shown}`{whose} failed: {said}")
