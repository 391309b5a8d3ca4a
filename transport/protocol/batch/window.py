"""Which packet numbers have been received of late: one integer, a bit for each."""

from __future__ import annotations

__all__ = ["ReceivedWindow"]

from aioquic.quic.recovery import MAX_ACK_RANGES

SIZE = 2 * MAX_ACK_RANGES
"""No wider than the acknowledgements that are kept reach (RFC 9000 section 13.2.3)."""

_ALL = (1 << SIZE) - 1


class ReceivedWindow:
    """Stands for `aioquic.quic.recovery.QuicPacketNumberWindow`, and takes whole runs.

    Numbers that have left the window count as received.
    """

    def __init__(self) -> None:
        self._top = -1
        self._bits = 0

    def add(self, number: int) -> None:
        """Note one packet number."""
        self.add_run(number, number)

    def add_run(self, first: int, last: int) -> None:
        """Note the packet numbers from `first` to `last`."""
        if last > self._top:
            self._bits = (self._bits << min(last - self._top, SIZE)) & _ALL
            self._top = last
        length, age = last - first + 1, self._top - last
        if age < SIZE:  # a peer may leave out as many numbers as there are
            self._bits |= (((1 << min(length, SIZE)) - 1) << age) & _ALL

    def __contains__(self, number: int) -> bool:
        age = self._top - number
        return age >= 0 and (age >= SIZE or bool(self._bits >> age & 1))
