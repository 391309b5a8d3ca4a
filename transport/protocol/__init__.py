"""The pure half of transport: bytes and time go in, bytes and events come out.

No sockets, no clock, no event loop. `Demultiplexer` finds the connection a datagram belongs to,
`ConnectionCore` is one connection, `StreamCore` one stream of it, `Liveness` tells a silent peer
from a quiet one. Two ends can be run against each other in one thread under a virtual clock, which
is how the tests do it.
"""

from transport.protocol.connection import NOTHING_LISTENS, ConnectionCore
from transport.protocol.demux import Demultiplexer, Dropped, Reply
from transport.protocol.liveness import Liveness
from transport.protocol.streams import StreamCore

__all__ = [
    "NOTHING_LISTENS",
    "ConnectionCore",
    "Demultiplexer",
    "Dropped",
    "Liveness",
    "Reply",
    "StreamCore",
]
