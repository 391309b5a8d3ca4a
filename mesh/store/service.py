"""The node that keeps stores: one for each job, and who its members are.

Offered as calls ``store:JOB``, which need the scope ``collective:JOB``. Each takes one operation::

    {"op": "get", "keys": [..], "timeout": s}             -> [value, ..], once all are there
    {"op": "wait", "keys": [..], "timeout": s}            -> None, once all are there
    {"op": "set", "keys": [..], "values": [..]}           -> None
    {"op": "check" | "delete", "key(s)": ..}              -> bool
    {"op": "add", "key": .., "amount": int}               -> int
    {"op": "compare_set", "key", "expected", "desired"}   -> bytes
    {"op": "append", "key": .., "value": bytes}           -> None
    {"op": "keys" | "count"}                              -> [str] | int
    {"op": "push" | "length", "key": .., "value": bytes}  -> None | int
    {"op": "pop", "key": .., "timeout": s}                -> bytes
    {"op": "enrol", "rank", "size", "addresses", "timeout"} -> [[node id, [address, ..]], ..]

A job's store is there from the first call of a member to the end of the last member's connection.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, TypeVar

import anyio

from auth import AccessDenied, NodeId
from mesh.store.keyvalues import KeyValues, StoreLimits
from transport import (
    CborValue,
    Connection,
    DeadlineExceeded,
    Endpoint,
    Incoming,
    LimitExceeded,
    ProtocolError,
    parse_address,
)

__all__ = ["FAMILY", "MAX_WAIT", "Member", "StoreService"]

FAMILY = "store"
"""What a call is named before the job's name."""

SCOPE = "collective"
"""What the scope is named before it."""

MAX_JOBS = 256
"""Jobs with stores at once."""

MAX_TOTAL = 256 << 20
"""Bytes that all jobs together may keep: beyond, nothing more is written."""

MAX_RANKS = 4096
"""Ranks of a job."""

MAX_KEY = 1024
"""Longest key, in characters."""

MAX_KEYS = 1024
"""Most keys in one operation."""

MAX_WAIT = 60.0
"""Longest that one call waits, in seconds. Who wants to wait longer asks again."""

MAX_WAITING = 4096
"""Calls of a job that wait at once."""

MAX_ADDRESSES = 16

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """A rank of a job: its key, proved to the node that keeps the store, and where it listens."""

    node_id: NodeId
    addresses: tuple[str, ...]


class _Job:
    def __init__(self, limits: StoreLimits) -> None:
        self.data = KeyValues(limits)
        self.members: dict[int, Member] = {}
        self.size = 0
        self.connections: set[Connection] = set()
        self.waiting = 0
        self._changed = anyio.Event()

    def change(self) -> None:
        """Let those look again who wait."""
        event, self._changed = self._changed, anyio.Event()
        event.set()

    async def until(self, look: Callable[[], T | None], seconds: float, what: str) -> T:
        """Return what `look` finds as soon as it does, or raise `DeadlineExceeded`."""
        if self.waiting >= MAX_WAITING:
            raise LimitExceeded(what, why=f"{MAX_WAITING} others of the job wait already")
        self.waiting += 1
        began = time.monotonic()
        try:
            with anyio.move_on_after(min(seconds, MAX_WAIT)):
                while (found := look()) is None:
                    await self._changed.wait()
                return found
        finally:
            self.waiting -= 1
        raise DeadlineExceeded(what, after=time.monotonic() - began, why="nobody has set it")


class StoreService:
    """The stores that one endpoint keeps. Made once; offered from then on.

    Args:
        endpoint: open; everything happens in its event loop.
        limits: of each job.
    """

    def __init__(self, endpoint: Endpoint, limits: StoreLimits | None = None) -> None:
        self._endpoint = endpoint
        self._limits = limits or StoreLimits()
        self._jobs: dict[str, _Job] = {}
        endpoint.register_call_family(FAMILY, self._serve, scope=SCOPE)

    @property
    def jobs(self) -> tuple[str, ...]:
        """The jobs that have a store now."""
        return tuple(self._jobs)

    def hold(self, job: str) -> None:
        """Keep the store of `job` as long as this service, whether anybody is connected or not."""
        self._job(job).connections.add(_NOBODY)

    async def answer(self, job: str, value: CborValue, by: NodeId) -> CborValue:
        """Do one operation for a member: `by` is whom it is done for.

        Raises:
            ProtocolError: the operation is malformed.
            DeadlineExceeded: what was to be waited for did not come in time.
            LimitExceeded: the job keeps too much.
        """
        if not isinstance(value, dict):
            raise ProtocolError("an operation on a store", why="it is no map")
        operation = _OPERATIONS.get(str(value.get("op")))
        if operation is None:
            raise ProtocolError("an operation on a store", why="there is no such operation")
        if value["op"] in _WRITING and sum(each.data.used for each in self._jobs.values()) > (
            MAX_TOTAL
        ):
            raise LimitExceeded(
                f"the store of job '{job}'", why="all jobs of this node together keep too much"
            )
        return await operation(self._job(job), value, by)

    async def _serve(self, request: Incoming) -> CborValue:
        name = request.service.partition(":")[2]
        job = self._job(name)
        connection = request.connection
        if connection not in job.connections:
            job.connections.add(connection)
            connection.on_close(lambda _: self._left(name, connection))
        return await self.answer(name, request.value, request.peer.node_id)

    def _job(self, name: str) -> _Job:
        job = self._jobs.get(name)
        if job is None:
            if len(self._jobs) >= MAX_JOBS:
                raise LimitExceeded(
                    f"the store of job '{name}'", why=f"this node keeps {MAX_JOBS} jobs' already"
                )
            job = self._jobs[name] = _Job(self._limits)
        return job

    def _left(self, name: str, connection: Connection) -> None:
        job = self._jobs.get(name)
        if job is None:
            return
        job.connections.discard(connection)
        if len(job.members) < job.size:  # a rank that is gone may come again, with another key
            gone = connection.peer.node_id
            for rank in [r for r, member in job.members.items() if member.node_id == gone]:
                del job.members[rank]
        if not job.connections:
            del self._jobs[name]


_NOBODY: Any = object()
"""Stands for a connection that does not end."""


async def _get(job: _Job, value: dict[str, Any], by: NodeId) -> CborValue:
    keys = _keys(value)

    def look() -> list[CborValue] | None:
        return [job.data.get(key) for key in keys] if job.data.has(*keys) else None

    return await job.until(look, _seconds(value), f"waiting for {', '.join(map(repr, keys[:8]))}")


async def _wait(job: _Job, value: dict[str, Any], by: NodeId) -> CborValue:
    keys = _keys(value)
    what = f"waiting for {', '.join(map(repr, keys[:8]))}"
    await job.until(lambda: job.data.has(*keys) or None, _seconds(value), what)
    return None


async def _set(job: _Job, value: dict[str, Any], by: NodeId) -> CborValue:
    keys, values = _keys(value), value.get("values")
    if not isinstance(values, list) or len(values) != len(keys):
        raise ProtocolError("setting keys of a store", why="there is not a value for each")
    for key, each in zip(keys, values, strict=True):
        job.data.set(key, _bytes(each))
    job.change()
    return None


async def _check(job: _Job, value: dict[str, Any], by: NodeId) -> CborValue:
    return job.data.has(*_keys(value))


async def _add(job: _Job, value: dict[str, Any], by: NodeId) -> CborValue:
    amount = value.get("amount")
    if type(amount) is not int:
        raise ProtocolError("adding to a key of a store", why="the amount is no number")
    total = job.data.add(_key(value), amount)
    job.change()
    return total


async def _compare_set(job: _Job, value: dict[str, Any], by: NodeId) -> CborValue:
    expected, desired = _bytes(value.get("expected")), _bytes(value.get("desired"))
    found = job.data.compare_set(_key(value), expected, desired)
    job.change()
    return found


async def _append(job: _Job, value: dict[str, Any], by: NodeId) -> CborValue:
    job.data.append(_key(value), _bytes(value.get("value")))
    job.change()
    return None


async def _delete(job: _Job, value: dict[str, Any], by: NodeId) -> CborValue:
    return job.data.delete(_key(value))


async def _list(job: _Job, value: dict[str, Any], by: NodeId) -> CborValue:
    return list[CborValue](job.data.keys())


async def _count(job: _Job, value: dict[str, Any], by: NodeId) -> CborValue:
    return len(job.data)


async def _push(job: _Job, value: dict[str, Any], by: NodeId) -> CborValue:
    job.data.push(_key(value), _bytes(value.get("value")))
    job.change()
    return None


async def _pop(job: _Job, value: dict[str, Any], by: NodeId) -> CborValue:
    key = _key(value)
    return await job.until(lambda: job.data.pop(key), _seconds(value), f"taking from {key!r}")


async def _length(job: _Job, value: dict[str, Any], by: NodeId) -> CborValue:
    return job.data.length(_key(value))


async def _enrol(job: _Job, value: dict[str, Any], by: NodeId) -> CborValue:
    rank, size, addresses = value.get("rank"), value.get("size"), value.get("addresses")
    what = "enrolment as a rank of a job"
    if type(rank) is not int or type(size) is not int or not 0 <= rank < size <= MAX_RANKS:
        raise ProtocolError(what, why=f"rank {rank!r} of {size!r} can't be")
    if not isinstance(addresses, list) or len(addresses) > MAX_ADDRESSES:
        raise ProtocolError(what, why="it has no list of addresses, or too long a one")
    if job.members and job.size != size:
        raise AccessDenied(what, why=f"the job has {job.size} ranks, and not {size}")
    present = job.members.get(rank)
    if present is not None and present.node_id != by:
        raise AccessDenied(
            what,
            why=f"rank {rank} is {present.node_id.short} already",
            fix="Give every process another rank, and every run another job name.",
        )
    for address in addresses:
        parse_address(str(address))
    job.size = size
    job.members[rank] = Member(by, tuple(map(str, addresses)))
    job.change()

    def look() -> list[CborValue] | None:
        if len(job.members) < size:
            return None
        ordered = [job.members[each] for each in range(size)]
        return [[str(member.node_id), list(member.addresses)] for member in ordered]

    try:
        return await job.until(look, _seconds(value), what)
    except DeadlineExceeded as error:
        missing = [str(each) for each in range(size) if each not in job.members]
        raise DeadlineExceeded(
            what,
            after=error.after,
            why=f"rank {', '.join(missing[:64])} has not come",
            fix="Is it running, with the same job name, ticket and world size?",
        ) from None


_OPERATIONS = {
    "get": _get,
    "wait": _wait,
    "set": _set,
    "check": _check,
    "add": _add,
    "compare_set": _compare_set,
    "append": _append,
    "delete": _delete,
    "keys": _list,
    "count": _count,
    "push": _push,
    "pop": _pop,
    "length": _length,
    "enrol": _enrol,
}


_WRITING = frozenset({"set", "add", "compare_set", "append", "push"})


def _key(value: dict[str, Any]) -> str:
    key = value.get("key")
    if not isinstance(key, str) or len(key) > MAX_KEY:
        raise ProtocolError("an operation on a store", why="it has no key, or too long a one")
    return key


def _keys(value: dict[str, Any]) -> list[str]:
    keys = value.get("keys")
    if not isinstance(keys, list) or len(keys) > MAX_KEYS:
        raise ProtocolError("an operation on a store", why="it has no list of keys, or too many")
    return [_key({"key": key}) for key in keys]


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise ProtocolError("an operation on a store", why="a value is no bytes")
    return value


def _seconds(value: dict[str, Any]) -> float:
    seconds = value.get("timeout")
    if not isinstance(seconds, int | float) or not seconds >= 0:
        raise ProtocolError("an operation on a store", why="it has no timeout")
    return float(seconds)
