# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Take secrets out of what is shown or packed: argument words, environment, ``docker inspect``, log text. Pure functions.

Keys stand in argv, in env, in the engine's own "non-default args" line, and in headers that a proxy logs. What is known to be a
secret (a value under a secret's name) is taken out wherever it appears, what looks like one by its form. Nothing of Ansible.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

GONE = "<removed>"
# A name of a variable or option that holds a secret. Not: tokenizer, max_tokens, eos_token, a key's file, monkeys.
_SECRET_NAME = re.compile(
    r"(?:^|[_\-.])(?:api[_\-]?keys?|access[_\-]?keys?|private[_\-]?keys?|secrets?(?:[_\-]?(?:access[_\-]?)?keys?)?|"
    r"passw(?:or)?d|passphrase|credentials?|auth(?:orization)?|bearer|cookie)$|"
    r"^(?:.*[_\-])?(?:hf|hub|auth|access|api|bearer|refresh|session|github|gitlab|registry|bot)[_\-]?tokens?$|^token$",
    re.IGNORECASE,
)
_PEM = re.compile(r"-----BEGIN ([A-Z ]*PRIVATE KEY)-----.*?(?:-----END \1-----|\Z)", re.DOTALL)
_FORMS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), GONE),
    (re.compile(r"\bsk-[A-Za-z0-9_\-]{16,}"), GONE),
    (re.compile(r"\bnvapi-[A-Za-z0-9_\-]{16,}"), GONE),
    (re.compile(r"\bgh[pousr]_[A-Za-z0-9]{20,}"), GONE),
    (re.compile(r"\bAKIA[0-9A-Z]{16}\b"), GONE),
    (re.compile(r"\beyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{4,}"), GONE),
    (re.compile(r"(?i)\b(authorization['\"]?\s*[:=]\s*['\"]?(?:bearer|basic)\s+)[^\s'\",]+"), rf"\1{GONE}"),
    (re.compile(r"(?i)\b(bearer\s+)[A-Za-z0-9._~+/\-]{8,}=*"), rf"\1{GONE}"),
    (re.compile(r"(\b[a-z][a-z0-9+.\-]*://[^\s/:@]+:)[^\s/@]+(@)"), rf"\1{GONE}\2"),
    (_PEM, GONE),
    # 'api_key': ['abc'], "password": "abc", api_key=abc, --api-key abc
    (
        re.compile(
            r"(?i)((?:['\"]|\b|--)(?:[a-z0-9]+[_\-])*(?:api[_\-]?key|access[_\-]?key|secret|private[_\-]?key|password|passwd|passphrase|"
            r"hf[_\-]token|auth[_\-]token|access[_\-]token)['\"]?\s*(?:[:=]|\s(?=\S))\s*)(\[[^\]]*\]|'[^']*'|\"[^\"]*\"|[^\s,}\]]+)"
        ),
        rf"\1{GONE}",
    ),
)
_SHORTEST = 6


def is_secret(name: str) -> bool:
    """Whether a variable or option of this name holds a secret (``VLLM_API_KEY``, ``--hf-token``; not ``max-tokens``)."""
    return bool(_SECRET_NAME.search(name.lstrip("-"))) and not name.lower().endswith(("_file", "-file"))


def words(argv: Sequence[str]) -> list[str]:
    """Argument words with the values of secret options taken out; an option may have several values (``--api-key A B``)."""
    out: list[str] = []
    secret = False
    for word in argv:
        if word.startswith("-"):
            name, equals, dummy = word.partition("=")
            secret = is_secret(name) and not equals
            out.append(f"{name}={GONE}" if equals and is_secret(name) else text(word))
        else:
            out.append(GONE if secret else text(word))
    return out


def environment(pairs: Iterable[str]) -> list[str]:
    """``NAME=value`` pairs with secret values taken out."""
    out = []
    for pair in pairs:
        name, equals, value = pair.partition("=")
        out.append(f"{name}={GONE}" if equals and is_secret(name) else f"{name}{equals}{text(value)}")
    return out


def text(raw: str, known: Iterable[str] = ()) -> str:
    """Free text without what looks like a secret, and without the ``known`` ones wherever they appear."""
    for value in sorted({value for value in known if len(value) >= _SHORTEST}, key=len, reverse=True):
        raw = raw.replace(value, GONE)
    for pattern, instead in _FORMS:
        raw = pattern.sub(instead, raw)
    return raw


# What a line has to contain to be worth the patterns above.
_HINTS = ("key", "KEY", "Key", "oken", "OKEN", "ecret", "ECRET", "assw", "ASSW", "assphrase", "ASSPHRASE", "earer", "EARER",
          "uthorization", "UTHORIZATION", "://", "hf_", "sk-", "nvapi-", "gh", "AKIA", "eyJ")  # fmt: skip


def log(raw: str, known: Iterable[str] = ()) -> str:
    """As :func:`text`, for megabytes: line by line, and only those lines that may hold something."""
    for value in sorted({value for value in known if len(value) >= _SHORTEST}, key=len, reverse=True):
        raw = raw.replace(value, GONE)
    if "-----BEGIN" in raw:
        raw = _PEM.sub(GONE, raw)
    out = []
    for line in raw.split("\n"):
        if any(hint in line for hint in _HINTS):
            for pattern, instead in _FORMS:
                line = pattern.sub(instead, line)
        out.append(line)
    return "\n".join(out)


def inspect(answer: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """``docker inspect`` of a container without secrets, and the secrets that it held (to take them out of logs, too)."""
    config = answer.get("Config") or {}
    known = set(secrets(config.get("Env") or [], [*(config.get("Entrypoint") or []), *(config.get("Cmd") or [])]))
    known |= {str(v) for k, v in (config.get("Labels") or {}).items() if is_secret(k)}
    return _clean(answer, known), known


def secrets(env: Iterable[str], argv: Sequence[str]) -> list[str]:
    """The values that stand under a secret's name."""
    found = [value for name, dummy, value in (pair.partition("=") for pair in env) if is_secret(name) and value]
    secret = False
    for word in argv:
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            secret = is_secret(name) and not equals
            if equals and is_secret(name):
                found.append(value)
        elif secret:
            found.append(word)
    return [value for value in found if len(value) >= _SHORTEST]


def _clean(value: Any, known: set[str], name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {
            k: GONE if is_secret(str(k)) and isinstance(v, str) and v else _clean(v, known, str(k))
            for k, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        if name == "Env":
            return environment(text(str(pair), known) for pair in value)
        if name in ("Cmd", "Entrypoint", "Args"):
            return [text(word, known) for word in words([str(word) for word in value])]
        return [_clean(item, known, name) for item in value]
    return text(value, known) if isinstance(value, str) else value
