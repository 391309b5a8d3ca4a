"""Ctrl+C and SIGTERM, from the command's first line to its last.

A ``KeyboardInterrupt`` appears wherever the program happens to be: within an import that takes any
exception for a missing module, or half-way into an event loop. So the command takes the default
handler's place before it imports anything that takes time. Until it has something to clean up, an
interrupt ends the process at once; after that it is noted, and the event loop sees it through a
socket. Each handler stays until the next has its place.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

__all__ = ["INTERRUPTED", "held", "interruptible", "leave_on_interrupt", "run", "wait_for_signal"]

INTERRUPTED = 128 + signal.SIGINT
"""The exit code of an interrupted command, as shells have it."""

T = TypeVar("T")


def leave_on_interrupt() -> None:
    """From now on a SIGINT ends the process at once and without a word."""
    signal.signal(signal.SIGINT, _leave)


@contextmanager
def held() -> Iterator[None]:
    """Keep a SIGINT that would end the process back until the end of the block, which is short."""
    noted: list[int] = []
    with _instead(lambda number, frame: noted.append(number)):
        yield
    if noted:
        os._exit(INTERRUPTED)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let a SIGINT raise ``KeyboardInterrupt``, for a block that waits and has to clean up."""
    with _instead(signal.default_int_handler):
        yield


def run(function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Run `function` in an event loop and return its result; a SIGINT cancels it.

    Raises:
        KeyboardInterrupt: it was cancelled by one.
    """
    import anyio

    from mesh.tasks import helpers

    async def main() -> list[T]:
        results: list[T] = []
        async with helpers() as tasks:
            cancel = tasks.cancel_scope.cancel
            await tasks.start(wait_for_signal, lambda number: cancel(), (signal.SIGINT,))
            results.append(await function(*arguments))
        return results

    results = anyio.run(main)
    if not results:
        raise KeyboardInterrupt
    return results[0]


async def wait_for_signal(
    received: Callable[[int], object],
    numbers: tuple[signal.Signals, ...],
    *,
    task_status: TaskStatus[None] | None = None,
) -> None:
    """Call `received` with the number of the first signal that arrives, of those wanted.

    A second SIGINT ends the process at once, whatever its loop is doing. On Windows, where an
    event loop watches no socket for it, Ctrl+C interrupts the loop.

    Args:
        received: called in the event loop.
        numbers: the signals to wait for, SIGINT among them.
        task_status: told once no signal can be missed any more.
    """
    import socket

    import anyio

    if sys.platform == "win32":
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if task_status is not None:
            task_status.started()
        return
    reader, writer = socket.socketpair()

    def note(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, _force)  # the second is another matter
        writer.send(bytes((number,)))

    with reader, writer:
        writer.setblocking(False)
        before = {number: signal.signal(number, note) for number in numbers}
        try:
            if task_status is not None:
                task_status.started()
            await anyio.wait_readable(reader)
            received(reader.recv(1)[0])
        except BaseException:
            for number, handler in before.items():
                if signal.getsignal(number) is note:
                    signal.signal(number, handler)
            raise
        for number in before:
            if number != signal.SIGINT:
                signal.signal(number, _ignore)  # it is leaving already


@contextmanager
def _instead(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    # Only in the place of our own: a program that runs the command within has other wishes.
    before = signal.getsignal(signal.SIGINT)
    if before is not _leave:
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


def _force(number: int, frame: FrameType | None) -> None:
    print("mesh: forced", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)


def _ignore(number: int, frame: FrameType | None) -> None:
    pass
