"""Tensors made where they are wanted: filled by the node itself, so that no payload travels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Self

import anyio.to_thread
import torch

from tensor_bridge.codec import TensorMeta, decode_meta, dtype_name, encode_meta
from tensor_bridge.errors import UnsupportedTensor
from tensor_bridge.fields import Fields
from tensor_bridge.memory import allocate
from tensor_bridge.store import TensorStore
from tensor_bridge.wire import MAX_NAME, Stored
from transport import CborValue, Incoming

__all__ = ["CREATE_CALL", "FILLS", "CreateCall", "serve_create"]

CREATE_CALL = "tensor.create"

FILLS: dict[str, Callable[[torch.Tensor, torch.Generator], object]] = {
    "zeros": lambda tensor, _: tensor.zero_(),
    "ones": lambda tensor, _: tensor.fill_(1),
    "rand": lambda tensor, generator: tensor.uniform_(generator=generator),
    "randn": lambda tensor, generator: tensor.normal_(generator=generator),
    "arange": lambda tensor, _: torch.arange(tensor.numel(), out=tensor.view(-1)),
}
"""How a tensor can be filled, by the name of the torch factory that gives the same content."""


@dataclasses.dataclass(frozen=True, slots=True)
class CreateCall:
    """A wish for a new contiguous tensor.

    Attributes:
        fill: one of `FILLS`.
        meta: what it is.
        seed: where the random fills start.
        name: what its owner will call it.
    """

    fill: str
    meta: TensorMeta
    seed: int = 0
    name: str | None = None

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        message: dict[str, CborValue] = {
            "fill": self.fill,
            "meta": encode_meta(self.meta),
            "seed": self.seed,
        }
        return message if self.name is None else message | {"name": self.name}

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "creation")
        fill = fields.text("fill", longest=32)
        meta = decode_meta(fields.value("meta"))
        seed = fields.integer("seed")
        name = fields.text("name", longest=MAX_NAME) if fields.has("name") else None
        fields.finish()
        if fill not in FILLS:
            raise fields.wrong(f"'fill' must be one of {', '.join(FILLS)}")
        return cls(fill, meta, seed, name)


def dense_meta(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorMeta:
    """Return the description of a contiguous tensor."""
    return TensorMeta(dtype=dtype, shape=shape, order=tuple(range(len(shape))))


async def serve_create(store: TensorStore, incoming: Incoming) -> CborValue:
    """Make the tensor that a peer wishes for; it becomes the peer's own.

    Raises:
        QuotaExceeded: before anything is allocated.
        UnsupportedTensor: torch has no such fill for the type.
    """
    call = CreateCall.decode(incoming.value)
    with store.reserve(incoming.peer.node_id, call.meta.nbytes, incoming.grant.quotas) as room:
        # In a thread: filling a large tensor takes longer than the loop may be away.
        tensor = await anyio.to_thread.run_sync(_make, call)
        return Stored.of(room.keep(tensor, name=call.name)).encode()


def _make(call: CreateCall) -> torch.Tensor:
    tensor = allocate(call.meta)
    try:
        FILLS[call.fill](tensor, torch.Generator().manual_seed(call.seed))
    except (RuntimeError, TypeError) as error:
        raise UnsupportedTensor(
            f"creation of a tensor by {call.fill!r}",
            why=f"torch does not offer it for {dtype_name(call.meta.dtype)}",
        ) from error
    return tensor
