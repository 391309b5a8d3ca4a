"""The store's books: quotas before memory, ownership, versions; and that they always add up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from auth import NodeId, Quotas
from tensor_bridge import (
    NoSuchTensor,
    QuotaExceeded,
    Reservation,
    StoredTensor,
    StoreLimits,
    TensorStore,
    UnsupportedTensor,
)

ALICE, BOB = NodeId(b"\x01" * 32), NodeId(b"\x02" * 32)
LIMITS = StoreLimits(max_bytes=100, max_bytes_per_owner=60, max_objects=5, max_objects_per_owner=3)


def bytes_of(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8)


def test_room_is_counted_from_the_reservation_on() -> None:
    store = TensorStore(LIMITS)
    with store.reserve(ALICE, 60) as first:
        with pytest.raises(QuotaExceeded, match="0 bytes are left"):
            store.reserve(ALICE, 1)
        with pytest.raises(QuotaExceeded, match="40 bytes are left"):
            store.reserve(BOB, 41)
        with store.reserve(BOB, 40):
            assert store.used() == (100, 2)
        stored = first.keep(bytes_of(60), name="w")
    assert store.used() == store.used(ALICE) == (60, 1)
    assert store.get(stored.object_id) is stored
    store.delete(stored.object_id)
    assert store.used() == (0, 0)


def test_a_grants_quota_lowers_the_share_and_never_raises_it() -> None:
    store = TensorStore(LIMITS)
    with pytest.raises(QuotaExceeded):
        store.reserve(ALICE, 11, Quotas(max_bytes=10))
    with pytest.raises(QuotaExceeded):
        store.reserve(ALICE, 61, Quotas(max_bytes=1000))
    with pytest.raises(QuotaExceeded, match="holds 0"):
        store.reserve(ALICE, 1, Quotas(max_objects=0))
    assert store.used() == (0, 0)
    store.reserve(ALICE, 10, Quotas(max_bytes=10)).release()


def test_a_reservation_is_used_once() -> None:
    store = TensorStore(LIMITS)
    reservation = store.reserve(ALICE, 5)
    reservation.keep(bytes_of(5))
    with pytest.raises(RuntimeError, match="used or released"):
        reservation.keep(bytes_of(5))
    reservation.release()
    assert store.used() == (5, 1)


def test_the_programs_own_tensors_are_held_by_reference_and_cost_no_bytes() -> None:
    store = TensorStore(LIMITS)
    tensor = bytes_of(1000)
    stored = store.put(tensor, owner=ALICE, name="big")
    assert stored.tensor is tensor
    assert store.used(ALICE) == (0, 1)
    store.put(tensor, owner=ALICE)
    store.put(tensor, owner=ALICE)
    with pytest.raises(QuotaExceeded, match="holds 3"):
        store.put(tensor, owner=ALICE)


def test_a_tensor_that_cannot_move_costs_nothing() -> None:
    store = TensorStore(LIMITS)
    with pytest.raises(UnsupportedTensor):
        store.put(torch.empty(3, device="meta"), owner=ALICE)
    assert store.used() == (0, 0)


def test_objects_of_others_look_like_none() -> None:
    store = TensorStore()
    stored = store.put(bytes_of(1), owner=ALICE)
    missing = "0" * 32
    with pytest.raises(NoSuchTensor) as others:
        store.owned(stored.object_id, BOB)
    with pytest.raises(NoSuchTensor) as nobodys:
        store.owned(missing, BOB)
    assert str(others.value).replace(stored.object_id[:8], missing[:8]) == str(nobodys.value)
    assert store.owned(stored.object_id, ALICE) is stored
    with pytest.raises(NoSuchTensor):
        store.put(bytes_of(1), owner=BOB, object_id=stored.object_id)


def test_versions_change_with_writes_replacement_and_rebirth() -> None:
    store = TensorStore()
    tensor = torch.zeros(3)
    stored = store.put(tensor, owner=ALICE, name="w")
    seen = {stored.version}
    tensor.add_(1)
    seen.add(stored.version)
    tensor[1:].zero_()  # through a view
    seen.add(stored.version)
    replaced = store.put(tensor, owner=ALICE, object_id=stored.object_id)
    assert (replaced.object_id, replaced.name) == (stored.object_id, "w")
    seen.add(replaced.version)
    store.delete(stored.object_id)
    seen.add(store.put(tensor, owner=ALICE).version)
    assert len(seen) == 5
    with torch.inference_mode():
        store.put(torch.zeros(2), owner=ALICE).version.bit_length()


def test_replacing_gives_back_what_the_former_content_cost() -> None:
    store = TensorStore(LIMITS)
    with store.reserve(ALICE, 50) as room:
        stored = room.keep(bytes_of(50))
    store.put(bytes_of(50), owner=ALICE, object_id=stored.object_id)
    assert store.used() == (0, 1)


class Books(RuleBasedStateMachine):
    """Any order of operations: the counts are those of what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.store = TensorStore(LIMITS)
        self.reserved: list[tuple[NodeId, int]] = []
        self.kept: dict[str, tuple[NodeId, int]] = {}

    reservations = Bundle("reservations")
    objects = Bundle("objects")
    owners = st.sampled_from([ALICE, BOB])

    @rule(target=reservations, owner=owners, nbytes=st.integers(0, 70))
    def reserve(self, owner: NodeId, nbytes: int) -> Reservation | None:
        try:
            reservation = self.store.reserve(owner, nbytes)
        except QuotaExceeded:
            return None
        self.reserved.append((owner, nbytes))
        return reservation

    @rule(target=objects, reservation=consumes(reservations))
    def keep(self, reservation: Reservation | None) -> StoredTensor | None:
        if reservation is None:
            return None
        stored = reservation.keep(bytes_of(reservation.nbytes))
        self.reserved.remove((reservation.owner, reservation.nbytes))
        self.kept[stored.object_id] = (reservation.owner, reservation.nbytes)
        return stored

    @rule(reservation=consumes(reservations))
    def release(self, reservation: Reservation | None) -> None:
        if reservation is not None:
            reservation.release()
            reservation.release()
            self.reserved.remove((reservation.owner, reservation.nbytes))

    @rule(stored=consumes(objects))
    def delete(self, stored: StoredTensor | None) -> None:
        if stored is None:
            return
        if stored.object_id in self.kept:
            self.store.delete(stored.object_id)
            del self.kept[stored.object_id]
        else:
            with pytest.raises(NoSuchTensor):
                self.store.delete(stored.object_id)

    @rule(owner=owners)
    def delete_owner(self, owner: NodeId) -> None:
        gone = [key for key, (each, _) in self.kept.items() if each == owner]
        assert self.store.delete_owner(owner) == len(gone)
        for key in gone:
            del self.kept[key]

    @invariant()
    def adds_up(self) -> None:
        everything = [*self.reserved, *self.kept.values()]
        for owner in (ALICE, BOB):
            own = [nbytes for each, nbytes in everything if each == owner]
            assert self.store.used(owner) == (sum(own), len(own))
            assert sum(own) <= LIMITS.max_bytes_per_owner
            assert len(own) <= LIMITS.max_objects_per_owner
        total, count = self.store.used()
        assert total <= LIMITS.max_bytes
        assert count == len(everything) <= LIMITS.max_objects
        assert len(self.store) == len(self.kept)


Books.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBooks = Books.TestCase
