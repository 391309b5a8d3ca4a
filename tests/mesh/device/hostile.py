"""A client that sends whatever it likes: what it is allowed to, slightly wrong, or nonsense."""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import torch

import mesh
from auth import Ticket
from mesh import blocking
from mesh.device import wire
from mesh.device.client.session import Order, Session
from mesh.device.client.tensors import device_of, handle_of
from mesh.device.handover import ARRIVED_CALL, INTERNAL, Arrived, PutIn, TakeOut
from mesh.device.ops import _NAMES
from mesh.errors import MeshError
from tensor_bridge import TensorMeta

__all__ = ["ATTACKS", "Attacker"]

_HUGE = 1 << 40
_DTYPES = (torch.float32, torch.int64, torch.bool, torch.uint8, torch.complex64)


class Attacker:
    """One session of a client that means no good.

    Args:
        node: its own.
        ticket: whom it attacks.
        seed: of what it draws.
    """

    def __init__(self, node: blocking.Node, ticket: Ticket, seed: int) -> None:
        self.node = node
        self.ticket = ticket
        self.random = random.Random(seed)
        self.device = mesh.device(ticket, node=node)
        self.session: Session = device_of(self.device).session
        self.tensor = torch.ones(4, device=self.device)
        self.handle = handle_of(self.tensor).id

    def attack(self, name: str) -> None:
        """Do one thing; raises nothing but `MeshError`."""
        ATTACKS[name](self)

    def is_alive(self) -> bool:
        """Return whether the session is still of use; an error of it is a typed one."""
        try:
            return bool((self.tensor + 1).sum().item() == 8)
        except MeshError:
            return False

    # -- what it does

    def send(self, *messages: bytes) -> None:
        for message in messages:
            self.session.emit(message)
        self.session.flush()

    def garbage(self) -> None:
        self.send(self.random.randbytes(self.random.randrange(1, 3000)))

    def mutate(self) -> None:
        """Send a valid batch with some bytes changed."""
        valid = bytearray()
        for _ in range(8):
            number, template = self.define()
            valid += wire.define(number, template)
            valid += wire.release([self.handle_number()])
        for _ in range(self.random.randrange(1, 6)):
            valid[self.random.randrange(len(valid))] = self.random.randrange(256)
        self.send(bytes(valid))

    def operations(self) -> None:
        """Run random operators on random arguments: each fails, or does what it does."""
        for _ in range(60):
            number, template = self.define()
            layout = wire.Layout(template)
            values: list[Any] = [self.handle] * len(layout.tensors)
            values += [self.session.next_id() for _ in range(layout.made)]
            values += [self.random.choice((0, 1, 3))] * layout.body.format.count("q")
            values += [0.5] * layout.body.format.count("d")
            with contextlib.suppress(struct.error):
                run = layout.packer().pack(wire.RUN_KIND, number, *values)
                self.send(wire.define(number, template), run)

    def bad_handles(self) -> None:
        number, template = (
            self.session._next_template(),
            wire.Template(
                "aten::add.Tensor",
                0,
                (wire.TensorOf(_VECTOR), wire.TensorOf(_VECTOR)),
                outputs=(wire.Output(_VECTOR, 16),),
                results=1,
            ),
        )
        layout = wire.Layout(template)
        values = [self.handle_number() for _ in range(3)]
        self.send(
            wire.define(number, template), layout.packer().pack(wire.RUN_KIND, number, *values)
        )

    def oversize(self) -> None:
        """Read and write beyond the end of a storage."""
        for geometry in (
            wire.Geometry(torch.float32, (1 << 20,), (1,)),
            wire.Geometry(torch.float32, (2, 2), (1 << 30, 1)),
            wire.Geometry(torch.float32, (4,), (1,), 1 << 38),
            wire.Geometry(torch.complex128, (4,), (1,)),
        ):
            number = self.session._next_template()
            template = wire.Template(wire.READ, 0, (wire.TensorOf(geometry),))
            self.send(wire.define(number, template))
            request = self.session.ask(
                number, wire.Layout(template), (self.handle,), "", memoryview(bytearray(8))
            )
            with contextlib.suppress(MeshError):
                request.future.result(30)
        self.send(wire.write(self.handle, 12, bytes(1000)))

    def huge(self) -> None:
        """Ask for far more memory than there is, at once and bit by bit."""
        with contextlib.suppress(MeshError):
            torch.zeros(_HUGE, device=self.device)
        held = [torch.zeros(8 << 20, dtype=torch.uint8, device=self.device) for _ in range(40)]
        with contextlib.suppress(MeshError):
            torch.ones(1 << 14, device=self.device).repeat(1 << 20)
        del held

    def flood(self) -> None:
        """Send as fast as it can what takes the other side long, and little of use."""
        x = torch.ones(64, 64, device=self.device)
        for _ in range(3000):
            x = x @ x
        for _ in range(2000):
            self.session.emit(wire.define(self.session._next_template(), self.define()[1]))

    def sequences(self) -> None:
        runs = wire.release([self.handle_number(), self.handle])
        self.send(wire.capture(7, runs), wire.replay(7), wire.replay(7))
        self.send(wire.capture(8, self.random.randbytes(20)))

    def orders(self) -> None:
        """Order moves that can't be, and tell of arrivals that nobody awaits."""
        meta = TensorMeta(torch.float32, (self.random.choice((3, 1 << 36)),), (0,))
        key, handle = self.session._next_request, self.handle_number()
        choice = self.random.randrange(5)
        if choice == 0:  # never arrives; what needs it waits, and is not much
            self.session.emit(Order(PutIn(key(), self.handle, 0, 16, 5).encode()))
            for _ in range(2000):
                self.session.emit(wire.write(self.handle, 0, bytes(16)))
            self.session.flush()
            self.session.close()
        elif choice == 1:
            self.session.emit(Order(PutIn(key(), handle, 1 << 50, 16, 6).encode()))
            self.call(Arrived(self.number, 6, "0" * 32).encode())
        elif choice == 2:
            self.session.emit(Order(TakeOut(key(), 3, handle, meta).encode()))
        elif choice == 3:
            self.session.emit(Order(b"\x40" + self.random.randbytes(30)))
        else:
            for arrival in range(300):
                self.call(Arrived(self.number, arrival, "0" * 32).encode())
        with contextlib.suppress(MeshError):
            self.session.flush()

    def frames(self) -> None:
        """Break the form of the session's own stream."""
        for data in (
            struct.pack("<IQQ", 1 << 31, 1, 0),
            struct.pack("<IQQ", 4, 9, 0) + b"1234",
            struct.pack("<IQQ", 4, 1, 1 << 60) + b"1234",
            self.random.randbytes(500),
        ):
            self.node.run(partial(self._send_frames, data))

    async def _send_frames(self, data: bytes) -> None:
        connection = await self.node.node.dial(self.ticket.node_id)
        opening: Any = {"session": self.random.randbytes(16), "received": 0, "new": True}
        with anyio.move_on_after(20), contextlib.suppress(MeshError):
            stream = await connection.open_stream(wire.SERVICE, opening)
            async with stream:
                await stream.reply()
                await stream.send(data)
                with contextlib.suppress(anyio.EndOfStream):
                    while True:
                        await stream.receive()

    # -- parts

    @property
    def number(self) -> bytes:
        carrier: Any = self.session.carrier
        return bytes(carrier.number)

    def call(self, value: Any) -> None:
        async def call() -> None:
            connection = await self.node.node.dial(self.ticket.node_id)
            with contextlib.suppress(MeshError):
                await connection.call(ARRIVED_CALL, value)

        self.node.run(call)

    def handle_number(self) -> int:
        """Return a handle that may be anything."""
        return self.random.choice((self.handle, 0, 1 << 60, INTERNAL, (1 << 64) - 1, 2, 77))

    def define(self) -> tuple[int, wire.Template]:
        """Return a template of some operator with some arguments."""
        draw = self.random
        operator = getattr(torch.ops.aten, draw.choice(_ALL))
        overload = getattr(operator, draw.choice(operator.overloads()))
        schema = overload._schema
        args: list[wire.Argument] = []
        for argument in schema.arguments:
            if argument.kwarg_only or (argument.has_default_value() and draw.random() < 0.5):
                break
            args.append(self.argument(str(argument.type)))
        suffix = f".{schema.overload_name}" if schema.overload_name else ""
        outputs = (wire.Output(_VECTOR, 16),) if draw.random() < 0.7 else ()
        name = f"{schema.name}{suffix}"
        template = wire.Template(name, 0, tuple(args), (), outputs, len(outputs))
        return self.session._next_template(), template

    def argument(self, kind: str) -> wire.Argument:
        draw = self.random
        if draw.random() < 0.1:
            kind = draw.choice(("Tensor", "int", "float", "List[int]", "str"))
        if "List[Tensor]" in kind:
            return wire.Items((wire.TensorOf(self.geometry()), wire.TensorOf(_VECTOR)))
        if "Tensor" in kind:
            return wire.TensorOf(self.geometry())
        if "List" in kind:
            return wire.Items(tuple(map(wire.Literal, draw.choices((-1, 0, 1, 2, 1 << 40), k=2))))
        if "float" in kind or "number" in kind:
            return draw.choice((wire.Number("d"), wire.Literal(float("nan")), wire.Literal(2)))
        if "bool" in kind:
            return wire.Literal(draw.random() < 0.5)
        if "str" in kind:
            return wire.Literal(draw.choice(("mean", "sum", "none", "x" * 60)))
        return wire.Literal(draw.choice((-1, 0, 1, 2, 4, 1 << 31, 1 << 62, -(1 << 63))))

    def geometry(self) -> wire.Geometry:
        """Return how a tensor may lie in 16 bytes, or does not."""
        draw = self.random
        dtype = draw.choice(_DTYPES)
        shape = tuple(draw.choices((0, 1, 2, 4), k=draw.randrange(4)))
        strides = tuple(draw.choices((0, 1, 2), k=len(shape)))
        return draw.choice((_VECTOR, wire.Geometry(dtype, shape, strides)))


_VECTOR = wire.Geometry(torch.float32, (4,), (1,))
_ALL = sorted(name for name in _NAMES if hasattr(torch.ops.aten, name))

ATTACKS: dict[str, Callable[[Attacker], None]] = {
    method.__name__: method
    for method in (
        *(Attacker.garbage, Attacker.mutate, Attacker.operations, Attacker.bad_handles),
        *(Attacker.oversize, Attacker.huge, Attacker.flood, Attacker.sequences),
        *(Attacker.orders, Attacker.frames),
    )
}
"""What it does, by name."""
