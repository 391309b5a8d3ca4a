"""Finds the largest datagram that a path carries (RFC 8899, RFC 9000 section 14.3), without I/O.

Every path carries 1200 bytes, and what it carries beyond that no host can know: routers drop what
is too large, and may not say so. So a probe of each likely size is sent, the largest first: what
this host's own interface can't send is refused at once and costs nothing. Probes are no congestion
signal, and a path that was found to have shrunk is measured anew.
"""

from __future__ import annotations

import math

__all__ = ["BASE_SIZE", "PathMtu"]

BASE_SIZE = 1200
"""UDP payload that every path carries (RFC 9000 section 14), in bytes."""

LIKELY_SIZES = (65000, 16000, 8952, 1472, 1452, 1392, 1372, 1352, 1332, 1232)
"""UDP payloads in bytes: of loopback on Linux and elsewhere, jumbo frames (IPv6), Ethernet (IPv4,
IPv6), and Ethernet less one or two tunnels."""

MAX_PROBES = 3
"""Probes of one size that may get lost before it is given up (RFC 8899 section 5.1.2)."""

RAISE_SECONDS = 600.0
"""After this time the search begins again: a path may have grown (RFC 8899 section 5.1.1)."""

DOUBT_SECONDS = 5.0
"""... and after this when the path seemed to have shrunk: it may only have been overrun."""


class PathMtu:
    """The search for one path. Sizes are UDP payloads in bytes, times in seconds.

    Args:
        largest: never probe beyond this, which is what the peer says that it takes.
    """

    def __init__(self, largest: int = LIKELY_SIZES[0]) -> None:
        self.size = BASE_SIZE
        """What the path is known to carry."""
        self._largest = largest
        self._untried: list[int] = []
        self._probing: int | None = None
        self._lost = 0
        self._search_at = math.inf

    def begin(self, now: float) -> None:
        """Search, unless that has begun: somebody has much to send."""
        if self._search_at == math.inf and not self._untried and self._probing is None:
            self._search(now)

    def next_probe(self, now: float) -> int | None:
        """Return the size of the probe to send at `now`, None if there is none."""
        if self._probing is not None:
            return None
        if now >= self._search_at:
            self._search(now)
        return self._untried[0] if self._untried else None

    def sent(self, size: int) -> None:
        """A probe has left."""
        self._probing = size

    def acknowledged(self, size: int) -> bool:
        """The path carried a probe of `size`. Return whether that is more than was known."""
        self._probing = None
        self._untried = []
        self._lost = 0
        has_grown = size > self.size
        self.size = max(self.size, size)
        return has_grown

    def lost(self, size: int) -> None:
        """A probe of `size` was not acknowledged."""
        if size != self._probing:
            return  # refused, or of a search that was given up
        self._probing = None
        self._lost += 1
        if self._lost >= MAX_PROBES:
            self.refused(size)

    def refused(self, size: int) -> None:
        """This host can't send `size` at all on the way there."""
        self._probing = None
        self._lost = 0
        self._untried = [each for each in self._untried if each < size]

    def shrunk(self, now: float) -> None:
        """What was known to be carried no longer is: begin again from what every path carries."""
        self.size = BASE_SIZE
        self._search(now)
        self._search_at = now + DOUBT_SECONDS

    def _search(self, now: float) -> None:
        self._probing = None
        self._lost = 0
        self._untried = [each for each in LIKELY_SIZES if self.size < each <= self._largest]
        self._search_at = now + RAISE_SECONDS
