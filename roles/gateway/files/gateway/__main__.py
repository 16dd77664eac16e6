# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The program: start, reload on SIGHUP, drain on SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence

from aiohttp import web

from .server import Gateway, Server
from .settings import Keys, Settings, SettingsError, load, load_certificate, tls_context

log = logging.getLogger("gateway")


def notify(state: str) -> None:
    """Tell systemd (nothing without it)."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
            s.sendto(state.encode(), f"\0{address[1:]}" if address.startswith("@") else address)


async def serve(settings: Settings) -> None:
    """Listen until SIGTERM, then let what runs finish for ``drain_s``."""
    keys, context = Keys(settings), tls_context(settings)
    gateway = Gateway(settings, keys)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def reload() -> None:
        try:
            keys.reload()
            if context is not None:
                load_certificate(context, settings)
            log.info("keys are read again")
        except SettingsError as exc:
            log.error("%s The old ones stay.", exc)

    loop.add_signal_handler(signal.SIGHUP, reload)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runner = web.ServerRunner(Server(gateway), shutdown_timeout=1)
    await runner.setup()
    try:
        await web.TCPSite(runner, settings.host, settings.port, ssl_context=context, backlog=1024).start()
        log.info("listening on %s port %d for %s", settings.host, settings.port, ", ".join(gateway.aliases))
        gc.freeze()  # what is loaded stays: no later collection has to walk through it while streams wait
        notify("READY=1")
        await stop.wait()
        notify("STOPPING=1")
        gateway.stop()
        end = loop.time() + settings.drain_s
        while gateway.queue.running and loop.time() < end:
            await asyncio.sleep(0.1)
    finally:
        await runner.cleanup()
        await gateway.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gateway", description="One address before one engine: model aliases, lanes, keys."
    )
    parser.add_argument("--config", required=True, help="JSON file")
    parser.add_argument("--check", action="store_true", help="read configuration and keys, then end")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    try:
        settings = load(args.config)
        if args.check:
            Keys(settings)
            tls_context(settings)
        else:
            asyncio.run(serve(settings))
    except (SettingsError, OSError) as exc:
        log.error("%s", exc)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
