"""A gigabyte for a reader that sleeps costs the sender its buffer, and nobody else anything."""

from __future__ import annotations

import mmap
import sys
import time

import anyio
import psutil
import pytest

from auth import SecretKey
from tests.transport.nodes import endpoint, eventually, peer_process

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
