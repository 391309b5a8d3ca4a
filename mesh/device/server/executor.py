"""The process that runs one session's operations, and nothing else.

It has no network, no key and no file of its own: batches come and answers go through one socket to
the node's process, and what concerns groups of devices goes through another. A batch is ``u32
length`` and its bytes, and so is an answer. If an operation crashes the process, takes too long or
too much memory, this session is over and no other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from auth import MeshError
from mesh.device import wire
from mesh.device.groups.member import Groups
from mesh.device.server.machine import Machine, MachineLimits

__all__ = ["LENGTH", "ExecutorLimits", "serve"]

LENGTH = struct.Struct("<I")

MEMORY_SLACK = 1 << 30
"""Bytes beside the session's own tensors: results on the way, and torch's workspaces."""

STACK_BYTES = 2 << 20
"""Of each thread: a group of devices has two for each other member, and they count as memory."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorLimits:
    """What one executor may use.

    Attributes:
        machine: of tensors.
        batch_seconds: for one batch of operations; beyond, the process is killed.
        threads: that torch computes with; 0 for as many as it likes.
    """

    machine: MachineLimits = dataclasses.field(default_factory=MachineLimits)
    batch_seconds: float = 600.0
    threads: int = 0


def serve(
    link: socket.socket, beside: socket.socket, devices: list[str], limits: ExecutorLimits
) -> None:
    """Serve the node's process until it closes its end.

    Args:
        link: for operations.
        beside: for groups of devices.
        devices: by name.
        limits: what the session may use.
    """
    hardware = [torch.device(name) for name in devices]
    _confine(hardware, limits)
    threading.stack_size(STACK_BYTES)
    groups = Groups(beside, _idle, limits.machine.max_bytes)
    threading.Thread(target=groups.serve, name="mesh-groups", daemon=True).start()
    machine = Machine(hardware, limits.machine, groups)

    def reply(data: bytes) -> None:
        with _idle():  # a client that is slow to read takes its own time, and not the operations'
            link.sendall(LENGTH.pack(len(data)) + data)

    try:
        while True:
            (length,) = LENGTH.unpack(_receive(link, LENGTH.size))
            batch = _receive(link, length)
            signal.setitimer(signal.ITIMER_REAL, limits.batch_seconds)
            machine.execute(memoryview(batch), reply)
            signal.setitimer(signal.ITIMER_REAL, 0)
    except EOFError:
        return  # the session is over
    except OSError:
        return  # the node's process is gone
    except MeshError as error:
        reply(wire.failure(0, wire.Failure(error)))


@contextlib.contextmanager
def _idle() -> Iterator[None]:
    """Don't count the time of the block as that of the session's operations."""
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    yield
    signal.setitimer(signal.ITIMER_REAL, left)


def _receive(link: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = link.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return data


def _confine(devices: list[torch.device], limits: ExecutorLimits) -> None:
    """Have the kernel hold the process to what it may use."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limits.threads:
        torch.set_num_threads(limits.threads)
    if all(device.type == "cpu" for device in devices):
        # An operation may make far more on its way than it leaves. CUDA reserves address space by
        # the terabyte, so there this can't be said.
        most = _data_bytes() + 2 * limits.machine.max_bytes + MEMORY_SLACK
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    score = Path("/proc/self/oom_score_adj")
    if score.exists():
        score.write_text("900")  # when memory runs out, sooner this process than the node's
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for device in devices:
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            share = min(1.0, (limits.machine.max_bytes + MEMORY_SLACK) / total)
            torch.cuda.set_per_process_memory_fraction(share, device)


def _data_bytes() -> int:
    """Return what RLIMIT_DATA counts of this process: private memory that can be written."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_PAGE_SIZE")
