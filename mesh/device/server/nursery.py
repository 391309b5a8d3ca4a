"""Starts executors: a process that has loaded torch once, and forks for each session.

torch takes seconds to load and must not be forked once it has computed, so the node's own process
can't. This one computes nothing. Orders come as lines of JSON, a start with the executor's ends of
two sockets beside it::

    {"start": id, "devices": [..], "limits": {..}}    {"started": id}
    {"kill": id}                                      {"ended": id, "status": n}

It is the executors' parent, so that who is killed is who was meant.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import anyio

from mesh.device.errors import DeviceError, SessionLost
from mesh.device.server.executor import ExecutorLimits, serve
from mesh.device.server.machine import MachineLimits

__all__ = ["CAN_FORK", "CAN_HAND_OVER", "Executor", "Nursery", "main"]

_log = logging.getLogger("quicmesh.device")

CAN_FORK = hasattr(os, "fork") and hasattr(socket, "send_fds")

CAN_HAND_OVER = CAN_FORK and hasattr(os, "memfd_create")
"""Whether memory passes between this process and executors by its descriptor."""

START_SECONDS = 60.0
"""How long loading torch may take, on a machine that is busy."""

MAX_LINE = 4096

CLOSE_SECONDS = 2.0


class Executor:
    """A process that runs one session's operations.

    Attributes:
        link: this process's end of the way to it, which does not block.
        beside: the same for what concerns groups of devices.
        ended: set once it has ended.
        status: its wait status then; None if nobody knows.
    """

    def __init__(
        self,
        number: int,
        link: socket.socket,
        beside: socket.socket,
        kill: Callable[[int], None],
    ) -> None:
        self.link = link
        self.beside = beside
        self.ended = anyio.Event()
        self.status: int | None = None
        self._number = number
        self._kill = kill

    def kill(self) -> None:
        """End it now, and let go of the way to it."""
        self._kill(self._number)
        self.link.close()
        if self.beside.fileno() >= 0:
            anyio.notify_closing(self.beside)
            self.beside.close()

    def why(self, limits: ExecutorLimits) -> str:
        """Return how it has ended, for people."""
        if self.status is None:
            return "the process that ran its operations is gone"
        if not os.WIFSIGNALED(self.status):
            return "the process that ran its operations has ended"
        number = os.WTERMSIG(self.status)
        if number == signal.SIGALRM:
            return f"its operations took longer than {limits.batch_seconds:g} s"
        name = signal.Signals(number).name
        if number == signal.SIGKILL:
            return f"the process that ran its operations was killed ({name})"
        return f"the process that ran its operations crashed ({name})"


class Nursery:
    """This process's way to the one that forks.

    Args:
        spawn: starts a task that runs beside whoever uses this.
    """

    def __init__(self, spawn: Callable[[Callable[[], Coroutine[Any, Any, None]]], None]) -> None:
        self._spawn = spawn
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._numbers = itertools.count(1)
        self._executors: dict[int, Executor] = {}
        self._lock = anyio.Lock()
        self._is_closed = False

    @property
    def count(self) -> int:
        """How many executors there are."""
        return len(self._executors)

    def prepare(self) -> None:
        """Have the process that forks be there, so that the first session need not wait for it.

        Raises:
            DeviceError: this platform can't fork.
        """
        if not CAN_FORK:
            raise DeviceError(
                "offering of devices",
                why=f"executors are forked, and {sys.platform} can't do that",
                fix="Offer devices from Linux or macOS.",
            )
        if self._process is not None and self._process.poll() is None:
            return
        self._close_socket()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - this very program
                [sys.executable, "-m", "mesh.device.server.nursery", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl+C is for the node, which tells us
            )
        ours.setblocking(False)
        self._socket = ours
        self._spawn(partial(self._listen, ours))

    async def start(self, devices: list[str], limits: ExecutorLimits) -> Executor:
        """Start an executor.

        Raises:
            DeviceError: this platform can't fork.
            SessionLost: it could not be started.
        """
        async with self._lock:
            if self._is_closed:
                raise SessionLost("start of a session", why="this node offers no devices any more")
            self.prepare()
            order = {"start": next(self._numbers), "devices": devices, "limits": _plain(limits)}
            ours, theirs = socket.socketpair()
            beside, beyond = socket.socketpair()
            try:
                ours.setblocking(False)
                beside.setblocking(False)
                executor = Executor(int(str(order["start"])), ours, beside, self._order_kill)
                with theirs, beyond:
                    await self._send(json.dumps(order).encode() + b"\n", theirs, beyond)
                self._executors[executor._number] = executor
            except BaseException:
                ours.close()
                beside.close()
                raise
        return executor

    def _order_kill(self, number: int) -> None:
        if number in self._executors and self._socket is not None:
            with contextlib.suppress(OSError):  # without it, closing the link has to do
                self._socket.send(json.dumps({"kill": number}).encode() + b"\n")

    async def _send(self, line: bytes, *sockets: socket.socket) -> None:
        assert self._socket is not None
        with anyio.move_on_after(START_SECONDS):
            while True:
                try:
                    socket.send_fds(self._socket, [line], [each.fileno() for each in sockets])
                    return
                except BlockingIOError:
                    await anyio.wait_writable(self._socket)
                except OSError as error:
                    raise SessionLost(
                        "start of a session", why=f"executors can't be started ({error.strerror})"
                    ) from error
        raise SessionLost("start of a session", why="executors are not started in time")

    async def _listen(self, link: socket.socket) -> None:
        """Take what the process says, until it has ended; then all its executors count as ended."""
        data = b""
        try:
            while True:
                await anyio.wait_readable(link)
                try:
                    part = link.recv(65536)
                except BlockingIOError:
                    continue
                except OSError:
                    break
                if not part:
                    break
                *lines, data = (data + part).split(b"\n")
                for line in lines:
                    said = json.loads(line)
                    executor = self._executors.pop(said["ended"], None)
                    if executor is not None:
                        executor.status = said["status"]
                        executor.ended.set()
        except (anyio.ClosedResourceError, OSError):
            pass
        except (ValueError, KeyError, TypeError):
            _log.exception("what starts executors has said something odd")
        finally:
            if self._socket is link:
                self._close_socket()
            if self._socket is None:  # no other has been started since
                for executor in self._executors.values():
                    executor.ended.set()
                self._executors.clear()

    def _close_socket(self) -> None:
        link, self._socket = self._socket, None
        if link is not None:
            anyio.notify_closing(link)
            link.close()

    async def close(self) -> None:
        """End the process, and with it all executors. Bounded in time."""
        self._is_closed = True
        with anyio.CancelScope(shield=True):
            await self._close()

    async def _close(self) -> None:
        if self._socket is not None:
            anyio.notify_closing(self._socket)
            self._socket.close()
        process, self._process = self._process, None
        if process is None:
            return
        # Without executors there is nobody whose end it would have to see to.
        deadline = anyio.current_time() + (CLOSE_SECONDS if self._executors else 0.0)
        while process.poll() is None:
            if anyio.current_time() > deadline:
                process.kill()
                process.wait()
                return
            await anyio.sleep(0.01)


def main() -> None:
    """Fork executors as ordered, until nobody is left who could order."""
    gc.collect()
    gc.freeze()  # what is never collected is not copied either
    orders = socket.socket(fileno=int(sys.argv[1]))
    signals, wake = socket.socketpair()
    wake.setblocking(False)
    signals.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, int] = {}
    data = b""
    descriptors: list[int] = []
    while True:
        ready, _, _ = select.select([orders, signals], [], [])
        if signals in ready:
            with contextlib.suppress(BlockingIOError):
                signals.recv(4096)
            _reap(orders, children)
        if orders not in ready:
            continue
        try:
            part, new, _, _ = socket.recv_fds(orders, MAX_LINE, 4)
        except ConnectionError:
            break
        if not part:
            break
        descriptors += new
        *lines, data = (data + part).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if "kill" in order:
                pid = next((p for p, number in children.items() if number == order["kill"]), None)
                if pid is not None:  # not reaped yet, so that it is still who it was
                    os.kill(pid, signal.SIGKILL)
                continue
            link = socket.socket(fileno=descriptors.pop(0))
            beside = socket.socket(fileno=descriptors.pop(0))
            pid = os.fork()
            if pid == 0:
                _be_executor(link, beside, order, (orders, signals, wake))
            children[pid] = order["start"]
            link.close()
            beside.close()
    signal.set_wakeup_fd(-1)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _be_executor(
    link: socket.socket,
    beside: socket.socket,
    order: dict[str, Any],
    others: tuple[socket.socket, ...],
) -> None:
    """Be an executor in the forked process, which ends here."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for each in others:
            each.close()
        limits = order["limits"]
        machine = MachineLimits(**limits.pop("machine"))
        serve(link, beside, order["devices"], ExecutorLimits(machine=machine, **limits))
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _reap(orders: socket.socket, children: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            number = children.pop(pid, None)
            if number is not None:
                with contextlib.suppress(OSError):  # nobody wants to know
                    orders.sendall(json.dumps({"ended": number, "status": status}).encode() + b"\n")


def _plain(limits: ExecutorLimits) -> dict[str, Any]:
    return dataclasses.asdict(limits)


if __name__ == "__main__":
    main()
