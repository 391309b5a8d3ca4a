"""What every test shares: both event loops, and a watch on blocked ones."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import anyio
import pytest

# A loop that answers no timer for this long is blocked: something on it waits or computes without
# yielding. Generous, because the machine's cores are shared and a handshake alone takes 5-7 ms.
BLOCKED_LOOP_SECONDS = 1.0
_BEAT = 0.05


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _loop_watch(request: pytest.FixtureRequest) -> None:
    """Let every async test fail when its event loop was blocked."""
    if "anyio_backend" in request.fixturenames:
        request.getfixturevalue("unblocked_loop")


@pytest.fixture
async def unblocked_loop(anyio_backend: str) -> AsyncIterator[None]:
    """Beat on the loop during the test; a beat that comes far too late is a blocked loop."""
    longest = 0.0

    async def beat() -> None:
        nonlocal longest
        while True:
            due = time.monotonic() + _BEAT
            cpu = time.process_time()
            await anyio.sleep(_BEAT)
            late = time.monotonic() - due
            # Busy with other processes, the machine is late too; but then we had no CPU time.
            if late > longest and time.process_time() - cpu > late / 2:
                longest = late

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(beat)
        yield
        tasks.cancel_scope.cancel()
    assert longest < BLOCKED_LOOP_SECONDS, f"the event loop was blocked for {longest:.2f} s"
