"""Tasks that serve an object for as long as it is open, whoever opens and closes it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVarTuple, Unpack

import anyio
import anyio.abc
import anyio.lowlevel

from transport.errors import TransportError

__all__ = ["Background"]

_Arguments = TypeVarTuple("_Arguments")


class Background:
    """A task group that may be closed by another task than the one that opened it.

    Event loops tie a task group to the task that opens it, and to the cancel scopes around it
    there: closed elsewhere, as by the finalizer of an async generator or by a fixture that is torn
    down in a task of its own, a plain one leaves its tasks running and both loops confused. Here
    one task alone hangs on the opener; it has the group in which all others live, and it is ended
    from wherever `close` is called. If one of them fails, the opener is cancelled, as with a plain
    group.

    Args:
        what: what is served, for the error.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._tie: anyio.abc.TaskGroup | None = None
        self._closing = anyio.Event()
        self._ended = anyio.Event()

    async def open(self) -> None:
        """Begin. The task that calls this should be the one that calls `close`."""
        self._opener = anyio.get_current_task()
        tie = anyio.create_task_group()
        await tie.__aenter__()
        try:
            self._tasks: anyio.abc.TaskGroup = await tie.start(self._live)
            # Cancelled meanwhile, the group has ended, and takes no tasks any more.
            await anyio.lowlevel.checkpoint_if_cancelled()
        except BaseException as error:
            await tie.__aexit__(type(error), error, error.__traceback__)
            raise
        self._tie = tie

    def start_soon(
        self,
        function: Callable[[Unpack[_Arguments]], Coroutine[Any, Any, object]],
        *arguments: *_Arguments,
    ) -> None:
        """Run a task until it ends by itself or `close` cancels it."""
        self._tasks.start_soon(function, *arguments)

    async def close(self) -> None:
        """Cancel the tasks and wait for their end. May be repeated.

        Raises:
            TransportError: another task has opened this and still runs. All is closed nevertheless,
                and that task puts its scopes in order if it calls this too.
            ExceptionGroup: tasks have failed.
        """
        self._closing.set()
        here = anyio.get_current_task()
        try:
            with anyio.CancelScope(shield=True):
                await self._ended.wait()
        finally:
            # Also if asyncio's own Task.cancel, which no shield holds off, has ended the wait: the
            # group waits for its tasks, and its scope must not be left in the opener's way.
            # Compared by coroutine: a new task may have the id of one that is over.
            if self._tie is not None and here.coro is self._opener.coro:
                tie, self._tie = self._tie, None
                # Errors of the block go their own way: a group would wrap them into an
                # ExceptionGroup.
                await tie.__aexit__(None, None, None)
        if self._tie is not None and any(
            task.coro is self._opener.coro for task in anyio.get_running_tasks()
        ):
            raise TransportError(
                f"closing {self._what}",
                why=f"this is task {here.name!r}, while task {self._opener.name!r} has opened it "
                f"and still runs, with its cancel scopes out of order; it is closed nevertheless",
                fix="Open and close it in one task. An async generator that has it open is to be "
                "closed by who iterates over it: async with contextlib.aclosing(generator).",
            )

    async def _live(
        self, *, task_status: anyio.abc.TaskStatus[anyio.abc.TaskGroup] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                task_status.started(tasks)
                await self._closing.wait()
                tasks.cancel_scope.cancel()
        finally:
            self._ended.set()
