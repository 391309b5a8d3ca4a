from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auth import NodeId, SecretKey, Ticket, TicketError
from auth.encoding import CborItem, base32_encode, cbor_encode
from auth.ticket import MAX_TEXT, _header

NODE = SecretKey.from_bytes(bytes(32)).node_id
ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"

hosts = st.ip_addresses().filter(lambda ip: not (ip.is_unspecified or ip.is_multicast))
tickets = st.builds(
    Ticket,
    st.binary(min_size=32, max_size=32).map(NodeId),
    st.lists(st.tuples(hosts.map(str), st.integers(1, 65535)), max_size=16).map(tuple),
    st.none() | st.binary(max_size=300),
)
TICKET = Ticket(NODE, (("192.0.2.1", 4433), ("2001:db8::1", 4433)), b"invite")
TEXT = TICKET.encode()


def refusal(text: str) -> TicketError:
    with pytest.raises(TicketError) as caught:
        Ticket.decode(text)
    return caught.value


def sealed(body: CborItem) -> str:
    """A ticket with right checksums around ``body``."""
    data = cbor_encode(body)
    return "mesh1" + base32_encode(_header(len(data)) + data + zlib.crc32(data).to_bytes(4, "big"))


@given(tickets)
def test_a_ticket_is_read_back(ticket: Ticket) -> None:
    text = ticket.encode()
    assert text.startswith("mesh1")
    assert len(text) <= MAX_TEXT
    assert Ticket.decode(text) == ticket


@given(st.text(max_size=200))
def test_arbitrary_text_is_refused(text: str) -> None:
    refusal(text)


@given(st.text(ALPHABET, max_size=200))
def test_arbitrary_text_behind_the_prefix_is_refused(text: str) -> None:
    why = refusal("mesh1" + text).why or ""
    assert why.startswith(("it is truncated", "it was altered"))


@given(tickets, st.data())
def test_every_truncated_ticket_is_called_truncated(ticket: Ticket, data: st.DataObject) -> None:
    text = ticket.encode()
    error = refusal(text[: data.draw(st.integers(1, len(text) - 1))])
    assert (error.why or "").startswith("it is truncated")
    assert error.fix == "Copy the whole ticket again."


@given(tickets, st.data())
def test_every_altered_ticket_is_called_altered(ticket: Ticket, data: st.DataObject) -> None:
    text = ticket.encode()
    at = data.draw(st.integers(5, len(text) - 1))
    character = data.draw(st.sampled_from(ALPHABET + "0189!ä").filter(lambda c: c != text[at]))
    error = refusal(text[:at] + character + text[at + 1 :])
    assert (error.why or "").startswith("it was altered")
    assert error.fix == "Copy the whole ticket again."


@given(tickets, st.text(ALPHABET, min_size=1, max_size=20))
def test_a_ticket_with_more_behind_it_is_called_altered(ticket: Ticket, more: str) -> None:
    why = refusal(ticket.encode() + more).why or ""
    assert why.startswith("it was altered")
    # One character may not make a byte.
    assert "something follows its end" in why or len(more) == 1


def test_two_swapped_characters_are_noticed() -> None:
    for at in range(5, len(TEXT) - 1):
        swapped = TEXT[:at] + TEXT[at + 1] + TEXT[at] + TEXT[at + 2 :]
        if swapped != TEXT:
            assert (refusal(swapped).why or "").startswith("it was altered")


def test_a_truncated_ticket_says_how_much_is_there() -> None:
    assert f"30 of {len(TEXT)} characters" in str(refusal(TEXT[:30]))


@pytest.mark.parametrize("text", ["", " ", "hello", "https://example.org", "mush1aaaa", str(NODE)])
def test_what_is_no_ticket_is_called_so(text: str) -> None:
    assert "it is not a ticket" in str(refusal(text))


def test_a_ticket_of_a_newer_version_asks_for_an_update() -> None:
    error = refusal(TEXT.replace("mesh1", "mesh2"))
    assert "version 2" in str(error)
    assert error.fix == "Update quicmesh."


def test_case_and_white_space_do_not_matter() -> None:
    wrapped = "\n  ".join(TEXT[at : at + 20] for at in range(0, len(TEXT), 20))
    assert Ticket.decode(f" {wrapped.upper()}\r\n") == TICKET


@pytest.mark.parametrize(
    ("address", "why"),
    [
        (("192.0.2.1", 0), "port 0"),
        (("192.0.2.1", 65536), "port 65536"),
        (("192.0.2.1", -1), "port -1"),
        (("example.org", 1), "not an IPv4 or IPv6 address"),
        (("192.0.2.1:1", 1), "not an IPv4 or IPv6 address"),
        (("", 1), "not an IPv4 or IPv6 address"),
        (("0.0.0.0", 1), "not the address of one host"),
        (("::", 1), "not the address of one host"),
        (("224.0.0.1", 1), "not the address of one host"),
        (("fe80::1%eth0", 1), "zone"),
    ],
)
def test_an_address_nobody_can_dial_is_refused(address: tuple[str, int], why: str) -> None:
    with pytest.raises(TicketError, match=why):
        Ticket(NODE, (("192.0.2.1", 4433), address))


def test_addresses_have_one_spelling() -> None:
    assert Ticket(NODE, (("2001:0DB8:0:0::1", 1),)).addresses == (("2001:db8::1", 1),)


def test_addresses_are_bounded() -> None:
    addresses = tuple((f"192.0.2.{n}", 1) for n in range(1, 18))
    Ticket(NODE, addresses[:16])
    with pytest.raises(TicketError, match="limit of 16"):
        Ticket(NODE, addresses)


def test_the_length_is_bounded_both_ways() -> None:
    sizes = [size for size in range(1100, 1400) if fits(size)]
    assert sizes == list(range(1100, sizes[-1] + 1))
    longest = Ticket(NODE, (), bytes(sizes[-1])).encode()
    assert MAX_TEXT - 2 <= len(longest) <= MAX_TEXT
    assert Ticket.decode(longest).invite == bytes(sizes[-1])
    assert "far too long" in str(refusal("mesh1" + "a" * 10000))


def fits(size: int) -> bool:
    try:
        Ticket(NODE, (), bytes(size))
    except TicketError:
        return False
    return True


@pytest.mark.parametrize(
    "body",
    [
        [],
        [NODE.raw, [], None, None],
        [NODE.raw[:-1], [], None],
        [NODE.raw, [[b"\x01\x02\x03", 1]], None],
        [NODE.raw, [[b"\x01\x02\x03\x04", 0]], None],
        [NODE.raw, [[b"\x00\x00\x00\x00", 1]], None],
        [NODE.raw, [[b"\x01\x02\x03\x04", 1]] * 17, None],
        [NODE.raw, [], "text"],
        "text",
    ],
)
def test_right_checksums_do_not_make_a_ticket(body: list[CborItem]) -> None:
    Ticket.decode(sealed([NODE.raw, [[b"\x01\x02\x03\x04", 1]], None]))
    assert "it is not a ticket" in str(refusal(sealed(body)))


def test_a_second_spelling_is_refused() -> None:
    body = b"\x98\x03" + cbor_encode([NODE.raw, [], None])[1:]
    data = _header(len(body)) + body + zlib.crc32(body).to_bytes(4, "big")
    assert "one form" in str(refusal("mesh1" + base32_encode(data)))


def test_the_invite_stays_out_of_repr() -> None:
    assert "invite" not in repr(TICKET)
    assert "192.0.2.1" in repr(TICKET)
