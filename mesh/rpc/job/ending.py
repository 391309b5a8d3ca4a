"""The end of a job's remote calls in good order: nobody leaves who may still be called.

All workers meet in waves, in a c10d store. A worker joins one when nothing is under way at it, and
says how many calls it has made so far. If none has made any between two waves, none can come: one
that was under way between the two was made before its caller's share in the first, when nothing was
under way there.
"""

from __future__ import annotations

import logging
import time

from mesh.rpc.job.worker import Worker, busy

__all__ = ["end_together"]

REPORT_SECONDS = 10.0
"""How often the log is told what is waited for."""

FAREWELL_SECONDS = 2.0
"""How long a worker that is done waits for the others to be: they need it for nothing any more but
to hear that references are let go of."""

_WHAT = "shutdown of remote calls"

_log = logging.getLogger("quicmesh.rpc")


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
    activity = worker.agent.activity
    before: list[str] | None = None
    number = 0
    while True:
        while not activity.until_quiet(min(end, time.monotonic() + REPORT_SECONDS)):
            if time.monotonic() >= end:
                raise busy(activity.described(), _WHAT, timeout)
            _log.warning("shutdown waits for %s", ", ".join(activity.described()))
        if worker.roster.size is None:
            break
        what = f"wave-{number}"
        worker.roster.say(what, str(activity.begun))
        now = worker.hear(what, end, _WHAT)
        if now == before:
            break
        before, number = now, number + 1
    worker.node.run(worker.agent.holdings.settle)
    worker.roster.say("told", "")
    end = min(end, time.monotonic() + FAREWELL_SECONDS)
    for rank in range(worker.roster.size or 0):
        while worker.roster.heard("told", rank) is None:
            if time.monotonic() > end or worker.lost(rank) is not None:
                return  # it has gone, perhaps with the store
