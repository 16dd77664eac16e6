# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the gateway is told: its configuration, its keys, and why the engine is away."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import ssl
import time
from dataclasses import dataclass, field, fields
from ipaddress import ip_address
from pathlib import Path
from typing import Any

# Whoever holds requests back lets go, or was killed: clients are not locked out for ever.
HOLD_S = 900


class SettingsError(ValueError):
    """A configuration that cannot be used; the message is a sentence for the user."""


def _known(what: str, cls: type, given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise SettingsError(f"{what} is {type(given).__name__}, wanted an object.")
    known = {f.name for f in fields(cls)}
    unknown = sorted(set(given) - known)
    if unknown:
        raise SettingsError(f"{what} has the unknown key {unknown[0]}; known are {', '.join(sorted(known))}.")
    return given


def _read(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as exc:
        raise SettingsError(f"{path} cannot be read: {exc.strerror}.") from exc
    except ValueError as exc:
        raise SettingsError(f"{path} is not JSON.") from exc


@dataclass(frozen=True)
class LaneSettings:
    """One lane: which model names lead to it, what it forces and proposes, and how much of the engine it takes."""

    aliases: list[str]
    forced: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    max_concurrent: int = 1
    max_queued: int = 64
    max_wait_s: float = 600


@dataclass(frozen=True)
class Settings:
    """The configuration file (JSON). Sizes in MiB, times in seconds."""

    upstream: str
    model: str
    lanes: dict[str, LaneSettings]
    host: str = "127.0.0.1"
    port: int = 8080
    tls_certificate: str | None = None
    tls_key: str | None = None
    keys_file: str | None = None
    open: bool = False
    routes: tuple[str, ...] = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")
    max_model_len: int | None = None
    hold_file: str = "/run/gb10-fleet/gateway.hold"
    reason_file: str = ""
    body_mib: int = 96
    buffer_mib: int = 256
    connect_s: float = 5
    idle_s: float = 300
    stall_s: float = 60
    total_s: float = 3600
    drain_s: float = 60
    retry_after_s: float = 10


@dataclass(frozen=True)
class Key:
    """Who asks. ``lanes``: those that the key may use (None: all). ``max_concurrent``: sequences at once over all lanes."""

    name: str
    sha256: str = ""
    lanes: tuple[str, ...] | None = None
    max_concurrent: int | None = None


ANYBODY = Key("anybody")


def load(path: str) -> Settings:
    """Read and check the configuration. Raises SettingsError."""
    given = dict(_known(path, Settings, _read(path)))
    lanes = given.get("lanes")
    if not isinstance(lanes, dict) or not lanes:
        raise SettingsError(f"{path}: lanes is missing, wanted at least one.")
    given["lanes"] = {name: LaneSettings(**_known(f"lane {name}", LaneSettings, lane)) for name, lane in lanes.items()}
    try:
        settings = Settings(**given)
    except TypeError as exc:
        raise SettingsError(f"{path} is not complete: {exc}.") from exc
    aliases = [alias for lane in settings.lanes.values() for alias in lane.aliases]
    if len(set(aliases)) != len(aliases):
        raise SettingsError(f"{path}: two lanes have the same alias ({', '.join(sorted(aliases))}).")
    return settings


class Keys:
    """The keys by the sha256 of their text. :meth:`reload` keeps the old ones when the new are bad."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._keys: list[Key] = []
        self.reload()

    def reload(self) -> None:
        """Read the file again. Raises SettingsError."""
        settings = self._settings
        keys = self._load(settings.keys_file, tuple(settings.lanes)) if settings.keys_file else []
        if not keys and not settings.open and not ip_address(settings.host).is_loopback:
            raise SettingsError(
                f"No key is set and the gateway would listen on {settings.host}: "
                "set keys, listen on 127.0.0.1, or say gateway_open: true."
            )
        self._keys = keys

    @staticmethod
    def _load(path: str, lanes: tuple[str, ...]) -> list[Key]:
        try:
            status = os.stat(path)  # noqa: PTH116
        except FileNotFoundError:
            return []
        if status.st_mode & 0o077:
            raise SettingsError(f"{path} has mode {status.st_mode & 0o777:04o}, wanted 0600: others could read it.")
        content = _read(path)
        if not isinstance(content, list):
            raise SettingsError(f"{path} is not a list of keys.")
        keys = []
        for item in content:
            given = _known(f"a key of {path}", Key, item)
            name, digest = given.get("name"), given.get("sha256")
            if not isinstance(name, str) or not isinstance(digest, str) or len(digest) != 64:
                raise SettingsError(f"{path}: a key needs a name and a sha256 of 64 hexadecimal digits.")
            allowed = given.get("lanes")
            if allowed is not None and not set(allowed) <= set(lanes):
                raise SettingsError(f"{path}: key {name} names an unknown lane; known are {', '.join(lanes)}.")
            keys.append(
                Key(name, digest.lower(), None if allowed is None else tuple(allowed), given.get("max_concurrent"))
            )
        if len({key.name for key in keys}) != len(keys):
            raise SettingsError(f"{path}: two keys have the same name.")
        return keys

    def find(self, authorization: list[str]) -> Key | None:
        """The key of the Authorization header(s), None for none. Every key is compared, each in constant time."""
        if not self._keys:
            return ANYBODY
        scheme, _space, secret = authorization[0].partition(" ") if len(authorization) == 1 else ("", "", "")
        digest = hashlib.sha256(secret.strip().encode("utf-8", "surrogateescape")).hexdigest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.sha256, digest):
                found = key
        return found if scheme.lower() == "bearer" else None


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """None without a certificate. Raises SettingsError."""
    if not settings.tls_certificate:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, settings)
    return context


def load_certificate(context: ssl.SSLContext, settings: Settings) -> None:
    """(Again, too: new connections get the new one.)"""
    try:
        context.load_cert_chain(settings.tls_certificate or "", settings.tls_key)
    except (OSError, ssl.SSLError) as exc:
        raise SettingsError(f"the certificate {settings.tls_certificate} cannot be used: {exc}.") from exc


def held(path: str) -> str | None:
    """Why new requests are held back (the text of the file), or None when there is no such file, or a forgotten one."""
    try:
        if time.time() - os.stat(path).st_mtime > HOLD_S:  # noqa: PTH116 - before every request, and pathlib takes 20 µs more
            return None
        said = Path(path).read_text(encoding="utf-8", errors="replace").strip()[:500]
    except FileNotFoundError:
        return None
    except OSError:
        said = ""
    return said or "the engine is being restarted"


def reason(path: str) -> str | None:
    """What the watchdog's state file says about an engine that is away, such as "recovering (spark-02: the rank is gone)"."""
    try:
        state = json.loads(Path(path).read_text(encoding="utf-8"))["state"]
        name, why = str(state["name"]).replace("_", " "), str(state.get("why") or "")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    if name == "serving":
        return None  # it has not noticed yet
    return f"{name} ({why[:400]})" if why else name
