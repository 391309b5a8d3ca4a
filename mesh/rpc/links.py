"""What a message has to do with distributed autograd, and what its task knows of that.

A call made in an autograd context tells its callee so; its function then runs in that context, too.
Where tensors of a message want gradients, the message has a number at its sender, and both sides
record it: gradients will travel the other way.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Set
from contextvars import ContextVar
from typing import NamedTuple, Self, TypeAlias

import torch

from auth import IdentityError, NodeId
from mesh.rpc.encoding.values import MAX_TENSORS
from tensor_bridge.fields import Fields
from transport import CborValue, ProtocolError

__all__ = [
    "ContextId",
    "Link",
    "Wanted",
    "current_context",
    "decode_wanted",
    "encode_wanted",
    "gradients_off",
    "like_this_thread",
]

MAX_NUMBER = (1 << 63) - 1
MAX_CLOCK = 1 << 62
"""Far beyond any honest count, and short of what the wire holds."""

MAX_FORETOLD = 64
"""Most messages that one says its tensors depend on, each counted as often as it is named."""

Wanted: TypeAlias = Mapping[int, Set[int]]
"""Messages by their numbers, and which of their tensors something depends on."""


class ContextId(NamedTuple):
    """One autograd context.

    Attributes:
        owner: the node whose program has begun it.
        number: what that program calls it.
    """

    owner: NodeId
    number: int

    def encode(self) -> list[CborValue]:
        """Return it as it travels."""
        return [self.owner.raw, self.number]

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the id in `value`. Also of what else a node numbers.

        Raises:
            ProtocolError: it is none.
        """
        match value:
            case [bytes(raw), int(number)] if 0 <= number <= MAX_NUMBER:
                try:
                    return cls(NodeId(raw), number)
                except (IdentityError, ValueError) as error:
                    raise ProtocolError("reading of an id", why=str(error)) from error
        raise ProtocolError("reading of an id", why="it is no node and number")


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """The part of a request or an answer that is about autograd.

    Attributes:
        context: the one that it was sent in.
        message: its number at its sender; 0 if none of its tensors wants a gradient.
        clock: the context's Lamport time at the sender.
        leads_to: for each such tensor, the messages of the reader's that it depends on; None if it
            may be others' as well.
    """

    context: ContextId
    message: int = 0
    clock: int = 0
    leads_to: tuple[Wanted, ...] | None = None

    def encode(self) -> dict[str, CborValue]:
        """Return it as it travels."""
        value: dict[str, CborValue] = {"context": self.context.encode()}
        if self.message:
            value |= {"message": self.message, "clock": self.clock}
        if self.leads_to is not None:
            value["leads_to"] = [encode_wanted(each) for each in self.leads_to]
        return value

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the link in `value`."""
        fields = Fields(value, "autograd link")
        context = ContextId.decode(fields.value("context"))
        message = clock = 0
        if fields.has("message"):
            message = fields.integer("message", low=1)
            clock = fields.integer("clock", low=1, high=MAX_CLOCK)
        leads_to: tuple[Wanted, ...] | None = None
        if message and fields.has("leads_to"):
            leads_to = tuple(
                decode_wanted(each, MAX_FORETOLD) for each in fields.items("leads_to", MAX_TENSORS)
            )
        fields.finish()
        return cls(context, message, clock, leads_to)


def encode_wanted(wanted: Wanted) -> list[CborValue]:
    """Return messages and tensors of them as they travel."""
    return [[number, list[CborValue](sorted(tensors))] for number, tensors in wanted.items()]


def decode_wanted(value: CborValue, most: int) -> dict[int, frozenset[int]]:
    """Return the messages, at most so many, in `value`.

    Raises:
        ProtocolError: they are none.
    """
    wanted: dict[int, frozenset[int]] = {}
    if not isinstance(value, list) or len(value) > most:
        raise ProtocolError("reading of messages", why=f"they are no list of at most {most}")
    for item in value:
        match item:
            case [int(number), [*tensors]] if (
                number not in wanted
                and 0 < len(tensors) <= MAX_TENSORS
                and all(type(each) is int and each >= 0 for each in tensors)
            ):
                wanted[number] = frozenset(tensors)  # type: ignore[arg-type]
            case _:
                raise ProtocolError("reading of messages", why="one has no number, or no tensors")
    return wanted


current_context: ContextVar[ContextId | None] = ContextVar("current_context", default=None)
"""The context of this thread or task; tasks and threads that are started for it inherit it."""

gradients_off: ContextVar[bool] = ContextVar("gradients_off", default=False)
"""Whether the thread that a task works for has switched gradients off."""


@contextlib.contextmanager
def like_this_thread() -> Iterator[None]:
    """Let tasks that are started in the block know whether this thread wants gradients."""
    token = gradients_off.set(not torch.is_grad_enabled())
    try:
        yield
    finally:
        gradients_off.reset(token)
