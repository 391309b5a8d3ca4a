"""What the driver does in one turn is bounded by time, so that the event loop stays responsive."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.transport.nodes import eventually, pair
from transport.protocol.batch import Transmit

pytestmark = pytest.mark.anyio


class _Endless:
    """Has always more to send; each batch takes so many seconds of a clock of its own."""

    has_stream_data = True

    def __init__(self, seconds: float) -> None:
        self.batches = 0
        self.now = 100.0
        self._seconds = seconds

    def batch_to_send(self, now: float) -> Transmit:
        self.batches += 1
        self.now += self._seconds
        return Transmit(b"junk", 4, ("127.0.0.1", 9))


@pytest.mark.parametrize(
    ("seconds", "batches"), [(0.00012, 8), (0.0003, 3), (0.0004, 2), (0.0006, 1), (0.005, 1)]
)
async def test_another_batch_leaves_only_if_it_fits_into_the_turn(
    monkeypatch: pytest.MonkeyPatch, seconds: float, batches: int
) -> None:
    async with pair() as (dialer, _, _):
        driver = dialer._engine.driver
        core: Any = _Endless(seconds)
        with monkeypatch.context() as patched:
            patched.setattr("transport.driver.time", SimpleNamespace(monotonic=lambda: core.now))
            driver._send_batches(core, core.now)
        del driver._busy[core]  # it would go on in its next turn
        assert core.batches == batches


async def test_who_waits_for_a_turn_has_none_before() -> None:
    async with pair() as (dialer, _, connection):
        driver = dialer._engine.driver
        async with await connection.open_raw_stream() as stream:
            driver._busy[connection.core] = None
            before = connection.info.bytes_sent
            await stream.send(b"a little")
            assert connection.info.bytes_sent == before
            driver._busier.set()
            await eventually(lambda: connection.info.bytes_sent > before)
            assert connection.core not in driver._busy
