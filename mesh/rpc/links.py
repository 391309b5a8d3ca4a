"""What a message has to do with distributed autograd, and what its task knows of that.

A call made in an autograd context tells its callee so; its function then runs in that context, too.
Where tensors of a message want gradients, the message has a number at its sender, and both sides
record it: gradients will travel the other way.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple, Self

import torch

from auth import IdentityError, NodeId
from tensor_bridge.fields import Fields
from transport import CborValue, ProtocolError

__all__ = ["ContextId", "Link", "current_context", "gradients_off", "like_this_thread"]

MAX_NUMBER = (1 << 63) - 1
MAX_CLOCK = 1 << 62
"""Far beyond any honest count, and short of what the wire holds."""


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
    """

    context: ContextId
    message: int = 0
    clock: int = 0

    def encode(self) -> dict[str, CborValue]:
        """Return it as it travels."""
        value: dict[str, CborValue] = {"context": self.context.encode()}
        if self.message:
            value |= {"message": self.message, "clock": self.clock}
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
        fields.finish()
        return cls(context, message, clock)


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
