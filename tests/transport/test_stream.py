"""Streams between two endpoints: bytes, frames, back-pressure, and every way to end one."""

from __future__ import annotations

import gc
import resource
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from auth import AccessDenied, MeshError
from tests.transport.nodes import eventually, pair
from transport import (
    BufferGone,
    Connection,
    DeadlineExceeded,
    Incoming,
    LimitExceeded,
    ProtocolError,
    RemoteError,
    ServiceUnknown,
    Stream,
    StreamReset,
    TransportError,
)
from transport.cbor import encode
from transport.frames import frame

pytestmark = pytest.mark.anyio

KIB, MIB = 1 << 10, 1 << 20


@asynccontextmanager
async def serving(
    handler: Callable[[Incoming], Awaitable[None]], **settings: object
) -> AsyncIterator[Connection]:
    """A connection whose peer offers `handler` as service ``s``; nothing may be left behind."""
    async with pair(**settings) as (dialer, listener, connection):
        listener.register_service("s", handler, scope="x")
        yield connection
        back = listener.connection(dialer.node_id)
        if back is not None and connection.is_open:
            await eventually(lambda: not (connection._streams or connection.core.streams))
            await eventually(lambda: not (back._streams or back.core.streams))


async def write_for_ever(stream: Stream) -> None:
    while True:
        await stream.send(bytes(16 * KIB))
        await anyio.sleep(0.001)


async def echo(request: Incoming) -> None:
    async for data in request.stream:
        await request.stream.send(data)


# -- bytes


async def test_bytes_come_back_in_order_and_the_end_follows() -> None:
    async with serving(echo) as connection, await connection.open_stream("s") as stream:
        await stream.send(b"one ")
        await stream.send(memoryview(bytearray(b"two")))
        await stream.send(b"")
        await stream.send_eof()
        assert await stream.receive_exactly(7) == b"one two"
        with pytest.raises(anyio.EndOfStream):
            await stream.receive()
        with pytest.raises(anyio.EndOfStream):
            await stream.receive()


@pytest.mark.parametrize("size", [1, 1199, 65536, MIB + 17])
async def test_any_amount_passes_unchanged(size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]

    async with serving(echo) as connection, await connection.open_stream("s") as stream:

        async def write() -> None:
            await stream.send(data)
            await stream.send_eof()

        got = bytearray()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write)
            async for part in stream:
                got += part
        assert got == data


async def test_bytes_go_straight_to_their_place() -> None:
    async with serving(echo) as connection, await connection.open_stream("s") as stream:
        await stream.send(b"0123456789")
        target = bytearray(b"." * 12)
        assert await stream.receive_into(memoryview(target)[1:5]) == 4
        assert await stream.receive_into(memoryview(target)[6:12]) == 6
        assert target == b".0123.456789"
        assert await stream.receive_into(memoryview(bytearray())) == 0


async def test_a_stream_that_ends_too_soon_says_how_much_came() -> None:
    async def short(request: Incoming) -> None:
        await request.stream.send(b"abc")

    async with serving(short) as connection, await connection.open_stream("s") as stream:
        with pytest.raises(ProtocolError, match="3 of 10 bytes"):
            await stream.receive_exactly(10)


async def test_messages_keep_their_bounds() -> None:
    async with serving(echo) as connection, await connection.open_stream("s") as stream:
        for value in (None, [1, {"a": b"b"}], "ä" * 1000, 2.5):
            await stream.send_message(value)
        await stream.send_eof()
        assert await stream.receive_message() is None
        assert await stream.receive_message() == [1, {"a": b"b"}]
        assert await stream.receive_message() == "ä" * 1000
        assert await stream.receive_message() == 2.5
        with pytest.raises(anyio.EndOfStream):
            await stream.receive_message()


async def test_a_message_of_nearly_the_limit_passes_and_one_beyond_is_refused_on_both_sides() -> (
    None
):
    async def serve(request: Incoming) -> None:
        size = len(await request.stream.receive_message(MIB))  # type: ignore[arg-type]
        await request.stream.send_message(size)
        await request.stream.receive_message(1000)

    async with serving(serve) as connection, await connection.open_stream("s") as stream:
        await stream.send_message(bytes(MIB - 100))
        assert await stream.receive_message() == MIB - 100
        with pytest.raises(ProtocolError, match="at most"):
            await stream.send_message(bytes(MIB))
        await stream.send_message(bytes(1001))
        with pytest.raises(ProtocolError):
            await stream.receive_message()


async def test_a_message_cut_off_is_no_message() -> None:
    async def cut(request: Incoming) -> None:
        await request.stream.send(b"\x00\x00\x00\x09abc")

    async with serving(cut) as connection, await connection.open_stream("s") as stream:
        with pytest.raises(ProtocolError, match="3 of 9"):
            await stream.receive_message()


async def test_one_task_reads_while_another_writes_but_not_two_at_once() -> None:
    async with (
        serving(echo) as connection,
        await connection.open_stream("s") as stream,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(stream.receive_exactly, 3)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(anyio.BusyResourceError):
            await stream.receive()
        await stream.send(b"abc")


async def test_a_connection_carries_many_streams_at_once() -> None:
    async with serving(echo) as connection:

        async def one(number: int) -> None:
            data = bytes([number]) * 5_000
            async with await connection.open_stream("s") as stream:
                await stream.send(data)
                await stream.send_eof()
                assert await stream.receive_exactly(len(data)) == data

        async with anyio.create_task_group() as tasks:
            for number in range(30):
                tasks.start_soon(one, number)


# -- the reply


async def test_a_service_may_answer_the_request_with_a_value() -> None:
    async def serve(request: Incoming) -> None:
        await request.stream.send_reply({"offset": request.value})
        await request.stream.send(b"rest")
        with pytest.raises(RuntimeError):
            await request.stream.send_reply(None)

    async with serving(serve) as connection, await connection.open_stream("s", 7) as stream:
        assert await stream.reply() == {"offset": 7}
        assert await stream.receive_exactly(4) == b"rest"
        assert await stream.reply() == {"offset": 7}


async def test_a_service_that_says_nothing_has_taken_the_stream_when_it_ends() -> None:
    async def silent(request: Incoming) -> None:
        async for _ in request.stream:
            pass

    async with serving(silent) as connection, await connection.open_stream("s") as stream:
        await stream.send(b"data")
        await stream.send_eof()
        assert await stream.reply() is None
        with pytest.raises(anyio.EndOfStream):
            await stream.receive()


async def test_a_handler_may_close_its_stream_itself() -> None:
    async def closing(request: Incoming) -> None:
        await request.stream.aclose()

    async with serving(closing) as connection, await connection.open_stream("s") as stream:
        assert await stream.reply() is None
        with pytest.raises(anyio.EndOfStream):
            await stream.receive()


async def test_an_error_before_the_first_write_arrives_whole() -> None:
    async def refuse(request: Incoming) -> None:
        raise LimitExceeded("storing", stage="quota", why="3 bytes too many", fix="Delete some.")

    async with serving(refuse) as connection:
        stream = await connection.open_stream("s")
        with pytest.raises(LimitExceeded) as caught:
            await stream.receive()
        assert caught.value.stage == "quota"
        assert caught.value.fix == "Delete some."
        await stream.aclose()


async def test_a_writer_learns_why_the_service_refused() -> None:
    async def refuse(request: Incoming) -> None:
        raise AccessDenied("storing", why="not yours")

    async with serving(refuse) as connection, await connection.open_stream("s") as stream:
        with pytest.raises(AccessDenied, match="not yours"):
            await write_for_ever(stream)


async def test_an_error_after_the_first_write_keeps_its_class() -> None:
    async def fail(request: Incoming) -> None:
        await request.stream.send(b"half")
        raise LimitExceeded("storing", why="full")

    async with serving(fail) as connection, await connection.open_stream("s") as stream:
        assert await stream.receive_exactly(4) == b"half"
        with pytest.raises(LimitExceeded):
            await stream.receive()


async def test_a_handler_that_breaks_after_the_first_write_resets(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(request: Incoming) -> None:
        await request.stream.send(b"half")
        raise ZeroDivisionError

    async with serving(fail) as connection, await connection.open_stream("s") as stream:
        assert await stream.receive_exactly(4) == b"half"
        with pytest.raises(RemoteError):
            await stream.receive()
    assert "ZeroDivisionError" in caplog.text


async def test_an_unknown_service_is_named_at_the_first_read() -> None:
    async with serving(echo) as connection, await connection.open_stream("nope") as stream:
        with pytest.raises(ServiceUnknown, match="nope"):
            await stream.receive()


# -- back-pressure


async def test_a_reader_that_sleeps_stops_the_writer_and_bounds_its_memory() -> None:
    wake, total = anyio.Event(), 0

    async def sleeper(request: Incoming) -> None:
        nonlocal total
        await wake.wait()
        async for data in request.stream:
            total += len(data)

    async with serving(sleeper, stream_window=128 * KIB, send_buffer=128 * KIB) as connection:
        written = 0
        finished = anyio.Event()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        async def write() -> None:
            nonlocal written
            block = bytes(64 * KIB)
            async with await connection.open_stream("s") as stream:
                for _ in range(32):
                    await stream.send(block)
                    written += len(block)
                await stream.send_eof()
                await stream.reply()
            finished.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write)
            await eventually(lambda: written >= 128 * KIB)
            stuck = -1
            while stuck != written:  # until nothing moves any more
                stuck = written
                await anyio.sleep(0.3)
            # What the reader's window and the send buffer hold, and not a block more.
            assert stuck <= 256 * KIB
            assert await connection.ping() < 3.0, "the connection lives beside the stuck stream"
            assert await connection.call("echo", 1) == 1
            after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            assert after - before < 16 * KIB, "in KiB: the writer holds no more than its buffer"
            wake.set()
            with anyio.fail_after(30):
                await finished.wait()
        assert total == written == 2 * MIB


async def test_a_caller_that_does_not_read_stops_the_handler() -> None:
    sent = 0

    async def pour(request: Incoming) -> None:
        nonlocal sent
        while True:
            await request.stream.send(bytes(64 * KIB))
            sent += 64 * KIB

    async with (
        serving(pour, stream_window=128 * KIB, send_buffer=128 * KIB) as connection,
        await connection.open_stream("s") as stream,
    ):
        await eventually(lambda: sent >= 128 * KIB)
        stuck = -1
        while stuck != sent:
            stuck = sent
            await anyio.sleep(0.3)
        assert stuck <= 256 * KIB
        await stream.receive_exactly(256 * KIB)  # reading moves it on
        await eventually(lambda: sent > stuck)


async def test_one_stuck_stream_leaves_the_connections_window_to_others() -> None:
    wake = anyio.Event()

    async def sleeper(request: Incoming) -> None:
        if request.value == "sleep":
            await wake.wait()
        async for _ in request.stream:
            pass

    async with serving(
        sleeper, stream_window=128 * KIB, connection_window=512 * KIB, send_buffer=512 * KIB
    ) as connection:
        stuck = await connection.open_stream("s", "sleep")
        await stuck.send(bytes(300 * KIB))
        async with await connection.open_stream("s", "read") as stream:
            with anyio.fail_after(20):
                await stream.send(bytes(MIB))
                await stream.send_eof()
                assert await stream.reply() is None
        wake.set()
        await stuck.send_eof()
        assert await stuck.reply() is None
        await stuck.aclose()


async def test_streams_given_up_unread_give_their_window_back() -> None:
    # Many times the connection's window in all: it would run dry if unread bytes stayed counted.
    async def ignore(request: Incoming) -> None:
        await request.stream.receive(1)

    async with serving(ignore, stream_window=64 * KIB, connection_window=128 * KIB) as connection:
        for _ in range(20):
            stream = await connection.open_stream("s")
            try:
                await stream.send(bytes(60 * KIB))
            except StreamReset:
                pass
            stream.reset()
        with anyio.fail_after(10):
            assert await connection.call("echo", bytes(60 * KIB)) == bytes(60 * KIB)


async def test_a_write_that_waits_too_long_ends() -> None:
    wake = anyio.Event()

    async def sleeper(request: Incoming) -> None:
        await wake.wait()

    async with serving(sleeper, stream_window=64 * KIB, send_buffer=64 * KIB) as connection:
        async with await connection.open_stream("s", timeout=0.2) as stream:
            with pytest.raises(DeadlineExceeded) as caught:
                await stream.send(bytes(MIB))
            assert caught.value.stage == "send"
            with pytest.raises(DeadlineExceeded) as caught:
                await stream.receive()
            assert caught.value.stage == "receive"
            stream.reset(caught.value)
        wake.set()


# -- ends


async def test_half_close_leaves_the_other_direction() -> None:
    async def serve(request: Incoming) -> None:
        got = b"".join([data async for data in request.stream])
        await request.stream.send(b"you said " + got)

    async with serving(serve) as connection, await connection.open_stream("s") as stream:
        await stream.send(b"bye")
        await stream.send_eof()
        await stream.send_eof()  # a second one changes nothing
        with pytest.raises(TransportError, match="its end was sent"):
            await stream.send(b"more")
        assert await stream.receive_exactly(12) == b"you said bye"


async def test_a_reset_reaches_the_reader_with_its_class() -> None:
    seen: list[MeshError] = []
    begun, done = anyio.Event(), anyio.Event()

    async def serve(request: Incoming) -> None:
        try:
            while True:
                await request.stream.receive()
                begun.set()
        except MeshError as error:
            seen.append(error)
            done.set()
            raise

    async with serving(serve) as connection:
        stream = await connection.open_stream("s")
        await stream.send(b"x")
        with anyio.fail_after(5):
            await begun.wait()
        stream.reset(LimitExceeded("mine"))
        stream.reset()  # a second one changes nothing
        with anyio.fail_after(5):
            await done.wait()
        assert isinstance(seen[0], LimitExceeded)
        with pytest.raises(anyio.ClosedResourceError):
            await stream.send(b"x")
        with pytest.raises(anyio.ClosedResourceError):
            await stream.receive()


async def test_leaving_the_block_by_an_exception_resets() -> None:
    seen: list[BaseException] = []
    begun, done = anyio.Event(), anyio.Event()

    async def serve(request: Incoming) -> None:
        try:
            async for _ in request.stream:
                begun.set()
        except MeshError as error:
            seen.append(error)
            raise
        finally:
            done.set()

    async with serving(serve) as connection:

        async def give_up() -> None:
            async with await connection.open_stream("s") as stream:
                await stream.send(b"half of it")
                await begun.wait()
                raise LimitExceeded("mine")

        with pytest.raises(LimitExceeded):
            await give_up()
        with anyio.fail_after(5):
            await done.wait()
        assert isinstance(seen[0], LimitExceeded), "half is not taken for the whole"


async def test_a_handler_that_leaves_early_stops_the_writer() -> None:
    async def early(request: Incoming) -> None:
        await request.stream.receive_exactly(10)

    async with serving(early) as connection, await connection.open_stream("s") as stream:
        with pytest.raises(StreamReset):
            await write_for_ever(stream)
        assert await stream.reply() is None


async def test_closing_early_tells_a_handler_that_writes() -> None:
    ended = anyio.Event()

    async def pour(request: Incoming) -> None:
        try:
            while True:
                await request.stream.send(bytes(16 * KIB))
                await anyio.sleep(0.001)
        except StreamReset:
            ended.set()
            raise

    async with serving(pour) as connection:
        stream = await connection.open_stream("s")
        await stream.receive_exactly(100)
        await stream.aclose()
        await stream.aclose()
        with anyio.fail_after(5):
            await ended.wait()


async def test_closing_wakes_a_reader_in_another_task() -> None:
    async with serving(echo) as connection:
        stream = await connection.open_stream("s")
        raised: list[type[BaseException]] = []

        async def read() -> None:
            try:
                await stream.receive()
            except anyio.ClosedResourceError as error:
                raised.append(type(error))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            await stream.aclose()
        assert raised == [anyio.ClosedResourceError]


async def test_handlers_that_never_read_or_write_do_not_hold_the_connection() -> None:
    async def idle(request: Incoming) -> None:
        return

    async with serving(idle) as connection:
        for _ in range(140):  # more than there are stream slots
            async with await connection.open_stream("s") as stream:
                assert await stream.reply() is None


async def test_streams_of_a_lost_connection_all_raise_how_it_ended() -> None:
    async def serve(request: Incoming) -> None:
        await request.stream.send(b"last words")
        await anyio.sleep_forever()

    async with serving(serve) as connection:
        stream = await connection.open_stream("s")
        assert await stream.receive_exactly(4) == b"last"
        await connection.close()
        assert await stream.receive_exactly(6) == b" words", "what had arrived is still there"
        for operation in (stream.receive(), stream.send(b"x"), stream.send_eof()):
            with pytest.raises(MeshError):
                await operation
        await stream.aclose()
        with pytest.raises(MeshError):
            await connection.open_stream("s")
        with pytest.raises(MeshError):
            await connection.call("echo")
        with pytest.raises(MeshError):
            await connection.ping()


async def test_a_stream_says_whose_it_is() -> None:
    async with serving(echo) as connection, await connection.open_stream("s") as stream:
        assert isinstance(stream, Stream)
        assert stream.peer == connection.peer
        assert stream.stream_id == stream.core.stream_id
        assert not stream.is_closed
    assert stream.is_closed


async def test_a_read_ends_when_another_task_closes_the_stream() -> None:
    """What comes after that goes nowhere, and must not count as read."""

    async def trickle(request: Incoming) -> None:
        await request.stream.send(bytes(100_000))
        await request.stream.receive(1)

    async with serving(trickle) as connection:
        stream = await connection.open_stream("s")
        async with anyio.create_task_group() as tasks:

            async def read() -> None:
                with pytest.raises(anyio.ClosedResourceError):
                    await stream.receive_into(memoryview(bytearray(200_000)))

            tasks.start_soon(read)
            await eventually(lambda: stream.core.incoming.delivered >= 100_000)
            await stream.aclose()
        assert await connection.call("echo", 1) == 1


async def test_memory_that_cannot_be_written_to_is_refused_at_once() -> None:
    async with serving(echo) as connection, await connection.open_stream("s") as stream:
        with pytest.raises(TypeError, match="written"):
            await stream.receive_into(memoryview(bytes(100_000)))
        await stream.send(bytes(range(8)))
        wide = array("I", [0, 0])
        assert await stream.receive_into(memoryview(wide)) == 8
        assert wide.tobytes() == bytes(range(8))


async def test_lent_memory_is_let_go_of_when_the_transfer_is_given_up() -> None:
    over = anyio.Event()

    async def nobody_reads(request: Incoming) -> None:
        await over.wait()

    async with serving(nobody_reads) as connection:
        memory = bytearray(5 * MIB)
        stream = await connection.open_stream("s")
        with anyio.move_on_after(0.2):
            await stream.send_lent(memoryview(memory))
        with pytest.raises(TransportError, match="given up halfway"):
            await stream.send(b"more")
        stream.reset()
        gc.collect()  # the frames that the cancellation went through
        memory.append(0)  # nobody holds a view of it any more
        assert await connection.call("echo", 1) == 1
        over.set()


async def test_lent_memory_that_is_gone_ends_the_transfer_with_an_error() -> None:
    async def sink(request: Incoming) -> None:
        await request.stream.receive_into(memoryview(bytearray(20 * MIB)))

    async with serving(sink) as connection:
        asked = 0

        def is_intact() -> bool:
            nonlocal asked
            asked += 1
            return asked < 20

        stream = await connection.open_stream("s")
        with pytest.raises(BufferGone):
            await stream.send_lent(memoryview(bytearray(20 * MIB)), is_intact=is_intact)
        stream.reset()
        assert asked == 20


async def test_a_small_read_given_up_halfway_leaves_nothing_to_read() -> None:
    async def dribble(request: Incoming) -> None:
        await request.stream.send(b"0123456789")
        await request.stream.receive()

    async with serving(dribble) as connection:
        stream = await connection.open_stream("s")
        with anyio.move_on_after(0.2) as scope:
            await stream.receive_exactly(100)
        assert scope.cancelled_caught
        with pytest.raises(MeshError):
            await stream.receive_exactly(1)
        stream.reset()


async def test_a_message_given_up_halfway_is_not_taken_for_the_next() -> None:
    async def half(request: Incoming) -> None:
        await request.stream.send(frame(encode("text", max_size=64))[:-1])
        await request.stream.receive()

    async with serving(half) as connection:
        stream = await connection.open_stream("s")
        with anyio.move_on_after(0.2) as scope:
            await stream.receive_message()
        assert scope.cancelled_caught
        with pytest.raises(MeshError):
            await stream.receive_message()
        stream.reset()
