"""A forked child has nothing of its parent's links, and takes nothing from them."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import anyio
import pytest
import torch

from auth import PeerIdentity, SecretKey
from tensor_bridge.lanes.shared.host import unavailable
from tensor_bridge.lanes.shared.link import Link
from tests.tensor_bridge.nodes import LANES, node, together
from transport import ConnectionClosed

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


def in_child(work) -> int:  # type: ignore[no-untyped-def]
    """Run `work` in a forked child; return its exit code."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = work()
        finally:
            os._exit(code)
    return exit_code(child)


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def pools() -> list[str]:
    """The shared memory that this process has a descriptor of."""
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # of the search itself
            found.append(str(each.readlink()))
    return [name for name in found if "memfd:quicmesh" in name]


async def test_a_child_can_not_use_a_link_and_the_parent_still_can() -> None:
    async with together(node(lanes=LANES["shared-memory"]), node(lanes=LANES["shared-memory"])) as (
        a,
        b,
    ):
        client, tensor = await a.client(b), torch.arange(300_000)
        ref = await client.put(tensor)
        await client.get(ref)
        assert pools(), "the search finds what there is"
        (pair,) = a.lanes._sharing._pairs.values()  # type: ignore[union-attr]
        link = pair.link
        assert link is not None

        def work() -> int:
            if pools():
                return 1
            try:
                link.check()
            except ConnectionClosed as error:
                return 0 if "forked" in str(error) else 2
            return 3

        assert in_child(work) == 0
        assert torch.equal(await client.get(ref), tensor)
        assert a.lanes.status(await a.connection(b)).name == "shared-memory"


async def test_a_child_that_lives_on_does_not_hide_the_parents_end() -> None:
    peer = PeerIdentity(SecretKey.generate().node_id)
    socks = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for sock in socks:
        sock.setblocking(False)
    ours, theirs = (Link(sock, peer, os.getpid()) for sock in socks)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # until the parent says so, or is gone
        os._exit(0)
    os.close(read)
    try:
        gone = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(theirs.run)
            with theirs.watched(gone.set), anyio.fail_after(2):
                ours._sock.close()  # as the kernel does for a process that was killed
                await gone.wait()
    finally:
        os.close(write)
        exit_code(child)
