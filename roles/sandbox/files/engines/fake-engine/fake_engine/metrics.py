# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The recorded /metrics page with this engine's own numbers."""

from __future__ import annotations

import math
import re
import threading
import time

from .arguments import RECORDED

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
# Values that are not counted: they stay as recorded.
CONSTANT = ("python_", "process_", "vllm:cache_config_info", "vllm:engine_sleep_state")
# Made by the HTTP layer from what it was asked; not part of the engine's page.
LEFT_OUT = ("http_", "# HELP http_", "# TYPE http_")


class Page:
    """Samples in the recorded order; everything that counts begins at 0."""

    def __init__(self, model_name: str, speculative: bool) -> None:
        self.lock = threading.Lock()
        self.comments: list[str] = []
        self.values: dict[str, float] = {}
        self.lines: list[str] = []
        self.labels: dict[str, list[str]] = {}
        self.fixed: dict[str, str] = {}
        begin = repr(time.time())
        for line in (RECORDED / "metrics.prom").read_text(encoding="utf-8").splitlines():
            if line.startswith(LEFT_OUT) or (not speculative and "spec_decode" in line):
                continue
            line = line.replace('model_name="tiny"', f'model_name="{model_name}"')
            self.lines.append(line)
            found = _SAMPLE.match(line)
            if not found:
                continue
            key = line.rsplit(" ", 1)[0]
            if found["name"].startswith(CONSTANT):
                self.fixed[key] = found["value"]
            elif found["name"].endswith("_created"):
                self.fixed[key] = begin
            else:
                self.values[key] = 0.0
                self.labels.setdefault(found["name"], []).append(key)
        self._zero = dict(self.values)

    def _keys(self, name: str, labels: str) -> list[str]:
        keys = self.labels.get(name, [])
        return [key for key in keys if labels in key] if labels else keys

    def add(self, name: str, value: float = 1.0, labels: str = "") -> None:
        """Add to a counter or gauge; `labels` is part of the sample's label text."""
        with self.lock:
            for key in self._keys(name, labels):
                self.values[key] += value

    def set(self, name: str, value: float, labels: str = "") -> None:
        with self.lock:
            for key in self._keys(name, labels):
                self.values[key] = value

    def observe(self, name: str, value: float, count: int = 1) -> None:
        """`count` observations of `value` for a histogram."""
        with self.lock:
            for key in self.labels.get(f"{name}_bucket", []):
                found = re.search(r'le="([^"]+)"', key)
                if found and value <= (math.inf if found[1] == "+Inf" else float(found[1])):
                    self.values[key] += count
            for suffix, amount in (("_count", float(count)), ("_sum", value * count)):
                for key in self.labels.get(name + suffix, []):
                    self.values[key] += amount

    def value(self, name: str) -> float:
        return sum(self.values[key] for key in self.labels.get(name, []))

    def reset(self) -> None:
        with self.lock:
            self.values = dict(self._zero)

    def text(self) -> str:
        with self.lock:
            out = []
            for line in self.lines:
                key = line.rsplit(" ", 1)[0]
                if line.startswith("#"):
                    out.append(line)
                elif key in self.values:
                    out.append(f"{key} {self.values[key]!r}")
                else:
                    out.append(f"{key} {self.fixed[key]}")
            return "\n".join(out) + "\n"
