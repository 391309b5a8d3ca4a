"""The pure half: what two ends may say, and that no slot is lost whatever they do."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensor_bridge.lanes.shared.protocol import (
    MAX_SLOT_BYTES,
    Arrivals,
    FilledMessage,
    GivenMessage,
    IncomingSlots,
    OutgoingSlots,
    PoolMessage,
    SealedMessage,
    decode_message,
)
from transport import ProtocolError

COUNT, SLOT = 4, 100


@given(st.lists(st.sampled_from(["take", "lend", "put back", "give"]), max_size=80), st.data())
def test_every_slot_is_somewhere_and_nowhere_twice(steps: list[str], data: st.DataObject) -> None:
    ours, theirs = OutgoingSlots(COUNT), IncomingSlots(COUNT, SLOT)
    taken: list[int] = []
    there: list[int] = []
    for step in steps:
        if step == "take" and ours.free:
            taken.append(ours.take())
        elif step in ("lend", "put back") and taken:
            slot = taken.pop(data.draw(st.integers(0, len(taken) - 1)))
            if step == "lend":
                ours.lend(slot)
                theirs.arrived(FilledMessage(slot, SLOT, 0))
                there.append(slot)
            else:
                ours.put_back(slot)
        elif step == "give" and there:
            slot = there.pop(data.draw(st.integers(0, len(there) - 1)))
            theirs.given(slot)
            ours.given(slot)
        assert len({*taken, *there}) == len(taken) + len(there)
        assert ours.free == COUNT - len(taken) - len(there)
        assert ours.lent == theirs.here == len(there)


@given(st.sampled_from(["free", "taken", "given before", "beyond"]))
def test_a_slot_that_was_not_lent_is_not_taken_back(how: str) -> None:
    slots = OutgoingSlots(COUNT)
    slot = slots.take()
    if how == "given before":
        slots.lend(slot)
        slots.given(slot)
    wrong = {"free": 0, "taken": slot, "given before": slot, "beyond": COUNT}[how]
    with pytest.raises(ProtocolError):
        slots.given(wrong)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (FilledMessage(COUNT, 1, 0), "of a pool of"),
        (FilledMessage(65535, 1, 0), "of a pool of"),
        (FilledMessage(0, SLOT + 1, 0), "in a slot of"),
        (FilledMessage(1, 1, 0), "lent twice"),
    ],
)
def test_a_slot_that_can_not_be_is_refused(message: FilledMessage, why: str) -> None:
    slots = IncomingSlots(COUNT, SLOT)
    slots.arrived(FilledMessage(1, SLOT, 0))
    with pytest.raises(ProtocolError, match=why):
        slots.arrived(message)
    assert slots.here == 1
    slots.given(1)
    slots.arrived(FilledMessage(1, SLOT, 0))


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(0, 20), st.integers(-1, 1))
def test_a_move_takes_what_it_has_and_not_a_byte_more(
    lengths: list[int], opened_after: int, beyond: int
) -> None:
    arrivals, due = Arrivals(), sum(lengths) + beyond
    messages = [FilledMessage(0, length, 7) for length in lengths]

    def run() -> None:
        for index, message in enumerate(messages):
            if index == opened_after:
                arrivals.open(due)
            arrivals.add(message)
        if opened_after >= len(messages):
            arrivals.open(due)

    if beyond < 0 and (lengths or opened_after >= 0) and sum(lengths) > due:
        with pytest.raises(ProtocolError, match="more bytes"):
            run()
        return
    run()
    got: deque[FilledMessage] = deque()
    while (message := arrivals.next()) is not None:
        got.append(message)
    assert list(got) == messages


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(15),
        bytes(17),
        bytes(16),
        b"\x09" + bytes(15),
        b"\6" + bytes(14) + b"\1",
        b"\7\0\0\1" + bytes(12),
        b"\x08" + bytes(14) + b"\1",
        PoolMessage(0).encode(),
        PoolMessage(MAX_SLOT_BYTES + 1).encode(),
        FilledMessage(0, 0, 0).encode(),
        FilledMessage(0, MAX_SLOT_BYTES + 1, 0).encode(),
        GivenMessage(0).encode()[:-1] + b"\1",
        b"\3\1" + GivenMessage(0).encode()[2:],
        b"\4\0\0\1" + SealedMessage(8).encode()[4:],
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_message(data)
