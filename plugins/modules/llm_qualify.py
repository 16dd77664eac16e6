#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: llm_qualify
short_description: Measure an engine by requests and by its own counters
version_added: "0.1.0"
description:
  - Sends what a plan says and times it - short prompts, unique cold prompts, exact repeats, decode, several streams at once,
    correctness checks, and a soak - and reads the engine's counters around every stage.
  - Judges nothing. The filter P(gb10.fleet.qualify_result#filter) does.
  - An engine that stops answering is a result (RV(measured.ended_early)), not a failure of this module.
author:
  - The gb10.fleet maintainers (@gb10-fleet)
extends_documentation_fragment:
  - gb10.fleet.attributes
attributes:
  check_mode:
    support: full
    details: Sends nothing in check mode.
  diff_mode:
    support: N/A
    details: This module never changes anything on the node.
  idempotent:
    support: N/A
    details: It measures anew every time.
options:
  url:
    description: Base URL of the engine or of a gateway before it.
    type: str
    required: true
  metrics_url:
    description: Base URL whose C(/metrics) is the engine's own. By default O(url).
    type: str
  model:
    description: Model name.
    type: str
    required: true
  plan:
    description: What to send, from P(gb10.fleet.qualify_plan#filter).
    type: dict
    required: true
  api_key_file:
    description: File whose first line is the API key.
    type: path
  state_file:
    description:
      - Keep what was measured after every stage here. A run that was interrupted goes on behind the last whole stage, if plan and
        O(engine) are the same.
      - A run on the same file whose controller went away is ended first.
    type: path
  engine:
    description: What tells one start of the engine from another, such as the container's id and its start time.
    type: str
    default: ""
  progress_file:
    description: Write how far it is into this file, for M(gb10.fleet.follow).
    type: path
"""

EXAMPLES = r"""
- name: Measure the engine on its node
  gb10.fleet.llm_qualify:
    url: http://127.0.0.1:8000
    model: glm-5.3-flash
    plan: "{{ topology_recipe | gb10.fleet.qualify_plan('quick') }}"
  register: qualify_measured
"""

RETURN = r"""
measured:
  description: What was seen; the input of P(gb10.fleet.qualify_result#filter).
  returned: success
  type: dict
  contains:
    requests: {description: "One row per request - stage, at, status, error, prompt, cached and completion tokens, ttft_s, total_s, tokens_per_s.", type: list, elements: dict, returned: success}
    stages: {description: "One entry per stage - name, began, ended, and by how much each counter grew.", type: list, elements: dict, returned: success}
    concurrency: {description: "One entry per step - streams, tokens, seconds, rounds (tokens a second of each), tokens_per_s (their median), errors.", type: list, elements: dict, returned: success}
    checks: {description: "Correctness by name - ok, why, next.", type: dict, returned: success}
    metrics: {description: "Counters before and after; error where the page could not be read; reset, the stage in which they began anew.", type: dict, returned: success}
    ended_early: {description: "Why the run ended before its end - stage, error, status, key_needed; or null.", type: dict, returned: success}
"""  # noqa: E501

import contextlib
import fcntl
import hashlib
import http.client
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gb10.fleet.plugins.module_utils._openai_client import Deadline, Endpoint, read_key
from ansible_collections.gb10.fleet.plugins.module_utils._qualify_client import Run

VERSION_TIMEOUT_S = 10.0


def write(path: Path, value: Mapping[str, Any]) -> None:
    """A JSON file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    Path(name).replace(path)


def identity(params: Mapping[str, Any]) -> str:
    """What has to be the same for a run to be taken up: endpoint, plan, and this start of the engine."""
    same = [params[name] for name in ("url", "model", "plan", "engine")]
    return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()


def take_over(state: Path, timeout_s: float = 10.0) -> IO[str]:
    """The only run on this state. One whose controller went away still sends requests: it is ended, what it measured is kept."""
    lock = state.with_name(f"{state.name}.lock").open("a+", encoding="ascii")
    end = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > end:
                raise
        lock.seek(0)
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(lock.read()), signal.SIGTERM)
        time.sleep(0.2)
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def unfinished(path: Path | None, key: str) -> dict[str, Any] | None:
    """What an interrupted run of the same plan on the same engine measured."""
    try:
        state = json.loads(path.read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        return None
    return dict(state["measured"]) if isinstance(state, dict) and state.get("key") == key else None


def progress(path: str | None) -> Callable[[str], None]:
    """Writes lines of progress; the process id says whether the job still lives."""
    begun = time.monotonic()

    def tell(line: str) -> None:
        if path:
            write(Path(path), {"pid": os.getpid(), "line": f"{time.monotonic() - begun:.0f} s: {line}"})

    return tell


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "metrics_url": {"type": "str"},
            "model": {"type": "str", "required": True},
            "plan": {"type": "dict", "required": True},
            "api_key_file": {"type": "path", "no_log": False},
            "state_file": {"type": "path"},
            "engine": {"type": "str", "default": ""},
            "progress_file": {"type": "path"},
        },
        supports_check_mode=True,
    )
    if module.check_mode:
        module.exit_json(changed=False, measured={})
    p = module.params
    try:
        key = read_key(p["api_key_file"])
    except OSError as exc:
        module.fail_json(msg=f"api_key_file {p['api_key_file']} cannot be read: {exc.strerror}.")
    state = Path(p["state_file"]) if p["state_file"] else None
    known_by, held = identity(p), None
    if state:
        state.parent.mkdir(parents=True, exist_ok=True)
        try:
            held = take_over(state)
        except BlockingIOError:
            module.fail_json(
                msg=f"Another qualification holds {state} and does not end. Look for llm_qualify on this node."
            )

    def keep(measured: Mapping[str, Any]) -> None:
        if state:
            write(state, {"key": known_by, "measured": measured})

    run = Run(
        Endpoint(p["url"], key),
        p["model"],
        p["plan"],
        Endpoint(p["metrics_url"], key) if p["metrics_url"] else None,
        unfinished(state, known_by),
        progress(p["progress_file"]),
        keep,
    )
    measured = run.run()
    try:
        status, said = run.endpoint.text("GET", "/version", Deadline(VERSION_TIMEOUT_S))
        measured["engine_version"] = json.loads(said).get("version") if status == 200 else None
    except (OSError, http.client.HTTPException, ValueError, AttributeError):
        measured["engine_version"] = None
    if state and held:
        state.unlink(missing_ok=True)
        held.close()
    module.exit_json(changed=False, measured=measured)


if __name__ == "__main__":
    main()
