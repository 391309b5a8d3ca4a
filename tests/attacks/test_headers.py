"""Headers that are too long, never end, or come a byte at a time: what is held of them, how long.

The hello of a stranger, the first frame of each stream, the messages that follow, and answers.
"""

from __future__ import annotations

import resource
import struct
import time

import anyio
import cbor2
import pytest
import torch

from auth import MeshError, SecretKey
from tensor_bridge import MoveLimits
from tensor_bridge.serve_create import dense_meta
from tensor_bridge.wire import PutOpen
from tests.attacks.raw import RawClient, framed, hello, raw_client, request
from tests.tensor_bridge.nodes import node as tensor_node
from tests.transport.nodes import Events, at, endpoint, eventually, is_idle
from transport import Incoming, PeerRefused
from transport.cbor import CborValue

pytestmark = [pytest.mark.anyio, pytest.mark.attack]

MIB = 1 << 20


def memory() -> int:
    """The most memory that this process has had, in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


async def admitted(client: RawClient) -> None:
    client.send(hello(), fin=True)
    await client.until(lambda: client.reply())
    assert "ok" in client.reply()  # type: ignore[operator]


async def drip(client: RawClient, data: bytes, stream_id: int) -> int:
    """Send a byte at a time until the node has enough of it; return how many were sent."""
    for sent in range(len(data)):
        stream = client.quic._streams.get(stream_id)
        if sent and (stream is None or stream.sender._reset_error_code is not None):
            return sent
        client.send(data[sent : sent + 1], stream_id=stream_id)
        await client.run(0.02)
    raise AssertionError("it was taken to the end")


def code_of(reply: object) -> object:
    assert isinstance(reply, dict)
    return reply["err"]["code"]


# -- the hello


async def test_a_length_of_a_gigabyte_makes_us_hold_nothing() -> None:
    async with endpoint() as node, endpoint() as friend:
        connection = await friend.connect(at(node))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(20):
            async with raw_client(node.port, SecretKey.generate()) as client:
                client.send(struct.pack(">I", 1 << 30) + b"x" * 100)
                await client.until(lambda: client.reply() or client.ended)
                answer = client.reply()
                assert isinstance(answer, dict)
                assert "announces 1073741824 bytes" in answer["err"]["why"]
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert after - before < 64 * 1024, "KiB"
        assert await connection.call("echo", 1) == 1


async def test_a_length_of_a_gigabyte_after_the_hello_is_refused_too() -> None:
    async with endpoint() as node, raw_client(node.port, SecretKey.generate()) as client:
        client.send(hello(), fin=True)
        await client.until(lambda: client.reply())
        client.send(struct.pack(">I", 1 << 30) + b"x", stream_id=4)
        await client.until(lambda: client.reply(4))
        answer = client.reply(4)
        assert isinstance(answer, dict)
        assert answer["err"]["code"] == "protocol"


async def test_a_hello_that_drips_is_cut_off_at_the_handshake_timeout() -> None:
    async with endpoint(handshake_timeout=0.4) as node:
        async with raw_client(node.port, SecretKey.generate()) as client:
            began = time.monotonic()
            data, sent = hello(), 0
            while not client.reply() and time.monotonic() - began < 5:
                client.send(data[sent : sent + 1])
                sent += 1
                await client.run(0.02)
            assert 0.3 < time.monotonic() - began < 2.0
            assert client.reply()["err"]["code"] == "deadline"  # type: ignore[index]
            assert sent < len(data)
            client.close()
        # The positive control: the same hello, in pieces, but in time.
        async with raw_client(node.port, SecretKey.generate()) as client:
            for start in range(0, len(data), 16):
                client.send(data[start : start + 16])
                await client.run(0.005)
            await client.until(lambda: client.reply())
            assert "ok" in client.reply()  # type: ignore[operator]


async def test_saying_nothing_at_all_is_cut_off_as_well() -> None:
    async with endpoint(handshake_timeout=0.3) as node:
        events = Events(node)
        async with raw_client(node.port, SecretKey.generate()) as client:
            await client.until(lambda: client.ended, timeout=3)
        await eventually(lambda: events.of(PeerRefused))
        assert events.of(PeerRefused)[0].error.stage == "hello"
        await eventually(lambda: is_idle(node))


# -- the first frame of a stream


HUGE = {
    "a length of a gigabyte": struct.pack(">I", 1 << 30) + b"x" * 100,
    "the largest length": b"\xff\xff\xff\xff",
    "a map of many entries": framed(b"\xba\xff\xff\xff\xff" + b"\x61a\x01" * 10),
    "a list of many entries": framed(b"\x9b\x00\x00\x00\xff\xff\xff\xff\xff" + b"\x01" * 10),
    "a text of a gigabyte": framed(b"\xa1\x61s\x7a\x40\x00\x00\x00" + b"x" * 100),
    "bytes of many terabytes": framed(b"\xa1\x61v\x5b\x00\x00\xff\xff\xff\xff\xff\xff" + b"x"),
    "lists in lists": framed(b"\x81" * 60_000 + b"\x00"),
    "a name without end": framed(cbor2.dumps({"s": "n" * 60_000, "v": None}, canonical=True)),
    "an endless list": framed(b"\x9f" + b"\x01" * 1000),
    "a number of a kilobyte": framed(b"\xa1\x61v\xc2\x59\x04\x00" + b"\xff" * 1024),
}


@pytest.mark.parametrize("what", HUGE)
async def test_a_request_that_announces_too_much_is_refused_and_nothing_held(what: str) -> None:
    async with endpoint() as node, raw_client(node.port, SecretKey.generate()) as client:
        await admitted(client)
        before = memory()
        for number in range(1, 21):
            client.send(HUGE[what], stream_id=4 * number)
            await client.until(lambda s=4 * number: client.reply(s))  # type: ignore[misc]
            assert code_of(client.reply(4 * number)) in ("protocol", "service-unknown")
        assert memory() - before < 32 * 1024
        client.send(request("echo", 5), stream_id=84, fin=True)  # the positive control
        await client.until(lambda: client.reply(84))
        assert client.reply(84) == {"ok": 5}


async def test_a_request_that_drips_is_cut_off_in_time() -> None:
    async with (
        endpoint(handshake_timeout=1.0) as node,
        raw_client(node.port, SecretKey.generate()) as client,
    ):
        await admitted(client)
        data, began = request("echo", "x" * 500), time.monotonic()
        assert await drip(client, data, 4) > 5
        assert 0.8 < time.monotonic() - began < 4
        await client.until(lambda: client.reply(4))
        reply = client.reply(4)
        assert isinstance(reply, dict)
        assert "not complete in time" in reply["err"]["why"]
        # The positive control: in pieces, but in time. The connection has not suffered.
        for start in range(0, len(data), 32):
            client.send(data[start : start + 32], stream_id=8, fin=start + 32 >= len(data))
            await client.run(0.005)
        await client.until(lambda: client.reply(8))
        assert client.reply(8) == {"ok": "x" * 500}


async def test_requests_that_drip_on_every_stream_keep_nobody_else_out() -> None:
    async with (
        endpoint(handshake_timeout=0.8, max_streams=16) as node,
        endpoint() as friend,
    ):
        connection = await friend.connect(at(node))
        async with raw_client(node.port, SecretKey.generate()) as client:
            await admitted(client)
            await client.until(lambda: client.quic._remote_max_streams_bidi >= 16)
            began = time.monotonic()
            for number in range(1, 16):
                client.send(request("echo", 5)[:-1], stream_id=4 * number)
            assert await connection.call("echo", 1, timeout=2) == 1
            await client.until(lambda: all(client.reply(4 * n) for n in range(1, 16)))
            assert time.monotonic() - began < 3
            await client.until(lambda: client.quic._remote_max_streams_bidi > 16)
            client.send(request("echo", 5), stream_id=64, fin=True)
            await client.until(lambda: client.reply(64) == {"ok": 5})


@pytest.mark.parametrize("sent", [b"", b"\x00", b"\x00\x00\x00\x05", request("echo")[:-1]])
async def test_a_request_cut_short_is_over_with_its_stream(sent: bytes) -> None:
    async with endpoint() as node, raw_client(node.port, SecretKey.generate()) as client:
        await admitted(client)
        client.send(sent, stream_id=4, fin=True)
        await client.until(lambda: client.reply(4) or client.was_reset(4))
        (connection,) = node.connections
        await eventually(lambda: connection.info.streams == 0)


# -- messages after it


async def test_messages_of_a_handler_are_bounded_as_it_says() -> None:
    refused: list[MeshError] = []

    async def listen(incoming: Incoming) -> None:
        try:
            while True:
                await incoming.stream.receive_message(100)
        except MeshError as error:
            refused.append(error)
            raise

    async with endpoint() as node, raw_client(node.port, SecretKey.generate()) as client:
        node.register_service("listen", listen, scope="x")
        await admitted(client)
        for stream_id, length in ((4, 101), (8, 1 << 31)):
            client.send(request("listen") + framed(cbor2.dumps("fine")), stream_id)
            client.send(struct.pack(">I", length) + b"x" * 100, stream_id)
            await client.until(lambda: len(refused) == stream_id // 4)  # noqa: B023
            assert f"announces {length} bytes" in str(refused[-1])


async def test_a_put_whose_bytes_drip_gives_its_memory_back() -> None:
    limits = MoveLimits(stall=0.6, resume=0.2, linger=0.2)
    async with (
        tensor_node(moves=limits) as node,
        raw_client(node.endpoint.port, SecretKey.generate()) as client,
    ):
        await admitted(client)
        order = PutOpen("ab" * 16, dense_meta(torch.uint8, (8 * MIB,)))
        client.send(request("tensor.put", order.encode()), stream_id=4)
        await client.until(lambda: client.data(4))
        assert node.store.used()[0] == 8 * MIB, "it has its room"
        began = time.monotonic()
        assert await drip(client, bytes(1000), 4) > 5
        assert 0.5 < time.monotonic() - began < 5
        await eventually(lambda: node.is_empty)


# -- answers


@pytest.mark.parametrize("what", ["drips", "is huge", "never comes"])
async def test_an_answer_that_does_not_end_costs_the_caller_its_timeout_at_most(what: str) -> None:
    async def answer(incoming: Incoming) -> None:
        stream = incoming.stream
        stream._owes_reply = False  # a peer without manners frames as it likes
        if what == "is huge":
            await stream.send(struct.pack(">I", 1 << 30))
        elif what == "drips":
            await stream.send(struct.pack(">I", 5000))
            while True:
                await stream.send(b"x")
                await anyio.sleep(0.02)
        await anyio.sleep_forever()

    async def honest(incoming: Incoming) -> CborValue:
        return "x" * 5000

    async with endpoint() as node, endpoint() as dialer:
        node.register_service("answer", answer, scope="x")
        node.register_call("honest", honest, scope="x")
        connection = await dialer.connect(at(node))
        began = time.monotonic()
        with pytest.raises(MeshError, match=r"announces 1073741824|has not answered"):
            await connection.call("answer", timeout=0.7)
        assert time.monotonic() - began < 2
        assert await connection.call("honest", timeout=5) == "x" * 5000  # the positive control
        await eventually(lambda: connection.info.streams == 0)
