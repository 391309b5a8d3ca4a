"""Pickles, for old programs inside one domain of trust: off unless both sides say otherwise.

Whoever reads a pickle lets its writer run code here. So a program writes none unless it is told to
(`Agent.pickles`), and reads those of a peer only if that peer's own grant has the scope
``rpc:pickle`` by its name: neither ``rpc`` nor ``*`` will do. Any other pickle is a breach of the
protocol, and nothing of it is looked at.

What can travel as data does so here, too; a pickle is what is left: an item ``["K", i, [j, ...],
[ref, ...]]`` of a value, with its bytes, its tensors and its references apart. The pickler is
torch's own, of ``torch.distributed.rpc``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.rpc.internal import _InternalRPCPickler

from auth import Grant
from mesh.rpc.errors import NotExposed, PickleRefused
from transport import CborValue, ProtocolError

__all__ = [
    "PICKLE_SCOPE",
    "has_pickle",
    "may_unpickle",
    "read_pickle",
    "refuse_pickle",
    "write_pickle",
]

PICKLE_SCOPE = "rpc:pickle"
"""What lets a peer run any code here. It is never granted but by its own name."""


def may_unpickle(grant: Grant | None) -> bool:
    """Return whether a peer with this grant may send pickles."""
    return grant is not None and PICKLE_SCOPE in grant.scopes


def has_pickle(items: Sequence[CborValue]) -> bool:
    """Return whether there is a pickle among the items of a message."""
    return any(isinstance(item, list) and item[:1] == ["K"] for item in items)


def refuse_pickle() -> PickleRefused:
    """Return the error for a pickle that its sender may not send."""
    return PickleRefused(
        "reading of a value",
        why=f"it is a pickle, and the scope {PICKLE_SCOPE} is not granted by name",
    )


def write_pickle(
    value: object, pack_ref: Callable[[Any], list[CborValue] | None]
) -> tuple[bytes, list[torch.Tensor], list[CborValue]]:
    """Return a value's pickle, its tensors, and the items of the references in it.

    Raises:
        Exception: whatever the pickling of a program's own class raises.
    """
    outer = _here.pack, _here.items
    _here.pack, _here.items = pack_ref, []
    try:
        data, tensors = _pickler().serialize(value)
        return data, list(tensors), _here.items
    finally:
        _here.pack, _here.items = outer


def read_pickle(data: bytes, tensors: Sequence[torch.Tensor], refs: Sequence[Any]) -> Any:
    """Return the value of a pickle of a peer that may run code here.

    Raises:
        ProtocolError: it is none.
        NotExposed: a function or class in it is not here.
    """
    outer, _here.refs = _here.refs, refs
    try:
        value = _pickler().deserialize(data, list(tensors))
    except Exception as error:
        raise ProtocolError(
            "reading of a pickle", why=f"{type(error).__name__}: {error}"
        ) from error
    finally:
        _here.refs = outer
    if isinstance(value, AttributeError):  # how torch says that a class or function is not here
        raise NotExposed("reading of a pickle", why=str(value)) from value
    return value


class _Here(threading.local):
    pack: Callable[[Any], list[CborValue] | None] | None = None
    items: list[CborValue] = []  # noqa: RUF012 - replaced before it is added to
    refs: Sequence[Any] = ()


_here = _Here()


def _pickler() -> Any:
    global _made
    if _made is None:
        # Both stand on what this belongs to.
        from mesh.rpc.modules import RemoteModule
        from mesh.rpc.refs.reference import RRef

        _made = _InternalRPCPickler()  # type: ignore[no-untyped-call]
        _made._register_reducer(RRef, _reduce)
        _made._register_reducer(RemoteModule, RemoteModule.reduce)
    return _made


_made: Any = None


def _reduce(ref: Any) -> tuple[Callable[[int], Any], tuple[int]]:
    assert _here.pack is not None
    item = _here.pack(ref)
    assert item is not None
    _here.items.append(item)
    return _restore, (len(_here.items) - 1,)


def _restore(number: int) -> Any:
    return _here.refs[number]
