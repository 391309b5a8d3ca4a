"""Tensors made where they are wanted: filled by the node itself, so that no payload travels.

They arrive like any other: under an upload id, so that whoever lost the answer and asks again gets
the tensor that was made and not a second one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Self

import anyio.lowlevel
import torch

from tensor_bridge.arrivals import Arrivals
from tensor_bridge.codec import TensorMeta, decode_meta, dtype_name, encode_meta
from tensor_bridge.errors import UnsupportedTensor
from tensor_bridge.fields import Fields
from tensor_bridge.moves import settle, while_wanted
from tensor_bridge.wire import MAX_NAME, take_id
from transport import CborValue, Incoming, StreamReset

__all__ = ["CREATE_CALL", "FILLS", "CreateCall", "check_creation", "serve_create"]

CREATE_CALL = "tensor.create"

_WHAT = "creation of a tensor"

PIECE = 1 << 16
"""Elements filled per turn of the event loop: about half a millisecond of random numbers."""

WHOLE_BLOCK = 16
"""Elements that torch draws normally distributed numbers for at a time. Pieces of whole blocks, the
last of at least one, give what the whole would."""

FILLS: dict[str, Callable[[torch.Tensor, int, torch.Generator], object]] = {
    "zeros": lambda piece, start, generator: piece.zero_(),
    "ones": lambda piece, start, generator: piece.fill_(1),
    "rand": lambda piece, start, generator: piece.uniform_(generator=generator),
    "randn": lambda piece, start, generator: piece.normal_(generator=generator),
    "arange": lambda piece, start, generator: torch.arange(start, start + len(piece), out=piece),
}
"""How a piece that begins at element `start` is filled, by the name of the torch factory that gives
the same content."""


@dataclasses.dataclass(frozen=True, slots=True)
class CreateCall:
    """A wish for a new contiguous tensor.

    Attributes:
        upload: names this wish, as in `PutOpen`.
        fill: one of `FILLS`.
        meta: what it is.
        seed: where the random fills start.
        name: what its owner will call it.
    """

    upload: str
    fill: str
    meta: TensorMeta
    seed: int = 0
    name: str | None = None

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        message: dict[str, CborValue] = {
            "upload": self.upload,
            "fill": self.fill,
            "meta": encode_meta(self.meta),
            "seed": self.seed,
        }
        return message if self.name is None else message | {"name": self.name}

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "creation")
        upload = take_id(fields, "upload")
        fill = fields.text("fill", longest=32)
        meta = decode_meta(fields.value("meta"))
        seed = fields.integer("seed")
        name = fields.text("name", longest=MAX_NAME) if fields.has("name") else None
        fields.finish()
        if fill not in FILLS:
            raise fields.wrong(f"'fill' must be one of {', '.join(FILLS)}")
        return cls(upload, fill, meta, seed, name)


def check_creation(fill: str, shape: Sequence[object]) -> None:
    """Return if a wish makes sense, for whoever has it: nothing need travel to learn that.

    Raises:
        UnsupportedTensor: there is no such fill, or something else than a size in the shape.
    """
    what = f"creation of a tensor by {fill!r}"
    if fill not in FILLS:
        raise UnsupportedTensor(
            what, why="there is no such fill", fix=f"Choose one of {', '.join(FILLS)}."
        )
    for size in shape:
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise UnsupportedTensor(
                what, why=f"{size!r} in its shape is no size: those are whole and not negative"
            )


def dense_meta(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorMeta:
    """Return the description of a contiguous tensor."""
    return TensorMeta(dtype=dtype, shape=shape, order=tuple(range(len(shape))))


async def serve_create(arrivals: Arrivals, incoming: Incoming) -> None:
    """Make the tensor that a peer wishes for, once for each upload id; it becomes the peer's own.

    Raises:
        QuotaExceeded: before anything is allocated.
        UnsupportedTensor: torch has no such fill for the type.
        StreamReset: a later try took this one over.
    """
    call, owner = CreateCall.decode(incoming.value), incoming.peer.node_id
    stream = incoming.stream
    async with arrivals.hold(
        owner, call.upload, call.meta, name=call.name, quotas=incoming.grant.quotas
    ) as arrival:
        if arrival.landing is not None:
            with while_wanted(stream, _WHAT):
                await _fill(call, arrival.landing.tensor)
        await stream.send_reply(arrival.keep().encode())
        await settle(stream)
        return
    raise StreamReset(_WHAT, why="a later try took it over")


async def _fill(call: CreateCall, tensor: torch.Tensor) -> None:
    """Fill piece by piece: the loop goes on, and whoever gives up is heard at once."""
    flat, fill = tensor.view(-1), FILLS[call.fill]
    generator = torch.Generator().manual_seed(call.seed)
    try:
        start = 0
        while start < len(flat):
            await anyio.lowlevel.checkpoint()
            end = start + PIECE if start + PIECE + WHOLE_BLOCK <= len(flat) else len(flat)
            fill(flat[start:end], start, generator)
            start = end
    except (RuntimeError, TypeError) as error:
        raise UnsupportedTensor(
            f"creation of a tensor by {call.fill!r}",
            why=f"torch does not offer it for {dtype_name(call.meta.dtype)}",
        ) from error
