"""A gigabyte for a reader that sleeps costs the sender its buffer, and nobody else anything."""

from __future__ import annotations

import mmap
import sys
import time

import anyio
import psutil
import pytest

from auth import SecretKey
from tests.transport.nodes import Events, endpoint, eventually, peer_process
from transport import PeerLeft

pytestmark = [
    pytest.mark.alone,
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="counts resident memory as Linux does"),
]

MIB = 1 << 20
GIB = 1 << 30


async def test_a_gigabyte_for_a_reader_that_sleeps() -> None:
    memory = psutil.Process().memory_info
    async with endpoint() as node, peer_process(SecretKey.generate()) as peer:
        connection = await node.connect(peer.address)
        sleeper = await connection.open_stream("sleep")
        # Never written to, so that it is resident nowhere: what grows is what the stream keeps.
        gigabyte = memoryview(mmap.mmap(-1, GIB))
        before, most, slowest = memory().rss, 0, 0.0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sleeper.send, gigabyte)
            await eventually(lambda: connection.info.bytes_sent >= MIB)
            began = time.monotonic()
            while time.monotonic() - began < 2.0:
                slowest = max(slowest, await connection.ping())
                most = max(most, memory().rss - before)
                await anyio.sleep(0.02)
            sent = connection.info.bytes_sent
            tasks.cancel_scope.cancel()
        sleeper.reset()
        assert most < 64 * MIB, f"{most / MIB:.0f} MiB more"
        assert sent < 16 * MIB, "what the reader's window holds, and no more, has left"
        assert slowest < 1.0
        # The control: a reader that is awake gets more than the sleeper did.
        async with await connection.open_stream("sink") as sink:
            await sink.send(gigabyte[: 16 * MIB])
            await sink.send_eof()
            await sink.reply()
        assert connection.info.bytes_sent - sent > 16 * MIB


async def test_beside_a_flood_pings_are_short_and_nobody_is_lost() -> None:
    liveness, pings = 0.8, []
    async with (
        endpoint(liveness=liveness) as node,
        peer_process() as peer,
        peer_process() as bystander,
    ):
        connection = await node.connect(peer.address)
        other = await node.connect(bystander.address)
        events = Events(node)
        gigabyte = memoryview(mmap.mmap(-1, GIB))

        async def flood() -> None:
            async with await connection.open_stream("sink") as sink:
                while True:
                    await sink.send(gigabyte)

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(flood)
            await eventually(lambda: connection.info.bytes_sent >= MIB)
            began = time.monotonic()
            while time.monotonic() - began < 2 * liveness:
                pings += [await connection.ping(), await other.ping()]
                await anyio.sleep(0.01)
            sent = connection.info.bytes_sent
            tasks.cancel_scope.cancel()
        pings.sort()
        assert sent > 16 * MIB, "that was no flood"
        # All but the few in which the machine did something else.
        assert pings[int(0.9 * len(pings))] < 0.2, f"{1e3 * pings[-1]:.0f} ms at most"
        assert events.of(PeerLeft) == []
        assert await other.call("echo", 1) == 1
