"""Runs the operations of one group, in issue order, each with a deadline, until it is left."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mesh.collective import (
    CollectiveError,
    CollectiveTimeout,
    Exchange,
    GroupAborted,
    Header,
    Operation,
    Signature,
    Transfer,
    blank,
    expect,
    gathered,
    raw,
    scatter_back,
)
from mesh.collective.exchange import Check
from mesh.distributed import streams
from mesh.distributed.coalescing import Collections
from mesh.distributed.flight import Flight, FlightRecorder
from mesh.distributed.spans import Span
from mesh.distributed.steps import Step
from mesh.distributed.streams import Turn
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
        self._collections = Collections()
        self.flights = FlightRecorder(exchange.group, exchange.rank, exchange.size)
        self._closed = False
        self._forked = False
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
        if _is_profiled():
            with Span(f"mesh:{name}") as span:
                work = self._start(name, result, steps, timeout, here=here)
                span.end_with(work)
            return work
        return self._start(name, result, steps, timeout, here=here)

    def _start(
        self, name: str, result: Any, steps: Sequence[Step], timeout: float | None, *, here: bool
    ) -> MeshWork:
        now = time.monotonic()
        deadline = now + (self.timeout if timeout is None else timeout)
        turns = _turns(steps)
        with self._lock:
            if self._closed:
                self._refuse_if_closed(name)
            first = self.sequence
            self.sequence = first + len(steps)
            flights = self.flights.issue(first, steps, now)
            is_here = here and self._collections.current() is None and self._ops.claim()
            if not is_here:
                work = self._work(f"{name} #{first}", result, deadline, turns)
                self._ops.submit(lambda: self._run(work, steps, flights))
                return work
        try:
            work = MeshWork(f"{name} #{first}", result, deadline, turns)
            self._run(work, steps, flights)
        finally:
            self._ops.release()
        return work

    def send(self, tensor: torch.Tensor, peer: int, tag: int, signature: Signature) -> MeshWork:
        """Start a tagged message to `peer`."""
        with Span("mesh:send") as span:
            work = self._send(tensor, peer, tag, signature)
            span.end_with(work)
        return work

    def _send(self, tensor: torch.Tensor, peer: int, tag: int, signature: Signature) -> MeshWork:
        deadline = time.monotonic() + self.timeout
        payload = raw(gathered(tensor))
        what = f"send to {self.exchange.label(peer)} with tag {tag}"
        self._refuse_if_closed(what)
        work = self._work(what, [tensor], deadline)
        header = Header(signature, 0, 0, payload.nbytes)
        transfer = self.exchange.post_send(peer, tag, header, payload, deadline)

        def end(done: Transfer) -> None:
            work.end(self._explained(work, done), self._completer.submit)

        def ended(done: Transfer) -> None:
            if isinstance(done.error, CollectiveTimeout):  # writes a file: not in the loop
                self._completer.submit(lambda: end(done))
            else:
                end(done)

        transfer.add_done_callback(ended)
        return work

    def receive(
        self, tensor: torch.Tensor, peer: int | None, tag: int, signature: Signature
    ) -> MeshWork:
        """Start the receipt of a tagged message from `peer`, a rank or None for any."""
        with Span("mesh:recv") as span:
            work = self._receive(tensor, peer, tag, signature)
            span.end_with(work)
        return work

    def _receive(
        self, tensor: torch.Tensor, peer: int | None, tag: int, signature: Signature
    ) -> MeshWork:
        deadline = time.monotonic() + self.timeout
        elements = blank(tensor)
        turns = () if tensor.is_cpu else (streams.turn(tensor.device),)
        who = "any rank" if peer is None else self.exchange.label(peer)
        what = f"recv from {who} with tag {tag}"
        self._refuse_if_closed(what)
        work = self._work(what, [tensor], deadline, turns)
        into = raw(elements)
        header = Header(signature, 0, 0, into.nbytes)

        def check_of(rank: int) -> Check:
            return expect(header, rank, self.exchange, self._named(work))

        def store(done: Transfer) -> None:
            error: BaseException | None = self._explained(work, done)
            if error is None:
                work.source = done.peer
                try:
                    with torch.no_grad(), _setting(work):
                        scatter_back(elements, tensor)
                except Exception as caught:  # the caller's tensor: whatever it raises is theirs
                    error = caught
            work.end(error, self._completer.submit)

        if peer is None:
            transfer = self.exchange.post_receive_any(tag, check_of, into, deadline)
        else:
            transfer = self.exchange.post_receive(peer, tag, check_of(peer), into, deadline)
        transfer.add_done_callback(lambda done: self._completer.submit(lambda: store(done)))
        return work

    def start_coalescing(self) -> None:
        """Collect the works that this thread starts from now on."""
        self._collections.begin()

    def end_coalescing(self) -> MeshWork:
        """Return one work for all that were collected: over when they are, failed if one is."""
        works = self._collections.end()
        deadline = max((work.deadline for work in works), default=time.monotonic())
        turns = tuple(turn for work in works for turn in work.turns)
        results = [work.result() for work in works]
        joined = self._work("coalesced operations", results, deadline, turns)
        left = len(works)
        lock = threading.Lock()

        def ended(_: object) -> None:
            nonlocal left
            with lock:
                left -= 1
                if left > 0:
                    return
            errors = [work.exception() for work in works]
            joined.end(next(filter(None, errors), None), self._completer.submit)

        for work in works:
            work.get_future().add_done_callback(ended)
        if not works:
            joined.end(None, self._completer.submit)
        return joined

    def wait_for_all(self) -> None:
        """Return when no operation is queued or running."""
        self._ops.drain(threading.TIMEOUT_MAX)

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

    def forked(self) -> None:
        """Take no further call: this process was forked from the one whose group it is."""
        self._lock = threading.Lock()  # which another thread may have held, who is not here
        self._closed = self._forked = True

    def _run(self, work: MeshWork, steps: Sequence[Step], flights: Sequence[Flight]) -> None:
        error: BaseException | None = None
        had_grad = torch.is_grad_enabled()  # which is of this thread, like inference mode
        _set_grad_enabled(False)
        try:
            if work.turns or _has_inference_tensors(work.result()):
                with _setting(work):
                    self._take(work, steps, flights)
            else:
                self._take(work, steps, flights)
        except Exception as caught:  # it belongs to whoever waits for the work
            error = caught
            self._note(flights, caught)
        finally:
            _set_grad_enabled(had_grad)
        work.end(error, self._completer.submit)

    def _take(self, work: MeshWork, steps: Sequence[Step], flights: Sequence[Flight]) -> None:
        for flight, step in zip(flights, steps, strict=True):
            operation = Operation(self.exchange, step.signature, flight.sequence, work.deadline)
            flight.started = operation.began
            with operation:
                step.run(operation)
            flight.ended = time.monotonic()

    def _note(self, flights: Sequence[Flight], error: Exception) -> None:
        for flight in flights:
            if flight.ended is None:
                flight.error, flight.ended = str(error), time.monotonic()
        if isinstance(error, CollectiveTimeout):
            self.flights.leave(error)

    def _work(
        self, what: str, result: Any, deadline: float, turns: Sequence[Turn] = ()
    ) -> MeshWork:
        work = MeshWork(what, result, deadline, turns)
        collected = self._collections.current()
        if collected is not None:
            collected.append(work)
        if _held_bytes(result) <= RECENT_BYTES:
            self._recent.append(work)
        return work

    def _refuse_if_closed(self, what: str) -> None:
        if self._closed:
            raise GroupAborted(
                f"{what} of group '{self.exchange.group}'",
                why="it belongs to the process from which this one was forked"
                if self._forked
                else "this rank has left the group",
                fix="Form a new one with init_process_group or new_group.",
            )

    def _named(self, work: MeshWork) -> str:
        return f"{work.what} of group '{self.exchange.group}' on rank {self.exchange.rank}"

    def _explained(self, work: MeshWork, transfer: Transfer) -> CollectiveError | None:
        """Return the error of a tagged message in terms of this call."""
        if transfer.error is None:
            return None
        error = transfer.error.during(self._named(work), after=time.monotonic() - work.began)
        if isinstance(error, CollectiveTimeout):
            self.flights.leave(error)
        return error


def _turns(steps: Sequence[Step]) -> Sequence[Turn]:
    """Return the places of an operation on the devices that its tensors are on."""
    for step in steps:
        if step.device is not None:
            devices = {step.device for step in steps if step.device is not None}
            return tuple(map(streams.turn, devices))
    return ()


@contextlib.contextmanager
def _setting(work: MeshWork) -> Iterator[None]:
    """Have the work's turns on devices, and be in inference mode if its tensors are of it.

    Those may be written to in that mode only.
    """
    with contextlib.ExitStack() as stack:
        if _has_inference_tensors(work.result()):
            stack.enter_context(torch.inference_mode())  # False would switch gradients on
        for turn in work.turns:
            stack.enter_context(turn.take())
        yield


def _has_inference_tensors(results: Sequence[Any]) -> bool:
    for each in results:
        if isinstance(each, torch.Tensor):
            if each.is_inference():
                return True
        elif _has_inference_tensors(each):
            return True
    return False


def _held_bytes(result: Any) -> int:
    """Return how much memory `result` keeps alive."""
    if isinstance(result, torch.Tensor):
        if result.is_sparse:
            return _held_bytes([result._indices(), result._values()])
        return result.untyped_storage().nbytes()
    return sum(map(_held_bytes, result)) if isinstance(result, list | tuple) else 0


_is_profiled = torch._C._autograd._profiler_enabled
_set_grad_enabled = torch._C._set_grad_enabled


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
"""Groups that were not left: their threads must be gone before the interpreter finalizes."""


def _fork_all() -> None:
    for engine in list(_engines):
        engine.forked()
    _engines.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fork_all)


@atexit.register
def _leave_all() -> None:
    for engine in list(_engines):
        with contextlib.suppress(Exception):
            engine.shutdown(EXIT_SECONDS)
