# Copyright (c) The gb10.fleet maintainers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Made by scripts/generate_troubleshooting.py from failures/catalogue.yml; edit that file."""

from __future__ import annotations

from typing import Any

# ruff: noqa: S108
CATALOGUE: list[dict[str, Any]] = [
    {
        "id": "launch-headless",
        "title": "A worker was started without --headless",
        "source": "engine",
        "kind": "cause",
        "severity": "hard",
        "stage": "load",
        "cause": (
            "this worker was started without --headless and built a full engine; the head then waits for ever wit"
            "hout a line"
        ),
        "fix": (
            "start it with --headless as its last argument, and with the entrypoint `vllm serve` (the api_server "
            "module ignores the flag)"
        ),
        "signature": ["collective_rpc should not be called on follower node"],
    },
    {
        "id": "launch-util-too-high",
        "title": "gpu-memory-utilization is above what is free",
        "source": "engine",
        "kind": "cause",
        "severity": "hard",
        "stage": "engine",
        "cause": (
            "{free_gib} GiB of {total_gib} GiB are free, {utilization} x {total_gib} GiB = {wanted_gib} GiB are wanted"
        ),
        "fix": (
            "lower gpu-memory-utilization to {max_utilization} on all ranks, or free memory on this node (page ca"
            "che, desktop, other containers)"
        ),
        "signature": [
            (
                "Free memory on device (?:\\S+ )?\\((?P<free_gib>[\\d.]+)/(?P<total_gib>[\\d.]+) GiB\\) on startup is less"
                " than desired GPU memory utilization \\((?P<utilization>[\\d.]+), (?P<wanted_gib>[\\d.]+) GiB\\)"
            ),
            "is less than desired GPU memory utilization",
        ],
        "compute": "max_utilization",
    },
    {
        "id": "launch-kv-too-small",
        "title": "The KV cache is too small for max-model-len",
        "source": "engine",
        "kind": "cause",
        "severity": "hard",
        "stage": "kv_cache",
        "cause": (
            "a request of max-model-len {max_model_len} needs {needed_gib} GiB of KV cache, {available_gib} GiB a"
            "re there"
        ),
        "fix": (
            "set max-model-len to {fits} at most, or give the cache more memory (a higher gpu-memory-utilization,"
            " fp8 KV cache)"
        ),
        "signature": [
            (
                "To serve at least one request with the model.?s max seq len(?:gth)? \\((?P<max_model_len>\\d+)\\).*?\\(("
                "?P<needed_gib>[\\d.]+) GiB KV cache is needed.*?\\((?P<available_gib>[\\d.]+) GiB\\).*?estimated maximum"
                " model length is (?P<fits>\\d+)"
            ),
            "To serve at least one request with the model.?s max seq len",
            "estimated maximum model length is (?P<fits>\\d+)",
        ],
    },
    {
        "id": "launch-no-kv-memory",
        "title": "No memory is left for the KV cache",
        "source": "engine",
        "kind": "cause",
        "severity": "hard",
        "stage": "kv_cache",
        "cause": "after the weights and the activations nothing is left of gpu-memory-utilization for the KV cache",
        "fix": "raise gpu-memory-utilization, lower max-num-batched-tokens, or spread the model over more ranks",
        "signature": [
            "No available memory for the cache blocks",
            "Available KV cache memory: (?P<available_gib>-[\\d.]+) GiB",
        ],
        "any_level": True,
    },
    {
        "id": "engine-cuda-oom",
        "title": "CUDA out of memory",
        "source": "engine",
        "kind": "cause",
        "severity": "hard",
        "stage": "load",
        "cause": (
            "the GPU allocator was refused memory (on a GB10 this is the memory of the whole node, page cache included)"
        ),
        "fix": (
            "lower gpu-memory-utilization or max-num-batched-tokens, end what else holds memory on this node, and"
            " keep the memory guard on"
        ),
        "signature": [
            "CUDA out of memory",
            "torch\\.(?:cuda\\.)?OutOfMemoryError",
            "CUDA error: out of memory",
            "cudaErrorMemoryAllocation",
        ],
    },
    {
        "id": "launch-shm-small",
        "title": "/dev/shm is too small",
        "source": "engine",
        "kind": "cause",
        "severity": "hard",
        "stage": "engine",
        "cause": "the engine needs {wanted_mib} MiB in /dev/shm, {free_mib} MiB are free",
        "fix": (
            "raise container.shm_size of the recipe, or the size of the node's own /dev/shm when container.ipc is host"
        ),
        "signature": [
            "Insufficient space in /dev/shm.*?: (?P<wanted_mib>\\d+) MiB required, (?P<free_mib>\\d+) MiB free",
            "Insufficient space in /dev/shm",
        ],
    },
    {
        "id": "engine-kernel-shared-memory",
        "title": "A GPU kernel asks for more shared memory than a GB10 has",
        "source": "engine",
        "kind": "cause",
        "severity": "hard",
        "stage": "compile",
        "cause": "a Triton kernel was tuned for a bigger GPU ({required} bytes of shared memory wanted, {limit} exist)",
        "fix": "use an image that is built for SM121, or another attention or MoE backend (moe-backend)",
        "signature": [
            (
                "OutOfResources: (?:out of resource: )?shared memory(?:, Required: (?P<required>\\d+), Hardware limit:"
                " (?P<limit>\\d+))?"
            )
        ],
    },
    {
        "id": "launch-port-in-use",
        "title": "A port is taken",
        "source": "engine",
        "kind": "cause",
        "severity": "hard",
        "stage": "config",
        "cause": "port {port} of this node is held by another process",
        "fix": (
            "stop what holds it (`ss -ltnp` names it, `playbooks/stop.yml` ends old ranks), or choose another por"
            "t or master_port"
        ),
        "signature": [
            "failed to listen on any local network address\\. port: (?P<port>\\d+).*EADDRINUSE",
            (
                "error while attempting to bind on address \\('(?P<address>[^']*)', (?P<port>\\d+)\\): address already i"
                "n use"
            ),
            "\\[Errno 98\\] .*[Aa]ddress already in use",
            "EADDRINUSE",
        ],
    },
    {
        "id": "launch-bad-argument",
        "title": "The engine does not know an argument",
        "source": "engine",
        "kind": "cause",
        "severity": "hard",
        "stage": "container",
        "cause": "the engine of this image refuses its arguments: {arguments}",
        "fix": "correct args of the recipe; an older image may not know a newer flag",
        "signature": [
            "error: unrecognized arguments: (?P<arguments>.+)",
            "^(?:vllm|api_server\\.py)(?: serve)?: error: (?P<arguments>.+)",
        ],
    },
    {
        "id": "engine-block-size",
        "title": "The attention backend does not take this block size",
        "source": "engine",
        "kind": "cause",
        "severity": "hard",
        "stage": "kv_cache",
        "cause": "block-size {block} is none that the backend takes ({backends})",
        "fix": "take block-size out of args, or set it to a multiple that the backend names",
        "signature": ["No common block size for (?P<block>\\d+) \\((?P<backends>.*?)\\)\\."],
    },
    {
        "id": "ckpt-missing-file",
        "title": "A file of the checkpoint is missing",
        "source": "engine",
        "kind": "cause",
        "severity": "hard",
        "stage": "load",
        "cause": "{path} is not there",
        "fix": "run playbooks/prepare.yml, which completes the checkpoint on every rank and verifies it",
        "signature": [
            "FileNotFoundError: (?:\\[Errno 2\\] )?No such file or directory: '?(?P<path>[^']+)",
            "OSError: (?P<path>\\S+) does not appear to have a file named",
        ],
    },
    {
        "id": "ckpt-no-weights",
        "title": "There are no weights in the checkpoint's folder",
        "source": "engine",
        "kind": "cause",
        "severity": "hard",
        "stage": "load",
        "cause": "there is not one weight file in {path}",
        "fix": "run playbooks/prepare.yml, which completes the checkpoint on every rank and verifies it",
        "signature": ["Cannot find any model weights with .?(?P<path>[^`']+)"],
    },
    {
        "id": "ckpt-header-eof",
        "title": "A shard of the checkpoint cannot be read",
        "source": "engine",
        "kind": "cause",
        "severity": "hard",
        "stage": "load",
        "cause": "a safetensors file is damaged or cut off ({detail})",
        "fix": "run playbooks/prepare.yml with checkpoint_verify=sha256; it fetches what differs",
        "signature": ["SafetensorError: (?P<detail>.+)", "safetensors_rust\\.SafetensorError"],
    },
    {
        "id": "ckpt-truncated",
        "title": "A file of the checkpoint has the wrong size",
        "source": "engine",
        "kind": "cause",
        "severity": "hard",
        "stage": "load",
        "cause": "{path} has {found} bytes, {wanted} are wanted",
        "fix": "run playbooks/prepare.yml, which fetches the file anew",
        "signature": [
            (
                "Consistency check failed: file should be of size (?P<wanted>\\d+) but has size (?P<found>\\d+) \\((?P<p"
                "ath>[^)]+)\\)"
            )
        ],
    },
    {
        "id": "ckpt-gated",
        "title": "The model hub refuses access",
        "source": "engine",
        "kind": "cause",
        "severity": "hard",
        "stage": "config",
        "cause": "the engine asks the model hub and is refused ({detail})",
        "fix": (
            "fetch the checkpoint with playbooks/prepare.yml and a token that was granted access; ranks run offline"
        ),
        "signature": ["GatedRepoError: (?P<detail>.+)", "401 Client Error: Unauthorized for url: (?P<detail>\\S+)"],
    },
    {
        "id": "img-not-rebuilt",
        "title": "The image is too old for the model or its drafter",
        "source": "engine",
        "kind": "cause",
        "severity": "hard",
        "stage": "config",
        "cause": "the engine of this image does not know {architecture}",
        "fix": "use the image that the recipe was tested with (image.reference and image.digest)",
        "signature": ["Model architectures \\[(?P<architecture>.*?)\\] are not supported for now"],
    },
    {
        "id": "launch-rendezvous-timeout",
        "title": "Not every rank came to the rendezvous",
        "source": "engine",
        "kind": "peer",
        "severity": "hard",
        "stage": "rendezvous",
        "cause": "after {seconds} s {joined} of {expected} ranks had come to the rendezvous",
        "fix": "look at the ranks that did not come; then at fabric_address and a firewall on the master port",
        "signature": [
            (
                "DistStoreError: Timed out after (?P<seconds>\\d+) seconds waiting for clients\\. (?P<joined>\\d+)/(?P<e"
                "xpected>\\d+) clients joined"
            ),
            "DistStoreError",
        ],
    },
    {
        "id": "launch-wrong-master",
        "title": "A worker cannot reach the head",
        "source": "engine",
        "kind": "wait",
        "severity": "hard",
        "stage": "rendezvous",
        "cause": (
            "nothing answers at {address}:{port}, where this worker looks for the head; by itself it would try fo"
            "r 30 minutes"
        ),
        "fix": (
            "check fabric_address of the head in the inventory, the cable, and a firewall on the master port; the"
            "n serve again"
        ),
        "signature": ["TCP client failed to connect/validate to host (?P<address>[\\d.]+):(?P<port>\\d+) - retrying"],
        "patience_s": 20,
    },
    {
        "id": "launch-ready-timeout",
        "title": "The engine's own start-up limit ran out",
        "source": "engine",
        "kind": "cause",
        "severity": "hard",
        "stage": "compile",
        "cause": "the engine gave itself up after VLLM_ENGINE_READY_TIMEOUT_S (600 s unless set)",
        "fix": "set env VLLM_ENGINE_READY_TIMEOUT_S of the recipe to 3600",
        "signature": ["Timed out waiting for engine core"],
    },
    {
        "id": "launch-exec-timeout",
        "title": "A step took longer than its limit",
        "source": "engine",
        "kind": "peer",
        "severity": "hard",
        "stage": "ready",
        "cause": (
            "{method} did not come back in time: another rank is frozen or gone, or a kernel was compiled in the "
            "middle of serving"
        ),
        "fix": (
            "look at the other ranks first; if all were alive, raise VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS, mount th"
            "e compile caches and warm up"
        ),
        "signature": [
            "RPC call to (?P<method>\\w+) timed out",
            "Watchdog caught collective operation timeout: .*OpType=(?P<method>\\w+)",
        ],
    },
    {
        "id": "rank-peer-lost",
        "title": "Another rank went away",
        "source": "engine",
        "kind": "peer",
        "severity": "hard",
        "stage": "ready",
        "cause": "the connection to the rank at {peer} ended",
        "fix": "look at that rank first; all ranks of a cluster start again together",
        "signature": [
            "Read error \\[(?P<peer>[\\d.]+)\\]:\\d+: Connection reset by peer",
            "Connection closed by peer \\[(?P<peer>[\\d.]+)\\]",
            (
                "Failed to recv, got 0 bytes\\. Connection was likely closed.*remote=\\[(?:::ffff:)?(?P<peer>[\\d.]+)\\]|"
                "recvValue failed on SocketImpl\\(.*remote=\\[(?:::ffff:)?(?P<peer2>[\\d.]+)\\]"
            ),
            "remote process exited or there was a network error",
            "rank (?P<gone>\\d+) ends, since a rank that left cannot rejoin",
        ],
    },
    {
        "id": "launch-pp-eager",
        "title": "Pipeline parallel without compile mode loses requests",
        "source": "engine",
        "kind": "cause",
        "severity": "hard",
        "stage": "ready",
        "cause": (
            "pipeline parallel without compile mode on the CPU build (--enforce-eager, TORCH_COMPILE_DISABLE); th"
            "e first request is lost"
        ),
        "fix": (
            "set compilation-config to mode 1 with backend eager; take enforce-eager out of args and TORCH_COMPIL"
            "E_DISABLE out of env"
        ),
        "signature": ["KeyError: 'chatcmpl-[^']+'"],
    },
    {
        "id": "launch-ray-platform",
        "title": "This build of the engine has no Ray",
        "source": "engine",
        "kind": "cause",
        "severity": "hard",
        "stage": "engine",
        "cause": "the {platform} build of the engine refuses Ray",
        "fix": "set parallel.backend to mp",
        "signature": ["current platform (?P<platform>\\S+) does not support ray"],
    },
    {
        "id": "launch-ray-pg",
        "title": "Ray waits for GPUs that it does not see",
        "source": "engine",
        "kind": "wait",
        "severity": "hard",
        "stage": "rendezvous",
        "cause": (
            "Ray has waited {seconds} s for GPUs; a node did not register its GPU, or VLLM_HOST_IP is not the add"
            "ress that Ray uses"
        ),
        "fix": (
            "compare the GPU total of `ray status` with the number of ranks, and VLLM_HOST_IP with the address of"
            " each node"
        ),
        "signature": ["Waiting for creating a placement group of specs for (?P<seconds>\\d+) seconds"],
        "patience_s": 120,
    },
    {
        "id": "guard-ray-memmon",
        "title": "Ray's memory monitor killed a worker",
        "source": "engine",
        "kind": "cause",
        "severity": "hard",
        "stage": "load",
        "cause": (
            "Ray's monitor killed a worker at 95 % of the node's memory, which a load on unified memory reaches ("
            "{used} of {total})"
        ),
        "fix": "set env RAY_memory_monitor_refresh_ms to 0",
        "signature": [
            (
                "killed due to the node running low on memory\\. Memory on the node \\(IP: (?P<peer>[\\d.]+)\\) was (?P<u"
                "sed>[\\d.]+GB) / (?P<total>[\\d.]+GB)"
            ),
            "killed due to the node running low on memory",
        ],
    },
    {
        "id": "tensorfold-window",
        "title": "The prompt-plus-reply window does not fit",
        "source": "engine",
        "kind": "cause",
        "severity": "hard",
        "stage": "kv_cache",
        "cause": "at most {window} tokens of prompt and reply fit",
        "fix": "start once more with a window of {window}",
        "signature": ["largest fitting prompt-plus-reply window: (?P<window>\\d+)"],
    },
    {
        "id": "net-gid-empty-errno61",
        "title": "The selected GID entry is empty",
        "source": "engine",
        "kind": "cause",
        "severity": "hard",
        "stage": "rendezvous",
        "cause": "the GID entry that NCCL_IB_GID_INDEX names on this node is all zero",
        "fix": (
            "take NCCL_IB_GID_INDEX out of the recipe and inventory; the fabric role finds the index per node and"
            " HCA at launch"
        ),
        "signature": ["ibv_modify_qp.*(?:errno 61|err 61|No data available)"],
    },
    {
        "id": "net-ibv-invalid",
        "title": "The RDMA connection is refused as invalid",
        "source": "engine",
        "kind": "cause",
        "severity": "hard",
        "stage": "rendezvous",
        "cause": "the two ends select GIDs or MTUs that do not fit together",
        "fix": "run playbooks/check_network.yml; it shows both GID tables and both MTUs",
        "signature": ["ibv_modify_qp.*(?:errno 22|Invalid argument)"],
    },
    {
        "id": "net-ibv-timeout",
        "title": "The RDMA connection timed out",
        "source": "engine",
        "kind": "cause",
        "severity": "hard",
        "stage": "rendezvous",
        "cause": "the other end's GID does not answer on this rail",
        "fix": "run playbooks/check_network.yml; check cabling, subnets per rail and fabric_hca",
        "signature": ["ibv_modify_qp.*(?:errno 110|timed out)"],
    },
    {
        "id": "pre-kernel-kho",
        "title": "RDMA memory cannot be registered",
        "source": "engine",
        "kind": "cause",
        "severity": "hard",
        "stage": "rendezvous",
        "cause": (
            "memory cannot be pinned: the container's memlock limit, or (with memlock unlimited) a 7.0.0-10xx-nvi"
            "dia kernel that gave 9 GiB to Kexec HandOver"
        ),
        "fix": (
            "set container.ulimits.memlock to -1; if it is, and CmaFree in /proc/meminfo exceeds CmaTotal, boot w"
            "ith kho=off or an older kernel"
        ),
        "signature": ["ibv_reg_mr\\S* (?:failed with error )?.*Cannot allocate memory"],
    },
    {
        "id": "net-mtu",
        "title": "RDMA packets are lost",
        "source": "engine",
        "kind": "cause",
        "severity": "hard",
        "stage": "ready",
        "cause": "packets of the fabric do not arrive; a common reason is an MTU of 1500 on one end",
        "fix": "run playbooks/check_network.yml; it compares the MTUs and proves jumbo frames both ways",
        "signature": ["IBV_WC_RETRY_EXC_ERR"],
    },
    {
        "id": "net-ifname-baked",
        "title": "A socket interface does not exist on this node",
        "source": "engine",
        "kind": "cause",
        "severity": "hard",
        "stage": "rendezvous",
        "cause": "the interface {interface} does not exist on this node or has no address",
        "fix": (
            "take *_SOCKET_IFNAME out of the recipe's env (and look for it in the image); the fabric role sets al"
            "l of them per node"
        ),
        "signature": ["Unable to find address for: (?P<interface>\\S+)"],
    },
    {
        "id": "net-gloo-loopback",
        "title": "The host name of this node leads to loopback",
        "source": "engine",
        "kind": "cause",
        "severity": "hard",
        "stage": "rendezvous",
        "cause": "the node's own name resolves to 127.x.x.x, and Gloo offered that address to the other ranks",
        "fix": "set fabric_interface, so that GLOO_SOCKET_IFNAME is set for every rank",
        "signature": ["Gloo connectFullMesh failed", "SO_ERROR: Connection refused, remote=\\[127\\."],
    },
    {
        "id": "net-host-ip-collision",
        "title": "Two ranks say the same address",
        "source": "engine",
        "kind": "cause",
        "severity": "hard",
        "stage": "rendezvous",
        "cause": "{nodes} nodes say {addresses} addresses; VLLM_HOST_IP is the same or wrong on some rank",
        "fix": "take VLLM_HOST_IP out of the recipe; it is set per rank from fabric_address",
        "signature": [
            "Every node should have a unique IP address\\. Got (?P<nodes>\\d+) nodes with (?P<addresses>\\d+)"
        ],
    },
    {
        "id": "net-host-ip-foreign",
        "title": "A rank says an address that is not its own",
        "source": "engine",
        "kind": "cause",
        "severity": "hard",
        "stage": "engine",
        "cause": "{address} is not an address of this node",
        "fix": (
            "correct fabric_address of this node in the inventory; after a reboot look whether the fabric's addre"
            "sses came back"
        ),
        "signature": ["Cannot assign requested address \\(addr='tcp://(?P<address>[^':]+)"],
    },
    {
        "id": "net-nccl-error",
        "title": "NCCL gave up",
        "source": "engine",
        "kind": "wrapper",
        "severity": "hard",
        "stage": "rendezvous",
        "cause": "NCCL could not connect the ranks; its own warning (NCCL WARN) before this line says why",
        "fix": "run playbooks/check_network.yml, then start with env NCCL_DEBUG=INFO to see rails and GIDs",
        "signature": ["NCCL error", "ncclSystemError|ncclUnhandledCudaError|ncclInternalError|ncclRemoteError"],
    },
    {
        "id": "net-tcp-fallback",
        "title": "NCCL talks over TCP sockets",
        "source": "engine",
        "kind": "note",
        "severity": "soft",
        "stage": "rendezvous",
        "cause": "NCCL found no RDMA device in the container and uses sockets (about 16 Gb/s instead of 180)",
        "fix": (
            "give the container /dev/infiniband, IPC_LOCK and memlock -1 (container.devices, cap_add, ulimits of "
            "the recipe)"
        ),
        "signature": ["NET/IB : No device found", "NCCL INFO Using network Socket", "via NET/Socket"],
    },
    {
        "id": "engine-failed",
        "title": "The engine failed and says the cause elsewhere",
        "source": "engine",
        "kind": "wrapper",
        "severity": "hard",
        "stage": "engine",
        "cause": "the engine ended with: {line}",
        "fix": "read the first error of this rank and of the other ranks; the evidence bundle holds all logs",
        "signature": [
            "EngineCore failed to start",
            "EngineCore encountered a fatal error",
            "Engine core initialization failed",
            "EngineDeadError",
            "WorkerProc initialization failed",
            "WorkerProc failed to start",
            "WorkerProc hit an exception",
        ],
    },
    {
        "id": "worker-process-died",
        "title": "A worker process of the engine died",
        "source": "engine",
        "kind": "wrapper",
        "severity": "hard",
        "stage": "load",
        "cause": (
            "the process {name} ended with exit code {code}; -9 is a kill, by the kernel for lack of memory or by"
            " a person"
        ),
        "fix": 'look for "Out of memory" in the kernel log of this node; keep the memory guard on while loading',
        "signature": ["Worker proc (?P<name>\\S+) died unexpectedly(?: \\(exit code: (?P<code>-?\\d+)\\))?"],
    },
    {
        "id": "ready-shm-info",
        "title": '"No available shared memory broadcast block"',
        "source": "engine",
        "kind": "note",
        "severity": "soft",
        "stage": "compile",
        "cause": (
            "a rank is busy (compiling, autotuning, loading) or gone; the line appears in healthy and in dead boo"
            "ts alike"
        ),
        "fix": "nothing by itself; the wait watches the other ranks and their progress",
        "signature": ["No available shared memory broadcast block found"],
    },
    {
        "id": "launch-skip-check-env",
        "title": "An environment variable that the engine does not know",
        "source": "engine",
        "kind": "note",
        "severity": "soft",
        "stage": "config",
        "cause": "{name} does nothing in this engine",
        "fix": "take it out of env of the recipe",
        "signature": ["Unknown vLLM environment variable detected: (?P<name>\\S+)"],
    },
    {
        "id": "kernel-oom-killer",
        "title": "The kernel killed a process for lack of memory",
        "source": "kernel",
        "kind": "cause",
        "severity": "hard",
        "stage": "load",
        "cause": "the kernel killed {name} (pid {pid}) for lack of memory",
        "fix": (
            "lower gpu-memory-utilization, end what else uses memory on this node, and keep the memory guard on w"
            "hile loading"
        ),
        "signature": [
            "Out of memory: Killed process (?P<pid>\\d+) \\((?P<name>[^)]*)\\)",
            "Memory cgroup out of memory: Killed process (?P<pid>\\d+) \\((?P<name>[^)]*)\\)",
        ],
    },
    {
        "id": "kernel-xid",
        "title": "The GPU reported an error (Xid)",
        "source": "kernel",
        "kind": "cause",
        "severity": "hard",
        "stage": "ready",
        "cause": "the driver reports Xid {xid} on {device}",
        "fix": (
            "restart the node; if it comes back under load, lower the GPU clock cap (playbooks/tune_thermal.yml) "
            "and check for a driver update"
        ),
        "signature": ["NVRM: Xid \\((?P<device>[^)]*)\\): (?P<xid>\\d+)"],
    },
    {
        "id": "kernel-nvrm-alloc",
        "title": "The GPU driver was refused memory",
        "source": "kernel",
        "kind": "cause",
        "severity": "hard",
        "stage": "load",
        "cause": "no contiguous memory was left for the GPU driver; page cache fills a GB10 while a checkpoint is read",
        "fix": "keep the memory guard on while loading; if it was, lower gpu-memory-utilization and reboot the node",
        "signature": ["NVRM: (?!nvCheckOkFailedNoLog).*NV_ERR_NO_MEMORY"],
    },
    {
        "id": "guard-nvrm-benign",
        "title": '"nvCheckOkFailedNoLog ... NV_ERR_NO_MEMORY"',
        "source": "kernel",
        "kind": "note",
        "severity": "soft",
        "stage": "load",
        "cause": "the engine's profiler probes the ceiling; healthy boots print about 60 of these lines, too",
        "fix": (
            "nothing by itself; many of them within seconds, together with free memory under the floor, announce "
            "a wedge"
        ),
        "signature": ["NVRM: nvCheckOkFailedNoLog: .*NV_ERR_NO_MEMORY"],
    },
    {
        "id": "net-cx7-aer",
        "title": "A ConnectX-7 function fell off the bus",
        "source": "kernel",
        "kind": "cause",
        "severity": "hard",
        "stage": "ready",
        "cause": "a fatal PCIe error of the network adapter; a restart of the engine cannot help",
        "fix": "reboot the node; if it returns, check the cage's temperature and the firmware",
        "signature": [
            "AER: Uncorrectable \\(Fatal\\) error",
            "mlx5_pci_err_detected",
            "mlx5_core \\S+: .*(?:device|health) .*(?:fatal|dead)",
        ],
    },
    {
        "id": "kernel-soft-lockup",
        "title": "A processor hangs in the kernel",
        "source": "kernel",
        "kind": "cause",
        "severity": "hard",
        "stage": "ready",
        "cause": "a processor is stuck in the kernel; the node is about to wedge",
        "fix": "reboot the node; if it does not answer, cut its power",
        "signature": ["BUG: soft lockup", "rcu_sched self-detected stall"],
    },
    {
        "id": "pre-docker-runtime",
        "title": "Docker has no GPU runtime",
        "source": "container",
        "kind": "cause",
        "severity": "hard",
        "stage": "container",
        "cause": (
            "the NVIDIA container toolkit is not installed, or Docker was not restarted after it was (Docker from"
            " snap never sees it)"
        ),
        "fix": (
            "install nvidia-container-toolkit, run `nvidia-ctk runtime configure --runtime=docker` and restart Docker"
        ),
        "signature": ["could not select device driver"],
    },
    {
        "id": "pre-cdi",
        "title": "The CDI description of the GPU is missing or stale",
        "source": "container",
        "kind": "cause",
        "severity": "hard",
        "stage": "container",
        "cause": "Docker knows no CDI device for the GPU; the description is missing or older than the driver",
        "fix": "run `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`",
        "signature": ["unresolvable CDI devices?"],
    },
    {
        "id": "img-arm64",
        "title": "The image is not built for this processor",
        "source": "container",
        "kind": "cause",
        "severity": "hard",
        "stage": "container",
        "cause": "the image has no linux/arm64 build",
        "fix": "use an image for arm64 (image.platform of the recipe)",
        "signature": [
            "no matching manifest for linux/arm64",
            "exec format error",
            "does not match the detected host platform",
        ],
    },
    {
        "id": "rank-oom-killed",
        "title": "The container reached its memory limit",
        "source": "state",
        "kind": "cause",
        "severity": "hard",
        "stage": "load",
        "cause": (
            "Docker says that the kernel killed a process of this container for lack of memory (exit code {exit_code})"
        ),
        "fix": "raise container.memory of the recipe or take it out; memory of the GPU is not counted by it",
    },
    {
        "id": "rank-killed",
        "title": "A rank was killed",
        "source": "state",
        "kind": "cause",
        "severity": "hard",
        "stage": "load",
        "cause": "the rank was killed (exit code 137, SIGKILL) without a word in its own log",
        "fix": (
            'look for "Out of memory" in the kernel log of this node and for a person or unit that stopped it; th'
            "en serve again"
        ),
    },
    {
        "id": "rank-ended",
        "title": "A rank ended",
        "source": "state",
        "kind": "cause",
        "severity": "hard",
        "stage": "load",
        "cause": "the rank ended with exit code {exit_code}; a headless worker that ends exits with 0, too",
        "fix": "read its last lines; all ranks of a cluster start again together",
    },
    {
        "id": "rank-missing",
        "title": "A rank container is not there",
        "source": "state",
        "kind": "cause",
        "severity": "hard",
        "stage": "container",
        "cause": "there is no container {container} on this node",
        "fix": "start the cluster with playbooks/serve.yml",
    },
    {
        "id": "rank-restarted",
        "title": "A rank was restarted on its own",
        "source": "state",
        "kind": "cause",
        "severity": "hard",
        "stage": "rendezvous",
        "cause": (
            "the container was restarted or replaced while the cluster was starting; the rendezvous is one-shot, "
            "the new rank waits for ever"
        ),
        "fix": (
            "set no restart policy on ranks, end what restarts them, and start all ranks together with playbooks/"
            "serve.yml"
        ),
    },
    {
        "id": "rank-unreachable",
        "title": "A node gives no answer",
        "source": "state",
        "kind": "cause",
        "severity": "hard",
        "stage": "load",
        "cause": "the node gave no answer ({detail})",
        "fix": (
            "if it answers ping but not SSH it is wedged by memory pressure; a node that is off needs its power c"
            "ut and given back by hand"
        ),
    },
    {
        "id": "rank-stopped",
        "title": "A rank is frozen",
        "source": "state",
        "kind": "cause",
        "severity": "hard",
        "stage": "load",
        "cause": "the processes of the rank are stopped (SIGSTOP or docker pause)",
        "fix": "find out who stopped them; start all ranks again with playbooks/serve.yml",
    },
    {
        "id": "launch-other-master",
        "title": "A worker looks for the head at another address",
        "source": "state",
        "kind": "cause",
        "severity": "hard",
        "stage": "rendezvous",
        "cause": "this worker looks for the head at {found}; the head is at {wanted}",
        "fix": (
            "correct fabric_address of the head in the inventory and start all ranks again with playbooks/serve.yml"
        ),
    },
    {
        "id": "launch-args-mismatch",
        "title": "Ranks run with different arguments",
        "source": "state",
        "kind": "cause",
        "severity": "hard",
        "stage": "container",
        "cause": "the engine arguments differ from those of {other}: {difference}",
        "fix": "start all ranks with playbooks/serve.yml, which gives every rank the same arguments",
    },
    {
        "id": "launch-apiserver-entrypoint",
        "title": "The image's own entrypoint ignores --headless",
        "source": "state",
        "kind": "cause",
        "severity": "hard",
        "stage": "container",
        "cause": "the rank runs `{entrypoint}`, which ignores --headless",
        "fix": "start it with the entrypoint `vllm serve`, as playbooks/serve.yml does",
    },
    {
        "id": "stage-still",
        "title": "A rank stands still",
        "source": "state",
        "kind": "cause",
        "severity": "hard",
        "stage": "load",
        "cause": "no sign of life while {doing}: for {seconds} s no new log line and no CPU time",
        "fix": (
            "look at the last lines of all ranks and at their kernel logs; a rank that waits for another one is s"
            "till, too"
        ),
    },
    {
        "id": "stage-budget",
        "title": "A stage took longer than its budget",
        "source": "state",
        "kind": "cause",
        "severity": "hard",
        "stage": "load",
        "cause": "{doing} took more than {seconds} s",
        "fix": (
            "if the rank was still working, raise readiness.{budget} of the recipe; otherwise look at its last lines"
        ),
    },
    {
        "id": "stage-rendezvous",
        "title": "The ranks do not find each other",
        "source": "state",
        "kind": "cause",
        "severity": "hard",
        "stage": "rendezvous",
        "cause": "after {seconds} s the rank still waits for the others",
        "fix": (
            "look at the ranks that have not come as far, then at fabric_address and a firewall on the master por"
            "t; a rank of an older run blocks the rendezvous"
        ),
    },
    {
        "id": "endpoint-silent",
        "title": "The engine says that it serves, a completion does not come",
        "source": "state",
        "kind": "cause",
        "severity": "hard",
        "stage": "ready",
        "cause": "a completion did not come ({error}) although /health may answer 200",
        "fix": "look at every worker; /health stays 200 with a dead worker",
    },
    {
        "id": "endpoint-error",
        "title": "The engine answers every request with an error",
        "source": "state",
        "kind": "cause",
        "severity": "hard",
        "stage": "ready",
        "cause": "for {seconds} s each completion ended with: {error}",
        "fix": "read the first error of the head; it lives on and will not heal by itself",
    },
    {
        "id": "endpoint-key",
        "title": "The endpoint wants a key",
        "source": "state",
        "kind": "cause",
        "severity": "hard",
        "stage": "ready",
        "cause": "the engine answers 401; it is up, and wants an API key",
        "fix": "set readiness_api_key_file to a file on the head that holds the key",
    },
    {
        "id": "endpoint-model",
        "title": "The endpoint serves another model",
        "source": "state",
        "kind": "cause",
        "severity": "hard",
        "stage": "ready",
        "cause": "the endpoint lists {listed}, not {model}",
        "fix": "something else listens on this port, or served_name of the recipe changed; stop it and serve again",
    },
]
