# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Why a rank fails to start, in the engine's words (0.32; GPU ones from public reports): where it shows, and the exception."""

from __future__ import annotations

import os
import socket

from .faults import Fault
from .journal import Rank

# Memory of a GB10 as vLLM counts it.
DEVICE_GIB = 121.69
_HELP = "See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."
_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 121.69 GiB of which "
    "1.33 GiB is free. Including non-PyTorch memory, this process has 103.21 GiB memory in use."
)
_NO_KV = (
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine "
    f"(this flag also controls CPU memory reservation on the CPU backend, despite its name). {_HELP}"
)
_NCCL = "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)"
# Value of the fault `nccl` -> NCCL's own warning, which comes first.
_NCCL_WARNINGS = {
    "errno61": 'Call to ibv_modify_qp failed with error No data available errno 61 ("No data available")',
    "memlock": "Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory errno 12",
    "timeout": "Call to ibv_modify_qp failed with error Connection timed out errno 110",
}
PEER_GONE = (
    "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer {where}. "
    "This is typically caused by a remote worker crashing. Check the logs of the remote worker before reporting an error. GLHF!"
)
PORT_TAKEN = (
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: {port}, "
    "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
)
NO_INTERFACE = (
    "RuntimeError: [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/device.cc:84] ifa != nullptr. "
    "Unable to find address for: {name}"
)


def shm(free_mib: int) -> str:
    return (
        "RuntimeError: Insufficient space in /dev/shm for shared-memory allocation: 160 MiB required, "
        f"{free_mib} MiB free. Increase /dev/shm (e.g. --shm-size or --ipc=host)."
    )


def free_memory(free_gib: str, utilization: float) -> str:
    return (
        f"ValueError: Free memory on device cuda:0 ({free_gib}/{DEVICE_GIB} GiB) on startup is less than desired GPU memory "
        f"utilization ({utilization}, {utilization * DEVICE_GIB:.2f} GiB). Decrease GPU memory utilization or reduce "
        "GPU memory used by other processes."
    )


def kv_too_small(length: int, fits: int, kv_gib: float) -> str:
    needed = kv_gib * length / max(1, fits)
    return (
        f"ValueError: To serve at least one request with the model's max seq len ({length}), ({needed:.2f} GiB KV cache is needed, "
        f"which is larger than the available KV cache memory ({kv_gib:.2f} GiB). Based on the available memory, the estimated "
        f"maximum model length is {fits}. Try increasing `gpu_memory_utilization` (which also controls CPU memory on the CPU "
        f"backend) or decreasing `max_model_len` when initializing the engine. {_HELP}"
    )


def warnings(fault: Fault) -> list[str]:
    """Lines that come before the failure."""
    text = _NCCL_WARNINGS.get(fault.value) if fault.kind == "nccl" else None
    pid = os.getpid()
    return [f"{socket.gethostname()}:{pid}:{pid} [0] misc/ibvwrap.cc:301 NCCL WARN {text}"] if text else []


def reason(fault: Fault, rank: Rank, kv_gib: float) -> tuple[str, str] | None:
    """Where a fault of starting shows ("core": the engine core, "worker": its worker) and its exception. None: no such fault."""
    block, value = rank.block_size, fault.value
    if fault.kind == "shm":
        return "core", shm(int(value or 64))
    if fault.kind == "oom":
        return "worker", _OOM
    if fault.kind == "load_error":
        return "worker", f"FileNotFoundError: No such file or directory: {rank.model}/{value or 'model.safetensors'}"
    if fault.kind == "free_memory":
        return "worker", free_memory(value or "98.89", rank.utilization)
    if fault.kind == "nccl":
        return "worker", _NCCL
    if rank.headless:
        return None
    if fault.kind == "kv_too_small":
        return "core", kv_too_small(
            rank.max_model_len, int(value or rank.max_model_len * 8 // 10 // block * block), kv_gib
        )
    if fault.kind == "no_kv":
        return "core", _NO_KV
    return None
