"""The process that runs one session's operations, and nothing else.

It has no network, no key and no file of its own: batches come and answers go through one socket to
the node's process, and what concerns groups of devices goes through another. A batch is ``u32
length`` and its bytes, and so is an answer. With the highest bit of the length set it is no batch
but an order of the node's own (`orders`); descriptors that belong to orders and answers lie beside
their lengths. If an operation crashes the process, takes too long or too much memory, this session
is over and no other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from auth import MeshError
from mesh.device import wire
from mesh.device.groups.member import Groups
from mesh.device.server import orders
from mesh.device.server.machine import Machine, MachineLimits
from tensor_bridge import tensor_bytes
from tensor_bridge.lanes import Writer, sealed_memory

__all__ = ["LENGTH", "ORDER", "ExecutorLimits", "Inlet", "serve"]

LENGTH = struct.Struct("<I")

ORDER = 1 << 31
"""Added to the length of an order."""

MAX_DESCRIPTORS = 8
"""Descriptors that have come and were not taken: one comes with a frame."""

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

    inlet = Inlet(link)
    try:
        while True:
            (length,) = LENGTH.unpack(inlet.receive(LENGTH.size))
            data = inlet.receive(length & ~ORDER)
            signal.setitimer(signal.ITIMER_REAL, limits.batch_seconds)
            if length & ORDER:
                _follow(orders.decode(data), machine, inlet, link, reply)
            else:
                machine.execute(memoryview(data), reply)
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


class Inlet:
    """One end of a socket as what comes in: bytes, and the descriptors beside them.

    Attributes:
        descriptors: those that have come and were not taken, in order.
    """

    def __init__(self, link: socket.socket) -> None:
        self.descriptors: deque[int] = deque()
        self._link = link

    def receive(self, count: int) -> bytearray:
        """Return the next `count` bytes.

        Raises:
            EOFError: the other end has closed it.
        """
        data = bytearray(count)
        view = memoryview(data)
        while view:
            view = view[self.take(view) :]
        return data

    def take(self, view: memoryview) -> int:
        """Take some bytes into `view`; return how many.

        Raises:
            EOFError: the other end has closed it.
            BlockingIOError: there are none, and the socket does not wait.
        """
        got, beside, _, _ = self._link.recvmsg_into([view], _BESIDE, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in beside:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(content) - len(content) % _DESCRIPTOR.size
                self.descriptors.extend(n for (n,) in _DESCRIPTOR.iter_unpack(content[:whole]))
        while len(self.descriptors) > MAX_DESCRIPTORS:
            os.close(self.descriptors.pop())
        if not got:
            raise EOFError
        return got

    def close(self) -> None:
        """Close the descriptors that nobody has taken."""
        while self.descriptors:
            os.close(self.descriptors.popleft())


_DESCRIPTOR = struct.Struct("i")
_BESIDE = socket.CMSG_SPACE(4 * _DESCRIPTOR.size)


def _follow(
    order: orders.Order,
    machine: Machine,
    inlet: Inlet,
    link: socket.socket,
    reply: Callable[[bytes], None],
) -> None:
    match order:
        case orders.Await(arrival, handle, offset, nbytes):
            machine.expect(arrival, handle, offset, nbytes)
        case orders.Fill(arrival, nbytes):
            machine.arrive(arrival, inlet.descriptors.popleft() if nbytes else None)
        case orders.Fail(arrival, error):
            machine.arrive(arrival, error)
        case orders.Hand(request, template, handle):
            give = partial(_give, link, request)
            machine.hand(request, template, handle, give, reply)


def _give(link: socket.socket, request: int, tensor: torch.Tensor) -> bool:
    """Answer a request with sealed memory that holds a tensor; return whether that could be."""
    if not tensor.numel():
        return False
    content = tensor_bytes(tensor)
    try:
        kept = sealed_memory(tensor, len(content))
        if kept is not None:  # it came like that
            descriptor = os.dup(kept)
        else:
            with contextlib.closing(Writer(len(content))) as writer:
                writer.fill(content)
                descriptor = writer.give()
    except OSError:
        return False
    try:
        answer = wire.answer(request, None)
        with _idle():
            socket.send_fds(link, [LENGTH.pack(len(answer)) + answer], [descriptor])
    finally:
        os.close(descriptor)
    return True


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
