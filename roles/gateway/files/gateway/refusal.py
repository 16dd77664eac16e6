# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a refused request is told: a status and one sentence, in the shape that OpenAI's clients read."""

from __future__ import annotations

import json
import math
from typing import Any


class Refusal(Exception):
    """A request that is not passed on. ``outcome`` is its name in the metrics and in the log."""

    def __init__(self, status: int, code: str, sentence: str, retry_after_s: float | None = None) -> None:
        super().__init__(sentence)
        self.status, self.code, self.sentence, self.retry_after_s = status, code, sentence, retry_after_s

    def body(self) -> bytes:
        return json.dumps({"error": self.error()}).encode()

    def error(self) -> dict[str, Any]:
        kind = (
            "invalid_request_error"
            if self.status < 429
            else "rate_limit_error"
            if self.status == 429
            else "server_error"
        )
        return {"message": self.sentence, "type": kind, "param": None, "code": self.code}

    def headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers
