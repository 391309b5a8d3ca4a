"""The parsers of `transport`: CBOR, frames, errors, the hello, addresses."""

from __future__ import annotations

import ipaddress
from typing import Any

from hypothesis import strategies as st

import transport.errors
from auth import AccessDenied, Delegation, Denial, IdentityError, MeshError, TokenRefused
from tests.parsers.of_auth import delegations
from tests.parsers.parser import MAX_MESSAGE, Parser, cbor_values, texts
from transport import cbor
from transport.addresses import canonical_address, format_address, parse_address
from transport.binding import parse_bind
from transport.codes import decode_error, encode_error
from transport.errors import AddressError, ProtocolError
from transport.frames import (
    LENGTH,
    MIN_FRAME,
    error_reply,
    ok_reply,
    parse_reply,
    parse_request,
    request_frame,
)
from transport.protocol.hello import (
    Hello,
    Welcome,
    challenge_value,
    parse_challenge,
    parse_proof,
    proof_value,
)
from transport.protocol.newcomers import NewcomerRules, prefix_of
from transport.renewal import parse_renewal

__all__ = ["PARSERS", "addresses", "errors", "same_error"]

_KINDS: list[type[MeshError]] = [
    getattr(transport.errors, name) for name in transport.errors.__all__
]
_KINDS += [MeshError, AccessDenied, TokenRefused, IdentityError]
_phrases = st.none() | st.text("abc xyz.'", min_size=1, max_size=40)


@st.composite
def errors(draw: st.DrawFn) -> MeshError:
    """Any error of the tree as it arrives."""
    kind = draw(st.sampled_from(_KINDS))
    error: MeshError = kind(
        draw(st.text("abc", min_size=1, max_size=20)),
        stage=draw(_phrases),
        why=draw(_phrases),
        fix=draw(_phrases),
    )
    if isinstance(error, AccessDenied) and error.why and draw(st.booleans()):
        error.denial = Denial("not-authorized", error.why)
    return error


def same_error(one: Any, other: Any) -> bool:
    """Whether two errors say the same, or two other things are the same."""
    if not isinstance(one, MeshError):
        return encoded(one) == encoded(other)
    assert str(one).isprintable()  # it ends on a terminal and in logs
    for name in vars(type(one)).get("__annotations__", {}):
        getattr(one, name)  # what the class promises is there
    return type(one) is type(other) and encode_error(one) == encode_error(other)


def encoded(value: Any) -> bytes:
    """Return what tells CBOR values apart: 1, 1.0 and True are three, and NaN is itself."""
    return cbor.encode(value, max_size=MAX_MESSAGE)


def body_of(frame: bytes) -> bytes:
    """Return what a frame holds."""
    (length,) = LENGTH.unpack_from(frame)
    assert length == len(frame) - LENGTH.size
    return frame[LENGTH.size :]


_bytes16, _bytes32 = (st.binary(min_size=size, max_size=size) for size in (16, 32))
_features = st.frozensets(texts, max_size=5)
_frames = st.integers(MIN_FRAME, (1 << 64) - 1)
_hellos = st.builds(
    Hello,
    boot=_bytes16,
    delegation=st.none() | st.binary(max_size=40),
    credential=st.binary(max_size=40),
    versions=st.tuples(st.integers(1, 9), st.integers(0, 9)).map(lambda v: (v[0], v[0] + v[1])),
    features=_features,
    max_frame=_frames,
)
_welcomes = st.builds(
    Welcome,
    version=st.integers(1, (1 << 64) - 1),
    boot=_bytes16,
    delegation=st.none() | st.binary(max_size=40),
    features=_features,
    max_frame=_frames,
    observed=st.text("0123456789abcdef.:[]", max_size=40),
    proof=st.none() | _bytes32,
)

_zones = st.just("") | st.from_regex(r"\A%[A-Za-z0-9._~-]{1,15}\Z")
_hosts = st.ip_addresses(v=4).map(str) | st.builds(
    lambda ip, zone: f"{ip}{zone}",
    st.ip_addresses(v=6).filter(lambda ip: not str(ip).startswith("::ffff:")),
    _zones,
)
addresses = st.tuples(_hosts, st.integers(1, 65535))

_networks = st.builds(
    lambda ip, length: ipaddress.ip_network((ip, length % (ip.max_prefixlen + 1)), strict=False),
    st.ip_addresses(),
    st.integers(0, 128),
)
_chosen = _networks.map(
    lambda network: f"[{network}]" if network.version == 6 else str(network)
) | st.from_regex(r"\A[a-z][a-z0-9]{0,6}\*?\Z")
_bindings = st.builds(
    lambda excludes, items, port: f"{excludes}{','.join(items)}:{port}",
    st.sampled_from(["", "^"]),
    st.lists(_chosen, min_size=1, max_size=3),
    st.integers(0, 65535),
) | addresses.map(format_address)


def _rules(text: str) -> str:
    NewcomerRules(allow=(text,), deny=(text,))
    return text


def _newcomer(text: str) -> tuple[str, int]:
    address = parse_address(text)
    _rules(prefix_of(address))  # whatever can be dialled has a prefix that rules can name
    return address


PARSERS = [
    Parser(
        name="transport.cbor",
        covers=("transport.cbor.decode",),
        form="bytes",
        values=cbor_values,
        write=encoded,
        read=lambda data: cbor.decode(data, max_size=MAX_MESSAGE),
        refuses=(ProtocolError,),
        same=lambda one, other: encoded(one) == encoded(other),
    ),
    Parser(
        name="transport.request",
        covers=("transport.frames.parse_request",),
        form="bytes",
        values=st.tuples(st.text("abc.:*-", min_size=1, max_size=128), cbor_values),
        write=lambda pair: body_of(request_frame(*pair)),
        read=parse_request,
        refuses=(ProtocolError,),
        same=lambda one, other: encoded(list(one)) == encoded(list(other)),
        is_canonical=False,  # a newer peer may say more
    ),
    Parser(
        name="transport.reply",
        covers=("transport.frames.parse_reply",),
        form="bytes",
        values=errors() | cbor_values,
        write=lambda value: body_of(
            error_reply(value) if isinstance(value, MeshError) else ok_reply(value)
        ),
        read=lambda body: parse_reply(body, peer="them"),
        refuses=(ProtocolError,),
        same=same_error,
        is_canonical=False,  # a newer peer may say more
    ),
    Parser(
        name="transport.error",
        covers=("transport.codes.decode_error",),
        form="message",
        values=errors(),
        write=encode_error,
        read=lambda value: decode_error(value, peer="them"),
        refuses=(),
        same=same_error,
        is_canonical=False,  # whatever it is, it is some error
    ),
    Parser(
        name="transport.hello",
        covers=("transport.protocol.hello.Hello.from_value",),
        form="message",
        values=_hellos,
        write=Hello.to_value,
        read=Hello.from_value,
        refuses=(ProtocolError,),
        is_canonical=False,  # a newer peer may say more
    ),
    Parser(
        name="transport.welcome",
        covers=("transport.protocol.hello.Welcome.from_value",),
        form="message",
        values=_welcomes,
        write=Welcome.to_value,
        read=Welcome.from_value,
        refuses=(ProtocolError,),
        is_canonical=False,  # a newer peer may say more
    ),
    Parser(
        name="transport.renewal",
        covers=("transport.renewal.parse_renewal",),
        form="message",
        values=delegations,
        write=Delegation.encode,
        read=parse_renewal,
        refuses=(ProtocolError, IdentityError),
    ),
    Parser(
        name="transport.challenge",
        covers=("transport.protocol.hello.parse_challenge",),
        form="message",
        values=_bytes32,
        write=lambda nonce: None if nonce is None else challenge_value(nonce),
        read=parse_challenge,
        refuses=(ProtocolError,),
        is_canonical=False,  # everything else is the reply itself
    ),
    Parser(
        name="transport.proof",
        covers=("transport.protocol.hello.parse_proof",),
        form="message",
        values=st.tuples(_bytes32, _bytes32),
        write=lambda pair: proof_value(*pair),
        read=parse_proof,
        refuses=(ProtocolError,),
        is_canonical=False,  # a newer peer may say more
    ),
    Parser(
        name="transport.address",
        covers=("transport.addresses.parse_address",),
        form="text",
        values=addresses,
        write=format_address,
        read=lambda text: canonical_address(parse_address(text)),
        refuses=(AddressError,),
        is_canonical=False,  # addresses have many spellings
    ),
    Parser(
        name="transport.bind",
        covers=("transport.binding.parse_bind",),
        form="text",
        values=_bindings.map(parse_bind),
        write=lambda binding: binding.text,
        read=parse_bind,
        refuses=(AddressError,),
    ),
    Parser(
        name="transport.newcomer_rules",
        covers=(),
        form="text",
        values=_networks.map(str),
        write=str,
        read=_rules,
        refuses=(AddressError,),
    ),
    Parser(
        name="transport.newcomer",
        covers=(),
        form="text",
        values=addresses,
        write=format_address,
        read=_newcomer,
        refuses=(AddressError,),
        is_canonical=False,  # addresses have many spellings
    ),
]
