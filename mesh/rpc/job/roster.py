"""Who takes part in a job of remote calls: names, ranks, nodes, told through a c10d store.

The store tells who the workers are and where; it proves nothing. Whoever is dialled has to hold the
key that the store named, and to admit this node, and what a worker may call here is for this
node's own authorizer to say.
"""

from __future__ import annotations

import dataclasses
import re
import time
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Store

from auth import IdentityError, NodeId, SocketAddress
from mesh.rpc.errors import RpcError, RpcTimeout
from mesh.rpc.names.types import register_type
from transport import (
    AddressError,
    CborValue,
    ProtocolError,
    cbor,
    format_address,
    parse_address,
)

__all__ = ["Roster", "WorkerInfo", "check_name"]

RECORD_BYTES = 4096
MAX_ADDRESSES = 16

STEP_SECONDS = 0.5
"""How long one look into the store waits, when something else may end the wait."""

MAX_NAME = 127
"""Longest name of a worker, in characters."""

_NAME = re.compile(r"[A-Za-z0-9_:-]+")


@register_type
@dataclasses.dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One worker.

    Attributes:
        name: what it calls itself, unique in the job.
        id: its rank.
        node_id: which node it is.
    """

    name: str
    id: int
    node_id: NodeId

    def __post_init__(self) -> None:
        check_name(self.name)


def check_name(name: str) -> None:
    """Return if a worker may be called that.

    Raises:
        RpcError: it is empty, too long, or has other characters.
    """
    if not name:
        raise RpcError("name of a worker", why="Worker name must be non-empty")
    if len(name) > MAX_NAME:
        raise RpcError(
            "name of a worker",
            why=f"RPC worker name must be shorter than {MAX_NAME + 1}, but got {len(name)}",
        )
    if not _NAME.fullmatch(name):
        raise RpcError(
            "name of a worker",
            why=f"Worker name must match ^[A-Za-z0-9-_:]*$, but got {name!r}",
        )


class Roster:
    """The workers of one job.

    Args:
        store: the job's own part of a c10d store.
        name, rank: this worker's.
        size: how many workers there are; None for a job that others join as they come.

    Attributes:
        cuda_devices: how many each worker that was found has.
    """

    def __init__(self, store: Store, name: str, rank: int, size: int | None) -> None:
        check_name(name)
        if rank < 0 or (size is not None and rank >= size):
            raise RpcError(
                f"rank {rank} of worker {name!r}",
                why="ranks go from 0 to the number of workers less one",
                fix="Give init_rpc rank= and world_size=, or run under torchrun.",
            )
        self._store = store
        self._name = name
        self._rank = rank
        self.size = size
        self._known: dict[int | str, WorkerInfo] = {}
        self._where: dict[NodeId, tuple[SocketAddress, ...]] = {}
        self._complete = False
        self.cuda_devices: dict[str, int] = {}

    def publish(self, node_id: NodeId, addresses: tuple[SocketAddress, ...]) -> None:
        """Tell the others who this worker is and where.

        Raises:
            RpcError: another worker has its name or its rank, or the job is of the other kind.
        """
        kinds = ("dynamic", "static") if self.size is None else ("static", "dynamic")
        self._store.add(f"kind/{kinds[0]}", 1)
        if self._store.add(f"kind/{kinds[1]}", 0):
            raise RpcError(
                f"worker {self._name!r}",
                why="RPC group mixes statically and dynamically initialized members which is not "
                "supported.",
                fix="Give all of its workers world_size=, or none.",
            )
        where: list[CborValue] = [format_address(each) for each in addresses[:MAX_ADDRESSES]]
        record: CborValue = {
            "name": self._name,
            "rank": self._rank,
            "node": str(node_id),
            "addresses": where,
            "cuda": torch.cuda.device_count(),
        }
        data = cbor.encode(record, max_size=RECORD_BYTES)
        for key in (f"name/{self._name}", f"rank/{self._rank}"):
            if self._store.add(f"taken/{key}", 1) != 1:
                who = f"{self._name} (rank {self._rank})"
                self._store.set("clash", who)  # for whoever has it: it waits for all to come
                raise _clash(who)
            self._store.set(key, data)  # type: ignore[arg-type]  # bytes will do

    def find(self, who: str | int, timeout: float) -> WorkerInfo:
        """Return a worker by name or rank, waiting for it to come if need be.

        Raises:
            RpcTimeout: there is none within `timeout` seconds.
            RpcError: all workers have come and it is none of them, or what the store has of it is
                no record.
        """
        known = self._known.get(who)
        if known is not None:
            return known
        if self._complete:
            raise RpcError(
                f"looking for worker {who!r}",
                why=f"could not find destination {who}: no worker of the job is called that",
            )
        key = f"name/{who}" if isinstance(who, str) else f"rank/{who}"
        if not self._wait(key, timeout):
            raise RpcTimeout(
                f"looking for worker {who!r}",
                after=timeout,
                why="nobody of that name has come: unknown destination worker",
                fix="Is it running, with the same init_method?",
            )
        info, where = self._read(self._store.get(key), who)
        self._known[info.name] = self._known[info.id] = info
        self._where[info.node_id] = where
        return info

    def everybody(self, timeout: float) -> tuple[WorkerInfo, ...]:
        """Return all workers of a job whose size is given, once all have come.

        Raises:
            RpcTimeout: names the first that did not.
            RpcError: two have one name or rank.
        """
        end = time.monotonic() + timeout
        found: list[WorkerInfo] = []
        while len(found) < (self.size or 0):
            left = end - time.monotonic()
            try:
                found.append(self.find(len(found), min(max(left, 0.0), STEP_SECONDS)))
            except RpcTimeout:
                if self._store.check(["clash"]):
                    raise _clash(self._store.get("clash").decode()) from None
                if left < 0:
                    raise
        if self._store.check(["clash"]):
            raise _clash(self._store.get("clash").decode())
        self._complete = True
        return tuple(found)

    def known(self) -> tuple[WorkerInfo, ...]:
        """Return the workers that were found so far."""
        return tuple({info.id: info for info in self._known.values()}.values())

    def addresses(self, node_id: NodeId) -> tuple[SocketAddress, ...]:
        """Return where a worker that was found says that it is."""
        return self._where.get(node_id, ())

    def of_node(self, node_id: NodeId) -> WorkerInfo | None:
        """Return a worker that was found, by its node."""
        return next((info for info in self._known.values() if info.node_id == node_id), None)

    # -- the end

    def say(self, what: str, value: str) -> None:
        """Tell the others that this worker has come as far as `what`, and a value with it."""
        self._store.set(f"{what}/{self._rank}", value)

    def heard(self, what: str, rank: int, wait: float = STEP_SECONDS) -> str | None:
        """Return what a worker has said there, after a moment's wait; None if it has not."""
        key = f"{what}/{rank}"
        if not self._wait(key, wait):
            return None
        return self._store.get(key).decode()

    # -- inside

    def _wait(self, key: str, timeout: float) -> bool:
        try:
            self._store.wait([key], timedelta(seconds=max(timeout, 0.001)))
        except RuntimeError:
            return False
        return True

    def _read(self, data: bytes, who: str | int) -> tuple[WorkerInfo, tuple[SocketAddress, ...]]:
        try:
            match cbor.decode(data, max_size=RECORD_BYTES):
                case {
                    "name": str(name),
                    "rank": int(rank),
                    "node": str(node),
                    "addresses": [*texts],
                    "cuda": int(count),
                } if who in (name, rank) and len(texts) <= MAX_ADDRESSES:
                    where = tuple(parse_address(str(text)) for text in texts)
                    self.cuda_devices[name] = count
                    return WorkerInfo(name, rank, NodeId.parse(node)), where
        except (ProtocolError, IdentityError, AddressError, RpcError) as error:
            raise _wrong(who, str(error)) from error
        raise _wrong(who, "it does not name a worker, a node and addresses")


def _clash(who: str) -> RpcError:
    return RpcError(
        f"worker {who}",
        why="its name or its rank is not unique: another worker has one of the two",
    )


def _wrong(who: str | int, why: str) -> RpcError:
    return RpcError(
        f"looking for worker {who!r}", why=f"the store's entry of it can't be used: {why}"
    )
