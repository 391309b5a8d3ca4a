"""A mirror against a process that is a few lines long: every byte comes to its place, once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auth import NodeId
from transport import ProtocolError
from transport.cbor import encode as encode_cbor
from transport.errors import EndpointLost
from transport.process import memory as memory_module
from transport.process import mirror as mirror_module
from transport.process.memory import SharedMemory, map_memory
from transport.process.mirror import MirrorLink
from transport.process.mirror_stream import Piece
from transport.process.records import PLACE, Flag, Kind, decode, encode
from transport.protocol import StreamCore
from transport.protocol.connection import MAX_REASON_BYTES
from transport.protocol.events import (
    ConnectionEnded,
    EndedBy,
    HandshakeCompleted,
    StreamChanged,
    StreamOpened,
    StreamsAvailable,
)

SLOT = 64
BULK = 32
SEND_BUFFER = 100
WINDOW = 80


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mirror_module, "BULK_BYTES", BULK)
        patch.setattr(mirror_module, "PIECE_BYTES", SLOT)
        patch.setattr(mirror_module, "STREAM_BYTES", 2 * SLOT)
        patch.setattr(memory_module, "GRAIN", SLOT)
        patch.setattr(memory_module, "TOTAL_BYTES", 3 * SLOT)
        yield


class Process:
    """Does what the mirror says, one stream's worth: a model of the server without QUIC."""

    def __init__(self, source: bytes = b"") -> None:
        self.slots = SharedMemory()
        self.memory = map_memory(self.slots.descriptor)
        self.said: deque[bytes] = deque()
        self.later: list[Piece] = []
        self.link = MirrorLink(
            1,
            outbound=True,
            send_buffer=SEND_BUFFER,
            stream_window=WINDOW,
            connection_window=8 * WINDOW,
            memory=self.slots,
            say=self.said.append,
            give_later=self.later.extend,
            go_on_later=lambda link: None,
        )
        self.source = source
        self.told = 0
        self.held = 0
        self.posts: deque[tuple[int, int, int]] = deque()
        self.expects = False
        self.wire = bytearray()
        self.lent: list[tuple[int, int]] = []
        self.acked = 0
        self.want: int | None = None
        self.kinds: list[Kind] = []
        self.tell(Kind.STREAMS, number=100)

    def close(self) -> None:
        self.memory.release()
        self.slots.close()

    def tell(self, kind: Kind, stream: int = 0, number: int = 0, data: bytes = b"", flags: int = 0):  # type: ignore[no-untyped-def]
        for record in decode(memoryview(encode(kind, 1, stream, number, data, flags))):
            self.link.take(record)

    def listen(self) -> None:
        while self.said:
            for record in decode(memoryview(self.said.popleft())):
                self.kinds.append(record.kind)
                match record.kind:
                    case Kind.WRITE:
                        self.wire += record.payload
                    case Kind.LEND:
                        at, size = PLACE.unpack(record.payload)
                        self.wire += self.memory[at : at + size]
                    case Kind.WANT:
                        self.want = record.number
                    case Kind.POST:
                        at, size = PLACE.unpack(record.payload)
                        self.posts.append((record.number, record.number + size, at))
                        self.expects = bool(record.flags & Flag.MORE)
                    case Kind.WITHDRAW:
                        self.posts.clear()
                        self.expects = False
                    case Kind.CONSUMED:
                        self.held -= record.number
                        assert self.held >= 0
                    case _:
                        pass

    def deliver(self, stream: StreamCore, count: int) -> None:
        """`count` bytes come from the peer, as far as its credit goes."""
        while self.posts and self.posts[0][1] <= self.told:
            self.posts.popleft()
        if self.posts:
            start, stop, at = self.posts[0]
            skip = self.told - start
            upto = min(self.told + count, stop, len(self.source))
            self.memory[at + skip : at + upto - start] = self.source[self.told : upto]
            if upto > self.told:
                self.told = upto
                self.tell(Kind.LANDED, stream.stream_id, upto)
        elif not self.expects:
            count = min(count, WINDOW - self.held, len(self.source) - self.told)
            if count > 0:
                data = self.source[self.told : self.told + count]
                at, self.told, self.held = self.told, self.told + count, self.held + count
                self.tell(Kind.DATA, stream.stream_id, at, data)

    def acknowledge(self, stream: StreamCore, count: int) -> None:
        self.acked = min(len(self.wire), self.acked + count)
        self.tell(Kind.ACKED, stream.stream_id, self.acked)


steps = st.lists(
    st.tuples(st.sampled_from(["come", "hear", "read", "post"]), st.integers(1, 200)), max_size=60
)


@given(steps=steps, holders=st.integers(0, 3))
def test_bytes_come_to_their_place_in_any_order_of_events(
    steps: list[tuple[str, int]], holders: int
) -> None:
    source = bytes(i * 7 % 251 for i in range(1500))
    process = Process(source)
    for _ in range(holders):
        process.slots.take(SLOT)
    link = process.link
    stream = link.open_stream()
    got = bytearray()
    target: bytearray | None = None

    def finish() -> None:
        nonlocal target
        if target is not None and stream.incoming.consumed >= len(got) + len(target):
            link.withdraw(stream)
            got.extend(target)
            target = None

    for what, size in [*steps, *[("come", 50), ("hear", 1), ("read", 500)] * 60]:
        match what:
            case "come":
                process.deliver(stream, size)
            case "hear":
                process.listen()
            case "read" if target is None:
                data = stream.incoming.take(size)
                got += data
                link.consumed(stream, len(data))
            case "post" if target is None:
                target = bytearray(min(size, len(source) - len(got)))
                link.post(stream, memoryview(target))
            case _:
                pass
        finish()
    if target is not None:
        got.extend(target)
    assert bytes(got) == source
    link.release(stream, 0)
    assert process.slots.free + SLOT * len(process.later) == SLOT * (3 - holders)
    process.close()


@given(
    writes=st.lists(st.tuples(st.booleans(), st.integers(1, 400)), max_size=8),
    acks=st.lists(st.integers(1, 120), max_size=20),
    holders=st.integers(0, 3),
)
def test_what_is_lent_and_written_leaves_in_order(
    writes: list[tuple[bool, int]], acks: list[int], holders: int
) -> None:
    process = Process()
    for _ in range(holders):
        process.slots.take(SLOT)
    link = process.link
    stream = link.open_stream()
    said = bytearray()
    pace = deque(acks)

    def move() -> None:
        link.go_on()
        process.listen()
        assert len(process.wire) - process.acked <= SEND_BUFFER + 3 * SLOT
        process.acknowledge(stream, pace.popleft() if pace else 1000)

    for is_lent, size in writes:
        data = bytes((len(said) + i) % 253 for i in range(size))
        said += data
        if is_lent:
            part = link.lend(stream, memoryview(data), lambda: True, 1)
            while link.unacknowledged(stream):
                move()
            assert part.unacknowledged == 0
        else:
            done = 0
            while done < size:
                room = link.room(stream)
                link.write(stream, data[done : done + room])
                done += min(room, size - done)
                if not room:
                    process.listen()
                    assert process.want is not None
                    move()
    for _ in range(30):
        move()
    assert process.wire == said
    assert process.slots.free == SLOT * (3 - holders)
    process.close()


def test_memory_that_is_gone_is_not_read() -> None:
    process = Process()
    stream = process.link.open_stream()
    answers = iter([True, True, False])
    process.link.lend(stream, memoryview(bytes(10 * SLOT)), lambda: next(answers), 7)
    process.listen()
    assert len(process.wire) == 2 * SLOT
    process.acknowledge(stream, SLOT)
    process.listen()
    assert process.link.is_spoiled(stream)
    assert process.kinds[-2:] == [Kind.TAKE_BACK, Kind.RESET]
    assert len(process.wire) == 2 * SLOT
    process.close()


def test_slots_are_free_only_once_the_process_has_let_go() -> None:
    process = Process(bytes(1000))
    stream = process.link.open_stream()
    process.link.post(stream, memoryview(bytearray(500)))
    other = process.link.open_stream()
    process.link.lend(other, memoryview(bytes(500)), lambda: True, 1)
    assert process.slots.free == 0
    process.link.withdraw(stream)
    process.link.take_back(other)
    assert process.slots.free == 0
    assert sorted(process.later) == [(0, 64), (64, 64), (128, 64)]
    process.close()


def test_a_link_that_ends_lets_go_of_everything_and_says_how() -> None:
    process = Process(bytes(1000))
    link = process.link
    stream = link.open_stream()
    link.post(stream, memoryview(bytearray(500)))
    link.events.clear()
    end = encode_cbor(["remote", "bye", True, None], max_size=100)
    process.tell(Kind.ENDED, number=9, data=end)
    assert link.events.popleft() == ConnectionEnded(EndedBy.REMOTE, 9, "bye", True)
    assert sorted(process.later) == [(0, 64), (64, 64)]
    process.tell(Kind.DATA, stream.stream_id, 0, b"late")
    assert stream.buffered == 0
    link.close(1, "twice")
    assert not link.events
    process.close()


def test_any_reason_of_an_end_can_be_said() -> None:
    process = Process()
    process.link.close(3, "\udcff" * (1 << 17))
    (record,) = (each for said in process.said for each in decode(memoryview(said)))
    assert (record.kind, record.number) == (Kind.CLOSE, 3)
    assert str(record.payload, "utf-8") == "?" * MAX_REASON_BYTES
    process.close()


def test_a_link_whose_process_is_gone_fails_with_its_error() -> None:
    process = Process()
    error = EndpointLost("the endpoint process", why="it was killed")
    process.link.fail(error)
    assert process.link.failure is error
    assert isinstance(process.link.events.popleft(), StreamsAvailable)
    assert isinstance(process.link.events.popleft(), ConnectionEnded)
    process.close()


def test_events_and_ends_of_streams_come_through() -> None:
    process = Process()
    link = process.link
    link.events.popleft()
    peer = NodeId(bytes(range(32)))
    process.tell(Kind.HANDSHAKE, data=encode_cbor([peer.raw, "mesh/1"], max_size=100))
    assert link.events.popleft() == HandshakeCompleted(peer, "mesh/1")
    process.tell(Kind.OPENED, 1)
    assert link.events.popleft() == StreamOpened(1)
    stream = link.streams[1]
    process.tell(Kind.DATA, 1, 0, b"abc", Flag.FIN)
    assert link.events.popleft() == StreamChanged(1)
    assert stream.fin_received
    assert stream.incoming.take(10) == b"abc"
    process.tell(Kind.STOP, 1, 5)
    assert (stream.remote_stop, stream.send_ended) == (5, True)
    process.tell(Kind.RESET, 1, 6)
    assert stream.remote_reset == 6
    link.release(stream, 0)
    process.tell(Kind.DATA, 1, 3, b"late")
    assert not link.streams
    with pytest.raises(ProtocolError):
        process.tell(Kind.OFFER)
    process.close()


def test_flushed_is_asked_once_for_each_change() -> None:
    process = Process()
    link = process.link
    assert link.is_flushed()
    stream = link.open_stream()
    link.write(stream, b"x")
    assert not link.is_flushed()
    assert not link.is_flushed()
    process.listen()
    assert process.kinds.count(Kind.FLUSH) == 1
    link.write(stream, b"y")
    process.tell(Kind.FLUSHED, number=1)
    assert not link.is_flushed()
    process.tell(Kind.FLUSHED, number=2)
    assert link.is_flushed()
    process.close()
