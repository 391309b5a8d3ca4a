"""The batching data path: many packets made, sent, received and opened at once.

On top of aioquic's own connection and wire-compatible with any other. `sealing` is the
cryptography, `sending` and `receiving` are a stream's two parts, `writer` and `reader` put packets
together and take them apart, and `credit` and `connection` join all that to aioquic's. Whatever is
out of the ordinary stays with aioquic's packet code.
"""

from transport.protocol.batch.connection import BatchConnection
from transport.protocol.batch.receiving import ReceivePart
from transport.protocol.batch.sending import SendPart
from transport.protocol.batch.sent import Transmit

__all__ = ["BatchConnection", "ReceivePart", "SendPart", "Transmit"]
