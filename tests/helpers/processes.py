"""Run a function in a fork, or in several processes that are one process group.

``DEVICE`` is the one place that says where: on CUDA the same tests run with nccl (untried).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

DEVICE = os.environ.get("TORCHQ_DISTRIBUTED_DEVICE", "cpu")
# Processes are copies of one that has imported this and run nothing: autograd has no threads in it.
multiprocessing.set_forkserver_preload(["tests.helpers.fork_of_ranks"])
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def device(rank: int) -> torch.device:
    return (
        torch.device(DEVICE, rank % torch.cuda.device_count()) if DEVICE == "cuda" else torch.device(DEVICE)
    )


def in_processes(function: Callable[..., Any], ranks: int, folder: Path, *arguments: Any) -> list[Any]:
    """Return what ``function(rank, ranks, *arguments)``, a function of a module, returns on each rank."""
    given = (function, ranks, str(folder), _free_port(), arguments)
    # torchao asks for CUDA at its import, and a fork of what did has none.
    method = "spawn" if DEVICE == "cuda" else "forkserver"
    mp.start_processes(_run, given, nprocs=ranks, start_method=method, join=True)
    results = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
    for rank, result in enumerate(results):
        assert not isinstance(result, str) or not result.startswith("Traceback"), f"rank {rank}: {result}"
    return results


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _run(
    rank: int,
    function: Callable[..., Any],
    ranks: int,
    folder: str,
    port: int,
    arguments: tuple[Any, ...],
) -> None:
    # For a function that makes a process group of its own, as under torchrun.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group(
        BACKENDS[DEVICE], store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=100)
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = function(rank, ranks, *arguments)
    except BaseException:
        result = traceback.format_exc()
    torch.save(result, f"{folder}/{rank}.pt")
    with contextlib.suppress(RuntimeError):  # of a rank that has failed
        if not isinstance(result, str) and dist.is_initialized():
            dist.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


def in_fork(check: Callable[[], object], seconds: int = 60) -> int:
    """Fork, and return how the child ended: 0 if ``check`` is true there, and it took no longer."""
    child = os.fork()
    if not child:
        try:
            signal.alarm(seconds)
            torch.set_num_threads(1)  # libgomp's threads are not in the child: two would wait for good
            os._exit(not check())
        finally:  # An error must not unwind into the tests.
            traceback.print_exc()
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
