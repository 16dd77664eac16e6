#!/usr/bin/python
# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: chat_requests
short_description: Send chat requests to an engine from its node and time them
version_added: "0.1.0"
description:
  - Sends streamed chat completions of given shapes, one after the other or several at once, and returns the time to the
    first token and tokens per second of each. Used to warm an engine up, and for one smoke request.
  - A prompt that turns out too long for the engine is halved until it fits.
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
    support: full
options:
  url:
    description: Base URL of the engine as this node reaches it.
    type: str
    required: true
  model:
    description: Model name.
    type: str
    required: true
  requests:
    description: What to send, in this order.
    type: list
    elements: dict
    required: true
    suboptions:
      prompt:
        description: The words. Made up in the length of O(requests[].prompt_tokens) when unset.
        type: str
      prompt_tokens:
        description: Length of a made-up prompt, about.
        type: int
        default: 16
      max_tokens:
        description: Length of the answer.
        type: int
        default: 16
      concurrency:
        description: How many of this shape at once.
        type: int
        default: 1
  timeout_s:
    description: Limit of each request.
    type: float
    default: 600
  api_key_file:
    description: File on this node whose first line is the API key.
    type: path
"""

EXAMPLES = r"""
- name: Ask once
  gb10.fleet.chat_requests:
    url: http://127.0.0.1:8000
    model: glm-5.3-flash
    requests:
      - prompt: What is a GB10?
        max_tokens: 64
  register: smoke
"""

RETURN = r"""
answers:
  description: >-
    One entry per request, in the order of O(requests) - status, text, prompt_tokens, cached_tokens, completion_tokens, ttft_s,
    total_s, tokens_per_s, error.
  returned: success
  type: list
  elements: dict
seconds:
  description: How long all of them took.
  returned: always
  type: float
"""

import http.client
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gb10.fleet.plugins.module_utils._openai_client import Deadline, Endpoint, read_key

# Words that most tokenizers know as one token each.
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def made_up(tokens: int, salt: int = 0) -> str:
    """A prompt of about ``tokens`` tokens; another ``salt`` begins differently, so that no prefix cache shortens it."""
    return " ".join([f"{salt}:", *(WORDS[(i + salt) % len(WORDS)] for i in range(max(tokens - 2, 1)))])


def too_long(answer: dict[str, Any]) -> bool:
    """Whether the engine refused the request for its length."""
    words = str(answer["error"] or "").lower()
    return answer["status"] == 400 and any(
        w in words for w in ("context length", "too long", "max_model_len", "maximum model length")
    )


def ask(endpoint: Endpoint, model: str, request: dict[str, Any], salt: int, timeout_s: float) -> dict[str, Any]:
    """One request; a made-up prompt that is too long is halved."""
    tokens = request["prompt_tokens"]
    while True:
        prompt = request["prompt"] or made_up(tokens, salt)
        step: dict[str, Any] = {
            "status": None,
            "text": None,
            "error": None,
            "ttft_s": None,
            "tokens_per_s": None,
            "completion_tokens": 0,
        }
        try:
            step.update(endpoint.chat(model, prompt, request["max_tokens"], Deadline(timeout_s)))
        except TimeoutError:
            step["error"] = f"no answer within {timeout_s:g} s"
        except (OSError, http.client.HTTPException, ValueError) as exc:
            step["error"] = f"{exc.__class__.__name__} {exc}".strip()
        if request["prompt"] or not too_long(step) or tokens < 16:
            return step
        tokens //= 2


def send(params: dict[str, Any], key: str | None) -> list[dict[str, Any]]:
    """All requests: shapes one after the other, those of one shape at once."""
    endpoint = Endpoint(params["url"], key)
    answers: list[dict[str, Any]] = []
    for number, request in enumerate(params["requests"]):
        count = max(request["concurrency"], 1)
        with ThreadPoolExecutor(max_workers=count) as pool:
            salts = range(number * 1000, number * 1000 + count)
            answers += pool.map(
                lambda salt, r=request: ask(endpoint, params["model"], r, salt, params["timeout_s"]), salts
            )
    return answers


def main() -> None:
    request = {
        "prompt": {"type": "str"},
        "prompt_tokens": {"type": "int", "default": 16, "no_log": False},
        "max_tokens": {"type": "int", "default": 16, "no_log": False},
        "concurrency": {"type": "int", "default": 1},
    }
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "model": {"type": "str", "required": True},
            "requests": {"type": "list", "elements": "dict", "options": request, "required": True},
            "timeout_s": {"type": "float", "default": 600},
            "api_key_file": {"type": "path", "no_log": False},
        },
        supports_check_mode=True,
    )
    if module.check_mode:
        module.exit_json(changed=False, answers=[], seconds=0.0)
    try:
        key = read_key(module.params["api_key_file"])
    except OSError as exc:
        module.fail_json(msg=f"api_key_file {module.params['api_key_file']} cannot be read: {exc.strerror}.")
    begun = time.monotonic()
    answers = send(module.params, key)
    seconds = round(time.monotonic() - begun, 2)
    failed = [answer for answer in answers if answer["error"]]
    if failed:
        error = failed[0]["error"]
        module.fail_json(
            msg=f"{len(failed)} of {len(answers)} requests to {module.params['url']} failed: {error}.",
            answers=answers,
            seconds=seconds,
        )
    module.exit_json(changed=False, answers=answers, seconds=seconds)


if __name__ == "__main__":
    main()
