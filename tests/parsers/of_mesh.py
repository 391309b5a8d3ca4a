"""The parsers of `mesh`: calls between nodes, what ranks tell each other, and the files beside."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st

from auth import NodeId
from mesh.bench import Usage
from mesh.collective import (
    CollectiveError,
    CollectiveTimeout,
    Header,
    RankFailed,
    RankLost,
    Signature,
)
from mesh.collective.host import header
from mesh.distributed import forming, wire
from mesh.peerbook import KnownPeer, _parse, suggest_petname
from mesh.runfile import RunFile
from mesh.services import (
    error_of,
    error_value,
    parse_announcement,
    parse_ping,
)
from tests.parsers.of_auth import petnames, strong_ids
from tests.parsers.of_transport import addresses, encoded, errors, same_error
from tests.parsers.parser import MAX_MESSAGE, Parser, texts
from transport import CborValue, ProtocolError, cbor, format_address

__all__ = ["PARSERS"]

GROUP_SIZE = 8

_literals = st.tuples(st.ip_addresses().map(str), st.integers(1, 65535))
_counts = st.integers(0, (1 << 62) - 1)
_words = st.text("abc_ ", max_size=20)
_channels = st.integers(-1, (1 << 62) - 1)
_headers = st.builds(
    Header,
    st.builds(Signature, texts, texts, st.none() | _counts, texts),
    _counts,
    _counts,
    _counts,
)
_reports = st.dictionaries(texts, texts | st.lists(st.integers(0, 9), max_size=3), max_size=3)
_entries = st.one_of(
    st.tuples(st.just("want"), st.tuples(_channels, _counts).map(list)),
    st.tuples(st.just("offer"), st.tuples(_channels, _counts, _headers).map(list)),
    st.tuples(st.just("ack"), _counts.map(lambda cost: [cost])),
    st.tuples(st.just("fail"), _reports.map(lambda report: [report])),
)


def _write_control(entries: list[tuple[str, list[Any]]]) -> Any:
    return [
        [verb, *(wire.header_value(a) if isinstance(a, Header) else a for a in arguments)]
        for verb, arguments in entries
    ]


_failures = st.builds(
    lambda kind, ranks, why, fix: kind("an operation", ranks=tuple(ranks), why=why, fix=fix),
    st.sampled_from([RankFailed, RankLost, CollectiveTimeout]),
    st.lists(st.integers(0, GROUP_SIZE - 1), max_size=4),
    st.text("abc .", min_size=1, max_size=20),
    st.none() | st.text("abc .", min_size=1, max_size=20),
)


def _same_failure(one: CollectiveError, other: CollectiveError) -> bool:
    assert f"{one.why}{one.fix}".isprintable()  # it ends on a terminal and in logs
    return type(one) is type(other) and wire.failure_value(one) == wire.failure_value(other)


def _meeting(data: bytes) -> Any:
    """What a rank finds in the store under another's name."""
    store = SimpleNamespace(add=lambda *_: 1, wait=lambda *_: None, get=lambda _: data)
    meeting = forming._Meeting(store, "a group", 0, 0.0)  # type: ignore[arg-type]
    (member,) = meeting.members(1)
    return member.node_id, member.addresses


def _write_member(member: tuple[NodeId, tuple[Any, ...]]) -> bytes:
    node_id, where = member
    texts_of: list[CborValue] = [format_address(address) for address in where]
    record: CborValue = {"node": str(node_id), "addresses": texts_of}
    return cbor.encode(record, max_size=MAX_MESSAGE)


_members = st.tuples(strong_ids, st.lists(addresses, max_size=4).map(tuple))

_peers = st.lists(
    st.builds(
        KnownPeer,
        strong_ids,
        st.none() | petnames,
        st.lists(_literals, max_size=3).map(tuple),
        st.none() | st.floats(0, 1e11),
    ),
    max_size=3,
    unique_by=lambda peer: peer.node_id,
).map(lambda peers: {peer.node_id: peer for peer in peers})


def _write_book(peers: dict[NodeId, KnownPeer]) -> bytes:
    entries = {
        str(peer.node_id): {
            "petname": peer.petname,
            "addresses": [list(address) for address in peer.addresses],
            "seen": peer.seen,
        }
        for peer in peers.values()
    }
    return json.dumps({"version": 1, "peers": entries}).encode()


_run_files = st.builds(
    RunFile,
    strong_ids,
    st.integers(1, 1 << 22),
    st.binary(min_size=16, max_size=16).map(bytes.hex),
    st.floats(0, 1e11),
    st.just("0.1.0"),
    st.lists(_literals, max_size=2).map(tuple),
    st.lists(_literals, max_size=2).map(tuple),
)
_directory = tempfile.TemporaryDirectory(prefix="mesh-run-files-")


def _read_run_file(data: bytes) -> RunFile:
    path = Path(_directory.name) / "daemon.json"
    path.write_bytes(data)
    found = RunFile.load(path)
    if found is None:
        raise ValueError("no run file")
    return found


def _suggested(host: str) -> str | None:
    name = suggest_petname(host, ["taken"])
    assert name is None or KnownPeer(NodeId(bytes(32)), name).label.isprintable()
    return name


PARSERS = [
    Parser(
        name="mesh.announcement",
        covers=("mesh.services.parse_announcement",),
        form="message",
        values=st.tuples(st.lists(addresses, max_size=16), texts),
        write=lambda told: {"addresses": [format_address(a) for a in told[0]], "host": told[1]},
        read=parse_announcement,
        refuses=(ProtocolError,),
        is_canonical=False,  # addresses have many spellings, and a newer peer may say more
    ),
    Parser(
        name="mesh.ping",
        covers=("mesh.services.parse_ping",),
        form="message",
        values=st.tuples(texts, st.integers(1, 100), st.floats(0.001, 60.0)),
        write=lambda order: dict(zip(("target", "count", "timeout"), order, strict=True)),
        read=parse_ping,
        refuses=(ProtocolError,),
        is_canonical=False,  # a newer peer may say more
    ),
    Parser(
        name="mesh.usage",
        covers=("mesh.bench.Usage.from_message",),
        form="message",
        values=st.builds(
            Usage,
            *(st.floats(0, 1e12) for _ in ("cpu", "machine", "busy")),
            st.integers(0, 65535),
        ),
        write=Usage.as_message,
        read=Usage.from_message,
        refuses=(ProtocolError,),
        is_canonical=False,  # a newer peer may say more
    ),
    Parser(
        name="mesh.petname",
        covers=(),
        form="text",
        values=st.from_regex(r"\A[A-Za-z0-9]{1,20}\Z"),
        write=lambda name: name or "",
        read=_suggested,
        refuses=(),
        is_canonical=False,  # what can't be a name is made one
    ),
    Parser(
        name="mesh.error",
        covers=(),
        form="message",
        values=errors(),
        write=error_value,
        read=error_of,
        refuses=(),
        same=same_error,
        is_canonical=False,  # whatever it is, it is some error
    ),
    Parser(
        name="mesh.collective_request",
        covers=("mesh.distributed.wire.parse_request",),
        form="message",
        values=st.tuples(
            st.binary(min_size=16, max_size=16),
            st.integers(0, (1 << 31) - 1),
            st.sampled_from(["control", "data"]),
        ),
        write=lambda request: wire.request_value(*request),
        read=wire.parse_request,
        refuses=(ProtocolError,),
    ),
    Parser(
        name="mesh.host_call",
        covers=("mesh.collective.host.header.decode_call",),
        form="bytes",
        values=st.tuples(
            st.builds(Signature, _words, _words, st.none() | _counts, _words),
            st.integers(0, (1 << 64) - 1),
        ),
        write=lambda call: (
            call[1].to_bytes(8, "little") + header.encode(call[0], 0, ())[: header.CALL_BYTES - 8]
        ),
        read=lambda data: header.decode_call(
            data.ljust(header.CALL_BYTES, b"\0")[: header.CALL_BYTES]
        ),
        refuses=(ValueError,),
        is_canonical=False,  # what lies behind the text is of an earlier call
    ),
    Parser(
        name="mesh.collective_message",
        covers=("mesh.distributed.wire.parse_message",),
        form="message",
        values=st.tuples(_channels, st.booleans(), _headers),
        write=lambda message: [*message[:2], *wire.header_value(message[2])],
        read=wire.parse_message,
        refuses=(ProtocolError,),
    ),
    Parser(
        name="mesh.collective_control",
        covers=("mesh.distributed.wire.parse_control",),
        form="message",
        values=st.lists(_entries, max_size=4),
        write=_write_control,
        read=wire.parse_control,
        refuses=(ProtocolError,),
        same=lambda one, other: encoded(_write_control(one)) == encoded(_write_control(other)),
    ),
    Parser(
        name="mesh.collective_failure",
        covers=("mesh.distributed.wire.parse_failure",),
        form="message",
        values=_failures,
        write=wire.failure_value,
        read=lambda value: wire.parse_failure(
            value if isinstance(value, dict) else {}, "an operation", GROUP_SIZE
        ),
        refuses=(),
        same=_same_failure,
        is_canonical=False,  # whatever it is, the group has failed
    ),
    Parser(
        name="mesh.rank_record",
        covers=(),
        form="bytes",
        values=_members,
        write=_write_member,
        read=_meeting,
        refuses=(CollectiveError,),
        is_canonical=False,  # addresses have many spellings
    ),
    Parser(
        name="mesh.peers_book",
        covers=(),
        form="bytes",
        values=_peers,
        write=_write_book,
        read=_parse,
        refuses=(ValueError,),
        is_canonical=False,  # JSON
    ),
    Parser(
        name="mesh.run_file",
        covers=("mesh.runfile.RunFile.load",),
        form="bytes",
        values=_run_files,
        write=lambda run: json.dumps(
            dataclasses.asdict(run) | {"node_id": str(run.node_id)}
        ).encode(),
        read=_read_run_file,
        refuses=(ValueError,),
        same=lambda one, other: repr(one) == repr(other),
        is_canonical=False,  # JSON
    ),
]
