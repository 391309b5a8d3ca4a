"""An operation of a group in the streams of the sessions that have its devices."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import torch

from mesh.device import wire
from mesh.device.client.backend import ask_wait
from mesh.device.client.entries import Entry
from mesh.device.client.session import Session
from mesh.device.client.tensors import Device, dense_strides, geometry_of, handle_of, new_tensor
from mesh.device.groups.working import Call, Ranks, contribution, work

__all__ = ["LocalPart", "Part", "SessionPart"]

_entries: dict[Any, Entry] = {}


class Part(Protocol):
    """The devices of a group that are at one place, and their ranks.

    Attributes:
        ranks: of its devices, in order.
        next: number of the operation that starts next.
    """

    ranks: tuple[int, ...]
    next: int

    def check(self, what: str) -> None:
        """Raise unless operations can be started now; `what` is for the message."""

    def all_done(self) -> Future[Any]:
        """Return what is done once the results that were taken are there, or never will be."""

    def start(self, call: Call, tensors: Sequence[torch.Tensor]) -> None:
        """Start the next operation with what each rank contributes."""

    def take(
        self, sequence: int, shape: Sequence[int], dtype: torch.dtype, *, waits: bool
    ) -> list[torch.Tensor]:
        """Return the results of an operation, one for each rank."""


class SessionPart:
    """The devices of one session: nobody waits here, whatever fails is told to who reads.

    Args:
        session: with the peer.
        devices: that are in the group.
        ranks: of those, in order.
    """

    def __init__(self, session: Session, devices: Sequence[Device], ranks: Sequence[int]) -> None:
        self.session = session
        self.devices = tuple(devices)
        self.ranks = tuple(ranks)
        self.number = session.next_id()
        """The group's, among those of the session."""
        self.next = 0

    def check(self, what: str) -> None:
        """See `Part.check`."""
        if not self.session.records_tentatively:
            self.session.check_not_recording(what)

    def all_done(self) -> Future[Any]:
        """See `Part.all_done`."""
        return ask_wait(self.devices[0]).future

    def start(self, call: Call, tensors: Sequence[torch.Tensor]) -> None:
        """See `Part.start`."""
        geometries = tuple(map(geometry_of, tensors))
        template = wire.Template(
            wire.START,
            self.devices[0].remote,
            (
                *(wire.Number("q"), wire.Number("q")),
                *map(wire.Literal, (call.kind, call.op, call.root)),
                *map(wire.TensorOf, geometries),
            ),
        )
        handles = [handle_of(tensor).id for tensor in tensors]
        self._emit((self.devices[0], call, geometries), template, handles, self.next)
        self.next += 1

    def take(
        self, sequence: int, shape: Sequence[int], dtype: torch.dtype, *, waits: bool
    ) -> list[torch.Tensor]:
        """See `Part.take`."""
        geometry = wire.Geometry(dtype, tuple(shape), dense_strides(shape))
        made = wire.Output(geometry, geometry.span)
        count = len(self.devices)
        template = wire.Template(
            wire.TAKE,
            self.devices[0].remote,
            (wire.Number("q"), wire.Number("q"), wire.Literal(waits)),
            outputs=(made,) * count,
            results=count,
        )
        handles = [self.session.next_id() for _ in self.devices]
        results = [
            new_tensor(device, handle, geometry)
            for device, handle in zip(self.devices, handles, strict=True)
        ]
        self._emit((self.devices[0], count, made, waits), template, handles, sequence)
        return results

    def _emit(
        self, key: Any, template: wire.Template, handles: Sequence[int], sequence: int
    ) -> None:
        entry = _entries.get(key)
        if entry is None:
            drop = partial(_entries.pop, key, None)
            entry = _entries[key] = Entry(self.devices[0], template, None, drop)
        message = entry.pack(wire.RUN_KIND, entry.number, *handles, self.number, sequence)
        self.session.emit(message)


class LocalPart:
    """Devices of this process: an operation is over when its start returns."""

    def __init__(self, count: int) -> None:
        self.ranks = tuple(range(count))
        self.next = 0
        self._results: dict[int, Sequence[torch.Tensor]] = {}

    def check(self, what: str) -> None:
        """See `Part.check`."""

    def all_done(self) -> Future[Any]:
        """See `Part.all_done`."""
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    def start(self, call: Call, tensors: Sequence[torch.Tensor]) -> None:
        """See `Part.start`."""
        with torch.no_grad():
            parts = [contribution(tensor.detach()) for tensor in tensors]
            self._results[self.next] = work(call, Ranks((self.ranks,), 0), None, parts)
        self.next += 1

    def take(
        self, sequence: int, shape: Sequence[int], dtype: torch.dtype, *, waits: bool
    ) -> list[torch.Tensor]:
        """See `Part.take`."""
        return [result.view(tuple(shape)) for result in self._results.pop(sequence)]
