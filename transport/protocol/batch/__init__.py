"""The batching data path: many packets made, sent, received and opened at once.

On top of aioquic's own connection and wire-compatible with any other. `sealing` is the
cryptography, `sending` and `receiving` are a stream's two parts, `writer` and `reader` put packets
together and take them apart. Whatever is out of the ordinary stays with aioquic's packet code.
"""

from transport.protocol.batch.reader import BatchReader
from transport.protocol.batch.receiving import ReceivePart
from transport.protocol.batch.sending import SendPart
from transport.protocol.batch.sent import SentPacket, Transmit
from transport.protocol.batch.window import ReceivedWindow
from transport.protocol.batch.writer import BatchWriter

__all__ = [
    "BatchReader",
    "BatchWriter",
    "ReceivePart",
    "ReceivedWindow",
    "SendPart",
    "SentPacket",
    "Transmit",
]
