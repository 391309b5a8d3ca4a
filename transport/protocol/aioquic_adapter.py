"""The module that touches aioquic's private attributes, with `batch` (pinned to minor version 1.7).

aioquic's sans-I/O connection does the QUIC; what it lacks is added here by overriding it:

* mutual authentication by Ed25519 key: the server asks for a certificate, both sides read the node
  id out of it, the dialer pins the id it dialled (RFC 8446 section 4.4.2; CertificateVerify, which
  proves the key, is aioquic's own);
* receive windows that move only as the application consumes (RFC 9000 section 4.2): upstream
  doubles a window once half of it was *received*, which never stops a sender;
* bounds on what a peer, perhaps not yet authenticated, can make its reassembly hold and search;
* key updates before the cipher's limit (RFC 9001 section 6.6), which upstream doesn't count;
* connection ids that the endpoint draws (RFC 9000 section 5.1), so that it can tell them;
* stateless resets (RFC 9000 section 10.3), which upstream neither sends nor knows;
* streams, pacing and packet records that batches of packets can be made of (`batch`);
* the figures that back-pressure, liveness and ``mesh status`` are made of.

`tests/transport/test_aioquic_adapter.py` fails loudly when an attribute used here changes.
"""

from __future__ import annotations

import hmac
import logging
import os
import ssl
from collections.abc import Callable

import aioquic
from aioquic import tls
from aioquic.buffer import Buffer  # type: ignore[attr-defined]
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import (
    QuicConnectionError,
    QuicConnectionState,
    QuicReceiveContext,
)
from aioquic.quic.events import ConnectionTerminated
from aioquic.quic.logger import QuicLoggerTrace
from aioquic.quic.packet import (
    QuicErrorCode,
    QuicFrameType,
)
from aioquic.quic.stream import QuicStreamReceiver
from cryptography.x509 import InvalidVersion

from auth import IdentityError, NodeId, SecretKey, certificate_for, node_id_of_certificate
from transport.codes import plain_text
from transport.protocol import congestion
from transport.protocol.batch import BatchConnection
from transport.protocol.events import ConnectionEnded, EndedBy
from transport.protocol.path_mtu import BASE_SIZE
from transport.protocol.stateless_reset import TOKEN_SIZE

__all__ = ["SUPPORTED_AIOQUIC", "AdaptedConnection", "client_configuration", "server_configuration"]

SUPPORTED_AIOQUIC = "1.7."
"""The minor version whose internals this module was written against."""

MAX_CRYPTO_BYTES = 1 << 14
"""Handshake bytes accepted of a peer per epoch: ours come to 2 KB. Upstream collects a message of
up to 16 MiB from anybody, copying all of it anew with every packet."""

MAX_CRYPTO_GAPS = 16
"""Gaps in them cost a linear search for each frame."""

if not aioquic.__version__.startswith(SUPPORTED_AIOQUIC):
    raise ImportError(
        f"quicmesh needs aioquic {SUPPORTED_AIOQUIC}x, and {aioquic.__version__} is installed at "
        f"{aioquic.__file__}. Install the tested set: pip install -c constraints.txt quicmesh"
    )

congestion.register()

# What strangers do wrong must not reach the terminal of a program that has not set up logging.
logging.getLogger("quic").addHandler(logging.NullHandler())


def client_configuration(
    key: SecretKey, alpn: str, *, max_data: int, max_stream_data: int, idle: float, congestion: str
) -> QuicConfiguration:
    """Return the configuration of a dialer that proves `key` and speaks `alpn`."""
    configuration = _configuration(key, [alpn], max_data, max_stream_data, idle, congestion)
    configuration.is_client = True
    # There is no authority to ask: the certificate is self-signed, and its key is the identity.
    configuration.verify_mode = ssl.CERT_NONE
    return configuration


def server_configuration(
    key: SecretKey,
    alpns: list[str],
    *,
    max_data: int,
    max_stream_data: int,
    idle: float,
    congestion: str,
) -> QuicConfiguration:
    """Return the configuration of a listener that proves `key` and offers `alpns`."""
    configuration = _configuration(key, alpns, max_data, max_stream_data, idle, congestion)
    configuration.is_client = False
    return configuration


class AdaptedConnection(BatchConnection):
    """A connection with mutual authentication, and bounds on what a stranger can do to it.

    Args:
        expected_peer: the node id a dialer insists on; None for a listener, which learns it.
        max_streams: bidirectional streams the peer may open before `admit`.
        new_connection_id: makes our connection ids, of the length given.
        reset_token: makes the token with which a connection id can be reset.
    """

    def __init__(
        self,
        *,
        configuration: QuicConfiguration,
        expected_peer: NodeId | None,
        max_streams: int,
        original_destination_connection_id: bytes | None = None,
        retry_source_connection_id: bytes | None = None,
        new_connection_id: Callable[[int], bytes] = os.urandom,
        reset_token: Callable[[bytes], bytes] = lambda _: os.urandom(TOKEN_SIZE),
    ) -> None:
        super().__init__(
            configuration=configuration,
            max_streams=max_streams,
            original_destination_connection_id=original_destination_connection_id,
            retry_source_connection_id=retry_source_connection_id,
        )
        self.peer_id: NodeId | None = None
        """The peer's key, once its certificate was seen; proven when the handshake completes."""
        self.peer_error: IdentityError | None = None
        """Why the peer's certificate was refused, if it was."""

        self._new_connection_id = new_connection_id
        self._reset_token = reset_token
        first = self._host_cids[0]
        first.cid = new_connection_id(len(first.cid))
        self.host_cid = self._local_initial_source_connection_id = first.cid
        if not self._is_client:  # a dialer may not say its first one's
            first.stateless_reset_token = reset_token(first.cid)
        self._expected_peer = expected_peer
        self._fell_silent = False

    # -- what the protocol half asks

    @property
    def is_client(self) -> bool:
        """Whether this side dialled."""
        return self._is_client

    @property
    def rtt(self) -> float | None:
        """Smoothed round-trip time in seconds (RFC 9002 section 5.3), once measured."""
        return self._loss._rtt_smoothed if self._loss._rtt_initialized else None

    @property
    def probe_timeout(self) -> float:
        """The PTO without backoff, in seconds (RFC 9002 section 6.2.1)."""
        return self._loss.get_probe_timeout()

    @property
    def is_confirmed(self) -> bool:
        """Whether both sides know that the handshake is complete (RFC 9001 section 4.1.2)."""
        return self._handshake_confirmed

    def is_acknowledgement_due(self, now: float) -> bool:
        """Whether the peer is to hear now of what has come."""
        at = self.data_space.ack_at
        return at is not None and at <= now

    @property
    def is_ended(self) -> bool:
        """Whether a close was sent or received, or is about to be sent."""
        return self._close_event is not None

    def is_stateless_reset(self, datagram: bytes) -> bool:
        """Whether `datagram` ends with a token of a peer's id that is in use.

        It takes the same time for every token (RFC 9000 section 10.3.1). Ids that are spare or
        retired don't count: for those anybody may have been told theirs.
        """
        on_paths = [path.peer_cid for path in self._network_paths]
        in_use = [self._peer_cid, *(each for each in on_paths if each is not None)]
        last = datagram[-TOKEN_SIZE:]
        found = [hmac.compare_digest(each.stateless_reset_token, last) for each in in_use]
        return any(found)

    def drain(self, reason: str, now: float) -> None:
        """End the connection without a word to the peer (RFC 9000 section 10.2.2)."""
        self._close_event = ConnectionTerminated(
            error_code=QuicErrorCode.NO_ERROR,
            frame_type=QuicFrameType.PADDING,
            reason_phrase=reason,
        )
        self._close_begin(is_initiator=False, now=now)

    @property
    def trace(self) -> QuicLoggerTrace | None:
        """What is written down of the connection for debugging, unless it is over."""
        return self._quic_logger

    def end_of_connection(self) -> ConnectionEnded | None:
        """How the connection ended, as soon as that is certain (upstream tells 3 PTOs later)."""
        end = self._close_event
        if end is None:
            return None
        if self._state is QuicConnectionState.DRAINING:
            by = EndedBy.REMOTE
        else:
            by = EndedBy.SILENCE if self._fell_silent else EndedBy.LOCAL
        reason = plain_text(end.reason_phrase)
        # CONNECTION_CLOSE of type 0x1d carries no frame type: that one is the application's.
        return ConnectionEnded(by, end.error_code, reason, end.frame_type is None)

    # -- overrides

    def handle_timer(self, now: float) -> None:
        """As upstream; an end that comes with time alone is the peer's silence."""
        was_open = not self.is_ended
        super().handle_timer(now)
        self._fell_silent = self._fell_silent or (was_open and self.is_ended)

    def _replenish_connection_ids(self) -> None:
        had = len(self._host_cids)
        super()._replenish_connection_ids()
        for issued in self._host_cids[had:]:  # the peer has not been told of these yet
            issued.cid = self._new_connection_id(len(issued.cid))
            issued.stateless_reset_token = self._reset_token(issued.cid)

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        if not self._is_client:
            self.tls._request_client_certificate = True
        accept = self.tls._set_peer_certificate

        def set_peer_certificate(certificate: tls.Certificate) -> None:
            try:
                accept(certificate)
            except InvalidVersion as error:  # not a ValueError: upstream lets it through
                raise tls.AlertBadCertificate("Certificate could not be parsed") from error
            self._check_peer_certificate()

        self.tls._set_peer_certificate = set_peer_certificate  # type: ignore[method-assign]

    def _check_peer_certificate(self) -> None:
        certificate = self.tls._peer_certificate
        assert certificate is not None
        try:
            peer_id = node_id_of_certificate(certificate)
            if self._expected_peer is not None and peer_id != self._expected_peer:
                raise IdentityError(
                    "proof of identity",
                    why=f"the node there is {peer_id.short}, not {self._expected_peer.short} "
                    "that was dialled",
                    fix="Ask for a fresh ticket: the address may have passed to another node.",
                )
        except IdentityError as error:
            self.peer_error = error
            raise tls.AlertBadCertificate(error.why or error.what) from error
        self.peer_id = peer_id

    def _payload_received(
        self, context: QuicReceiveContext, plain: bytes, crypto_frame_required: bool = False
    ) -> tuple[bool, bool]:
        self.last_heard = context.time  # only reached by packets that were authentic
        try:
            return super()._payload_received(context, plain, crypto_frame_required)
        except QuicConnectionError as error:
            # Without a frame type it would travel, and be told here, as the application's.
            error.frame_type = error.frame_type or QuicFrameType.PADDING
            raise

    def _handle_crypto_frame(
        self, context: QuicReceiveContext, frame_type: int, buf: Buffer
    ) -> None:
        super()._handle_crypto_frame(context, frame_type, buf)
        receiver = self._crypto_streams[context.epoch].receiver
        if receiver.highest_offset > MAX_CRYPTO_BYTES or _gaps(receiver) > MAX_CRYPTO_GAPS:
            raise QuicConnectionError(
                QuicErrorCode.CRYPTO_BUFFER_EXCEEDED, frame_type, "no handshake is that long"
            )


def _configuration(
    key: SecretKey,
    alpns: list[str],
    max_data: int,
    max_stream_data: int,
    idle: float,
    congestion: str,
) -> QuicConfiguration:
    configuration = QuicConfiguration(
        alpn_protocols=alpns,
        congestion_control_algorithm=congestion,
        idle_timeout=idle,
        max_data=max_data,
        max_stream_data=max_stream_data,
        max_datagram_size=BASE_SIZE,
    )
    configuration.certificate = certificate_for(key)
    configuration.private_key = key.private
    return configuration


def _gaps(receiver: QuicStreamReceiver) -> int:
    return len(receiver._ranges)
