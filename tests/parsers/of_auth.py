"""The parsers of `auth`: statements, tickets, ids, certificates, and what passes for a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import strategies as st

from auth import (
    AuthorizedKey,
    Delegation,
    IdentityError,
    Invite,
    NodeId,
    SecretKey,
    Ticket,
    TicketError,
    TokenBook,
    TokenRefused,
    certificate_for,
    node_id_of_certificate,
)
from auth.encoding import base32_decode, base32_encode, cbor_decode, cbor_encode
from auth.keys_file import parse_authorized_keys
from tests.parsers.parser import Parser, texts

__all__ = ["PARSERS", "delegations", "node_ids", "petnames", "scopes"]

KEY = SecretKey.from_bytes(bytes(32))
CERTIFICATE = certificate_for(KEY).public_bytes(Encoding.DER)
TOKEN = bytes(range(32))
MAX_STATEMENT = 4096

node_ids = st.binary(min_size=32, max_size=32).map(NodeId)
strong_ids = node_ids.filter(lambda node_id: not node_id.is_weak)
petnames = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._]{0,20}\Z")
scopes = st.lists(
    st.sampled_from(["tensor", "tensor:put", "collective:*", "collective:a-job", "admin", "*"])
    | st.from_regex(r"\A[a-z]{1,8}(:[a-z0-9]{1,8}){0,2}\Z"),
    max_size=6,
)
times = st.floats(0, 1e10)

_atoms = (
    st.none()
    | st.integers(-(1 << 64), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.binary(max_size=40)
    | texts
)
_items = st.lists(_atoms | st.lists(_atoms | st.lists(_atoms, max_size=3), max_size=4), max_size=6)

_hosts = st.ip_addresses().filter(lambda ip: not (ip.is_unspecified or ip.is_multicast)).map(str)
_tickets = st.builds(
    Ticket,
    node_ids,
    st.lists(st.tuples(_hosts, st.integers(1, 65535)), max_size=16).map(tuple),
    st.none() | st.binary(max_size=300),
)


def _signed(kind: Callable[..., Any], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    # Form is what is read here; signing would take more time than all the rest.
    return st.builds(kind, signature=st.binary(min_size=64, max_size=64), **fields)


delegations = _signed(
    Delegation,
    machine=node_ids,
    program=node_ids,
    scopes=scopes.map(lambda some: tuple(sorted(set(some)))),
    issued_at=times,
    expires_at=times,
)
_invites = _signed(
    Invite,
    issuer=node_ids,
    nonce=st.binary(min_size=16, max_size=16),
    scopes=scopes.map(lambda some: tuple(sorted(set(some)))),
    expires_at=times,
    petname=st.none() | petnames,
)

_authorized_keys = st.lists(
    st.builds(
        AuthorizedKey,
        strong_ids,
        st.none() | petnames,
        scopes.filter(bool).map(tuple),
        st.none() | st.integers(0, 10**11).map(float),
    ),
    max_size=4,
    unique_by=(lambda key: key.node_id, lambda key: key.petname or key.node_id),
).map(tuple)


def _read_certificate(data: bytes) -> NodeId:
    try:
        certificate = x509.load_der_x509_certificate(data)
    except (ValueError, x509.InvalidVersion) as error:  # what the handshake takes for a bad one
        raise IdentityError("reading the peer's certificate", why="it can't be parsed") from error
    return node_id_of_certificate(certificate)


def _claim(secret: bytes) -> bytes:
    """Present `secret` to a book that has one token live."""
    book = TokenBook(clock=lambda: 0.0, random=lambda count: TOKEN[:count])
    book.mint(
        issuer=KEY.node_id,
        audience=KEY.node_id,
        action="read",
        object_id="ab" * 16,
        version=(0, 0),
        meta_digest=bytes(32),
        nbytes=1,
        session="s",
        owner=KEY.node_id,
    )
    book.claim(secret, audience=KEY.node_id, action="read", version_of=lambda _: (0, 0))
    return secret


PARSERS = [
    Parser(
        name="auth.statement",
        covers=("auth.encoding.cbor_decode",),
        form="bytes",
        values=_items,
        write=cbor_encode,
        read=lambda data: cbor_decode(data, max_bytes=MAX_STATEMENT),
        refuses=(ValueError,),
        same=lambda one, other: cbor_encode(one) == cbor_encode(other),
        is_canonical=False,  # each statement compares what it read, once re-encoded
    ),
    Parser(
        name="auth.base32",
        covers=("auth.encoding.base32_decode",),
        form="text",
        values=st.binary(max_size=100),
        write=base32_encode,
        read=base32_decode,
        refuses=(ValueError,),
        is_canonical=False,  # either case; the bits of an incomplete byte are dropped
    ),
    Parser(
        name="auth.node_id",
        covers=("auth.identity.NodeId.parse",),
        form="text",
        values=strong_ids,
        write=str,
        read=NodeId.parse,
        refuses=(IdentityError,),
        is_canonical=False,  # either case
    ),
    Parser(
        name="auth.delegation",
        covers=("auth.delegation.Delegation.decode",),
        form="bytes",
        values=delegations,
        write=Delegation.encode,
        read=Delegation.decode,
        refuses=(IdentityError,),
    ),
    Parser(
        name="auth.invite",
        covers=("auth.invite.Invite.decode",),
        form="bytes",
        values=_invites,
        write=Invite.encode,
        read=Invite.decode,
        refuses=(IdentityError,),
    ),
    Parser(
        name="auth.ticket",
        covers=("auth.ticket.Ticket.decode",),
        form="text",
        values=_tickets,
        write=Ticket.encode,
        read=Ticket.decode,
        refuses=(TicketError,),
        is_canonical=False,  # either case, white space anywhere
    ),
    Parser(
        name="auth.keys_file",
        covers=("auth.keys_file.parse_authorized_keys",),
        form="text",
        values=_authorized_keys,
        write=lambda keys: "".join(f"{key.line()}\n" for key in keys),
        read=parse_authorized_keys,
        refuses=(ValueError,),
        is_canonical=False,  # comments, spaces, any order of options
    ),
    Parser(
        name="auth.certificate",
        covers=("auth.certificate.node_id_of_certificate",),
        form="bytes",
        values=strong_ids,
        write=lambda node_id: CERTIFICATE.replace(KEY.node_id.raw, node_id.raw),
        read=_read_certificate,
        refuses=(IdentityError,),
        is_canonical=False,  # nothing in it but the key is believed
    ),
    Parser(
        name="auth.token",
        covers=("auth.tokens.TokenBook.claim",),
        form="bytes",
        values=st.just(TOKEN),
        write=bytes,
        read=_claim,
        refuses=(TokenRefused,),
    ),
]
