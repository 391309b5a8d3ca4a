"""The end of a job's remote calls in good order: nobody leaves who may still be called.

All workers meet in waves, in a c10d store. A worker joins one when nothing is under way at it, and
says how many calls it has made so far. If none has made any between two waves, none can come: one
that was under way between the two was made before its caller's share in the first, when nothing was
under way there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from mesh.rpc.errors import RpcError, RpcTimeout
from mesh.rpc.worker import Worker

__all__ = ["end_together"]

FAREWELL_SECONDS = 2.0
"""How long a worker that is done waits for the others to be: they need it for nothing any more but
to hear that references are let go of."""


def end_together(worker: Worker, timeout: float) -> None:
    """Wait until no worker of the job has anything under way, and let go of references.

    Args:
        worker: this one.
        timeout: seconds; 0 for as long as it takes.

    Raises:
        RpcTimeout: names who was not there in time.
        RpcError: a worker was lost meanwhile.
    """
    end = time.monotonic() + timeout if timeout else float("inf")
    before: list[str] | None = None
    number = 0
    while True:
        if not worker.agent.activity.until_quiet(end):
            raise _late(["this worker's own calls"], timeout)
        if worker.roster.size is None:
            break
        now = _wave(worker, number, end, timeout)
        if now == before:
            break
        before, number = now, number + 1
    worker.node.run(worker.agent.holdings.settle)
    worker.roster.say("told", "")
    _farewell(worker, min(end, time.monotonic() + FAREWELL_SECONDS))


def _wave(worker: Worker, number: int, end: float, timeout: float) -> list[str]:
    """Join a wave; return what each worker has said in it."""
    roster, what = worker.roster, f"wave-{number}"
    roster.say(what, str(worker.agent.activity.begun))
    said: dict[int, str] = {}
    while missing := set(range(roster.size or 0)) - said.keys():
        for rank in sorted(missing):
            heard = roster.heard(what, rank)
            if heard is not None:
                said[rank] = heard
                continue
            _check_alive(worker, rank)
            if time.monotonic() > end:
                late = sorted(missing - said.keys())
                raise _late([roster.find(each, 0.001).name for each in late], timeout)
    return [said[rank] for rank in sorted(said)]


def _farewell(worker: Worker, end: float) -> None:
    for rank in range(worker.roster.size or 0):
        while worker.roster.heard("told", rank) is None:
            if time.monotonic() > end or _error_of(worker, rank) is not None:
                return  # it has gone, perhaps with the store


def _check_alive(worker: Worker, rank: int) -> None:
    error = _error_of(worker, rank)
    if error is not None:
        info = worker.roster.find(rank, 0.001)
        raise RpcError(
            "shutdown of remote calls",
            peer=f"{info.name} ({info.node_id.short})",
            why=f"it was lost before it was done: {error}",
        ) from error


def _error_of(worker: Worker, rank: int) -> Exception | None:
    return worker.agent.lost.get(worker.roster.find(rank, 0.001).node_id)


def _late(names: Iterable[str], timeout: float) -> RpcTimeout:
    return RpcTimeout(
        "shutdown of remote calls",
        after=timeout,
        why=f"still busy: {', '.join(names)}",
        fix="Give it more time: timeout=, or shutdown(graceful=False) to leave at once.",
    )
