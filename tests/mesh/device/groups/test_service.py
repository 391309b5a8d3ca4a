"""A node's part in groups of devices, without a peer."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from auth import NodeId
from mesh.device.groups import wire
from mesh.device.groups.service import GroupService, _Joined
from mesh.tasks import helpers

pytestmark = pytest.mark.anyio


class Executor:
    def __init__(self) -> None:
        self.ended = anyio.Event()


class Stream:
    """A client's, in which something happens while news are sent to it."""

    timeout = 0.0

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    async def receive(self, count: int) -> bytes:
        await anyio.sleep_forever()
        return b""

    async def send_message(self, message: object) -> None:
        self.executor.ended.set()
        await anyio.wait_all_tasks_blocked()  # who waits for that has noticed


async def test_a_membership_ends_though_the_end_comes_while_news_are_sent() -> None:
    member = wire.Member(NodeId(bytes(32)), (0,))
    executor: Any = Executor()
    stream: Any = Stream(executor)
    joined = _Joined(wire.Join(bytes(16), bytes(16), 1, 0, (member,), 5.0), executor, member.node)
    joined.hear(wire.Formed(1, False))
    service = GroupService.__new__(GroupService)
    with anyio.fail_after(5):
        async with helpers() as tasks:
            await service._watch(joined, stream, tasks)
