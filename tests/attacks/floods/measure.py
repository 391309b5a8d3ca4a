"""What a flood leaves of a transfer: the rate beside it, over the rate without it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from auth import SecretKey
from tests.programs import Program

MIB = 1 << 20

ROUND_SECONDS = 0.3
ROUNDS = (2, 4, 4)
"""Rounds of a transfer with and as many without the flood, in turns, of each try: the machine is
shared, and something else may take the processors in the wrong moment."""

WARM_UP = 0.3
"""How long a flood goes on before it is measured, so that it is one."""

MEMORY_BOUND = 48 * MIB
"""What the victim's memory may grow by under one flood: its half-open connections, at 0.3 MB each,
and their handshakes' garbage."""

KEPT = 0.5
"""The rate that a transfer keeps beside any flood."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What was measured of one flood."""

    flood: str
    kept: float
    """The rate beside the flood, over the rate without it: the median of the rounds."""
    rate: float
    """Without the flood, in bytes per second."""
    attacks: float
    """Datagrams, handshakes or streams per second that the attacker sent."""
    grown: int
    """Bytes by which the victim's memory has grown."""
    drops: dict[str, int]
    """What the victim has dropped meanwhile, by reason."""
    is_open: bool
    """Whether the honest connection is still the one it was."""

    def __str__(self) -> str:
        drops = ", ".join(f"{count} {reason}" for reason, count in sorted(self.drops.items()))
        return (
            f"{self.flood:22} {self.kept:6.0%} of {self.rate / MIB:4.0f} MiB/s  "
            f"{self.attacks:8.0f}/s  {self.grown / MIB:+5.1f} MiB  dropped: {drops or 'nothing'}"
        )


HEADING = (
    f"kept rate and memory beside floods (asked: {KEPT:.0%}, at most {MEMORY_BOUND // MIB} MiB)"
)


OUTCOME = "what a flood leaves"
"""The property of a test's report that holds a line of the table."""


class ProcessEnded(Exception):
    """A process of a measurement has ended, with its connection."""


class Process:
    """A process that answers lines with lines."""

    def __init__(self, module: str, *arguments: str) -> None:
        self.process = Program(
            ["-m", f"tests.attacks.floods.{module}", *arguments],
            stdin=True,
            torch=module == "nodes",
        )

    def say(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            assert self.process.stderr is not None
            raise ProcessEnded(self.process.stderr.read())
        return line

    def ask(self, **order: object) -> Any:
        self.say(json.dumps(order))
        return json.loads(self.hear())

    def close(self) -> None:
        with self.process:
            self.process.kill()


class Arena:
    """A victim and a friend of its, for one flood after another.

    Args:
        stack: ends them.
        victim: the role that the victim has, see `nodes`.
    """

    def __init__(self, stack: contextlib.ExitStack, victim: str = "victim") -> None:
        self._stack = stack
        self._friend_key, self._insider_key = SecretKey.generate(), SecretKey.generate()
        known = [str(key.node_id) for key in (self._friend_key, self._insider_key)]
        self._victim = self._start("nodes", victim, *known)
        about = json.loads(self._victim.hear())
        self._port = about["port"]
        self._friend = self._start(
            "nodes", "friend", self._friend_key.to_bytes().hex(), about["id"], str(self._port)
        )
        self._friend.hear()
        for _ in range(3):
            self._move()

    def measure(self, flood: str, rounds: int) -> Outcome:
        """Let `flood` loose in every second of twice so many rounds of a transfer."""
        key = self._insider_key.to_bytes().hex()
        attacker = Process("attackers", flood, str(self._port), key)
        try:
            attacker.hear()
            return self._measure(flood, attacker, rounds)
        finally:
            attacker.close()

    def _measure(self, flood: str, attacker: Process, rounds: int) -> Outcome:
        before = self._victim.ask()
        quiet: list[float] = []
        loud: list[float] = []
        attacked, attacking, is_open = 0, 0.0, True
        for _ in range(rounds):
            quiet.append(self._move()["rate"])
            attacker.say()
            began = time.monotonic()
            time.sleep(WARM_UP)
            moved = self._move()
            loud.append(moved["rate"])
            attacker.say()
            attacked += int(attacker.hear())
            attacking += time.monotonic() - began
            is_open = is_open and moved["open"]
        after = self._victim.ask()
        return Outcome(
            flood=flood,
            kept=statistics.median(loud) / statistics.median(quiet),
            rate=statistics.median(quiet),
            attacks=attacked / attacking,
            grown=after["rss"] - before["rss"],
            drops=dict(Counter(after["drops"]) - Counter(before["drops"])),
            is_open=is_open,
        )

    def _move(self) -> Any:
        return self._friend.ask(seconds=ROUND_SECONDS)

    def _start(self, module: str, *arguments: str) -> Process:
        process = Process(module, *arguments)
        self._stack.callback(process.close)
        return process


@contextlib.contextmanager
def arena(victim: str = "victim") -> Iterator[Arena]:
    """Start the two honest processes; end them with the block."""
    with contextlib.ExitStack() as stack:
        yield Arena(stack, victim)
