"""What an owner keeps account of, apart from everything that talks."""

from __future__ import annotations

import pytest

from auth import SecretKey
from mesh.rpc.errors import RefLost
from mesh.rpc.refs.owned import OwnerTable, RefLimits, new_id
from mesh.rpc.wire import Fork
from transport import LimitExceeded

GIVER, VICTIM, STRANGER = (SecretKey.generate().node_id for _ in range(3))
LIMITS = RefLimits(max_forks_per_peer=4, confirm=60.0)


def fork_of(ref: bytes) -> Fork:
    return Fork(ref, new_id())


def test_what_is_given_counts_against_the_giver_until_it_has_come() -> None:
    table = OwnerTable(LIMITS)
    ref = new_id()
    table.create(Fork(ref, new_id()), GIVER, 0.0)
    given = [fork_of(ref) for _ in range(3)]
    for fork, to in zip(given, (VICTIM, VICTIM, STRANGER), strict=True):
        assert table.share(fork, to, GIVER, 0.0)
    with pytest.raises(LimitExceeded, match=GIVER.short):
        table.share(fork_of(ref), STRANGER, GIVER, 0.0)
    for _ in range(4):  # who was given something, has all its own room
        table.create(Fork(new_id(), new_id()), VICTIM, 0.0)
    assert table.confirm(given[0], VICTIM)
    assert table.confirm(given[0], VICTIM)  # said twice
    assert table.share(fork_of(ref), STRANGER, GIVER, 0.0)
    with pytest.raises(LimitExceeded, match=VICTIM.short):
        table.create(Fork(new_id(), new_id()), VICTIM, 0.0)
    table.lapse(60.0)
    assert table._counts == {GIVER: 1, VICTIM: 5}
    table.forget(VICTIM)
    table.forget(GIVER)
    assert not table._counts
    assert len(table) == 0
    with pytest.raises(RefLost):
        table.held(ref, VICTIM)
