"""One bidirectional stream as the application sees it, without I/O."""

from __future__ import annotations

from transport.protocol.batch import ReceivePart

__all__ = ["StreamCore"]


class StreamCore:
    """What has come on a stream, and the facts about its two ends.

    What may wait in it is bounded by the receive window, which moves only as bytes are taken: the
    connection is told of that with `ConnectionCore.consumed`.
    """

    __slots__ = (
        "fin_sent",
        "incoming",
        "local_reset",
        "released",
        "remote_reset",
        "remote_stop",
        "stream_id",
    )

    def __init__(self, stream_id: int, incoming: ReceivePart) -> None:
        self.stream_id = stream_id
        self.incoming = incoming
        """What was received and not yet taken."""
        self.fin_sent = False
        """We have finished sending."""
        self.local_reset: int | None = None
        """The code with which we gave up, on either direction."""
        self.remote_reset: int | None = None
        """The code of the peer's RESET_STREAM: nothing more will arrive."""
        self.remote_stop: int | None = None
        """The code of the peer's STOP_SENDING: nothing more will be read there."""
        self.released = False
        """The application holds the stream no more; what still arrives is thrown away."""

    @property
    def buffered(self) -> int:
        """Bytes received and not yet taken."""
        return self.incoming.buffered

    @property
    def fin_received(self) -> bool:
        """The peer has finished sending (RFC 9000 section 3.2, 'Data Recvd')."""
        return self.incoming.is_whole

    @property
    def is_readable(self) -> bool:
        """Whether a read returns at once: data, end or reset."""
        return bool(self.buffered) or self.receive_ended

    @property
    def receive_ended(self) -> bool:
        """Whether nothing more will arrive."""
        return self.fin_received or self.remote_reset is not None

    @property
    def send_ended(self) -> bool:
        """Whether nothing more can be written."""
        return self.fin_sent or self.local_reset is not None or self.remote_stop is not None
