"""What a program is told of its connections and its socket beside what happens on them."""

from __future__ import annotations

from collections.abc import Mapping

from auth import SocketAddress
from transport.addresses import format_address
from transport.cbor import CborValue
from transport.cbor import encode as encode_cbor
from transport.process.records import FACTS, MAX_PAYLOAD
from transport.process.told import LinkState
from transport.udp import Refusal

__all__ = ["FACTS_SECONDS", "REPORT_SECONDS", "new_facts", "report_of"]

FACTS_SECONDS = 0.05
"""How old the figures of a connection may be when something else is told of it."""

REPORT_SECONDS = 0.25
"""How often the figures of connections and of the socket are looked at."""


def new_facts(state: LinkState, now: float) -> bytes | None:
    """Return the payload of a FACTS record, None if its program has been told the same before."""
    core = state.core
    where = core.remote_address or state.address
    figures = FACTS.pack(
        -1.0 if core.rtt is None else core.rtt,
        core.bytes_sent,
        core.bytes_received,
        core.datagram_size,
    )
    facts = figures + format_address(where).encode()
    state.facts_at = now
    if facts == state.facts:
        return None
    state.facts = facts
    return facts


def report_of(drops: Mapping[str, int], refused: Mapping[SocketAddress, Refusal]) -> bytes:
    """Return the payload of a REPORT record."""
    told: list[CborValue] = [[host, port, refused[host, port].why] for host, port in refused]
    return encode_cbor({"drops": dict(drops), "refused": told}, max_size=MAX_PAYLOAD)
