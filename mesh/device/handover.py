"""Moves into and out of devices: what client and nodes say to each other about them.

Large tensors don't travel among the operations. A node takes them out of an executor into its
store, or puts them into the executor from there, and `tensor_bridge` moves them from and to the
store by the best lane: between the client and the node, or, of devices of different peers, straight
between their nodes under a capability, so that no element passes through the client. The orders to
take out and to put in travel among the batches of their sessions, so that they hold their place
among the operations; neither goes to the executor as it is::

    0x40, CBOR [request, template of a read, handle, what it is]    answered once it is in the store
    0x41, CBOR [request, handle, byte offset, bytes, arrival]       answered once it is in its place

The call ``device.arrived`` says which object of the store has arrived, or why there is none.
Operations that need what has not arrived wait for it, and others don't.
"""

from __future__ import annotations

import dataclasses

from auth import MeshError
from tensor_bridge import TensorMeta, decode_meta, encode_meta
from tensor_bridge.fields import Fields
from tensor_bridge.wire import take_id
from transport import CborValue, ProtocolError, cbor
from transport.codes import decode_error, encode_error

__all__ = [
    "ARRIVED_CALL",
    "INTERNAL",
    "Arrived",
    "PutIn",
    "TakeOut",
    "Taken",
    "decode_order",
    "transit_name",
]

ARRIVED_CALL = "device.arrived"
"""The call with which a client tells a node what has arrived for one of its sessions."""

INTERNAL = 1 << 63
"""Added to the number of a request that a node passes on to an executor for itself."""

_TAKE_OUT, _PUT_IN = 0x40, 0x41

MAX_ORDER = 1 << 16


def transit_name(session: bytes, *, out: bool = False) -> str:
    """Return what objects of a store are called that are on their way into a session, or out of it.

    Those into it go with the session, if any is left, and those out of it with its client.
    """
    return f"device:{'from' if out else 'to'}:{session.hex()}"


@dataclasses.dataclass(frozen=True, slots=True)
class TakeOut:
    """Put a copy of a tensor into the store, as an object of the client's.

    Attributes:
        request: under which the answer comes, a `Taken`.
        template: of a read of the tensor, in row order.
        handle: its storage.
        meta: what it is.
    """

    request: int
    template: int
    handle: int
    meta: TensorMeta

    def encode(self) -> bytes:
        """Return the order as it travels."""
        fields: CborValue = [self.request, self.template, self.handle, encode_meta(self.meta)]
        return bytes([_TAKE_OUT]) + cbor.encode(fields, max_size=MAX_ORDER)


@dataclasses.dataclass(frozen=True, slots=True)
class PutIn:
    """Write what arrives into a storage; whatever needs it and comes later waits for it.

    Attributes:
        request: under which an answer comes once it is in its place.
        handle: the storage.
        offset: where in it, in bytes.
        nbytes: how many bytes it is.
        arrival: which one.
    """

    request: int
    handle: int
    offset: int
    nbytes: int
    arrival: int

    def encode(self) -> bytes:
        """Return the order as it travels."""
        fields: CborValue = [self.request, self.handle, self.offset, self.nbytes, self.arrival]
        return bytes([_PUT_IN]) + cbor.encode(fields, max_size=MAX_ORDER)


def decode_order(payload: bytearray) -> TakeOut | PutIn | None:
    """Return the order in a payload; None if it is a batch of operations.

    Raises:
        ProtocolError: it begins as an order and is none.
    """
    if not payload or payload[0] not in (_TAKE_OUT, _PUT_IN):
        return None
    value = cbor.decode(bytes(payload[1:]), max_size=MAX_ORDER)
    if payload[0] == _PUT_IN:
        match value:
            case [int(request), int(handle), int(offset), int(nbytes), int(arrival)] if (
                _are_numbers(request, handle, offset, nbytes, arrival) and request > 0
            ):
                return PutIn(request, handle, offset, nbytes, arrival)
    else:
        match value:
            case [int(request), int(template), int(handle), dict(meta)] if (
                _are_numbers(request, template, handle) and request > 0 and template < 1 << 32
            ):
                return TakeOut(request, template, handle, decode_meta(meta))
    raise ProtocolError("an order about a device", why="it is malformed")


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """The object that a tensor was put into the store as."""

    object_id: str
    version: int

    def encode(self) -> CborValue:
        """Return the answer as it travels."""
        return {"object": self.object_id, "version": self.version}

    @classmethod
    def decode(cls, value: CborValue) -> Taken:
        """Return the answer in `value`."""
        fields = Fields(value, "tensor taken out of a device")
        taken = cls(take_id(fields, "object"), fields.integer("version", high=(1 << 64) - 1))
        fields.finish()
        return taken


@dataclasses.dataclass(frozen=True, slots=True)
class Arrived:
    """What has arrived for a session: an object of the store, or an error in its place."""

    session: bytes
    arrival: int
    object_id: str | None = None
    error: MeshError | None = None

    def encode(self) -> CborValue:
        """Return the call's value as it travels."""
        value: dict[str, CborValue] = {"session": self.session, "arrival": self.arrival}
        if self.object_id is not None:
            value["object"] = self.object_id
        if self.error is not None:
            value["error"] = encode_error(self.error)
        return value

    @classmethod
    def decode(cls, value: CborValue) -> Arrived:
        """Return what the value of the call says."""
        fields = Fields(value, "arrival for a device")
        session = fields.data("session", shortest=16, longest=16)
        arrival = fields.integer("arrival")
        object_id = take_id(fields, "object") if fields.has("object") else None
        error = None
        if object_id is None:
            error = decode_error(fields.value("error"), peer=None)
        fields.finish()
        return cls(session, arrival, object_id, error)


def _are_numbers(*values: int) -> bool:
    return all(not isinstance(value, bool) and 0 <= value < INTERNAL for value in values)
