"""Writes down, for whoever debugs, the packets that don't pass through aioquic's packet code.

They are opened once more, as they are on the wire: what is told is what went, whoever made it, and
where nobody wants to know, nothing is done for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioquic.buffer import Buffer, BufferReadError  # type: ignore[attr-defined]
from aioquic.quic.logger import QuicLoggerTrace
from aioquic.quic.packet import QuicFrameType, QuicStreamFrame, pull_ack_frame
from cryptography.exceptions import InvalidTag

from transport.protocol.batch.frames import STREAM, WITH_FIN, WITH_LENGTH, WITH_OFFSET
from transport.protocol.batch.sealing import open_packet
from transport.protocol.batch.sent import Transmit
from transport.protocol.batch.writer import keys_of

if TYPE_CHECKING:
    from transport.protocol.batch.connection import BatchConnection

__all__ = ["frames_of", "trace_received", "trace_sent"]

UDP_HEADER_SIZE = 8
TOKEN_SIZE = 16


def trace_sent(
    quic: BatchConnection, trace: QuicLoggerTrace, transmit: Transmit, first: int
) -> None:
    """Write down the packets of a batch that is about to leave, numbered from `first` on."""
    data = bytes(transmit.data)
    starts = range(0, len(data), transmit.segment)
    _trace_datagrams(trace, "datagrams_sent", data, starts)
    keys, destination = keys_of(quic.data_crypto.send), quic._peer_cid.cid
    for number, start in enumerate(starts, first):
        packet = data[start : start + transmit.segment]
        opened = open_packet(keys, packet, destination, number)
        assert opened is not None, "a packet of our own"
        frames = frames_of(trace, opened[1], quic._local_ack_delay_exponent)
        _trace_packet(trace, "packet_sent", number, destination, len(packet), frames)


def trace_received(
    quic: BatchConnection, trace: QuicLoggerTrace, data: bytearray, size: int, segment: int
) -> None:
    """Write down the datagrams in ``data[:size]``, one in every `segment` bytes, not read yet.

    Those that aioquic is going to read it writes down itself.
    """
    keys, destination, space = keys_of(quic.data_crypto.recv), quic.host_cid, quic.data_space
    expected, seen = space.expected_packet_number, set[int]()
    for start in range(0, size, segment):
        packet = bytes(data[start : min(start + segment, size)])
        dropped = None
        try:
            opened = open_packet(keys, packet, destination, expected)
        except InvalidTag:
            dropped = "payload_decrypt_error"
        else:
            if opened is None:
                continue
            number, payload = opened
            if number in seen or number in space.received_packets:
                dropped = "duplicate"
        _trace_datagrams(trace, "datagrams_received", packet, range(0, 1, len(packet)))
        if dropped is not None:
            event = {"trigger": dropped, "raw": {"length": len(packet)}}
            trace.log_event(category="transport", event="packet_dropped", data=event)
            continue
        seen.add(number)
        expected = max(expected, number + 1)
        frames = frames_of(trace, payload, quic._remote_ack_delay_exponent)
        _trace_packet(trace, "packet_received", number, destination, len(packet), frames)


def frames_of(
    trace: QuicLoggerTrace, payload: bytes, ack_delay_exponent: int
) -> list[dict[str, Any]]:
    """Return the frames of a 1-RTT packet, as `trace` has them (RFC 9000 section 19)."""
    out: list[dict[str, Any]] = []
    buffer = Buffer(data=payload)
    try:
        while not buffer.eof():
            kind = None  # a peer may send even that cut off
            kind = buffer.pull_uint_var()
            if kind == QuicFrameType.PADDING:
                rest = payload[buffer.tell() :]
                buffer.seek(len(payload) - len(rest.lstrip(b"\0")))
            out.append(_frame(trace, kind, buffer, ack_delay_exponent))
            if out[-1]["frame_type"] == "unknown":
                break  # nobody knows where it ends
    except (BufferReadError, ValueError):
        out.append({"frame_type": "unknown", "raw_frame_type": kind})
    return out


def _frame(
    trace: QuicLoggerTrace, kind: int, buffer: Buffer, ack_delay_exponent: int
) -> dict[str, Any]:
    pull = buffer.pull_uint_var
    if kind & ~(WITH_OFFSET | WITH_LENGTH | WITH_FIN) == STREAM:
        stream_id = pull()
        offset = pull() if kind & WITH_OFFSET else 0
        length = pull() if kind & WITH_LENGTH else buffer.capacity - buffer.tell()
        frame = QuicStreamFrame(buffer.pull_bytes(length), bool(kind & WITH_FIN), offset)
        return trace.encode_stream_frame(frame, stream_id)
    match kind:
        case QuicFrameType.PADDING:
            return trace.encode_padding_frame()
        case QuicFrameType.PING:
            return trace.encode_ping_frame()
        case QuicFrameType.ACK | QuicFrameType.ACK_ECN:
            ranges, delay = pull_ack_frame(buffer)
            if kind == QuicFrameType.ACK_ECN:
                for _ in range(3):
                    pull()
            return trace.encode_ack_frame(ranges, (delay << ack_delay_exponent) / 1e6)
        case QuicFrameType.RESET_STREAM:
            stream_id, code, size = pull(), pull(), pull()
            return trace.encode_reset_stream_frame(code, size, stream_id)
        case QuicFrameType.STOP_SENDING:
            stream_id, code = pull(), pull()
            return trace.encode_stop_sending_frame(code, stream_id)
        case QuicFrameType.CRYPTO:
            offset, length = pull(), pull()
            return trace.encode_crypto_frame(
                QuicStreamFrame(buffer.pull_bytes(length), offset=offset)
            )
        case QuicFrameType.NEW_TOKEN:
            return trace.encode_new_token_frame(buffer.pull_bytes(pull()))
        case (
            QuicFrameType.MAX_DATA | QuicFrameType.MAX_STREAMS_BIDI | QuicFrameType.MAX_STREAMS_UNI
        ):
            return trace.encode_connection_limit_frame(kind, pull())
        case QuicFrameType.MAX_STREAM_DATA:
            stream_id, limit = pull(), pull()
            return trace.encode_max_stream_data_frame(limit, stream_id)
        case QuicFrameType.DATA_BLOCKED:
            return trace.encode_data_blocked_frame(pull())
        case QuicFrameType.STREAM_DATA_BLOCKED:
            stream_id, limit = pull(), pull()
            return trace.encode_stream_data_blocked_frame(limit, stream_id)
        case QuicFrameType.STREAMS_BLOCKED_BIDI | QuicFrameType.STREAMS_BLOCKED_UNI:
            is_unidirectional = kind == QuicFrameType.STREAMS_BLOCKED_UNI
            return trace.encode_streams_blocked_frame(is_unidirectional, pull())
        case QuicFrameType.NEW_CONNECTION_ID:
            number, retire_prior_to = pull(), pull()
            connection_id = buffer.pull_bytes(buffer.pull_uint8())
            return trace.encode_new_connection_id_frame(
                connection_id, retire_prior_to, number, buffer.pull_bytes(TOKEN_SIZE)
            )
        case QuicFrameType.RETIRE_CONNECTION_ID:
            return trace.encode_retire_connection_id_frame(pull())
        case QuicFrameType.PATH_CHALLENGE:
            return trace.encode_path_challenge_frame(buffer.pull_bytes(8))
        case QuicFrameType.PATH_RESPONSE:
            return trace.encode_path_response_frame(buffer.pull_bytes(8))
        case QuicFrameType.TRANSPORT_CLOSE | QuicFrameType.APPLICATION_CLOSE:
            code = pull()
            about = pull() if kind == QuicFrameType.TRANSPORT_CLOSE else None
            reason = buffer.pull_bytes(pull()).decode(errors="replace")
            return trace.encode_connection_close_frame(code, about, reason)
        case QuicFrameType.HANDSHAKE_DONE:
            return trace.encode_handshake_done_frame()
        case QuicFrameType.DATAGRAM | QuicFrameType.DATAGRAM_WITH_LENGTH:
            has_length = kind == QuicFrameType.DATAGRAM_WITH_LENGTH
            length = pull() if has_length else buffer.capacity - buffer.tell()
            return trace.encode_datagram_frame(len(buffer.pull_bytes(length)))
        case _:
            return {"frame_type": "unknown", "raw_frame_type": kind}


def _trace_datagrams(trace: QuicLoggerTrace, event: str, data: bytes, starts: range) -> None:
    sizes = [min(starts.step, len(data) - start) for start in starts]
    raw = [{"length": UDP_HEADER_SIZE + size, "payload_length": size} for size in sizes]
    trace.log_event(category="transport", event=event, data={"count": len(raw), "raw": raw})


def _trace_packet(
    trace: QuicLoggerTrace,
    event: str,
    number: int,
    destination: bytes,
    size: int,
    frames: list[dict[str, Any]],
) -> None:
    header = {
        "packet_number": number,
        "packet_type": "1RTT",
        "scid": "",
        "dcid": destination.hex(),
    }
    data = {"frames": frames, "header": header, "raw": {"length": size}}
    trace.log_event(category="transport", event=event, data=data)
