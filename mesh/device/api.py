"""What programs call: open a device of a peer, ask what there is, wait, read in async code."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import torch

from auth import DEFAULT_SCOPES, MeshError, NodeId, Ticket
from mesh import blocking
from mesh.device import wire
from mesh.device.client import backend
from mesh.device.client import tensors as known
from mesh.device.client.carrier import TICK, StreamCarrier
from mesh.device.client.moving import Mover, answered
from mesh.device.client.session import Session
from mesh.device.client.special import ask_elements, finish_elements
from mesh.device.client.tensors import BACKEND, MAX_DEVICES, Device, device_of, handle_of
from mesh.device.errors import DeviceError
from tensor_bridge.fields import Fields
from transport import CborValue

if TYPE_CHECKING:
    from mesh.node import Node
    from mesh.peer import Peer

__all__ = [
    "DeviceInfo",
    "close",
    "configure",
    "describe",
    "device",
    "device_async",
    "devices",
    "devices_async",
    "read",
    "synchronize",
    "synchronize_async",
]

SCOPES = (*DEFAULT_SCOPES, "device")
"""What this program's node for devices asks for."""

LANE_SECONDS = 1.0
"""How long opening waits until it is known which lane large tensors take; on one host it takes
milliseconds. Otherwise it becomes known later."""

EXIT_SECONDS = 0.5
"""How long the end of the program waits for peers to hear of it; it takes a round trip."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device of a peer.

    Attributes:
        peer: who has it, as people call it.
        node_id: who has it.
        index: its number there.
        type: ``"cpu"`` or ``"cuda"``.
        name: what the peer calls it.
        memory: bytes that it has in all.
        device: what it is here, ``mesh:k``; None if it is not open.
        lane: the way that large tensors take there, as far as it is known; None if it is not open.
    """

    peer: str
    node_id: NodeId
    index: int
    type: str
    name: str
    memory: int
    device: torch.device | None = None
    lane: str | None = None


@dataclasses.dataclass(slots=True)
class _Peering:
    """This program's session with one peer."""

    session: Session
    carrier: StreamCarrier
    node: Node
    node_id: NodeId
    opened: dict[int, Device] = dataclasses.field(default_factory=dict)


_lock = threading.Lock()
_nodes: dict[bytes, blocking.Node] = {}
_peerings: dict[tuple[int, NodeId], _Peering] = {}
_by_session: dict[int, _Peering] = {}
_beginning: dict[tuple[int, NodeId], anyio.Lock] = {}


def device(
    target: Ticket | NodeId | str,
    index: int = 0,
    *,
    node: blocking.Node | None = None,
    credential: bytes = b"",
) -> torch.device:
    """Open a device of a peer and return the `torch.device` that stands for it.

    Opening the same one again returns the same. All devices of a peer share one session, in which
    operations run in the order they are called in; without `node`, all peers share one node.

    Args:
        target: the peer: a ticket, a node id, or a petname.
        index: which of its devices, as `devices` lists them.
        node: a node that is open already; it needs the scope ``device`` at the peer.
        credential: sent to the peer for its authorizer alone.

    Raises:
        AccessDenied: the peer does not let this program compute there.
        ServiceUnknown: the peer offers no devices.
        Unreachable, UnknownPeer: there is no way to it.
        DeviceError: it has no such device; or this program has 128 already, which is as many as
            torch can tell apart.
    """
    backend.register()
    using = node or _default_node(credential)
    return using.run(partial(device_async, using.node, target, index))


async def device_async(node: Node, target: Ticket | NodeId | str, index: int = 0) -> torch.device:
    """Do the same in async code, on a node of its own event loop.

    Blocking reads such as ``tensor.cpu()`` and ``tensor.item()`` are for other threads then; in the
    loop there is `read`.
    """
    await anyio.to_thread.run_sync(backend.register)
    peer = await node.connect(target)
    key = (id(node), peer.node_id)
    async with _beginning.setdefault(key, anyio.Lock()):  # of one node, and so of one loop
        peering = _peerings.get(key)
        if peering is None or peering.session.error is not None:
            peering = await _begin(node, peer)
            _peerings[key] = peering
            _by_session[id(peering.session)] = peering
    return _opened(peering, index)


def devices(
    target: Ticket | NodeId | str,
    *,
    type: str | None = None,
    node: blocking.Node | None = None,
    credential: bytes = b"",
) -> tuple[DeviceInfo, ...]:
    """Return what devices a peer offers.

    Args:
        target, node, credential: as `device`.
        type: only those of this type, such as ``"cuda"``.

    Raises:
        AccessDenied, ServiceUnknown, Unreachable, UnknownPeer: as `device`.
    """
    using = node or _default_node(credential)
    return using.run(partial(devices_async, using.node, target, type=type))


async def devices_async(
    node: Node,
    target: Ticket | NodeId | str,
    *,
    type: str | None = None,
) -> tuple[DeviceInfo, ...]:
    """Do the same in async code."""
    peer = await node.connect(target)
    connection = await peer.connection()
    answer = await connection.call(wire.DEVICES_CALL, None)
    found = []
    for index, facts in enumerate(answer if isinstance(answer, list) else []):
        info = _info(facts, peer.label, peer.node_id, index)
        if type in (None, info.type):
            found.append(info)
    return tuple(found)


def describe(device: torch.device | str) -> DeviceInfo:
    """Return what an open device is: a `torch.device` can't carry more than a number.

    Raises:
        DeviceError: it is not open, or its session was closed.
    """
    opened = device_of(torch.device(device))
    peering = _by_session.get(id(opened.session))
    if peering is None:
        raise opened.session.lost()
    label = peering.node.label(peering.node_id)
    info = _info(opened.facts, label, peering.node_id, opened.remote)
    connection = peering.node.endpoint.connection(peering.node_id)
    lane = None if connection is None else peering.node.lanes.status(connection).name
    return dataclasses.replace(info, device=opened.torch_device, lane=lane)


def configure(
    device: torch.device | str,
    *,
    float_dtype: torch.dtype | None = None,
    seed: int | None = None,
    max_bytes: int | None = None,
) -> None:
    """Set what holds for a device from its first use on. Once, and before that.

    Args:
        device: an open device.
        float_dtype: of new tensors of floats where no type is given, as by ``torch.ones``, in place
            of ``torch.get_default_dtype()``.
        seed: where its random numbers start, in place of ``torch.initial_seed()``.
        max_bytes: how much its session makes do with, of what the peer allows; of several devices
            of one peer, the least counts.

    Raises:
        DeviceError: it was used or configured before, or `float_dtype` is no type of floats.
        SessionLost: the peer no longer has the session.
    """
    opened = device_of(torch.device(device))
    what = f"configuration of device '{opened.torch_device}'"
    if float_dtype is not None and not float_dtype.is_floating_point:
        raise DeviceError(what, why=f"{float_dtype} is no type of floats")
    with _lock:
        if opened.is_configured or opened.is_used:
            raise DeviceError(
                what,
                why="it was configured before" if opened.is_configured else "it is in use already",
                fix="Configure a device once, right after it was opened.",
            )
        opened.is_configured = True
    opened.float_dtype = float_dtype
    if seed is not None:
        opened.session.emit(wire.seed(opened.remote, seed))
    if max_bytes is not None:
        opened.session.emit(wire.content(max_bytes))


def synchronize(device: torch.device | str) -> None:
    """Wait until the peer has done everything that was called before.

    Raises:
        DeviceError: the session is lost.
    """
    backend.synchronize(device_of(torch.device(device)))


async def synchronize_async(device: torch.device | str) -> None:
    """Do the same in async code."""
    opened = device_of(torch.device(device))
    await _room(opened.session)
    await answered(backend.ask_wait(opened).future)


async def read(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements, on the CPU, without blocking the event loop.

    Raises:
        OperationFailed: an operation that it was made by has failed at the peer.
        SessionLost: the peer does not have it any more.
    """
    await _room(handle_of(tensor).device.session)
    request, target = ask_elements(tensor)
    await answered(request.future)
    return finish_elements(tensor, target)


def close(device: torch.device | str) -> None:
    """End the session with a device's peer, and with it all its devices: their memory is freed."""
    session = device_of(torch.device(device)).session
    peering = _by_session.pop(id(session), None)
    session.close()
    if peering is not None:
        _peerings.pop((id(peering.node), peering.node_id), None)


@atexit.register  # later than what closes nodes that were left open, and so run before that
def _leave_all() -> None:
    _leave(list(_by_session.values()))


def _leave(peerings: Sequence[_Peering]) -> None:
    """Have peers end sessions now, and not after the lease of those whose program has vanished."""
    for peering in peerings:
        peering.session.close()
    deadline = time.monotonic() + EXIT_SECONDS
    while time.monotonic() < deadline and not all(each.carrier.has_ended for each in peerings):
        time.sleep(TICK)


async def _begin(node: Node, peer: Peer) -> _Peering:
    with anyio.move_on_after(LANE_SECONDS), contextlib.suppress(MeshError):
        await node.lanes.meet(await peer.connection())
    session = Session(partial(node.label, peer.node_id))
    carrier = StreamCarrier(session, partial(node.dial, peer.node_id, once=True))
    carrier.mover = Mover(node, peer, session, carrier.number)
    session.carry_by(carrier)
    await carrier.begin()
    node.endpoint.start_soon(carrier.run)
    return _Peering(session, carrier, node, peer.node_id)


def _opened(peering: _Peering, index: int) -> torch.device:
    with _lock:
        opened = peering.opened.get(index)
        if opened is not None:
            return opened.torch_device
        offered = peering.carrier.devices
        if not 0 <= index < len(offered):
            raise DeviceError(
                f"opening of device {index}",
                peer=peering.session.label(),
                why=f"it offers {len(offered)}",
                fix="List them: mesh.devices(ticket).",
            )
        if len(known.devices) >= MAX_DEVICES:
            raise DeviceError(
                f"opening of a device as '{BACKEND}:{len(known.devices)}'",
                why=f"torch numbers devices up to {MAX_DEVICES - 1}",
                fix="Open no more than that in one process.",
            )
        opened = Device(peering.session, len(known.devices), index, offered[index])
        known.devices.append(opened)
        peering.opened[index] = opened
    # As for torch's own devices: what manual_seed has set holds for those used later, too.
    peering.session.emit(wire.seed(index, torch.initial_seed()))
    return opened.torch_device


def _default_node(credential: bytes) -> blocking.Node:
    with _lock:
        node = _nodes.get(credential)
        if node is None:
            node = blocking.Node.client(scopes=SCOPES, credential=credential)
            _nodes[credential] = node.open()
        return node


def _info(facts: CborValue, label: str, node_id: NodeId, index: int) -> DeviceInfo:
    fields = Fields(facts, "description of a device")
    info = DeviceInfo(
        peer=label,
        node_id=node_id,
        index=index,
        type=fields.text("type", longest=16),
        name=fields.text("name", longest=128),
        memory=fields.integer("memory"),
    )
    fields.finish()
    return info


async def _room(session: Session) -> None:
    """Wait until what is queued is on its way."""
    while not session.flush(wait=False):  # noqa: ASYNC110 - other threads fill and empty it
        await anyio.sleep(TICK)
