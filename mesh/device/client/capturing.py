"""A sequence of operations that is captured once, sent once, and then run by its number.

What is captured is what goes to the peer: operations on the tensors there are, and the release of
those that come and go meanwhile. To run it again costs this program one message, whatever it holds,
and gives what the operations give with the content that the tensors have by then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mesh.device import wire
from mesh.device.client.session import Recording, Session
from mesh.device.client.tensors import device_of
from mesh.device.errors import DeviceError, UnsupportedOnDevice

__all__ = ["Captured", "Kept", "Steps", "capture", "keep"]

PART_BYTES = 1 << 19
"""Bytes of operations that are sent as one part of a sequence."""


@dataclasses.dataclass(frozen=True, slots=True)
class Steps:
    """What was recorded, to be run again.

    Attributes:
        runs: operations, and releases, in order.
        made: handles that they make and don't release.
        used: handles that they use, made before.
    """

    runs: list[wire.Run | wire.Release]
    made: set[int]
    used: set[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """Operations that the peer keeps. Those of a group of devices are sent each time.

    Attributes:
        items: numbers of sequences, and operations of groups, in order.
        pins: handles that are kept for them.
    """

    session: Session
    items: tuple[int | wire.Run, ...]
    pins: frozenset[int]

    def close(self) -> None:
        """Have the peer forget them, and what it has kept for them alone. Only queues."""
        numbers = tuple(each for each in self.items if isinstance(each, int))
        self.session.forget_captured(numbers, self.pins)


class Captured:
    """Operations that can be run again. Made by `capture`.

    The tensors that they use are kept at the peer for as long as this is, and so are those that
    they have made and not let go of, such as a loss or gradients: after `replay` these hold what
    was made anew.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept: Kept | None = None

    def replay(self) -> None:
        """Run the operations again. Nobody waits for them.

        Raises:
            DeviceError: the block in which they were captured has not ended, or has failed, or this
                was closed.
            SessionLost: the peer no longer has them.
        """
        kept = self._kept
        if kept is None:
            raise DeviceError(
                "replay of operations",
                why="nothing is captured",
                fix="Leave the block of mesh.device.capture first; it must not fail.",
            )
        for number in kept.items:
            assert isinstance(number, int), "operations of groups are refused"
            kept.session.emit(wire.replay(number))

    def close(self) -> None:
        """Have the peer forget the operations, and what it has kept for them alone."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()

    def __del__(self) -> None:
        # From the garbage collector, too: it only queues.
        if getattr(self, "_kept", None) is not None:
            self.close()


@contextlib.contextmanager
def capture(device: torch.device | str) -> Iterator[Captured]:
    """Run the operations of the block as ever, and capture them to be run again.

    ::

        with mesh.device.capture(d) as step:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
        for images, labels in batches:
            x.copy_(images), y.copy_(labels)
            step.replay()
        print(loss.item())

    As with ``torch.cuda.graph``, the program's own part is not run again: what it decided, and the
    numbers it passed, stay as they were. Tensors that the operations use must outlive the block,
    and new content gets into them in place. Random numbers go on. Operations on all devices of the
    peer are captured, by whatever thread they are called.

    Raises:
        UnsupportedOnDevice: from within the block: the program has read elements or a shape that
            depends on them, has moved elements there, or has used an optimizer that counts its
            steps here.
        DeviceError: what the operations use was let go of, or others are captured now, or this is
            the thread of the node's own loop.
        SessionLost: the peer no longer has this program's tensors.
    """
    session = device_of(torch.device(device)).session
    captured = Captured(torch.device(device))
    check = register_optimizer_step_pre_hook(_check_optimizer)
    try:
        with session.recording() as recording:
            yield captured
            captured._kept = keep(session, recording)
    finally:
        check.remove()


def _check_optimizer(optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Refuse optimizers whose numbers change with each step: those of the first would be taken."""
    for group in optimizer.param_groups:
        counts_here = "capturable" in group and not (group["capturable"] or group.get("fused"))
        on_mesh = any(each.device.type == "mesh" for each in group["params"])
        if on_mesh and counts_here:
            name = type(optimizer).__name__
            raise UnsupportedOnDevice(
                f"capture of {name}.step",
                why="it counts its steps in this program, and what depends on them would not "
                "change when it is run again",
                fix=f"Make it with {name}(..., capturable=True), or fused=True where it has that.",
            )


def keep(
    session: Session, recording: Recording, accept: Callable[[Steps], bool] = lambda steps: True
) -> Kept | None:
    """Have the peer keep what was recorded up to here.

    Args:
        session: whose recording goes on.
        recording: what to keep.
        accept: looks at it first; nothing is kept where it returns False.

    Raises:
        UnsupportedOnDevice: it holds what can't be run again.
        DeviceError: it uses tensors that were let go of meanwhile.
    """
    session.flush()
    found: list[Steps] = []

    def chosen() -> set[int]:
        steps = _steps_of(session, recording)
        lost = steps.used & recording.released
        if lost:
            raise DeviceError(
                "capture of operations",
                why=f"{len(lost)} tensors that they use, made before, were let go of meanwhile",
                fix="Keep them in variables that outlive the block.",
            )
        if not accept(steps):
            return set()
        found.append(steps)
        return steps.made | steps.used

    session.pin(chosen)
    if not found:
        return None
    (steps,) = found
    items: list[int | wire.Run] = []
    for is_group, part in itertools.groupby(steps.runs, lambda run: _is_group(session, run)):
        if is_group:
            items += [run for run in part if isinstance(run, wire.Run)]
            continue
        for messages in _parts([_packed(session, run) for run in part]):
            number = session.next_sequence()
            items.append(number)
            session.emit(wire.capture(number, messages))
    return Kept(session, tuple(items), frozenset(steps.made | steps.used))


def _steps_of(session: Session, recording: Recording) -> Steps:
    steps = Steps([], set(), set())
    made, used = steps.made, steps.used
    for batch in recording.batches:
        for message in wire.read_batch(memoryview(bytearray(batch)), session.layouts.get):
            match message:
                case wire.Run(number, values):
                    layout = session.layouts[number]
                    count = len(layout.tensors)
                    used.update(int(each) for each in values[:count] if each not in made)
                    made.update(int(each) for each in values[count : count + layout.made])
                    steps.runs.append(message)
                case wire.Release(handles):
                    made.difference_update(handles)
                    steps.runs.append(message)
                case wire.Define():
                    pass  # the peer has it by now
                case _:
                    raise UnsupportedOnDevice(
                        "capture of operations",
                        why="elements were moved to the device, or its random numbers were set, "
                        "meanwhile",
                        fix="Do that before, or between two replays, in place.",
                    )
    return steps


def _is_group(session: Session, run: wire.Run | wire.Release) -> bool:
    return isinstance(run, wire.Run) and session.layouts[run.template].name in (
        wire.START,
        wire.TAKE,
    )


def _packed(session: Session, run: wire.Run | wire.Release) -> bytes:
    if isinstance(run, wire.Release):
        return wire.release(run.handles)
    packer = session.layouts[run.template].packer()
    return packer.pack(wire.RUN_KIND, run.template, *run.values)


def _parts(steps: list[bytes]) -> Iterator[bytes]:
    """Cut a sequence into parts that fit into a batch."""
    sizes = itertools.accumulate(map(len, steps))
    for _, part in itertools.groupby(
        zip(steps, sizes, strict=True), lambda pair: pair[1] // PART_BYTES
    ):
        yield b"".join(step for step, _ in part)
