"""Background tasks that end with their block."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.abc

__all__ = ["helpers"]


@asynccontextmanager
async def helpers() -> AsyncIterator[anyio.abc.TaskGroup]:
    """A task group for tasks that serve the block: cancelled when it ends.

    An error of the block comes out as it is, where a plain task group would wrap it into an
    `ExceptionGroup` although none of the tasks failed. That goes for `KeyboardInterrupt` too, which
    trio raises in the block; only a cancellation is the task group's own to see.
    """
    failure: BaseException | None = None
    async with anyio.create_task_group() as tasks:
        try:
            yield tasks
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as error:
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
