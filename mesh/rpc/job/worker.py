"""What a program is that takes part in a job of remote calls."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import anyio

from auth import MeshError, NodeId
from mesh import blocking
from mesh.rpc.agent import Agent
from mesh.rpc.errors import RpcError, RpcTimeout
from mesh.rpc.futures import CallFuture
from mesh.rpc.job.roster import Roster, WorkerInfo
from mesh.rpc.links import like_this_thread
from mesh.rpc.tensors.placement import DeviceMap, Placement, check_maps
from mesh.threads import Completer

__all__ = ["FIND_SECONDS", "Worker", "busy"]

FIND_SECONDS = 60.0
"""How long a worker that is called for the first time may take to come."""

CLOSE_SECONDS = 2.0


class Worker:
    """This program's part in a job.

    Args:
        node: open.
        agent: the node's.
        roster: who takes part.
        me: this worker.
        device_maps: for each worker that is called, by name.
        owns_node: whether the node ends with it.

    Attributes:
        is_ending: whether `mesh.rpc.shutdown` has begun.
    """

    def __init__(
        self,
        node: blocking.Node,
        agent: Agent,
        roster: Roster,
        me: WorkerInfo,
        *,
        device_maps: Mapping[str, DeviceMap],
        owns_node: bool,
    ) -> None:
        self.node = node
        self.agent = agent
        self.roster = roster
        self.me = me
        self.is_ending = False
        self._owns_node = owns_node
        self._device_maps = device_maps
        agent.placement.map_to = self._map_to
        self._completer = Completer(f"mesh-rpc-{me.name}")
        self._pending: set[Future[Any]] = set()
        self._is_over = False
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Tell the others, and wait for all of them if it is known how many they are.

        Raises:
            RpcTimeout: they did not come.
            RpcError: another has this worker's name or rank, or one was lost meanwhile.
            ValueError: a device map names a worker or a device that there is not.
        """
        self.roster.publish(self.me.node_id, self.node.addresses)
        if self.roster.size is None:
            return
        end = time.monotonic() + max(self.agent.timeout, FIND_SECONDS)
        everybody = self.roster.everybody(end - time.monotonic())
        devices = self.agent.placement.devices
        check_maps(self.me.name, self._device_maps, devices, self.roster.cuda_devices)
        self._meet(everybody)
        self.roster.say("met", "")
        self.hear("met", end, "init_rpc")

    def hear(self, what: str, end: float, why: str) -> list[str]:
        """Return what every worker of the job has said about `what`, in the order of ranks.

        Args:
            what: as `Roster.say`.
            end: when to give up, monotonic.
            why: what is being done, for people.

        Raises:
            RpcTimeout: names who has not.
            RpcError: a worker that has not was lost.
        """
        roster, said, began = self.roster, dict[int, str](), time.monotonic()
        while missing := set(range(roster.size or 0)) - said.keys():
            for rank in sorted(missing):
                heard = roster.heard(what, rank)
                if heard is not None:
                    said[rank] = heard
                    continue
                if (lost := self.lost(rank)) is not None:
                    info = roster.find(rank, 0.001)
                    raise RpcError(
                        why,
                        peer=f"{info.name} ({info.node_id.short})",
                        why=f"it was lost before it was done: {lost}",
                    ) from lost
                if time.monotonic() > end:
                    late = [roster.find(each, 0.001).name for each in sorted(missing - said.keys())]
                    raise busy(late, why, time.monotonic() - began)
        return [said[rank] for rank in sorted(said)]

    def lost(self, rank: int) -> Exception | None:
        """Return how the connection with a worker ended, None if it is there."""
        return self.agent.lost.get(self.roster.find(rank, 0.001).node_id)

    def start(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> CallFuture[Any]:
        """Run a coroutine in the node's loop; return a future that callbacks may be added to."""
        future: CallFuture[Any] = CallFuture()
        here = contextvars.copy_context()  # for callbacks, which may call on
        with like_this_thread():
            begun = self.node.portal.start_task_soon(call)
        self._add(begun)

        def ended(done: Future[Any]) -> None:
            compute = functools.partial(self.agent.bridge.wait, done)
            self._completer.submit(lambda: here.run(future.complete, compute))
            with self._lock:
                self._pending.discard(done)

        begun.add_done_callback(ended)
        return future

    def wait_for(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run a coroutine in the node's loop and return its result; `close` ends it."""
        begun = self.agent.bridge.start(call)
        self._add(begun)
        try:
            return self.agent.bridge.wait(begun)
        finally:
            begun.cancel()  # if the wait was interrupted, as by Ctrl-C
            with self._lock:
                self._pending.discard(begun)

    def find(self, to: str | int | WorkerInfo | NodeId) -> NodeId:
        """Return the node of a worker, which can be dialled then. Raises as `node_of`."""
        node_id = self.node_of(to)
        where = self.roster.addresses(node_id)
        endpoint = self.node.endpoint
        if where and not endpoint.known_addresses(node_id):
            self.node.portal.call(endpoint.add_addresses, node_id, where)
        return node_id

    def node_of(self, to: str | int | WorkerInfo | NodeId) -> NodeId:
        """Return the node of a worker.

        Raises:
            RpcError: there is no such worker.
            ValueError: `to` is nothing that a worker is called by.
        """
        if isinstance(to, NodeId):
            return to
        if isinstance(to, WorkerInfo):
            return to.node_id
        if isinstance(to, str | int):
            return self.info(to).node_id
        raise ValueError(f"Cannot get WorkerInfo from name {to}")  # as upstream

    def info(self, who: str | int) -> WorkerInfo:
        """Return a worker by name or rank.

        Raises:
            RpcError: there is none.
        """
        if who in (self.me.name, self.me.id):
            return self.me
        return self.roster.find(who, FIND_SECONDS)

    def close(self) -> None:
        """End what is under way, and close the node if it was made for this."""
        with self._lock:
            self._is_over = True
            pending = tuple(self._pending)
        for future in pending:
            future.cancel()
        self.agent.placement = Placement()
        if self._owns_node:
            with contextlib.suppress(MeshError):  # it has been closed already
                self.node.run(self.agent.service.streams.end)
            self.node.close()  # another's own goes on to answer
        self._completer.close(CLOSE_SECONDS)

    def _add(self, begun: Future[Any]) -> None:
        """Have `close` end this, also if it has been called just now."""
        with self._lock:
            self._pending.add(begun)
            is_over = self._is_over
        if is_over:
            begun.cancel()

    def _map_to(self, node_id: NodeId) -> DeviceMap:
        if not self._device_maps:
            return {}
        info = self.me if node_id == self.me.node_id else self.roster.of_node(node_id)
        return self._device_maps.get(info.name, {}) if info is not None else {}

    def _meet(self, workers: Iterable[WorkerInfo]) -> None:
        """Connect with workers that were found, so that the loss of one is noticed from now on."""

        async def dial() -> None:
            async with anyio.create_task_group() as tasks:
                for info in workers:
                    if info.node_id != self.me.node_id:
                        tasks.start_soon(self.node.node.dial, info.node_id)

        for info in workers:
            self.find(info)
        try:
            self.node.run(dial)
        except ExceptionGroup as group:
            raise group.exceptions[0] from None


def busy(names: Iterable[str], what: str, after: float) -> RpcTimeout:
    """Return the error for workers that were not there in time."""
    return RpcTimeout(
        what,
        after=after,
        why=f"still busy: {', '.join(names)}",
        fix="Give it more time: timeout=, or shutdown(graceful=False) to leave at once.",
    )
