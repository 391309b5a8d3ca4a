"""Many small calls on one connection: does the last cost what the first did, and does memory stay?

Run it with ``python -m tests.benchmarks.small_calls [calls]``; both loops, both ends in this
process, 64 bytes each way. aiortc/aioquic#99 is the fault it looks for.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time

import anyio
import psutil

from tests.transport.nodes import pair

PAYLOAD = b"x" * 64
WINDOW = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class SmallCalls:
    """Seconds that the fastest tenth of the first and of the last window stayed under.

    They are what a call costs; the rest depends on what else the machine does meanwhile.
    """

    calls: int
    first: float
    last: float
    grown: int
    """Bytes that resident memory grew between the first window and the end."""
    carried: float
    """UDP payload per call in bytes, both directions."""

    @property
    def ratio(self) -> float:
        return self.last / self.first

    def __str__(self) -> str:
        return (
            f"{self.calls} calls: first {self.first * 1e6:.0f} us, last {self.last * 1e6:.0f} us "
            f"({self.ratio:.2f}x), {self.carried:.0f} B per call, RSS +{self.grown / 1024:.0f} KiB"
        )


async def measure(calls: int, window: int = WINDOW) -> SmallCalls:
    """Time `calls` sequential calls."""
    process = psutil.Process()
    times: list[float] = [0.0] * calls
    before = 0
    async with pair() as (_, _, connection):
        for _ in range(window // 4):  # warm caches and windows
            await connection.call("echo", PAYLOAD)
        start = connection.info
        for number in range(calls):
            began = time.perf_counter()
            await connection.call("echo", PAYLOAD)
            times[number] = time.perf_counter() - began
            if number == window:
                before = process.memory_info().rss
        end = connection.info
        carried = end.bytes_sent - start.bytes_sent + end.bytes_received - start.bytes_received
        return SmallCalls(
            calls,
            statistics.quantiles(times[:window], n=10)[0],
            statistics.quantiles(times[-window:], n=10)[0],
            process.memory_info().rss - before,
            carried / calls,
        )


def main() -> None:
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    for backend in ("asyncio", "trio"):
        print(f"{backend:8}", anyio.run(measure, calls, backend=backend))


if __name__ == "__main__":
    main()
