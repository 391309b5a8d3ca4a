"""The asking side of tensors that the peer keeps in memory made here (see `lanes.shared`)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

import anyio
import torch

from auth import AccessDenied, MeshError
from tensor_bridge.codec import TensorMeta
from tensor_bridge.errors import TensorChanged
from tensor_bridge.lanes import Lanes
from tensor_bridge.memory import Payload
from tensor_bridge.moves import Landing
from tensor_bridge.serve_keep import FIND_CALL, GIVE_CALL, KEEP_CALL, UNDO_CALL
from tensor_bridge.wire import ObjectCall, Stored
from tensor_bridge.wire_blocks import Found, GiveCall, KeepCall, UndoCall
from transport import CborValue, Connection, DeadlineExceeded, ServiceUnknown

__all__ = ["give", "have_kept", "take_back"]

UNDO_SECONDS = 1.0
"""For a put that was given up to be undone at the peer, where nothing waits."""

_NOT_OFFERED = (ServiceUnknown, AccessDenied)
"""What says that the peer does not do so, or not for us: the other way tells what may be done."""


async def have_kept(
    connection: Connection,
    lanes: Lanes,
    tensor: torch.Tensor,
    meta: TensorMeta,
    *,
    upload: str,
    name: str | None,
    check: Callable[[], None],
    moved: Callable[[int], object],
) -> Stored | None:
    """Write a tensor to a block and have the peer keep it there; None if it can't be done so.

    What is given up when the peer was asked already is undone there.

    Args:
        connection: with the peer.
        lanes: of this node.
        tensor, meta, upload, name: as those of a put.
        check: raises if the tensor was written to while it was copied.
        moved: told of each part.

    Raises:
        MeshError: as of a put.
    """

    async def ask(block: int, lend: int) -> Stored | None:
        check()
        call = KeepCall(upload, meta, block, lend, name)
        async with _undone(connection, upload):
            return await _stored(connection, KEEP_CALL, call.encode())

    return await lanes.lend(connection, Payload(tensor, meta), moved, ask)


async def give(
    connection: Connection,
    lanes: Lanes,
    tensor: torch.Tensor,
    meta: TensorMeta,
    *,
    upload: str,
    name: str | None,
    check: Callable[[], None],
) -> Stored | None:
    """Hand the sealed memory of a tensor over to the peer; None if it can't be done so.

    Arguments, and what is raised, as `have_kept`.
    """
    check()
    gift = lanes.give(connection, Payload(tensor, meta))
    if gift is None:
        return None
    async with _undone(connection, upload):
        return await _stored(connection, GIVE_CALL, GiveCall(upload, meta, gift, name).encode())


async def take_back(connection: Connection, lanes: Lanes, object_id: str, landing: Landing) -> bool:
    """Read a tensor that the peer keeps in a block; return whether it does.

    Raises:
        TensorChanged: it is not what is to land.
        MeshError: as of a get.
    """

    async def ask() -> int | None:
        answer = None
        with contextlib.suppress(*_NOT_OFFERED):
            answer = await connection.call(FIND_CALL, ObjectCall(object_id).encode())
        if answer is None:
            return None
        found = Found.decode(answer)
        if found.meta != landing.meta:
            raise TensorChanged(
                "get of a tensor",
                peer=connection.peer,
                why="it has another type, shape or layout than announced",
                fix="Ask for what it is now.",
            )
        return found.lend

    return await lanes.take_back(connection, landing, ask)


async def _stored(connection: Connection, call: str, value: CborValue) -> Stored | None:
    with contextlib.suppress(*_NOT_OFFERED):
        answer = await connection.call(call, value)
        return None if answer is None else Stored.decode(answer)
    return None


@contextlib.asynccontextmanager
async def _undone(connection: Connection, upload: str) -> AsyncIterator[None]:
    """Undo a put at the peer if the block, in which it is asked for, is given up."""
    try:
        yield
    except BaseException as error:
        # A broken link leaves the answer for the next try; a refusal leaves nothing.
        is_refused = isinstance(error, MeshError) and not isinstance(error, DeadlineExceeded)
        if not is_refused:
            await _undo(connection, upload)
        raise


async def _undo(connection: Connection, upload: str) -> None:
    with anyio.move_on_after(UNDO_SECONDS, shield=True), contextlib.suppress(MeshError):
        await connection.call(UNDO_CALL, UndoCall(upload).encode(), timeout=UNDO_SECONDS)
