"""The cost of a call does not grow with the calls made before it, nor does memory."""

from __future__ import annotations

import pytest

from auth import SocketAddress
from tests.benchmarks.small_calls import measure
from tests.transport.nodes import pair
from transport.udp import UdpSocket

pytestmark = pytest.mark.anyio


async def test_calls_stay_cheap_and_memory_flat() -> None:
    # The full 20,000 are in tests/benchmarks/small_calls.py; linear growth shows here already.
    result = await measure(2000, window=300)
    assert result.ratio < 2.0, result  # of the full run 1.25 is asked; this machine may be shared
    assert result.grown < 2 << 20, result
    assert result.carried < 320, "two packets for a call, and now and then an acknowledgement"


async def test_a_call_is_one_datagram_each_way_and_seldom_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pair() as (dialer, listener, connection):
        await connection.call("echo", b"warm")
        counts = {}
        for node in (dialer, listener):
            counts[node] = _count(node._socket, monkeypatch)
        for number in range(100):
            assert await connection.call("echo", number) == number
        for count in counts.values():
            # Where the machine is slow, what was held back for 1 ms leaves before the answer.
            assert 100 <= len(count) <= 200


def _count(sock: UdpSocket, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    send = sock.send

    def counting(data: bytes | memoryview, address: SocketAddress) -> bool:
        sizes.append(len(data))
        return send(data, address)

    monkeypatch.setattr(sock, "send", counting)
    return sizes
