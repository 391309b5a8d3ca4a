"""Whose cancellation it was: this task's, or that of something which an app's code has awaited.

On asyncio, awaiting a future that somebody cancelled raises just what cancelling the task raises. A
group of tasks takes it for the end of the task, and of the others with it, and says nothing.
"""

from __future__ import annotations

import sys

import anyio.lowlevel

__all__ = ["is_cancelled"]


async def is_cancelled() -> bool:
    """Return whether the cancellation that was just caught was meant for this task.

    If so it has to be raised again. It is raised here already where a cancel scope asked for it,
    which asks at every await.
    """
    await anyio.lowlevel.checkpoint_if_cancelled()
    asyncio = sys.modules.get("asyncio")
    try:
        task = None if asyncio is None else asyncio.current_task()
    except RuntimeError:
        return True  # another loop's: its cancellations have no other cause
    return task is None or task.cancelling() > 0
