"""What the program of an endpoint process has been told, and what it has asked to be told of."""

from __future__ import annotations

from collections import deque

from auth import SocketAddress
from transport.looks import LookStep
from transport.protocol import ConnectionCore
from transport.protocol.batch import SendPart

__all__ = ["LinkState", "Told"]

LOOK_SECONDS = 0.04
GREATEST_STEP = 16 << 20
"""How often the program is told of a transfer under way, and after how many bytes at most: each
time takes the interpreter's lock from a program that computes, and may cost it milliseconds."""


class Told:
    """What the program knows of one stream, and what it has asked."""

    __slots__ = (
        "acked",
        "expects_posts",
        "fin",
        "finished",
        "landing",
        "lent",
        "position",
        "posts",
        "reset",
        "sending",
        "stop",
        "want",
        "written",
    )

    def __init__(self) -> None:
        self.position = 0
        """The offset up to which it has the bytes, or knows where they have landed."""
        self.fin = False
        self.reset: int | None = None
        self.stop: int | None = None
        self.written = 0
        self.acked = 0
        self.want: int | None = None
        self.lent: SendPart | None = None
        self.finished = False
        self.posts: deque[tuple[int, int, int]] = deque()
        """Offsets where memory begins and ends, and where it lies."""
        self.expects_posts = False
        """Whether bytes are to wait for memory that is still to be named."""
        self.landing = LookStep(seconds=LOOK_SECONDS, greatest=GREATEST_STEP)
        self.sending = LookStep(seconds=LOOK_SECONDS, greatest=GREATEST_STEP)


class LinkState:
    """One connection as the program knows it."""

    def __init__(self, number: int, core: ConnectionCore, address: SocketAddress) -> None:
        self.number = number
        self.core = core
        self.address = address
        self.told: dict[int, Told] = {}
        self.dirty: dict[int, None] = {}
        self.flush: int | None = None
        self.max_streams = 1
        self.unclaimed = 0
        """Streams that the peer has opened and the program not dropped."""
        self.facts = b""
        self.facts_at = 0.0
