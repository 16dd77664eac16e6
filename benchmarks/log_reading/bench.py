#!/usr/bin/env python3
"""How much it costs to read the log of a rank that has served for weeks: 200 MB once, then only what is new.

Docker's own file (what a module reads with become) and Docker's engine over its socket (what it asks without), beside
`docker logs | tail` done anew at every look. Limits: 2 s and 64 MiB once; the next look only the new bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "collections"))

LOG = ROOT / "tests/fixtures/engine_logs/success_head.log"
LIMIT_S, LIMIT_MIB = 2.0, 64.0
STARTED = "2026-11-29T12:48:00Z"
ERROR = "(EngineCore pid=7) ERROR 11-29 12:10:03 [core.py:1510] EngineCore encountered a fatal error."


def record(text: str, number: int) -> bytes:
    stamp = f"2026-11-29T12:{48 + number // 6000000 % 12}:{number // 100000 % 60:02d}.{number % 100000:05d}1111Z"
    return json.dumps({"log": text + "\n", "stream": "stderr", "time": stamp}).encode() + b"\n"


def write_log(path: Path, size: int) -> int:
    """A real start, then real lines of serving until ``size`` bytes, with one error three quarters in."""
    lines = [line for line in LOG.read_text(encoding="utf-8").replace("\r", "").splitlines() if line]
    start = [line for line in lines if "[shutdown]" not in line and "shutdown" not in line.lower()]
    serving = [
        line for line in lines if "HTTP/1.1" in line or "Avg prompt throughput" in line or "FutureWarning" in line
    ]
    written = number = 0
    told = False
    with path.open("wb") as file:
        for line in start:
            written += file.write(record(line, number))
            number += 1
        while written < size:
            written += file.write(record(serving[number % len(serving)], number))
            number += 1
            if not told and written > size * 3 // 4:
                told = True
                written += file.write(record(ERROR, number))
    return number


def read(path: Path, cursor: dict[str, Any] | None) -> dict[str, Any]:
    """One look in a fresh process, as a module does it; its own peak memory."""
    code = (
        "import json, sys, time\n"
        "from ansible_collections.gb10.fleet.plugins.module_utils._docker_log import DockerLog\n"
        "asked = json.load(sys.stdin)\n"
        "begun, cpu = time.monotonic(), time.process_time()\n"
        "log = DockerLog(None, asked['inspect'], asked['cursor'])\n"
        "state = log.read()\n"
        "took, cpu = time.monotonic() - begun, time.process_time() - cpu\n"
        # The high-water mark of this very program: what getrusage says is inherited from the parent.
        "peak = next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "print(json.dumps({'seconds': took, 'cpu_s': cpu, 'peak_mib': peak / 1024, 'stage': state['stage'],\n"
        "  'fatal': (state['fatal'] or {}).get('id'), 'cursor': log.cursor}))\n"
    )
    inspect = {
        "Id": "c0ffee",
        "State": {"StartedAt": STARTED},
        "Config": {},
        "HostConfig": {"LogConfig": {"Type": "json-file"}},
        "LogPath": str(path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps({"inspect": inspect, "cursor": cursor}),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "collections")},
    )
    return dict(json.loads(done.stdout))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=200, help="size of the log (default 200)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gb10-bench-log-") as folder:
        path = Path(folder) / "c0ffee-json.log"
        lines = write_log(path, args.mb * 1_000_000)
        size = path.stat().st_size
        path.read_bytes()  # into the page cache: what is measured is the reading, not the disk
        first = read(path, None)
        same = read(path, first["cursor"])
        with path.open("ab") as file:
            file.write(record('INFO:     127.0.0.1:1 - "GET /health HTTP/1.1" 200 OK', lines))
        new = read(path, first["cursor"])
        begun = time.monotonic()
        for line in path.open("rb"):
            json.loads(line)
        whole = time.monotonic() - begun
    rows = [("first look, all of it", first), ("next look, nothing new", same), ("next look, one new line", new)]
    print(
        f"log of {size / 1e6:.0f} MB, {lines} lines; load of this machine {os.getloadavg()[0]:.1f}, {os.cpu_count()} CPUs"
    )
    for name, row in rows:
        cost = f"{row['seconds']:8.4f} s  CPU {row['cpu_s']:7.4f} s  peak {row['peak_mib']:5.1f} MiB"
        print(f"{name:26} {cost}  {row['stage']}  {row['fatal']}")
    print(f"{'decoding each line anew':26} {whole:8.4f} s")
    figures = {
        "megabytes": args.mb,
        "first_s": first["seconds"],
        "first_cpu_s": first["cpu_s"],
        "first_peak_mib": first["peak_mib"],
        "next_s": new["seconds"],
        "decode_every_line_s": whole,
    }
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    found = first["stage"] == "ready" and first["fatal"] == "engine-failed"
    good = found and first["cpu_s"] <= LIMIT_S and first["peak_mib"] <= LIMIT_MIB and new["seconds"] < 0.05
    print(f"limits: {LIMIT_S:g} s and {LIMIT_MIB:g} MiB once: {'kept' if good else 'NOT kept'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
