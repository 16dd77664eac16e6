#!/usr/bin/env python3
"""Guards side by side: none, the seed's design, ours. One command, one table, one JSON, one SVG.

A loader floods the page cache, a stand-in of a GPU allocator is granted memory only when MemFree covers it, a bystander uses
a mapped file and counts its major faults, MemFree is sampled every 20 ms. The floor has the share of this machine's memory that
8 GiB have of a GB10's 121.7 GiB. Needs root (it writes drop_caches and compact_memory, as the guards do) and changes nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import plot

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROGRAM = ROOT / "roles/memory_guard/files/memory_guard.py"
GB10_GIB, GB10_FLOOR_GIB = 121.69, 8.0
MIB = 1 << 20
RUN_LIMIT_S = 60.0
GUARDS = {
    "none": "no guard",
    "seed": "seed's design (1 s, drop 3 and compact)",
    "ours-floor": "ours without trailing",
    "ours": "ours",
}
DEFAULT_PLAN = (
    "read:none,seed,ours-floor,ours",
    "mmap:none,seed,ours-floor,ours",
    "mmap-keep:none,ours",
    "second-pass:none,ours-floor,ours",
    "two-ranks:none,ours-floor,ours",
    "self-evict:none",  # the limit to chase
)


def meminfo() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) for line in lines}


def vmstat() -> dict[str, int]:
    return {k: int(v) for k, v in (line.split() for line in Path("/proc/vmstat").read_text().splitlines())}


class Sampler(threading.Thread):
    """(seconds, MemFree KiB, MemAvailable KiB) every 20 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.rows: list[tuple[float, int, int]] = []
        self.ending = threading.Event()

    def run(self) -> None:
        fd = os.open("/proc/meminfo", os.O_RDONLY)
        begun = time.monotonic()
        while not self.ending.is_set():
            now = time.monotonic()
            words = os.pread(fd, 256, 0).split()
            self.rows.append((now - begun, int(words[4]), int(words[7])))
            time.sleep(max(0.0, 0.02 - (time.monotonic() - now)))
        os.close(fd)


@dataclass
class Result:
    guard: str
    loader: str
    run: int
    load_s: float = 0.0
    load_mib_s: int = 0
    loader_cpu_s: float = 0.0
    min_free_mib: int = 0
    below_floor_s: float = 0.0
    faults_mapped: int = 0
    faults_cached: int = 0
    alloc_failed: bool = False
    alloc_stalled_s: float = 0.0
    guard_cpu_s: float = 0.0
    guard_cpu_percent: float = 0.0
    guard_rss_mib: float = 0.0
    guard_actions: int = 0
    guard_useless: int = 0
    read_amplification: float = 0.0
    scanned_mib: int = 0
    load_average: float = 0.0
    busy_elsewhere: float = 0.0
    receipt: dict[str, Any] = field(default_factory=dict, repr=False)
    trace: list[tuple[float, int, int]] = field(default_factory=list, repr=False)


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.data = Path(args.data)
        self.tmp = self.data / "run"
        self.children: list[subprocess.Popen[str]] = []
        self.ballast: subprocess.Popen[str] | None = None
        total = meminfo()["MemTotal"]
        self.floor_mib = args.floor_mib or round(total / 1024 * GB10_FLOOR_GIB / GB10_GIB)
        self.pool_mib = args.pool_mib or round(total / 1024 * 0.36)
        usable = max(512, self.pool_mib - args.leave_mib)
        self.staging_mib = min(3072, usable * 3 // 5 // 64 * 64)
        self.profile_mib = min(2048, usable * 2 // 5 // 256 * 256)

    # --- data -------------------------------------------------------------------------------------------------------
    @property
    def shards(self) -> list[Path]:
        count = self.args.shards
        return [self.data / f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]

    def make_data(self) -> None:
        """Incompressible shards and the bystander's file, written once and kept out of the page cache."""
        self.data.mkdir(parents=True, exist_ok=True)
        self.tmp.mkdir(exist_ok=True)
        block = os.urandom(16 * MIB)
        wanted = [(p, self.args.shard_mib) for p in self.shards] + [(self.data / "bystander.bin", 64)]
        for path, mib in wanted:
            if path.exists() and path.stat().st_size == mib * MIB:
                continue
            fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            for written in range(0, mib, 16):
                os.write(fd, block)
                if written % 256 == 240:
                    os.fdatasync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.fsync(fd)
            os.close(fd)

    def clean_start(self) -> None:
        for path in self.tmp.iterdir():
            if not path.name.startswith("ballast"):
                path.unlink()
        for path in [*self.shards, self.data / "bystander.bin"]:
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        Path("/proc/sys/vm/drop_caches").write_text("1")
        Path("/proc/sys/vm/compact_memory").write_text("1")
        if self.ballast is None:
            self.ballast = self.actor("ballast", f"--pool-mib={self.pool_mib}")
            self.children.remove(self.ballast)
            self.listen(self.ballast)
        self.talk(self.ballast, "adjust")
        self.listen(self.ballast)
        time.sleep(0.3)

    # --- processes --------------------------------------------------------------------------------------------------
    def start(self, argv: list[str], name: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.tmp / f"{name}.err").open("w"),
            text=True,
            start_new_session=True,
        )
        self.children.append(child)
        return child

    def actor(self, name: str, *words: str) -> subprocess.Popen[str]:
        out = str(self.tmp / f"{name}.json")
        return self.start([sys.executable, str(HERE / "actors.py"), name, "--out", out, *words], name)

    def guard(self, name: str) -> subprocess.Popen[str] | None:
        if name == "none":
            return None
        if name == "seed":
            child = self.actor("seed-guard", "--floor-mib", str(self.floor_mib))
        else:
            words = ["--floor-mib", str(self.floor_mib), "--receipt", str(self.tmp / "receipt.json")]
            words += ["--order9-mib", str(self.floor_mib // 16), "--files", str(self.data / "*.safetensors")]
            words += ["--trail"] if name == "ours" else []
            child = self.start([self.args.python, "-I", "-S", self.args.program, *words], "guard")
        assert child.stdout is not None
        child.stdout.readline()
        if name != "seed":  # what it says goes to nobody here; a full pipe must not be its problem
            threading.Thread(target=lambda: list(child.stdout or ()), daemon=True).start()
        time.sleep(0.3)
        return child

    def end_all(self) -> None:
        for child in self.children:
            if child.poll() is None:
                child.kill()
                child.wait()
        self.children.clear()

    def close(self) -> None:
        self.end_all()
        if self.ballast is not None:
            self.ballast.kill()
            self.ballast.wait()

    def talk(self, child: subprocess.Popen[str], word: str = "") -> None:
        assert child.stdin is not None
        child.stdin.write(word + "\n")
        child.stdin.flush()

    # --- one measurement --------------------------------------------------------------------------------------------
    def measure(self, guard: str, loader: str, run: int) -> Result:
        watchdog = threading.Timer(RUN_LIMIT_S + 30, self.end_all)
        watchdog.start()
        try:
            return self._measure(Result(guard, loader, run))
        finally:
            watchdog.cancel()
            self.end_all()

    def _measure(self, result: Result) -> Result:
        self.clean_start()
        done = self.tmp / "done"
        bystander = self.actor("bystander", str(self.data / "bystander.bin"))
        self.listen(bystander)
        guard = self.guard(result.guard)
        sizes = [f"--{n}-mib={getattr(self, n + '_mib')}" for n in ("staging", "profile")]
        alloc = self.actor("allocator", "--done", str(done), f"--leave-mib={self.args.leave_mib}", *sizes)
        self.listen(alloc)
        counters, cpu, begun = vmstat(), self.cpu_times(), time.monotonic()
        guard_cpu, own_cpu = self.cpu_of(guard), self.cpu_of_tree()
        sampler = Sampler()
        sampler.start()
        loading = self.actor("loader", "--mode", result.loader, *map(str, self.shards))
        if result.loader == "mmap-keep":
            self.listen(loading)
        else:
            loading.wait(RUN_LIMIT_S + 20)
        load_wall = time.monotonic() - begun
        self.alive(guard)
        result.guard_cpu_percent = round(100 * (self.cpu_of(guard) - guard_cpu) / load_wall, 2)
        done.touch()
        self.listen(alloc)
        if result.loader == "mmap-keep":
            self.talk(loading)
            loading.wait(RUN_LIMIT_S)
        sampler.ending.set()
        sampler.join()
        after, cpu_after, wall = vmstat(), self.cpu_times(), time.monotonic() - begun
        own_cpu = self.cpu_of_tree() - own_cpu + json.loads((self.tmp / "loader.json").read_text())["cpu_s"]
        result.guard_cpu_s = round(self.cpu_of(guard) - guard_cpu, 3)
        result.guard_rss_mib = self.peak_rss_mib(guard)
        self.talk(bystander)
        bystander.wait(20)
        self.talk(alloc)
        alloc.wait(20)
        if guard is not None:
            guard.send_signal(signal.SIGTERM)
            guard.wait(20)
        scanned = sum(after[k] - counters[k] for k in ("pgscan_kswapd", "pgscan_direct"))
        result.scanned_mib = scanned * os.sysconf("SC_PAGE_SIZE") // MIB
        self.fill(result, sampler.rows, after["pgpgin"] - counters["pgpgin"])
        result.load_average = round(os.getloadavg()[0], 2)
        result.busy_elsewhere = round(max(0.0, (cpu_after - cpu - own_cpu) / wall), 2)
        return result

    def alive(self, guard: subprocess.Popen[str] | None) -> None:
        """A guard that died makes a run worthless: say what it said."""
        if guard is not None and guard.poll() is not None:
            raise SystemExit(f"the guard ended with {guard.returncode}: {(self.tmp / 'guard.err').read_text()}")

    def listen(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        if not child.stdout.readline():
            raise SystemExit(f"an actor died: {[p.read_text() for p in self.tmp.glob('*.err') if p.stat().st_size]}")

    def fill(self, result: Result, rows: list[tuple[float, int, int]], pgpgin_kib: int) -> None:
        floor = self.floor_mib * 1024
        load, alloc, stander = (
            json.loads((self.tmp / f"{n}.json").read_text()) for n in ("loader", "allocator", "bystander")
        )
        result.load_s = round(load["seconds"], 2)
        result.loader_cpu_s = round(load["cpu_s"], 2)
        result.load_mib_s = round(load["bytes"] / MIB / load["seconds"])
        result.min_free_mib = min(row[1] for row in rows) // 1024
        result.below_floor_s = round(sum(b[0] - a[0] for a, b in itertools.pairwise(rows) if a[1] < floor), 2)
        result.faults_mapped, result.faults_cached = stander["faults_mapped"], stander["faults_cached"]
        result.alloc_failed = alloc["failed"]
        result.alloc_stalled_s = round(alloc["stalled_load_s"] + alloc["stalled_profile_s"], 2)
        result.read_amplification = round(pgpgin_kib * 1024 / sum(p.stat().st_size for p in self.shards), 2)
        result.trace = rows
        for name in ("receipt.json", "seed-guard.json"):
            path = self.tmp / name
            if path.exists():
                result.receipt = json.loads(path.read_text())
                result.guard_actions = len(result.receipt["events"])
                result.guard_useless = result.receipt.get("ineffective_actions", 0)

    # --- what it costs ----------------------------------------------------------------------------------------------
    @staticmethod
    def cpu_of(child: subprocess.Popen[str] | None) -> float:
        """User and system seconds of a process, from the scheduler's nanosecond account where there is one."""
        if child is None:
            return 0.0
        total = 0.0
        for task in Path(f"/proc/{child.pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0]) / 1e9
        return total

    @staticmethod
    def peak_rss_mib(child: subprocess.Popen[str] | None) -> float:
        if child is None:
            return 0.0
        for line in Path(f"/proc/{child.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return round(int(line.split()[1]) / 1024, 1)
        return 0.0

    @staticmethod
    def cpu_times() -> float:
        """Busy CPU seconds of the whole machine so far."""
        words = list(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]))
        return (sum(words) - words[3] - words[4]) / os.sysconf("SC_CLK_TCK")

    def cpu_of_tree(self) -> float:
        """CPU seconds of this process and of its children that still run (the loader says its own when it ends)."""
        return time.process_time() + sum(self.cpu_of(c) for c in self.children if c.poll() is None)

    def idle_cost(self, seconds: float) -> dict[str, float]:
        """CPU of our guard on a node where nothing happens."""
        self.clean_start()
        child = self.guard("ours")
        time.sleep(1)
        before = self.cpu_of(child)
        time.sleep(seconds)
        used = self.cpu_of(child) - before
        rss = self.peak_rss_mib(child)
        self.end_all()
        return {"seconds": seconds, "cpu_percent": round(100 * used / seconds, 3), "rss_mib": rss}


COLUMNS = (
    ("loader", "loader", "{}"),
    ("guard", "guard", "{}"),
    ("run", "run", "{}"),
    ("min free MiB", "min_free_mib", "{}"),
    ("s < floor", "below_floor_s", "{:.2f}"),
    ("faults", "faults_mapped", "{}"),
    ("+cached", "faults_cached", "{}"),
    ("load MiB/s", "load_mib_s", "{}"),
    ("loader CPU s", "loader_cpu_s", "{:.2f}"),
    ("read x", "read_amplification", "{:.2f}"),
    ("reclaim scan MiB", "scanned_mib", "{}"),
    ("alloc wait s", "alloc_stalled_s", "{:.2f}"),
    ("CPU %", "guard_cpu_percent", "{:.2f}"),
    ("CPU s", "guard_cpu_s", "{:.3f}"),
    ("RSS MiB", "guard_rss_mib", "{:.1f}"),
    ("acts", "guard_actions", "{}"),
    ("useless", "guard_useless", "{}"),
    ("load1", "load_average", "{:.1f}"),
)


def table(results: list[Result]) -> str:
    rows = [[title for title, _, _ in COLUMNS]]
    for result in sorted(results, key=lambda r: (r.loader, list(GUARDS).index(r.guard), r.run)):
        cells = [form.format(getattr(result, name)) for _, name, form in COLUMNS]
        cells[7] += " FAILED" if result.alloc_failed else ""
        rows.append(cells)
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    left = (0, 1)
    lines = [
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="append", metavar="LOADER:GUARD,…", help=f"default: {' '.join(DEFAULT_PLAN)}")
    parser.add_argument("--runs", type=int, default=3, help="runs of each pair (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one run, small shards: shows that it works, not how well")
    parser.add_argument("--shards", type=int, default=6)
    parser.add_argument("--shard-mib", type=int, default=2048)
    parser.add_argument(
        "--floor-mib", type=int, default=0, help="default: the share of memory that 8 GiB have of a GB10's"
    )
    parser.add_argument(
        "--pool-mib", type=int, default=0, help="available memory at the start of the load (default: 36 %%)"
    )
    parser.add_argument("--leave-mib", type=int, default=3584, help="always left to others (default %(default)s)")
    parser.add_argument("--idle-s", type=float, default=20, help="seconds of the idle-cost measurement")
    parser.add_argument("--data", default=str(ROOT / ".cache/memory_guard"), help="where the shards lie (a real disk)")
    parser.add_argument("--out", default=str(HERE.parent / "results"), help="folder of JSON and SVG")
    parser.add_argument("--python", default=sys.executable, help="interpreter of our guard")
    parser.add_argument("--program", default=str(PROGRAM), help="our guard")
    args = parser.parse_args()
    if args.quick:
        args.runs, args.shards, args.shard_mib, args.idle_s = 1, 3, 1024, 5
        args.plan = args.plan or ["read:none,seed,ours", "mmap:ours"]
    return args


def main() -> int:
    args = parse()
    if os.geteuid() != 0:
        print("bench: needs root, since drop_caches and compact_memory do.", file=sys.stderr)
        return 2
    bench = Bench(args)
    free = meminfo()["MemAvailable"] // 1024
    if free < bench.pool_mib:
        print(f"bench: {free} MiB available, {bench.pool_mib} MiB wanted. Lower --pool-mib.", file=sys.stderr)
        return 2
    bench.make_data()
    pairs = [(g, p.split(":")[0]) for p in args.plan or DEFAULT_PLAN for g in p.split(":")[1].split(",")]
    print(
        f"floor {bench.floor_mib} MiB of {meminfo()['MemTotal'] // 1024} MiB, {args.shards} shards of {args.shard_mib} MiB, "
        f"{bench.pool_mib} MiB available at the start, {bench.staging_mib} + {bench.profile_mib} MiB allocated, "
        f"Linux {platform.release()} {platform.machine()}",
        flush=True,
    )
    results: list[Result] = []
    idle: dict[str, float] = {}
    try:
        for run in range(1, args.runs + 1):
            for guard, loader in pairs:
                results.append(bench.measure(guard, loader, run))
                print(table(results[-1:]).splitlines()[1], flush=True)
        idle = bench.idle_cost(args.idle_s) if args.idle_s else {}
    finally:
        bench.close()
        if results:
            report(args, bench, results, idle)
    return 0


def report(args: argparse.Namespace, bench: Bench, results: list[Result], idle: dict[str, float]) -> None:
    print("\n" + table(results))
    if idle:
        print(f"\nidle: {idle['cpu_percent']} % of a core, {idle['rss_mib']} MiB, over {idle['seconds']:.0f} s")
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    settings = {k: getattr(bench, k) for k in ("floor_mib", "pool_mib", "staging_mib", "profile_mib")}
    data = {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "memory_mib": meminfo()["MemTotal"] // 1024,
        "settings": {**settings, **vars(args)},
        "idle": idle,
        "results": [asdict(r) for r in results],
    }
    (out / "memory_guard.json").write_text(json.dumps(data))
    for loader in dict.fromkeys(r.loader for r in results):
        first = {GUARDS[r.guard]: r.trace for r in results if r.loader == loader and r.run == 1}
        svg = plot.lines(first, bench.floor_mib, f"MemFree while loading, {loader} loader")
        (out / f"memory_guard_{loader}.svg").write_text(svg)
    print(f"\n{out}/memory_guard.json and {out}/memory_guard_*.svg")


if __name__ == "__main__":
    sys.exit(main())
