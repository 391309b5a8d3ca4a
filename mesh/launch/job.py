"""The ranks of a job on this machine: their place, their processes, their end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from subprocess import DEVNULL

import anyio
import anyio.abc

from auth import MeshError, Ticket
from mesh.errors import PlaceError
from mesh.home import Home
from mesh.launch.output import pump
from mesh.node import Node
from mesh.store import StoreClient, StoreService
from transport import EndpointConfig, PeerAddress

__all__ = ["Job", "Plan"]

GRACE_SECONDS = 5.0
"""How long ranks have to end after they were told to, before they are killed."""

OUTPUT_SECONDS = 2.0
"""How long the output of ranks that ended may go on: a process they left may hold it open."""

FINISH_SECONDS = 30.0
"""How long the launcher that keeps the job's store stays for the other machines' to finish."""

_CHILD = Path(__file__).with_name("child.py")


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What to start.

    Attributes:
        command: program and arguments of each rank.
        job: the job's name; ranks need the scope ``collective:JOB`` at each other.
        ranks: how many on this machine; the same on each.
        machines: how many machines.
        machine: this one's number; None for the order in which they come.
        ticket: of the node that keeps the job's store, which knows this machine; None for the
            launcher itself.
        bind: where launcher and ranks listen.
    """

    command: tuple[str, ...]
    job: str
    ranks: int = 1
    machines: int = 1
    machine: int | None = None
    ticket: Ticket | None = None
    bind: str = "[::]:0"

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.machines < 1:
            raise PlaceError("a job", why="it needs a rank and a machine at least")
        if self.machine is not None and not 0 <= self.machine < self.machines:
            raise PlaceError(
                f"machine {self.machine} of {self.machines}",
                why=f"machines are from 0 to {self.machines - 1}",
            )

    def environment(self, url: str, machine: int, local: int) -> dict[str, str]:
        """Return what tells a rank its place: torchrun's names, and where to meet."""
        size = self.ranks * self.machines
        return {
            "RANK": str(machine * self.ranks + local),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "GROUP_RANK": str(machine),
            "GROUP_WORLD_SIZE": str(self.machines),
            "MESH_RENDEZVOUS": url,
            "MESH_JOB": self.job,
            "MESH_BIND": self.bind,
        }


class Job:
    """One job's processes on this machine.

    Args:
        home: this machine's state directory; its key is made if there is none.
        plan: what to start.
        say: called with what the user should know.
    """

    def __init__(self, home: Home, plan: Plan, say: Callable[[str], object]) -> None:
        self._home = home
        self._plan = plan
        self._say = say
        self._ranks: dict[int, anyio.abc.Process] = {}
        self._code = 0
        self._end = anyio.Event()
        self._signal = signal.SIGTERM

    async def run(self) -> int:
        """Run all ranks to their end and return the exit code: of the first that failed, or 0.

        When one fails the others are ended, too.

        Raises:
            MeshError: the node that keeps the store is out of reach, or refuses; or there are more
                machines than the plan has.
        """
        config = EndpointConfig(bind=self._plan.bind)
        async with Node.worker(self._home, config=config) as node:
            store, url, machine = await self._place(node)
            if self._end.is_set():  # a signal was faster
                return self._code
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._end_all)
                    try:
                        await self._start_all(url, machine)
                        await self._watch_all()
                        if not self._code and self._plan.machines > 1:
                            await self._finish(store)
                    finally:
                        tasks.cancel_scope.cancel()
            finally:
                self._kill_all()
                with anyio.move_on_after(OUTPUT_SECONDS, shield=True):
                    for process in self._ranks.values():
                        await process.aclose()
        return self._code

    def stop(self, number: int) -> None:
        """End all ranks with the signal `number`, which is what `run` returns then, plus 128."""
        self._fail(128 + number, signal.Signals(number))

    def notify(self, number: int) -> None:
        """Send all ranks that run a signal which is theirs to act on."""
        for process in self._ranks.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.Signals(number))

    async def _place(self, node: Node) -> tuple[StoreClient, str, int]:
        plan = self._plan
        if plan.ticket is None:
            service = StoreService(node.endpoint)
            service.hold(plan.job)
            ticket = node.ticket()
            client = StoreClient(node.endpoint, None, plan.job, service)
        else:
            ticket = Ticket(plan.ticket.node_id, plan.ticket.addresses)  # its invite is used
            keeper = PeerAddress(ticket.node_id, ticket.addresses)
            client = StoreClient(node.endpoint, keeper, plan.job)
        machine = plan.machine
        if machine is None:
            machine = 0
            if plan.machines > 1:
                machine = await client.do("add", key="mesh/machines", amount=1) - 1
        if machine >= plan.machines:
            raise PlaceError(
                f"joining job '{plan.job}'",
                why=f"it is for {plan.machines} machines, and as many have come",
                fix="Give each run another job name.",
            )
        text = ticket.encode()
        if plan.ticket is None and plan.machines > 1:
            self._say(
                f"waiting for {plan.machines - 1} more; on each of them, which must have joined "
                f"this machine:\n\n  mesh run --ticket {text} --job {plan.job} "
                f"--nnodes {plan.machines} --nproc-per-node {plan.ranks} ...\n"
            )
        return client, f"mesh://{text}?job={plan.job}", machine

    async def _finish(self, store: StoreClient) -> None:
        """Tell that this machine's ranks are done, and stay as long as others need the store."""
        with contextlib.suppress(MeshError):  # it is all over, or others take too long
            if await store.do("add", key="mesh/done", amount=1) == self._plan.machines:
                await store.do("set", keys=["mesh/over"], values=[b""])
            if self._plan.ticket is None:
                await store.do("wait", keys=["mesh/over"], timeout=FINISH_SECONDS)

    async def _start_all(self, url: str, machine: int) -> None:
        base = dict(os.environ) | {"MESH_HOME": str(self._home.path)} | self._home.key_environment()
        if self._plan.ranks > 1:
            base.setdefault("OMP_NUM_THREADS", "1")  # or they would all take all cores
        for local in range(self._plan.ranks):
            place = self._plan.environment(url, machine, local)
            self._ranks[int(place["RANK"])] = await self._start(base | place)

    async def _start(self, environment: Mapping[str, str]) -> anyio.abc.Process:
        return await anyio.open_process(
            [sys.executable, "-I", "-S", str(_CHILD), str(os.getpid()), *self._plan.command],
            stdin=DEVNULL,
            env=environment,
            start_new_session=True,  # a terminal's Ctrl+C is for the launcher, which passes it on
        )

    async def _watch_all(self) -> None:
        async with anyio.create_task_group() as outputs:
            for rank, process in self._ranks.items():
                prefix = f"[{rank}] ".encode() if len(self._ranks) > 1 else b""
                assert process.stdout is not None
                assert process.stderr is not None
                outputs.start_soon(pump, process.stdout, prefix, sys.stdout.buffer)
                outputs.start_soon(pump, process.stderr, prefix, sys.stderr.buffer)
            async with anyio.create_task_group() as watchers:
                for rank, process in self._ranks.items():
                    watchers.start_soon(self._watch, rank, process)
            outputs.cancel_scope.deadline = anyio.current_time() + OUTPUT_SECONDS

    async def _watch(self, rank: int, process: anyio.abc.Process) -> None:
        code = await process.wait()
        _kill(process)  # what it has left of its own children
        if code and not self._code:
            how = f"exit code {code}" if code > 0 else f"signal {_name(-code)}"
            self._say(f"rank {rank} ended with {how}; ending the others")
            self._fail(code if code > 0 else 128 - code, signal.SIGTERM)

    def _fail(self, code: int, number: signal.Signals) -> None:
        if not self._code:
            self._code, self._signal = code, number
            self._end.set()

    async def _end_all(self) -> None:
        """Once there is a reason, tell all ranks to end, and kill those that don't."""
        await self._end.wait()
        self.notify(self._signal)
        await anyio.sleep(GRACE_SECONDS)
        self._kill_all()

    def _kill_all(self) -> None:
        for process in self._ranks.values():
            _kill(process)


def _name(number: int) -> str:
    with contextlib.suppress(ValueError):  # most of the real-time ones have no name
        return signal.Signals(number).name
    return str(number)


def _kill(process: anyio.abc.Process) -> None:
    if sys.platform == "win32":
        if process.returncode is None:
            process.kill()
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # the rank leads a group of its own
