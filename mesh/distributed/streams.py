"""The place of operations among the streams of an accelerator.

It is that of torch's own groups: an operation comes after what its caller's stream was given before
the call, and ``wait()`` makes the waiting thread's stream, not the whole device, go on after the
results. Copies between the device and the CPU go through a stream of their own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch

__all__ = ["Turn", "turn"]


class Turn:
    """The place of one operation. Made where it is called.

    Args:
        side: the stream for its copies.

    Attributes:
        device: where its tensors are.
    """

    def __init__(self, side: torch.cuda.Stream) -> None:
        self.device = side.device
        self._side = side
        self._before = torch.cuda.current_stream(self.device).record_event()
        self._after: torch.cuda.Event | None = None

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        """Run the operation in this block: its copies go to the side stream."""
        self._side.wait_event(self._before)
        with torch.cuda.stream(self._side):
            yield
        self._after = self._side.record_event()

    def follow(self) -> None:
        """Have the calling thread's current stream go on after the operation, if it took place."""
        if self._after is not None:
            torch.cuda.current_stream(self.device).wait_event(self._after)


def turn(device: torch.device) -> Turn:
    """Return the place of an operation that is called now, on tensors of `device`."""
    return Turn(_side(device))


@functools.cache
def _side(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
