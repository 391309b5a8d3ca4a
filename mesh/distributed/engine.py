"""Runs the operations of one group, in issue order, each with a deadline, until it is left."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from mesh.collective import (
    CollectiveError,
    Exchange,
    GroupAborted,
    Header,
    Operation,
    Signature,
    Transfer,
    expect,
    gathered,
    raw,
    scatter_back,
)
from mesh.distributed.steps import Step
from mesh.distributed.work import MeshWork
from mesh.threads import Completer, OpThread

__all__ = ["Engine"]

RECENT_WORKS = 1024
"""Works kept alive: where Python hands one to C++, nobody else keeps its Python half."""

RECENT_BYTES = 4096
"""Largest result of such a work: C++ is handed a count, and large results must not pile up."""

LEAVE_SECONDS = 5.0
"""How long leaving a group may take: what is queued, then what is under way to others."""

EXIT_SECONDS = 1.5
"""The same when the interpreter exits without having left the group."""


class Engine:
    """The operations of one process group on this rank.

    Args:
        exchange: the group's messages.
        timeout: default for an operation, in seconds.
    """

    def __init__(self, exchange: Exchange, timeout: float) -> None:
        self.exchange = exchange
        self.timeout = timeout
        self.sequence = 0
        self._lock = threading.Lock()
        self._ops = OpThread(f"mesh-ops-{exchange.group}")
        self._completer = Completer(f"mesh-done-{exchange.group}")
        self._recent: deque[MeshWork] = deque(maxlen=RECENT_WORKS)
        self._closed = False
        _engines.add(self)

    def run(
        self,
        name: str,
        result: Any,
        steps: Sequence[Step],
        timeout: float | None = None,
        *,
        here: bool = False,
    ) -> MeshWork:
        """Queue `steps`, each an operation of its own, and return the work for all of them.

        Args:
            name: what the caller called.
            result: the caller's tensors.
            steps: what there is to do.
            timeout: in seconds; None for the group's.
            here: the caller waits in any case: if nothing is queued, run them on its thread, which
                spares two changes of threads, several times what a small operation takes.
        """
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        inference = _has_inference_tensors(result)
        with self._lock:
            self._refuse_if_closed(name)
            first = self.sequence
            what = f"{name} #{first}"
            is_here = here and self._ops.claim()
            if is_here:
                work = MeshWork(what, result, deadline)
            else:
                work = self._work(what, result, deadline)
                self._ops.submit(lambda: self._run(work, steps, first, deadline, inference))
            self.sequence += len(steps)
        if is_here:
            try:
                self._run(work, steps, first, deadline, inference)
            finally:
                self._ops.release()
        return work

    def send(self, tensor: torch.Tensor, peer: int, tag: int, signature: Signature) -> MeshWork:
        """Start a tagged message to `peer`."""
        deadline = time.monotonic() + self.timeout
        payload = raw(gathered(tensor))
        what = f"send to {self.exchange.label(peer)} with tag {tag}"
        self._refuse_if_closed(what)
        work = self._work(what, [tensor], deadline)
        header = Header(signature, 0, 0, payload.nbytes)
        transfer = self.exchange.post_send(peer, tag, header, payload, deadline)
        transfer.add_done_callback(
            lambda done: work.end(self._explained(work, done), self._completer.submit)
        )
        return work

    def receive(self, tensor: torch.Tensor, peer: int, tag: int, signature: Signature) -> MeshWork:
        """Start the receipt of a tagged message from `peer`."""
        deadline = time.monotonic() + self.timeout
        elements = gathered(tensor)
        what = f"recv from {self.exchange.label(peer)} with tag {tag}"
        self._refuse_if_closed(what)
        work = self._work(what, [tensor], deadline, source=peer)
        into = raw(elements)
        check = expect(Header(signature, 0, 0, into.nbytes), peer, self.exchange, self._named(work))

        def store(done: Transfer) -> None:
            error: BaseException | None = self._explained(work, done)
            if error is None:
                try:
                    with _mode(tensor.is_inference()):
                        scatter_back(elements, tensor)
                except Exception as caught:  # the caller's tensor: whatever it raises is theirs
                    error = caught
            work.end(error, self._completer.submit)

        transfer = self.exchange.post_receive(peer, tag, check, into, deadline)
        transfer.add_done_callback(lambda done: self._completer.submit(lambda: store(done)))
        return work

    def abort(self) -> None:
        """Fail everything in flight, here and on the other ranks, and leave."""
        rank = self.exchange.rank
        self.exchange.fail(
            GroupAborted(
                f"group '{self.exchange.group}'",
                ranks=(rank,),
                why=f"{self.exchange.label(rank)} aborted it",
            )
        )
        self.shutdown(LEAVE_SECONDS)

    def shutdown(self, timeout: float = LEAVE_SECONDS) -> None:
        """Finish what is queued, send what others still need, and leave the group. Bounded.

        What can't be finished in half the time is aborted.
        """
        end = time.monotonic() + timeout
        with self._lock:
            if self._closed:
                return
            self._closed = True
        _engines.discard(self)
        if not self._ops.drain(timeout / 2):
            rank = self.exchange.rank
            self.exchange.fail(
                GroupAborted(
                    f"group '{self.exchange.group}'",
                    ranks=(rank,),
                    why=f"{self.exchange.label(rank)} left it with an operation unfinished",
                )
            )
        self._ops.close(max(0.0, end - time.monotonic()))
        self.exchange.close(max(0.0, end - time.monotonic()))
        self._completer.close(max(0.1, end - time.monotonic()))

    def _run(
        self,
        work: MeshWork,
        steps: Sequence[Step],
        first: int,
        deadline: float,
        inference: bool,
    ) -> None:
        error: BaseException | None = None
        try:
            with _mode(inference):
                for offset, step in enumerate(steps):
                    operation = Operation(self.exchange, step.signature, first + offset, deadline)
                    with operation:
                        step.run(operation)
        except Exception as caught:  # it belongs to whoever waits for the work
            error = caught
        work.end(error, self._completer.submit)

    def _work(self, what: str, result: Any, deadline: float, source: int = -1) -> MeshWork:
        work = MeshWork(what, result, deadline, source)
        if _held_bytes(result) <= RECENT_BYTES:
            self._recent.append(work)
        return work

    def _refuse_if_closed(self, what: str) -> None:
        if self._closed:
            raise GroupAborted(
                f"{what} of group '{self.exchange.group}'",
                why="this rank has left the group",
                fix="Form a new one with init_process_group or new_group.",
            )

    def _named(self, work: MeshWork) -> str:
        return f"{work.what} of group '{self.exchange.group}' on rank {self.exchange.rank}"

    def _explained(self, work: MeshWork, transfer: Transfer) -> CollectiveError | None:
        """Return the error of a tagged message in terms of this call."""
        if transfer.error is None:
            return None
        return transfer.error.during(self._named(work), after=time.monotonic() - work.began)


def _has_inference_tensors(result: Any) -> bool:
    if isinstance(result, torch.Tensor):
        return result.is_inference()
    return isinstance(result, list | tuple) and any(map(_has_inference_tensors, result))


def _held_bytes(result: Any) -> int:
    """Return how much memory `result` keeps alive."""
    if isinstance(result, torch.Tensor):
        return result.untyped_storage().nbytes()
    return sum(map(_held_bytes, result)) if isinstance(result, list | tuple) else 0


def _mode(inference: bool) -> contextlib.AbstractContextManager[Any]:
    # Both are thread-local, and this is not the caller's thread. Inference tensors may only be
    # written to in inference mode.
    return torch.inference_mode() if inference else torch.no_grad()


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
"""Groups that were not left: their threads must be gone before the interpreter finalizes."""


@atexit.register
def _leave_all() -> None:
    for engine in list(_engines):
        with contextlib.suppress(Exception):
            engine.shutdown(EXIT_SECONDS)
