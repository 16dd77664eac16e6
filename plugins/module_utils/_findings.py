# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Findings: all of all nodes are collected, then reported together. Errors stop a cluster, warnings do not."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

ERROR = "error"
WARNING = "warning"
NOTE = "note"
ORDER = (ERROR, WARNING, NOTE)


@dataclass(frozen=True)
class Finding:
    """One sentence or two: the node, what was wanted, what was found, what to do.

    ``code`` is stable and may be accepted by the user (``fabric_accept``, ``preflight_accept``): the error becomes a warning.
    """

    severity: str
    code: str
    node: str
    text: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def accept(findings: Iterable[Finding], codes: Sequence[str]) -> list[Finding]:
    """Errors whose code the user accepts become warnings."""
    return [
        replace(finding, severity=WARNING) if finding.severity == ERROR and finding.code in codes else finding
        for finding in findings
    ]


def of(findings: Iterable[Finding], severity: str) -> list[Finding]:
    return [finding for finding in findings if finding.severity == severity]


def count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def headline(subject: str, findings: Sequence[Finding]) -> str:
    """``cluster alpha: fabric: 1 error, 2 warnings``"""
    errors, warnings = len(of(findings, ERROR)), len(of(findings, WARNING))
    if not errors and not warnings:
        return f"{subject}: no errors, no warnings"
    parts = [count(number, word) for number, word in ((errors, "error"), (warnings, "warning")) if number]
    return f"{subject}: {', '.join(parts)}"


def lines(findings: Iterable[Finding], width: int = 100, severities: Sequence[str] = ORDER) -> list[str]:
    """Findings as wrapped lines, errors first; the order within a severity is kept."""
    found = list(findings)
    result: list[str] = []
    for severity in severities:
        for finding in of(found, severity):
            head = f"{severity + ':':<9}"
            text = f"{finding.text} [{finding.code}]"
            paragraphs = text.split("\n")
            first = textwrap.wrap(
                paragraphs[0],
                width,
                initial_indent=head,
                subsequent_indent=" " * 9,
                break_on_hyphens=False,
                break_long_words=False,
            )
            result += first
            for paragraph in paragraphs[1:]:
                result.append(" " * 9 + paragraph)
    return result


def report(subject: str, findings: Sequence[Finding], width: int = 100) -> str:
    return "\n".join([headline(subject, findings), *lines(findings, width)])
