"""Fails, naming the attribute, when aioquic changes something that the adapter relies on.

The list is read out of the adapter's source, so that it can't go stale: every private name used on
one of aioquic's objects, every override, every call to what is overridden.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import aioquic
import pytest
from aioquic import tls
from aioquic.quic.congestion.base import create_congestion_control
from aioquic.quic.connection import (
    Limit,
    QuicConnection,
    QuicConnectionError,
    QuicConnectionId,
    QuicConnectionState,
    QuicNetworkPath,
    QuicReceiveContext,
)
from aioquic.quic.crypto import CryptoContext, CryptoPair
from aioquic.quic.recovery import QuicPacketRecovery, QuicPacketSpace
from aioquic.quic.stream import QuicStream, QuicStreamReceiver

from tests.transport.pair import World, connect, key
from transport.protocol import aioquic_adapter, batch
from transport.protocol.aioquic_adapter import (
    SUPPORTED_AIOQUIC,
    AdaptedConnection,
    client_configuration,
    server_configuration,
)
from transport.protocol.batch import ReceivePart, SendPart, credit
from transport.protocol.batch import connection as batch_connection
from transport.protocol.pacing import BatchPacer

ADAPTER = Path(aioquic_adapter.__file__)
BATCH = sorted(Path(batch.__file__).parent.glob("*.py"))
CONNECTION = Path(batch_connection.__file__)
CREDIT = Path(credit.__file__)
TREES = [ast.parse(path.read_text()) for path in (ADAPTER, CONNECTION, CREDIT)]
CLASSES = [node for tree in TREES for node in tree.body if isinstance(node, ast.ClassDef)]

CHANGED = (
    "aioquic has changed: {what}. Read the difference between the versions, adapt "
    "transport/protocol/aioquic_adapter.py, and only then widen the pin."
)


def upstream_connection() -> QuicConnection:
    return QuicConnection(
        configuration=server_configuration(
            key(1), ["x"], max_data=1, max_stream_data=1, idle=1.0, congestion="cubic"
        ),
        original_destination_connection_id=os.urandom(8),
    )


def upstream_tls() -> tls.Context:
    return tls.Context(is_client=False)


OWNERS: dict[str, object] = {
    "aioquic": aioquic,
    "self": upstream_connection(),
    "self.tls": upstream_tls(),
    "self._loss": QuicPacketRecovery(
        congestion_control_algorithm="cubic",
        initial_rtt=0.1,
        max_datagram_size=1200,
        peer_completed_address_validation=True,
        send_probe=lambda: None,
    ),
    "self._loss._cc": create_congestion_control("cubic", max_datagram_size=1200),
    "self.pacer": BatchPacer(None, max_datagram_size=1200),
    "stream": QuicStream(stream_id=0),
    "stream.sender": SendPart(0),
    "stream.receiver": ReceivePart(0),
    "sender": SendPart(0),
    "receiver": ReceivePart(0),
    "space": QuicPacketSpace(),
    "limit": Limit(frame_type=0, name="", value=0),
    "streams": Limit(frame_type=0, name="", value=0),
    "self._local_max_data": Limit(frame_type=0, name="", value=0),
    "self._local_max_streams_bidi": Limit(frame_type=0, name="", value=0),
    "first": QuicConnectionId(cid=b"", sequence_number=0),
    "issued": QuicConnectionId(cid=b"", sequence_number=0),
    "context": None,  # a dataclass: its fields are looked at
    "error": QuicConnectionError(0, 0, ""),
}
"""One of aioquic's objects for each expression on which the adapter uses a name of theirs."""

OWN = {
    target.attr
    for node in itertools.chain(*map(ast.walk, CLASSES))
    for target in (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    if isinstance(target, ast.Attribute)
    and isinstance(target.value, ast.Name)
    and target.value.id == "self"
} | {
    node.name
    for node in itertools.chain(*map(ast.walk, CLASSES))
    if isinstance(node, ast.FunctionDef)
}
"""What the adapter itself adds to ``self``."""


def uses() -> Iterator[tuple[str, str]]:
    """Every attribute the adapter uses, with the expression it is used on."""
    for node in itertools.chain(*map(ast.walk, TREES)):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node.value), node.attr


PRIVATE_USES = sorted(
    {
        (owner, name)
        for owner, name in uses()
        if name.startswith("_") and not (owner == "self" and name in OWN)
    }
)

PUBLIC_USES = sorted(
    {
        (owner, name)
        for owner, name in uses()
        if not name.startswith("_") and owner in OWNERS and owner != "self" and owner != "error"
    }
    | {("self", "tls")}
)


def has(owner: str, name: str) -> bool:
    if (owner, name) == ("receiver", "_ranges"):
        return hasattr(QuicStreamReceiver(0, readable=True), name)  # of a crypto stream
    if owner == "context":
        return name in QuicReceiveContext.__dataclass_fields__
    if owner == "self" and name == "tls":
        return "self.tls = tls.Context(" in inspect.getsource(QuicConnection._initialize)
    return hasattr(OWNERS[owner], name)


def test_the_list_covers_the_adapter() -> None:
    """A private name on an expression that is not in OWNERS could change unnoticed."""
    unknown = [
        (owner, name)
        for owner, name in PRIVATE_USES
        if owner not in OWNERS and not owner.startswith("super()")
    ]
    assert not unknown, f"add to OWNERS what these are: {unknown}"
    assert len(PRIVATE_USES) > 20
    assert ("stream.sender", "_buffer_fin") in PRIVATE_USES
    assert ("self.tls", "_set_peer_certificate") in PRIVATE_USES


@pytest.mark.parametrize(("owner", "name"), PRIVATE_USES + PUBLIC_USES)
def test_every_name_that_is_used_is_there(owner: str, name: str) -> None:
    if owner == "super()":
        assert hasattr(QuicConnection, name), CHANGED.format(what=f"QuicConnection.{name} is gone")
        return
    kind = type(OWNERS[owner]).__name__ if owner != "context" else "QuicReceiveContext"
    assert has(owner, name), CHANGED.format(what=f"{kind}.{name} is gone")


def test_a_name_that_is_gone_is_told_by_name() -> None:
    """The control of the test above."""
    assert not has("stream.sender", "_no_such_thing")
    assert not has("context", "no_such_thing")
    assert not has("self", "_no_such_thing")


def dialling(quic: AdaptedConnection) -> AdaptedConnection:
    """Return it with what a connection has from its first packet on."""
    quic.connect(("127.0.0.1", 1), now=0.0)
    return quic


BATCH_OWNERS: dict[str, Callable[[], object]] = {
    "quic": lambda: dialling(
        AdaptedConnection(
            configuration=client_configuration(
                key(1), "x", max_data=1, max_stream_data=1, idle=1.0, congestion="cubic"
            ),
            expected_peer=None,
            max_streams=0,
        )
    ),
    "loss": lambda: OWNERS["self._loss"],
    "space": QuicPacketSpace,
    "controller": lambda: OWNERS["self._loss"]._cc,  # type: ignore[attr-defined]
    "crypto": CryptoPair,
    "context": CryptoContext,
    "path": lambda: QuicNetworkPath(("127.0.0.1", 1)),
    "stream": lambda: OWNERS["stream"],
    "sender": lambda: SendPart(0),
    "receiver": lambda: ReceivePart(0),
    "packets": lambda: None,
}
"""What the variables of those names are in the modules of `batch`."""


def batch_uses() -> Iterator[tuple[str, str]]:
    for path in BATCH:
        if path == CONNECTION:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                owner = ast.unparse(node.value).removeprefix("self._")
                for prefix, short in (
                    ("quic._loss._cc", "controller"),
                    ("quic._loss", "loss"),
                    ("quic._network_paths[0]", "path"),
                    ("stream.sender", "sender"),
                    ("stream.receiver", "receiver"),
                ):
                    owner = owner.replace(prefix, short)
                if owner in BATCH_OWNERS and owner != "packets":
                    yield owner, node.attr
                elif (
                    node.attr.startswith("_")
                    and not node.attr.startswith("__")
                    and not owner.startswith(("self", "super()"))
                ):
                    assert (owner, node.attr) in BATCH_DEEP, f"say what {owner!r} is: {node.attr}"


BATCH_DEEP = {
    ("context.aead", "_aead"),
    ("context.aead", "_iv"),
    ("context.hp", "_is_chacha20"),
    ("context.hp", "_mask"),
    ("context.hp", "_encryptor"),
}
"""Names of the keys' own parts: nothing can be sealed or opened if one of them changes."""


def test_every_name_that_batches_use_is_there() -> None:
    used = sorted(set(batch_uses()))
    assert ("quic", "_remote_max_data_used") in used
    assert ("space", "sent_packets") in used
    owners = {name: make() for name, make in BATCH_OWNERS.items()}
    missing = [f"{owner}.{name}" for owner, name in used if not hasattr(owners[owner], name)]
    assert not missing, CHANGED.format(what=f"{missing} are gone")


OVERRIDES = sorted(
    {
        node.name
        for made in CLASSES
        for node in made.body
        if isinstance(node, ast.FunctionDef)
        and node.name in vars(QuicConnection)
        and node.name != "__init__"
    }
)

SIGNATURES = {
    "_handle_ack_frame": "(self, context, frame_type, buf)",
    "_parse_transport_parameters": "(self, data, from_session_ticket=False)",
    "_get_or_create_stream": "(self, frame_type, stream_id)",
    "_get_or_create_stream_for_send": "(self, stream_id)",
    "_handle_crypto_frame": "(self, context, frame_type, buf)",
    "_handle_stop_sending_frame": "(self, context, frame_type, buf)",
    "_handle_stream_frame": "(self, context, frame_type, buf)",
    "_initialize": "(self, peer_cid)",
    "_on_max_stream_data_delivery": "(self, delivery, stream)",
    "_payload_received": "(self, context, plain, crypto_frame_required=False)",
    "_replenish_connection_ids": "(self)",
    "_write_connection_limits": "(self, builder, space)",
    "_write_stream_limits": "(self, builder, space, stream)",
    "datagrams_to_send": "(self, now)",
    "get_timer": "(self)",
    "send_stream_data": "(self, stream_id, data, end_stream=False)",
    "handle_timer": "(self, now)",
}


def bare(signature: inspect.Signature) -> str:
    """Names, order, kinds and defaults, without types."""
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


def test_what_is_overridden_is_what_is_listed() -> None:
    """An override whose original has gone is called by nobody, and does nothing, silently."""
    assert sorted(SIGNATURES) == OVERRIDES


@pytest.mark.parametrize("name", SIGNATURES)
def test_every_override_has_the_signature_of_its_original(name: str) -> None:
    theirs, ours = (
        bare(inspect.signature(getattr(c, name))) for c in (QuicConnection, AdaptedConnection)
    )
    assert theirs == SIGNATURES[name], CHANGED.format(what=f"QuicConnection.{name}{theirs}")
    assert ours == theirs


HANDLERS = {
    "_on_connection_limit_delivery": "(self, delivery, limit)",
    "_on_max_stream_data_delivery": "(self, delivery, stream)",
    "request_key_update": "(self)",
    "reset_stream": "(self, stream_id, error_code)",
    "stop_stream": "(self, stream_id, error_code)",
    "send_stream_data": "(self, stream_id, data, end_stream=False)",
    "send_ping": "(self, uid)",
    "close": "(self, error_code=<QuicErrorCode.NO_ERROR: 0>, frame_type=None, reason_phrase='')",
    "receive_datagram": "(self, data, addr, now)",
    "connect": "(self, addr, now)",
}


@pytest.mark.parametrize("name", HANDLERS)
def test_what_is_called_takes_what_it_took(name: str) -> None:
    found = bare(inspect.signature(getattr(QuicConnection, name)))
    assert found == HANDLERS[name], CHANGED.format(what=f"QuicConnection.{name}{found}")


@pytest.mark.parametrize(
    ("caller", "called"),
    [
        ("_write_application", "self._write_connection_limits(builder=builder, space=space)"),
        (
            "_write_application",
            "self._write_stream_limits(builder=builder, space=space, stream=stream)",
        ),
        ("_write_application", "self._stream_limit(stream.stream_id).value += 1"),
        ("receive_datagram", "self._payload_received("),
        ("receive_datagram", "self._initialize(header.destination_cid)"),
        ("_connect", "self._initialize(self._peer_cid.cid)"),
        ("__init__", "self._local_initial_source_connection_id = self._host_cids[0].cid"),
        ("_replenish_connection_ids", "self._host_cids.append("),
        ("__init__", "self._handle_stop_sending_frame"),
        ("__init__", "self._handle_stream_frame"),
        ("__init__", "self._handle_crypto_frame"),
        ("_handle_stream_frame", "self._local_max_data.used += newly_received"),
        ("_handle_reset_stream_frame", "self._local_max_data.used += newly_received"),
    ],
)
def test_upstream_still_calls_what_is_overridden_and_counts_as_it_did(
    caller: str, called: str
) -> None:
    source = inspect.getsource(getattr(QuicConnection, caller))
    assert called in source, CHANGED.format(what=f"QuicConnection.{caller} has no {called!r}")


def test_tls_still_asks_for_and_checks_what_it_did() -> None:
    """Both sides' certificates pass `_set_peer_certificate`, and their signatures are checked."""
    for caller in ("_client_handle_certificate", "_server_handle_certificate"):
        source = inspect.getsource(getattr(tls.Context, caller))
        assert "self._set_peer_certificate(certificate)" in source, caller
    for caller in ("_client_handle_certificate_verify", "_server_handle_certificate_verify"):
        source = inspect.getsource(getattr(tls.Context, caller))
        assert "self._check_certificate_verify_signature(verify)" in source, caller
    assert "_request_client_certificate" in inspect.getsource(tls.Context._server_handle_hello)
    assert bare(inspect.signature(tls.Context._set_peer_certificate)) == "(self, certificate)"


def test_the_states_of_a_connection_are_those_known() -> None:
    assert {state.name for state in QuicConnectionState} == {
        "FIRSTFLIGHT",
        "CONNECTED",
        "CLOSING",
        "DRAINING",
        "TERMINATED",
    }


def test_the_version_is_the_one_it_was_written_against() -> None:
    assert aioquic.__version__.startswith(SUPPORTED_AIOQUIC)
    pins = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"aioquic>={SUPPORTED_AIOQUIC}' in pins
    assert '<1.8"' in pins


def test_nothing_else_touches_what_is_private() -> None:
    """The adapter and the batches are what to read when aioquic moves."""
    for path in Path(aioquic_adapter.__file__).parents[1].rglob("*.py"):
        if path == ADAPTER or path in BATCH:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                owner = ast.unparse(node.value)
                assert not owner.endswith(("quic", "tls")), f"{path.name}: {owner}.{node.attr}"


# -- the adapter's own facts


def test_the_figures_are_there_when_they_should_be() -> None:
    world = World()
    here, there = world.host(1), world.host(2)
    dialer = here.dial(there).core.quic
    assert dialer.is_client
    assert dialer.rtt is None
    assert dialer.probe_timeout > 0
    assert not dialer.is_ended
    world.run(lambda: there.ends and there.end.handshake)
    world.run(seconds=1)
    assert dialer.rtt == pytest.approx(0.02, rel=0.2)
    assert not there.end.core.quic.is_client
    assert dialer.is_local_stream(0)
    assert not dialer.is_local_stream(1)
    assert there.end.core.quic.is_local_stream(1)


def test_every_id_that_a_peer_is_told_is_drawn_by_the_endpoint() -> None:
    world = World()
    here, there = world.host(1), world.host(2)
    dialer = here.dial(there)
    assert world.run(lambda: there.ends and there.end.handshake and dialer.handshake)
    world.run(seconds=1)
    for host, peer in ((here, there.end), (there, dialer)):
        ids = [cid for cid in host.demux._by_id if host.ids.is_ours(cid)]
        foreign = [cid for cid in host.demux._by_id if not host.ids.is_ours(cid)]
        assert len(ids) == 8
        assert len(foreign) == (0 if host is here else 1), "the one the dialer has drawn for us"
        told = [peer.core.quic._peer_cid, *peer.core.quic._peer_cid_available]
        assert {each.cid for each in told} == set(ids)
        assert len({each.sequence_number for each in told}) == 8


def test_upstream_logs_to_those_who_asked_for_it() -> None:
    handlers = aioquic.quic.connection.logger.handlers
    assert any(isinstance(handler, logging.NullHandler) for handler in handlers)


def test_no_session_is_resumed_and_no_early_data_taken() -> None:
    dialer, listener = connect(World())
    for end in (dialer, listener):
        assert end.core.quic.tls.session_resumed is False
        assert not end.core.quic.tls.early_data_accepted
    assert dialer.core.quic.configuration.session_ticket is None


def test_configurations_carry_what_they_were_given() -> None:
    for configuration in (
        client_configuration(
            key(1), "mesh/1", max_data=7, max_stream_data=5, idle=9.0, congestion="reno"
        ),
        server_configuration(
            key(1), ["mesh/1"], max_data=7, max_stream_data=5, idle=9.0, congestion="reno"
        ),
    ):
        assert configuration.alpn_protocols == ["mesh/1"]
        assert (configuration.max_data, configuration.max_stream_data) == (7, 5)
        assert configuration.idle_timeout == 9.0
        assert configuration.congestion_control_algorithm == "reno"
        assert configuration.max_datagram_size == 1200
        assert configuration.max_datagram_frame_size is None
