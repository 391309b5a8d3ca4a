"""What an endpoint remembers of where its peers are."""

from __future__ import annotations

import pytest

from auth import SecretKey
from transport import whereabouts
from transport.whereabouts import MAX_ADDRESSES, Whereabouts

NODE = SecretKey.generate().node_id


def addresses(*ports: int) -> tuple[tuple[str, int], ...]:
    return tuple(("192.0.2.1", port) for port in ports)


def test_the_latest_come_first_and_none_twice() -> None:
    book = Whereabouts()
    book.add(NODE, addresses(1, 2))
    book.add(NODE, addresses(3, 2))
    assert book.of(NODE) == addresses(3, 2, 1)


def test_what_worked_last_is_dialled_first() -> None:
    book = Whereabouts()
    book.reached(NODE, ("192.0.2.1", 1))
    book.add(NODE, addresses(2))
    assert book.to_dial(NODE, addresses(3)) == addresses(1, 3, 2)


def test_who_is_unknown_is_dialled_where_it_is_said_to_be() -> None:
    assert Whereabouts().to_dial(NODE, addresses(3)) == addresses(3)
    assert Whereabouts().to_dial(NODE, ()) == ()


def test_addresses_of_a_node_are_bounded() -> None:
    book = Whereabouts()
    book.add(NODE, addresses(*range(1, 100)))
    assert book.of(NODE) == addresses(*range(1, MAX_ADDRESSES + 1))


def test_nodes_are_bounded_and_who_was_not_heard_of_for_longest_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(whereabouts, "MAX_PEERS", 2)
    first, second, third = (SecretKey.generate().node_id for _ in range(3))
    book = Whereabouts()
    book.reached(first, ("192.0.2.1", 1))
    book.reached(second, ("192.0.2.1", 2))
    book.add(first, addresses(3))
    book.add(third, addresses(4))
    assert book.of(first) == addresses(3, 1)
    assert book.to_dial(second, addresses(5)) == addresses(5)
