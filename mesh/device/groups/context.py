"""`DistributedContext`: collectives over devices, as programs call them."""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

import anyio
import torch

from auth import MeshError
from mesh.collective import CollectiveTimeout, refuse_unless_reducible
from mesh.device.client.moving import answered
from mesh.device.client.special import ask_elements, resolved
from mesh.device.client.tensors import BACKEND, Device, device_of
from mesh.device.errors import DeviceError
from mesh.device.groups.forming import FORMING_SECONDS, Bond
from mesh.device.groups.issuing import LocalPart, Part, SessionPart
from mesh.device.groups.wire import MAX_MEMBERS, MAX_RANKS
from mesh.device.groups.working import REDUCTIONS, Call

__all__ = ["Collective", "DistributedContext", "ReduceOperation"]

TIMEOUT = 300.0
"""Default limit in seconds for one operation: the slowest device has that long to come to it."""

NEW = "not entered yet"

GRACE_SECONDS = 1.0
"""For the reason why a group broke to come, where a session has failed."""


class ReduceOperation(enum.StrEnum):
    """How tensors are combined. Means of integers are rounded toward zero."""

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"


class DistributedContext:
    """A group of devices, and the collectives over it.

    ::

        with mesh.DistributedContext(devices, op="mean") as context:
            pending = context.all_reduce(tensors)   # one tensor on each device
            ...                                     # whatever else there is to do
            tensors = pending.resolve()

    In async code it is entered by ``async with``, and waited for by `Collective.wait_async`.
    Nothing else waits.

    Devices of peers exchange among themselves; nothing but the orders passes through this process.
    Each operation runs beside what else its devices do, in the order of the calls. What it works on
    may be written to as soon as the call has returned. No gradient flows through it.

    A context is entered once, and used by one thread at a time.

    Args:
        devices: of peers, all opened with one node, or all of this process, in which case one may
            come several times. The order is that of the tensors of each call.
        op: the reduction of calls that name none.
        timeout: seconds for one operation.

    Raises:
        DeviceError: a device comes twice, is not open, or of a mixture of both kinds.
        ValueError: there is no such reduction.
    """

    def __init__(
        self,
        devices: Sequence[torch.device | str],
        *,
        op: ReduceOperation | str = ReduceOperation.MEAN,
        timeout: float = TIMEOUT,
    ) -> None:
        self.devices = tuple(map(_whole, devices))
        self.op = ReduceOperation(op)
        self.timeout = float(timeout)
        self._lock = threading.Lock()
        self._next = 0
        self._turns = [0] * len(self.devices)
        """For each device the number of the operation that it has to contribute to next."""
        self._bond: Bond | None = None
        self._parts: tuple[Part, ...] = ()
        self._state = NEW
        self._check_devices()

    def __repr__(self) -> str:
        return f"<mesh.DistributedContext of {_names(self.devices)}>"

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        """Form the group in async code, on the node whose event loop this is; see `open`."""
        with self._forming() as bond:
            if bond is not None:
                bond.check_in_loop()
                bond.begin()
                await answered(bond.formed)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def open(self) -> None:
        """Form the group.

        Raises:
            AccessDenied: a peer does not admit another one, or this program.
            RankLost: a peer can't be reached from another one; names its devices.
            SessionLost: a device is lost.
            DeviceError: the group can't be formed; or this is an event loop's own thread.
        """
        with self._forming() as bond:
            if bond is not None:
                bond.check_waiting()
                bond.begin()
                bond.formed.result(FORMING_SECONDS + GRACE_SECONDS)

    @contextlib.contextmanager
    def _forming(self) -> Iterator[Bond | None]:
        """Have the context be open after the block, in which its group is formed."""
        with self._lock:
            if self._state != NEW:
                raise self._unusable("entering")
            self._state = "being entered"
        bond = None
        try:
            parts: tuple[Part, ...] = (LocalPart(len(self.devices)),)
            if self.devices[0].type == BACKEND:
                parts, bond = self._made()
            yield bond
        except BaseException:
            self._state = NEW
            if bond is not None:
                bond.leave()
            raise
        self._parts, self._bond, self._state = parts, bond, ""

    def close(self) -> None:
        """Leave the group. What was not resolved is lost; tensors that were are what they are.

        It does not wait: the group is left once the devices have come to the end of what was
        called, or after the limit for an operation.
        """
        with self._lock:
            if self._state == "closed":
                return
            is_whole = self._next > 0 and not self._state and self.failure is None
            self._state = "closed"
            if self._bond is not None:
                self._bond.leave(self._all_done() if is_whole else ())

    def _all_done(self) -> list[Future[Any]]:
        done = []
        for part in self._parts:
            with contextlib.suppress(MeshError):  # it is lost, or captures operations
                done.append(part.all_done())
        return done

    @property
    def failure(self) -> MeshError | None:
        """Why the group is broken, with the devices at fault; None while it is whole."""
        bond = self._bond
        if bond is None or not bond.broken.done() or self._state:
            return None
        return bond.broken.result()

    def reason(self, failed: BaseException) -> BaseException:
        """Return what broke the group, where that may be why an operation on a device failed."""
        bond = self._bond
        if bond is None:
            return failed
        try:
            return bond.broken.result(GRACE_SECONDS)
        except TimeoutError:
            return failed

    def find_lost(self) -> tuple[torch.device, ...]:
        """Return the devices whose peers can't be reached within the liveness bound, or are gone.

        Their sessions are given up.
        """
        bond = self._bond
        if bond is None:
            return ()
        bond.check_waiting()
        ranks = {rank for member in bond.find_lost() for rank in self._parts[member].ranks}
        return tuple(self.devices[rank] for rank in sorted(ranks))

    def all_reduce(
        self, tensors: Sequence[torch.Tensor], op: ReduceOperation | str | None = None
    ) -> Collective:
        """Reduce tensors of one shape and type, one on each device; each gets the result.

        Raises:
            DeviceError: the tensors don't fit the group, or the context is not open.
            UnsupportedCollective: the reduction makes no sense for their type.
            CollectiveError: the group is broken.
        """
        return self._call("all_reduce", tensors, op)

    def reduce_scatter(
        self, tensors: Sequence[torch.Tensor], op: ReduceOperation | str | None = None
    ) -> Collective:
        """Reduce as `all_reduce`, and give each device its part along the first dimension."""
        return self._call("reduce_scatter", tensors, op)

    def all_gather(self, tensors: Sequence[torch.Tensor]) -> Collective:
        """Give each device all tensors, joined along the first dimension in the devices' order."""
        return self._call("all_gather", tensors)

    def broadcast(self, tensor: torch.Tensor) -> Collective:
        """Give each device a copy of `tensor`, which is on one of them."""
        root = self._rank_of(tensor)
        tensors = [
            tensor if rank == root else torch.empty_like(tensor, device=device)
            for rank, device in enumerate(self.devices)
        ]
        return self._call("broadcast", tensors, root=root)

    def start(self, kind: str, op: ReduceOperation | str | None = None, root: int = 0) -> Starting:
        """Begin an operation whose tensors come device by device; see `Starting`.

        Operations begin in the order of these calls, on every device.
        """
        with self._lock:
            self._check_usable(kind)
            reduces = kind in ("all_reduce", "reduce_scatter")
            call = Call(kind, str(ReduceOperation(op or self.op)) if reduces else "", root)
            number, self._next = self._next, self._next + 1
        return Starting(self, call, number)

    def _call(
        self,
        kind: str,
        tensors: Sequence[torch.Tensor],
        op: ReduceOperation | str | None = None,
        root: int = 0,
    ) -> Collective:
        self._check_usable(kind)
        self._check_tensors(kind, tensors)
        if kind in ("all_reduce", "reduce_scatter"):
            refuse_unless_reducible(tensors[0].dtype, REDUCTIONS[ReduceOperation(op or self.op)])
        starting = self.start(kind, op, root)
        for rank, tensor in enumerate(tensors):
            starting.add(rank, tensor)
        return starting.collective()

    # What is refused.

    def _check_devices(self) -> None:
        what = f"a context of {_names(self.devices)}"
        if not 0 < len(self.devices) <= MAX_RANKS:
            raise DeviceError(what, why=f"it takes 1 to {MAX_RANKS} devices")
        kinds = {device.type == BACKEND for device in self.devices}
        if len(kinds) > 1:
            raise DeviceError(
                what,
                why="some are of peers, and some of this process",
                fix="Offer those of this machine, too: mesh up --device NAME.",
            )
        for device in self.devices:
            if kinds == {True} and self.devices.count(device) > 1:
                raise DeviceError(what, why=f"'{device}' comes twice", fix="Name each once.")
        if kinds == {True}:
            for device in self.devices:
                device_of(device)

    def _check_usable(self, kind: str) -> None:
        if self._state:
            raise self._unusable(kind)
        failure = self.failure
        if failure is not None:
            raise failure
        for part in self._parts:
            part.check(kind)

    def _unusable(self, what: str) -> DeviceError:
        return DeviceError(
            f"{what} with a context of {_names(self.devices)}",
            why=f"the context is {self._state or 'entered already'}",
            fix="Use it inside its `with` block, and make a new one for each.",
        )

    def _check_tensors(self, kind: str, tensors: Sequence[torch.Tensor]) -> None:
        """Raise unless there is one tensor for each device, in order and alike."""
        what = f"{kind} over {_names(self.devices)}"
        found = [tensor.device for tensor in tensors]
        missing = [device for device in self.devices if device not in found]
        strange = [device for device in found if device not in self.devices]
        if strange:
            raise DeviceError(
                what,
                why=f"a tensor is on '{strange[0]}', which is not in the group",
                fix="Move it to a device of the group, or make a context with that device.",
            )
        if missing or len(found) != len(self.devices):
            why = f"{len(found)} tensors for {len(self.devices)} devices"
            if missing:
                why = f"there is none on {_names(missing)}"
            raise DeviceError(what, why=why, fix="Pass one tensor for each device, in order.")
        if found != list(self.devices):
            raise DeviceError(
                what,
                why=f"the tensors are on {_names(found)}, which is another order",
                fix="Pass them in the order of the context's devices.",
            )
        first = tensors[0]
        for tensor in tensors:
            if tensor.shape != first.shape or tensor.dtype is not first.dtype:
                raise DeviceError(
                    what,
                    why=f"the tensor on '{tensor.device}' is {tuple(tensor.shape)} of "
                    f"{tensor.dtype}, and that on '{first.device}' {tuple(first.shape)} of "
                    f"{first.dtype}",
                    fix="All must be alike.",
                )
            if tensor.layout is not torch.strided:
                raise DeviceError(what, why=f"a tensor's layout is {tensor.layout}")
        if kind in ("all_gather", "reduce_scatter") and not first.dim():
            raise DeviceError(what, why="the tensors have no dimensions", fix="Use view(1).")
        if kind == "reduce_scatter" and first.shape[0] % len(self.devices):
            why = f"{first.shape[0]} rows don't divide among {len(self.devices)} devices"
            raise DeviceError(what, why=why)

    def _rank_of(self, tensor: torch.Tensor) -> int:
        if tensor.device not in self.devices:
            raise DeviceError(
                f"broadcast over {_names(self.devices)}",
                why=f"the tensor is on '{tensor.device}', which is not in the group",
                fix="Move it to a device of the group.",
            )
        return self.devices.index(tensor.device)

    def _made(self) -> tuple[tuple[Part, ...], Bond]:
        by_session: dict[int, list[tuple[int, Device]]] = {}
        for rank, device in enumerate(map(device_of, self.devices)):
            by_session.setdefault(id(device.session), []).append((rank, device))
        parts = tuple(
            SessionPart(
                each[0][1].session, [device for _, device in each], [rank for rank, _ in each]
            )
            for each in by_session.values()
        )
        if len(parts) > MAX_MEMBERS:
            raise DeviceError(
                f"a context of {len(self.devices)} devices",
                why=f"they are of {len(parts)} peers, and at most {MAX_MEMBERS} can be together",
            )
        return parts, Bond(parts, self.timeout)


class Starting:
    """An operation whose tensors come device by device, each as soon as there is one.

    A peer begins with its part of the operation once all of its devices have theirs; the results
    are there when all have. Whoever begins it has to go through with it, or to close the context.
    """

    def __init__(self, context: DistributedContext, call: Call, number: int) -> None:
        self._context = context
        self._call = call
        self._number = number
        self._tensors: dict[int, torch.Tensor] = {}
        self._left = {part: set(part.ranks) for part in context._parts}
        self._like: torch.Tensor | None = None

    def add(self, rank: int, tensor: torch.Tensor) -> None:
        """Add the tensor of a device, by its rank.

        Raises:
            DeviceError: it is of another device, comes before that of an operation that has begun
                earlier, or comes twice.
        """
        context = self._context
        context._check_usable(self._call.kind)
        part = next(part for part in context._parts if rank in part.ranks)
        what = f"{self._call.kind} over {_names(context.devices)}"
        if tensor.device != context.devices[rank]:
            why = f"a tensor is on '{tensor.device}', and it is the turn of {context.devices[rank]}"
            raise DeviceError(what, why=why)
        turn = context._turns[rank]
        if turn != self._number:
            raise DeviceError(
                what,
                why=f"'{tensor.device}' is at operation {turn} of the group, and this is "
                f"operation {self._number}",
                fix="All devices take part in the same operations, in the same order.",
            )
        context._turns[rank] += 1
        self._left[part].discard(rank)
        self._like = tensor if self._like is None else self._like
        self._tensors[rank] = resolved(tensor.detach())
        if not self._left[part]:
            part.start(self._call, [self._tensors.pop(each) for each in part.ranks])

    def collective(self) -> Collective:
        """Return the operation, with the tensors of all devices added."""
        assert self._like is not None
        shape, count = list(self._like.shape), len(self._context.devices)
        if self._call.kind == "all_gather":
            shape[0] *= count
        elif self._call.kind == "reduce_scatter":
            shape[0] //= count
        return Collective(self._context, self._call, self._number, shape, self._like.dtype)


class Collective:
    """The results of an operation that is under way."""

    def __init__(
        self,
        context: DistributedContext,
        call: Call,
        number: int,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        self._context = context
        self._call = call
        self._number = number
        self._shape = tuple(shape)
        self._dtype = dtype
        self._results: list[torch.Tensor] | None = None

    def resolve(self) -> list[torch.Tensor]:
        """Return the results, one on each device, in order.

        It does not wait: the devices do, with whatever is called on them from now on. What goes
        wrong is raised by later calls of the context, and where elements are read.

        Raises:
            DeviceError: the context was closed before.
            CollectiveError: the group is known to be broken.
        """
        return self._taken(waits=True)

    def assume_resolved(self) -> list[torch.Tensor]:
        """Return the same without having the devices wait, where the operation is known to be over.

        It is over once a later one of the context is, or `wait` has returned. If it is not, reading
        the results raises `DeviceError`: they are never silently wrong.
        """
        return self._taken(waits=False)

    def wait(self, timeout: float | None = None) -> list[torch.Tensor]:
        """Return the results once they are there, on all devices.

        Args:
            timeout: in seconds; by default the context's.

        Raises:
            CollectiveTimeout: it takes longer.
            CollectiveError: the group broke; names the devices at fault.
            MeshError: what an operation on a device has failed with before.
        """
        results, bond = self.resolve(), self._context._bond
        if bond is None:
            return results
        bond.check_waiting()
        changed = threading.Event()
        waiting = _Waiting(results, bond, changed.set)
        limit = self._context.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        while not waiting.is_over():
            changed.clear()
            if not waiting.is_over() and not changed.wait(max(0.0, deadline - time.monotonic())):
                raise self._timed_out(limit)
        failed = waiting.failed()
        if failed is not None:
            raise self._context.reason(failed)
        return results

    async def wait_async(self, timeout: float | None = None) -> list[torch.Tensor]:
        """Do the same in async code, on the node whose event loop this is."""
        results, bond = self.resolve(), self._context._bond
        if bond is None:
            return results
        bond.check_in_loop()
        over = anyio.Event()
        waiting = _Waiting(results, bond, lambda: over.set() if waiting.is_over() else None)
        limit = self._context.timeout if timeout is None else timeout
        with anyio.move_on_after(limit):
            await over.wait()
        if not waiting.is_over():
            raise self._timed_out(limit)
        failed = waiting.failed()
        if failed is not None:
            with anyio.move_on_after(GRACE_SECONDS):
                raise await answered(bond.broken)
            raise failed
        return results

    def _timed_out(self, limit: float) -> CollectiveTimeout:
        return CollectiveTimeout(
            f"{self._call.kind} over {_names(self._context.devices)}",
            after=limit,
            why="not all devices have come to its end",
            fix="Look at what they are doing, or give it more time.",
        )

    def _taken(self, *, waits: bool) -> list[torch.Tensor]:
        if self._results is None:
            context = self._context
            context._check_usable(f"resolving of {self._call.kind}")
            found: dict[int, torch.Tensor] = {}
            if any(part.next <= self._number for part in context._parts):
                raise DeviceError(
                    f"resolving of {self._call.kind}",
                    why="not all devices have contributed to it",
                )
            for part in context._parts:
                results = part.take(self._number, self._shape, self._dtype, waits=waits)
                found.update(zip(part.ranks, results, strict=True))
            self._results = [found[rank] for rank in range(len(context.devices))]
        return self._results


class _Waiting:
    """For results to be there, or for the group to break.

    Args:
        results: that are waited for.
        bond: of the group.
        changed: called whenever that may have come, maybe by another thread.
    """

    def __init__(
        self, results: Sequence[torch.Tensor], bond: Bond, changed: Callable[[], object]
    ) -> None:
        self._bond = bond
        # An empty part of each: it is there when the whole is, and costs nothing to move.
        self._asked = [ask_elements(each.view(-1)[:0])[0].future for each in results]
        for future in self._asked:
            future.add_done_callback(lambda _: changed())
        bond.broken.add_done_callback(lambda _: changed())

    def is_over(self) -> bool:
        """Return whether they are there, or can't be any more."""
        is_there = all(each.done() for each in self._asked)
        return is_there or self._bond.broken.done() or self.failed() is not None

    def failed(self) -> BaseException | None:
        """Return what went wrong."""
        for each in self._asked:
            if each.done() and (error := each.exception()) is not None:
                return error
        if all(each.done() for each in self._asked) or not self._bond.broken.done():
            return None
        return self._bond.broken.result()


def _whole(device: torch.device | str) -> torch.device:
    """Return a device as tensors name theirs: the CPU without an index, all others with one."""
    name = str(torch.device(device))
    if name.startswith("cpu"):
        return torch.device("cpu")
    return torch.device(name if ":" in name else f"{name}:0")


def _names(devices: Sequence[torch.device]) -> str:
    return ", ".join(f"'{device}'" for device in devices)
