# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Questions to a model hub (huggingface.co or a mirror of it), with a sentence for each way in which it can say no.

The hub's own client exits with 0 after a 404, a 503 and without a network when the target folder is not empty. So what a commit
holds, and why it cannot be had, is always asked here.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import stat
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urljoin, urlsplit

from ansible_collections.gb10.fleet.plugins.module_utils._checkpoint import (
    COMMIT,
    CheckpointError,
    Manifest,
    manifest_from_hub,
)

PUBLIC = "https://huggingface.co"
AGENT = "gb10.fleet"
# Waiting helps against these; everything else is final.
_PASSING = ("rate", "unavailable", "offline")
T = TypeVar("T")


class HubError(CheckpointError):
    """The hub said no. ``kind``: repo, revision, file, token, gated, rate, unavailable, offline, tls, refused."""

    def __init__(self, kind: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after_s = retry_after_s

    @property
    def passing(self) -> bool:
        return self.kind in _PASSING


def retry_after(value: str | None, now: float | None = None) -> float | None:
    """Seconds of a Retry-After header: a number, or a date."""
    if not value:
        return None
    if re.fullmatch(r"\d+(\.\d+)?", value.strip()):
        return float(value)
    from email.utils import parsedate_to_datetime

    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - (time.time() if now is None else now))
    except (TypeError, ValueError):
        return None


def refusal(
    endpoint: str, repo: str, revision: str | None, status: int, headers: Any, token_file: str | None
) -> HubError:
    """The sentence for an HTTP status; the hub names the reason in X-Error-Code."""
    code = headers.get("X-Error-Code") or ""
    page = f"{endpoint}/{repo}"
    token = f"the token in {token_file}" if token_file else "no token"
    if status == 404 and code == "RevisionNotFound":
        return HubError(
            "revision",
            f"{repo} has no revision {revision}. Put the full commit from {page}/commits/main into the recipe.",
        )
    if status == 404 and code == "EntryNotFound":
        return HubError("file", f"{repo} lacks a file that its own listing names (revision {revision}).")
    if status == 404:
        return HubError("repo", f"There is no repository {repo} on {endpoint}. Correct checkpoint.repo in the recipe.")
    if status == 403 or code == "GatedRepo":
        what = "accept its terms there" if token_file else "accept its terms there, and set checkpoint_token_file"
        return HubError(
            "gated", f"{repo} is gated and {token} has no access ({status}). Open {page} with that account and {what}."
        )
    if status == 401:
        what = (
            "The token is invalid or expired: write a new one there."
            if token_file
            else "It does not exist, or it is private: set checkpoint_token_file to a file with a token."
        )
        return HubError("token", f"{endpoint} refuses {repo} with {token} (401). {what}")
    if status == 429:
        wait = retry_after(headers.get("Retry-After"))
        hint = "" if token_file else " A token (checkpoint_token_file) raises the limit."
        asked = f", and asks to wait {wait:.0f} s" if wait else ""
        return HubError("rate", f"{endpoint} says that this address asks too often (429){asked}.{hint}", wait)
    if status >= 500:
        return HubError(
            "unavailable",
            f"{endpoint} is out of order ({status}). Run again later.",
            retry_after(headers.get("Retry-After")),
        )
    return HubError("refused", f"{endpoint} answers {status} for {repo}.")


def unreachable(endpoint: str, error: BaseException) -> HubError:
    """The sentence for a connection that was not made or broke."""
    import ssl

    reason = getattr(error, "reason", None) or error
    if isinstance(reason, ssl.SSLCertVerificationError):
        hint = (
            "Correct the clock"
            if "not yet valid" in str(reason) or "expired" in str(reason)
            else "Install the certificate authority"
        )
        return HubError(
            "tls", f"The certificate of {endpoint} is not accepted ({reason.verify_message}). {hint} of this node."
        )
    text = str(reason) or type(reason).__name__
    return HubError(
        "offline",
        f"{endpoint} cannot be reached from this node ({text}). Give the node a route or proxy, or set checkpoint_endpoint or "
        "checkpoint_source to a place that it reaches.",
    )


def read_token(path: str | None) -> str | None:
    """The token of a file that only its owner may read. The value is never part of a message."""
    if not path:
        return None
    try:
        status = Path(path).stat()
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise CheckpointError(
                f"{path} may be read by others (mode {stat.S_IMODE(status.st_mode):04o}). Run: chmod 600 {path}"
            )
        if status.st_uid not in (0, os.geteuid()):
            raise CheckpointError(f"{path} belongs to user {status.st_uid}, wanted root or the user that downloads.")
        token = Path(path).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise CheckpointError(
            f"There is no {path} on this node. Write the token there (mode 0600), or unset checkpoint_token_file."
        ) from None
    except (OSError, UnicodeDecodeError) as exc:
        raise CheckpointError(f"{path} cannot be read ({type(exc).__name__}).") from None
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        raise CheckpointError(f"{path} does not hold one token on one line.")
    return token


class _Redirect(urllib.request.HTTPRedirectHandler):
    """Follows to a content network without taking the token there."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None and urlsplit(urljoin(req.full_url, newurl)).netloc != urlsplit(req.full_url).netloc:
            new.headers.pop("Authorization", None)
            new.unredirected_hdrs.pop("Authorization", None)
        return new


class Hub:
    """One hub as one node sees it."""

    def __init__(self, endpoint: str | None = None, token_file: str | None = None, timeout_s: float = 30.0) -> None:
        self.endpoint = (endpoint or PUBLIC).rstrip("/")
        self.token_file = token_file
        self.token = read_token(token_file)
        self.timeout_s = timeout_s
        self.opener = urllib.request.build_opener(_Redirect)

    def open(self, url: str, repo: str, revision: str | None, headers: dict[str, str] | None = None) -> Any:
        """An answer to read from. Raises HubError."""
        request = urllib.request.Request(url, headers={"User-Agent": AGENT, **(headers or {})})  # noqa: S310 - http and https alike
        if self.token:
            request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        try:
            return self.opener.open(request, timeout=self.timeout_s)
        except urllib.error.HTTPError as exc:
            with exc:
                raise refusal(self.endpoint, repo, revision, exc.code, exc.headers, self.token_file) from None
        except (OSError, http.client.HTTPException) as exc:
            raise unreachable(self.endpoint, exc) from None

    def _json(self, url: str, repo: str, revision: str | None) -> tuple[Any, str | None]:
        with self.open(url, repo, revision) as answer:
            following = re.search(r'<([^>]+)>;\s*rel="?next"?', answer.headers.get("Link") or "")
            try:
                return json.loads(answer.read()), urljoin(url, following[1]) if following else None
            except ValueError:
                raise HubError("unavailable", f"{self.endpoint} answers with something that is not JSON.") from None
            except (OSError, http.client.HTTPException) as exc:
                raise unreachable(self.endpoint, exc) from None

    def resolve(self, repo: str, revision: str | None = None) -> str:
        """The commit (40 hexadecimal digits) of a branch, tag or commit; of ``main`` for None."""
        url = f"{self.endpoint}/api/models/{quote(repo)}" + (
            f"/revision/{quote(revision, safe='')}" if revision else ""
        )
        about, _next = self._json(url, repo, revision)
        commit = str(about.get("sha") or "") if isinstance(about, dict) else ""
        if not COMMIT.match(commit):
            raise HubError("unavailable", f"{self.endpoint} names no commit for {repo}.")
        return commit

    def manifest(self, repo: str, commit: str) -> Manifest:
        """All files of a commit, with size and hash; the listing comes in pages."""
        url: str | None = f"{self.endpoint}/api/models/{quote(repo)}/tree/{commit}?recursive=true"
        items: list[Any] = []
        while url:
            page, url = self._json(url, repo, commit)
            items += page
        manifest = manifest_from_hub(repo, commit, items)
        if not manifest.files:
            raise HubError("repo", f"{repo} has no files at {commit}.")
        return manifest

    def file_url(self, repo: str, commit: str, path: str) -> str:
        return f"{self.endpoint}/{quote(repo)}/resolve/{commit}/{quote(path)}"


def waits(retries: int, first_s: float, longest_s: float) -> Iterator[float]:
    """Waiting times between tries: doubling, up to ``longest_s``."""
    for number in range(retries):
        yield min(longest_s, first_s * 2**number)


def patiently(
    ask: Callable[[], T],
    retries: int,
    first_s: float,
    longest_s: float,
    note: Callable[[str], None] = lambda _text: None,
) -> T:
    """Ask again while the hub is busy or away, for as long as it asks for (Retry-After) within ``longest_s``."""
    for wait in waits(retries, first_s, longest_s):
        try:
            return ask()
        except HubError as exc:
            if not exc.passing:
                raise
            pause = min(max(wait, exc.retry_after_s or 0), longest_s)
            note(f"waits {pause:.0f} s: {exc}")
            time.sleep(pause)
    return ask()
