"""Runs what a client orders, on tensors that nobody else can touch.

The client is a stranger: whatever it sends is checked before torch sees it, and what fails poisons
the handles it was to make or write to. Whoever reads one of those is told what failed. Operations
run in the order they come in, on one thread, but for those that wait for what has not arrived.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from auth import MeshError
from mesh.device import wire
from mesh.device.errors import DeviceError, OperationFailed
from mesh.device.groups.member import Groups
from mesh.device.server.arrivals import Arrivals, Come, Place
from mesh.device.server.later import Later, Step
from mesh.device.server.program import Made, Program
from mesh.device.server.randomness import RandomStates
from mesh.device.server.sequence import Sequences
from mesh.device.server.storages import Slot, over, zeros
from tensor_bridge import CHUNK_BYTES, QuotaExceeded, tensor_bytes
from tensor_bridge.codec import memory_order
from transport import CborValue, LimitExceeded, ProtocolError

__all__ = ["Machine", "MachineLimits"]

Reply = Callable[[bytes], object]
Give = Callable[[torch.Tensor], bool]

MAX_REASON = 400
"""Characters of an operator's own message that are passed on."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MachineLimits:
    """How much one session may hold.

    Attributes:
        max_bytes: of all storages.
        max_handles: storages.
        max_templates: templates defined and not forgotten.
    """

    max_bytes: int = 8 << 30
    max_handles: int = 1 << 20
    max_templates: int = 1 << 16


class _Poisoned(Exception):
    """A tensor was to be used that does not exist because an operation has failed."""

    def __init__(self, failure: wire.Failure) -> None:
        super().__init__(str(failure.error))
        self.failure = failure


class Machine:
    """The handles and templates of one session.

    Args:
        devices: what the client's device numbers stand for; one may be there several times, each
            with random numbers of its own.
        limits: how much it may hold.
        groups: of devices that the session is in; without, it is in none.

    Attributes:
        operations: how many were run.
        used: bytes of all storages.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        limits: MachineLimits | None = None,
        groups: Groups | None = None,
    ) -> None:
        self.limits = limits or MachineLimits()
        self.operations = 0
        self.used = 0
        self._random = RandomStates(devices)
        self._devices = tuple(devices)
        self._groups = groups
        self._slots: dict[int, Slot | wire.Failure] = {}
        self._programs: dict[int, Program] = {}
        self._known: dict[wire.Geometry, wire.Geometry] = {}
        self._later = Later()
        self._sequences = Sequences()
        self._arrivals = Arrivals(self._later, self._settle)
        self._own: dict[str, Callable[[int, Program, Sequence[Any], Reply], None]] = {
            wire.READ: self._read,
            wire.WAIT: self._wait,
            wire.GET_RNG: self._get_random,
        }

    @property
    def handles(self) -> int:
        """How many handles there are, the poisoned included."""
        return len(self._slots)

    @property
    def templates(self) -> int:
        """How many templates there are."""
        return len(self._programs)

    def execute(self, batch: memoryview, reply: Reply) -> None:
        """Run a batch to its end, and hand answers to `reply` as they come.

        Raises:
            ProtocolError, LimitExceeded: the session can't go on: what the client has sent is no
                batch, or makes more of something than it may.
        """
        run, programs, later = self._run, self._programs, self._later
        with torch.inference_mode():
            for message in wire.read_batch(batch, self._layout):
                if type(message) is wire.Run:  # nearly all of them
                    program = programs[message.template]
                    if later.is_idle:
                        run(program, message.values)
                    else:
                        later.do(program.step(message.values, run))
                    continue
                match message:
                    case wire.Release(handles):
                        self._release_now_or_later(handles)
                    case wire.Ask(request, number, values):
                        ask = partial(self._ask, request, reply=reply)
                        later.do(programs[number].step(values, ask))
                    case wire.Define(number, template):
                        self._define(number, template)
                    case wire.Write(handle, offset, data):
                        if not later.is_idle:
                            data = memoryview(bytearray(data))  # the batch is gone by then
                        later.do(Step(partial(self._write, handle, offset, data), (), (handle,)))
                    case wire.Seed(device, value):
                        place = self._check_device(device)
                        seed = partial(self._random.seed, place, value)
                        later.do(Step(seed, random=(place,)))
                    case wire.Forget(number):
                        self._forget(number)
                    case wire.Poison(handle, error):
                        replace = partial(self._replace, handle, wire.Failure(error))
                        later.do(Step(replace, (), (handle,)))
                    case wire.Replay(number):
                        sequence = self._sequences[number]
                        later.do(sequence.step(run, self._release))
                    case wire.Capture(number, steps):
                        self._sequences.add(number, steps, programs)
                    case wire.Drop(number):
                        self._sequences.drop(number)
                    case wire.Content(max_bytes):
                        most = min(max_bytes, self.limits.max_bytes)
                        self.limits = dataclasses.replace(self.limits, max_bytes=most)

    # -- what comes and goes beside the batches

    def expect(self, arrival: int, handle: int, offset: int, nbytes: int) -> None:
        """Have what touches a storage from now on wait until bytes for it have arrived."""
        with torch.inference_mode():
            self._arrivals.expect(arrival, Place(handle, offset, nbytes))

    def arrive(self, arrival: int, come: Come) -> None:
        """Put what has arrived in its place, and run what has waited for it."""
        with torch.inference_mode():
            self._arrivals.come(arrival, come)

    def hand(self, request: int, number: int, handle: int, give: Give, reply: Reply) -> None:
        """Give the elements of a tensor, read by a template, as they lie in memory.

        Args:
            request: what is answered.
            number: of the template.
            handle: the tensor's storage.
            give: takes a contiguous tensor on the CPU; returns whether it could give that.
            reply: for failures, and for the elements if it could not.
        """
        program = self._programs.get(number)
        if program is None or program.template.name != wire.READ:
            raise _bad(f"template {number} is none of a read")

        def read(program: Program, values: Sequence[Any]) -> None:
            self._ask(request, program, values, reply, give)

        with torch.inference_mode():
            self._later.do(program.step((handle,), read))

    def _settle(self, place: Place, come: Come) -> None:
        if isinstance(come, MeshError):
            self._replace(place.handle, wire.Failure(come))
        slot = self._slots.get(place.handle)
        if not isinstance(come, int) or type(slot) is not Slot:
            return  # poisoned: whoever reads it is told
        try:
            if place.offset + place.nbytes > slot.nbytes:
                end = place.offset + place.nbytes
                raise _bad(f"bytes up to {end} of a storage of {slot.nbytes}")
            slot.fill(come, place.offset, place.nbytes)
        except (MeshError, OSError, RuntimeError) as error:
            failed = DeviceError("a move into a device", why=_reason(error))
            self._replace(place.handle, wire.Failure(failed))

    # -- operations

    def _run(self, program: Program, values: Sequence[Any]) -> None:
        self.operations += 1
        name = program.template.name
        try:
            if name.startswith("mesh::"):
                self._run_own(program, values)
                return
            results = self._call(program, values)
            outputs = program.template.outputs
            if outputs is None:
                raise _bad("an operation whose results only it can tell was not asked")
            if outputs:
                self._keep(program, values, results)
        except (ProtocolError, LimitExceeded):
            raise
        except _Poisoned as poisoned:
            self._poison(program, values, poisoned.failure)
        except Exception as error:
            self._poison(program, values, self._failure(program, values, error))

    def _call(self, program: Program, values: Sequence[Any]) -> list[Any]:
        """Call the operator and return its results, lists laid out flat."""
        self._check_made(program, values)
        if self.used + program.nbytes > self.limits.max_bytes:
            raise self._no_room(program.nbytes)
        for index in program.written:
            slot = self._slots.get(values[index])
            if type(slot) is Slot and slot.is_sealed:
                slot.make_writable()
        tensors = list(map(self._view, values, program.tensors))
        args, kwargs = program.arguments(tensors, values)
        if program.is_random:
            self._random.enter(program.template.device)
        result = program.operate(args, kwargs)
        if isinstance(result, torch.Tensor):
            return [result]
        return list(_flat(result))

    def _keep(self, program: Program, values: Sequence[Any], results: list[Any]) -> None:
        start = len(program.tensors)
        for index, made in enumerate(program.made):
            result = results[made.position] if made.position < len(results) else None
            if program.aliases is None or program.takes_numbers:  # which may decide about it
                program.aliases = self._finds_aliases(results, values[:start])
            handle = values[start + index]
            try:
                self._add(handle, self._settled(program, made, result), made.geometry, program)
            except (DeviceError, QuotaExceeded) as error:
                # The other results are what they should be; this one may be of no use to anybody.
                self._replace(handle, wire.Failure(error, program.template.name, handle))

    def _settled(self, program: Program, made: Made, result: object) -> torch.Tensor:
        """Return `result` as the client expects it: alone in its storage, laid out as agreed."""
        if not isinstance(result, torch.Tensor):
            raise _unexpected("it made no tensor where one was expected")
        if result.shape != made.shape or result.dtype is not made.dtype:
            raise _unexpected(
                f"it made {tuple(result.shape)} of {result.dtype} where {made.shape} of "
                f"{made.dtype} was expected"
            )
        if result.is_conj() or result.is_neg():
            result = result.resolve_conj().resolve_neg()
        fits = result.stride() == made.strides and result.storage_offset() == 0
        if fits and not program.aliases:
            return result
        fresh = zeros(made.geometry, made.nbytes, program.device)
        fresh.copy_(result)
        return fresh

    def _finds_aliases(self, results: Sequence[Any], handles: Sequence[int]) -> bool:
        """Return whether any result shares memory with another, or with what went in."""
        seen = {
            slot.base.untyped_storage().data_ptr()
            for handle in handles
            if isinstance(slot := self._slots.get(handle), Slot)
        }
        for result in results:
            if isinstance(result, torch.Tensor) and (
                address := result.untyped_storage().data_ptr()
            ):
                if address in seen:
                    return True
                seen.add(address)
        return False

    def _add(
        self,
        handle: int,
        tensor: torch.Tensor,
        geometry: wire.Geometry | None,
        program: Program,
    ) -> None:
        slot = Slot(tensor, geometry, program.template.device)
        if self.used + slot.nbytes > self.limits.max_bytes:
            raise self._no_room(slot.nbytes)
        self.used += slot.nbytes
        self._slots[handle] = slot

    def _view(self, handle: int, geometry: wire.Geometry) -> torch.Tensor:
        slot = self._slots.get(handle)
        if type(slot) is not Slot:
            if isinstance(slot, wire.Failure):
                raise _Poisoned(slot)
            raise _bad(f"there is no handle {handle}")
        if slot.geometry is geometry:
            return slot.base
        views = slot.views
        if views is not None:
            view = views.get(geometry)
            if view is not None:
                return view
        view = self._make_view(slot, geometry)
        slot.keep_view(geometry, view)
        return view

    def _make_view(self, slot: Slot, geometry: wire.Geometry) -> torch.Tensor:
        if geometry.span > slot.nbytes:
            raise _bad(f"a tensor ends at byte {geometry.span} of a storage of {slot.nbytes}")
        if geometry.dtype is slot.base.dtype:
            return slot.base.as_strided(geometry.shape, geometry.strides, geometry.offset)
        return over(slot.base, geometry)

    def _release_now_or_later(self, handles: Sequence[int]) -> None:
        if self._later.is_idle:
            self._release(handles)
            return
        for handle in handles:
            self._later.do(Step(partial(self._release, (handle,)), (), (handle,)))

    def _release(self, handles: Sequence[int]) -> None:
        for handle in handles:
            slot = self._slots.pop(handle, None)
            if type(slot) is Slot:
                self.used -= slot.nbytes

    # -- failures

    def _poison(self, program: Program, values: Sequence[Any], failure: wire.Failure) -> None:
        """Have whatever the operation was to make or to write to tell of its failure."""
        start = len(program.tensors)
        made = values[start : start + program.count]
        for handle in (*made, *(values[index] for index in program.written)):
            self._replace(handle, failure)

    def _replace(self, handle: int, failure: wire.Failure) -> None:
        """Have `handle` tell of `failure`, unless it tells of another already."""
        slot = self._slots.get(handle)
        if type(slot) is Slot:
            self.used -= slot.nbytes
        elif slot is None and len(self._slots) >= self.limits.max_handles:
            raise self._too_many()
        if not isinstance(slot, wire.Failure):
            self._slots[handle] = failure

    def _check_made(self, program: Program, values: Sequence[Any]) -> None:
        """Raise unless the handles that an operation makes are new, and there is room for them.

        Raises:
            ProtocolError, LimitExceeded: the session can't go on.
        """
        slots = self._slots
        start = len(program.tensors)
        for handle in values[start : start + program.count]:
            if handle in slots:
                raise _bad(f"handle {handle} is taken")
        if len(slots) + program.count > self.limits.max_handles:
            raise self._too_many()

    def _failure(self, program: Program, values: Sequence[Any], error: Exception) -> wire.Failure:
        name = program.template.name
        start = len(program.tensors)
        made = values[start : start + program.count] or [values[i] for i in program.written]
        if not isinstance(error, MeshError):
            error = OperationFailed(f"operation {name}", why=_reason(error))
        return wire.Failure(error, name, int(made[0]) if made else 0)

    # -- what is answered

    def _ask(
        self,
        request: int,
        program: Program,
        values: Sequence[Any],
        reply: Reply,
        give: Give | None = None,
    ) -> None:
        try:
            own = self._own.get(program.template.name)
            if give is not None and give(self._elements(program, values)):
                return
            if own is not None:
                own(request, program, values, reply)
            else:
                self.operations += 1
                reply(wire.answer(request, self._describe(program, values)))
        except (ProtocolError, LimitExceeded):
            raise
        except _Poisoned as poisoned:
            reply(wire.failure(request, poisoned.failure))
        except Exception as error:
            reply(wire.failure(request, self._failure(program, values, error)))

    def _describe(self, program: Program, values: Sequence[Any]) -> CborValue:
        """Run an operation whose results only it can tell, and return what they are."""
        results = self._call(program, values)
        if len(results) == 1 and isinstance(results[0], bool | int | float):
            return results[0]
        start = len(program.tensors)
        handles = values[start : start + program.count]
        if len(results) != len(handles):
            raise _unexpected(f"it made {len(results)} tensors where {len(handles)} were expected")
        described: list[CborValue] = []
        for handle, result in zip(handles, results, strict=True):
            # Results of unknown size have been made by now; the limit of memory has held so far.
            kept = result.resolve_conj()
            dense = memory_order(kept.shape, kept.stride()) is not None
            if not dense or kept.storage_offset() or self._finds_aliases([kept], values[:start]):
                kept = kept.clone(memory_format=torch.contiguous_format)
            self._add(handle, kept, None, program)
            described.append(wire.result_value(kept))
        return described

    def _read(self, request: int, program: Program, values: Sequence[Any], reply: Reply) -> None:
        tensor = self._elements(program, values)
        data = tensor_bytes(tensor) if tensor.numel() else memoryview(b"")
        for start in range(0, max(len(data), 1), CHUNK_BYTES):
            part = data[start : start + CHUNK_BYTES]
            reply(wire.data_answer(request, part, last=start + CHUNK_BYTES >= len(data)))

    def _elements(self, program: Program, values: Sequence[Any]) -> torch.Tensor:
        (geometry,) = program.tensors
        return self._view(values[0], geometry).contiguous().cpu()

    def _wait(self, request: int, program: Program, values: Sequence[Any], reply: Reply) -> None:
        reply(wire.answer(request, {"used": self.used, "handles": len(self._slots)}))

    def _get_random(
        self, request: int, program: Program, values: Sequence[Any], reply: Reply
    ) -> None:
        reply(wire.answer(request, self._random.get(program.template.device)))

    # -- the rest

    def _run_own(self, program: Program, values: Sequence[Any]) -> None:
        self._check_made(program, values)
        if self.used + program.nbytes > self.limits.max_bytes:
            raise self._no_room(program.nbytes)
        if program.template.name == wire.ALLOCATE:
            (made,) = program.made
            self._add(
                values[0],
                zeros(made.geometry, made.nbytes, program.device),
                made.geometry,
                program,
            )
        elif program.template.name == wire.MOVE:
            (made,) = program.made
            source = self._view(values[0], program.tensors[0])
            if source.shape != made.shape or source.dtype is not made.dtype:
                raise _bad("a copy differs from what it is a copy of")
            copy = zeros(made.geometry, made.nbytes, program.device).copy_(source)
            self._add(values[1], copy, made.geometry, program)
        elif program.template.name == wire.SET_RNG:
            state = self._view(values[0], program.tensors[0])
            self._random.set(program.template.device, state)
        elif program.call is not None:
            views = zip(values, program.tensors, strict=False)
            contribute = partial(map, lambda each: self._view(*each), views)
            group, sequence = values[-2:]
            self._in_groups().start(group, sequence, program.call, contribute)
        elif program.template.name == wire.TAKE:
            group, sequence = values[-2:]
            taken = self._in_groups().take(group, sequence, program.nbytes, waits=program.waits)
            for handle, made, result in zip(values, program.made, taken, strict=False):
                settled = self._settled(program, made, result.view(made.shape))
                self._add(handle, settled, made.geometry, program)
        else:
            raise _bad("what only answers was not asked")

    def _in_groups(self) -> Groups:
        if self._groups is None:
            raise _bad("there are no groups of devices here")
        return self._groups

    def _define(self, number: int, template: wire.Template) -> None:
        if number in self._programs:
            raise _bad(f"template {number} is there already")
        if len(self._programs) >= self.limits.max_templates:
            raise LimitExceeded(
                "definition of a template",
                why=f"this session has {self.limits.max_templates} already",
                fix="Forget some.",
            )
        device = self._devices[self._check_device(template.device)]
        self._programs[number] = Program(template, device, self._intern)

    def _forget(self, number: int) -> None:
        if self._programs.pop(number, None) is None:
            raise _bad(f"template {number} was not defined")
        if not self._programs:
            self._known.clear()

    def _write(self, handle: int, offset: int, data: memoryview) -> None:
        slot = self._slots.get(handle)
        if slot is None:
            raise _bad(f"there is no handle {handle}")
        if type(slot) is not Slot or not data:
            return  # poisoned: whoever reads it is told
        if offset + len(data) > slot.nbytes:
            raise _bad(f"bytes up to {offset + len(data)} of a storage of {slot.nbytes}")
        slot.make_writable()
        target = over(slot.base, wire.Geometry(torch.uint8, (len(data),), (1,), offset))
        target.copy_(torch.frombuffer(data, dtype=torch.uint8))

    def _layout(self, number: int) -> wire.Layout | None:
        program = self._programs.get(number)
        return None if program is None else program.layout

    def _intern(self, geometry: wire.Geometry) -> wire.Geometry:
        """Return the one object that stands for `geometry`, so that comparing is looking."""
        return self._known.setdefault(geometry, geometry)

    def _check_device(self, device: int) -> int:
        if device >= len(self._devices):
            raise _bad(f"there is no device {device}")
        return device

    def _no_room(self, nbytes: int) -> QuotaExceeded:
        return QuotaExceeded(
            f"allocation of {nbytes} bytes on a device",
            why=f"{max(0, self.limits.max_bytes - self.used)} of {self.limits.max_bytes} bytes "
            "are left for this session",
            fix="Let go of tensors that are not needed any more, or ask for a larger quota.",
        )

    def _too_many(self) -> LimitExceeded:
        return LimitExceeded(
            "tensors on a device",
            why=f"this session has {self.limits.max_handles} storages already",
            fix="Let go of tensors that are not needed any more.",
        )


def _flat(results: Any) -> Iterator[Any]:
    if isinstance(results, list | tuple):
        for result in results:
            yield from _flat(result)
    else:
        yield results


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:MAX_REASON] or type(error).__name__


def _unexpected(why: str) -> DeviceError:
    return DeviceError("operation on a device", why=why)


def _bad(why: str) -> ProtocolError:
    return ProtocolError("an operation on a device", why=why)
