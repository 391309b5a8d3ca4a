"""Apps that host a node in their own loop: FastAPI, trio, asyncio; HTTP beside peers."""

from __future__ import annotations

import itertools
import json
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from argparse import Namespace
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import psutil
import pytest
import torch
import uvicorn

import mesh.blocking
from auth import AccessDenied, NodeId, SecretKey, Ticket, allow_any, deny_all, load_or_create_key
from examples.app import App, Members, open_app
from examples.fastapi_app import make_app
from mesh import Node, recently_lost
from tensor_bridge import moves
from tests.e2e.machines import Daemon
from tests.mesh.nodes import eventually
from tests.programs import Program
from transport import (
    Connection,
    ConnectionClosed,
    EndpointConfig,
    EndpointEvent,
    Incoming,
    PeerAddress,
    PeerJoined,
)

pytestmark = pytest.mark.timeout(180)

LOOPBACK = EndpointConfig(bind="127.0.0.1:0", linger=1.0)
KINDS = ("fastapi", "trio", "asyncio")
MIB = 1 << 20
MOVE_BYTES = 128 * MIB
HTTP_SECONDS = 2.0
"""Longest that an HTTP request may take while a tensor moves through the same loop."""
STOP_SECONDS = 8.0
"""A request under way has five seconds to end, then the node takes leave."""
REASON = "this app is for its members, and you are none"


class RunningApp:
    """An example in a process of its own."""

    def __init__(self, kind: str, daemon: Daemon) -> None:
        self.daemon = daemon
        self.ticket = Ticket.decode(daemon.wait_for(r"^(mesh1\w+)$")[1])
        self.url = daemon.wait_for(r"(http://127\.0\.0\.1:\d+)")[1]
        self.killed_by_term = -signal.SIGTERM if kind == "fastapi" else 0
        """uvicorn stops in order and then dies of the signal it was sent; the others return."""

    def get(self, path: str) -> tuple[int, Any]:
        """Return status and answer of an HTTP request."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=20) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    async def aget(self, path: str) -> tuple[int, Any]:
        return await anyio.to_thread.run_sync(self.get, path)


@contextmanager
def running(
    kind: str, folder: Path, *members: object, bind: str = "127.0.0.1:0"
) -> Iterator[RunningApp]:
    """Run an example as the README does, on free ports."""
    options = ["--key", str(folder / f"{kind}.key"), "--bind", bind, "--http", "0"]
    command = ["-m", f"examples.{kind}_app", *options, *map(str, members)]
    with Program(command, stderr=False) as process:
        try:
            yield RunningApp(kind, Daemon(process))
        finally:
            process.kill()


def peer(key: SecretKey | None = None, authorizer: mesh.Authorizer | None = None) -> Node:
    return Node.embedded(
        key=key or SecretKey.generate(),
        authorizer=authorizer or allow_any(),
        config=LOOPBACK,
        tensors=False,
    )


async def greet(request: Incoming) -> str:
    return "hello from the test"


async def leave_note(node: Node, ticket: Ticket, text: str) -> object:
    """Speak the app's own protocol."""
    where = PeerAddress(ticket.node_id, ticket.addresses)
    connection = await node.endpoint.connect(where, alpn="notes/1")
    try:
        async with await connection.open_raw_stream() as stream:
            await stream.send_message(text)
            return await stream.receive_message()
    finally:
        await connection.close()


# -- in processes of their own


@pytest.mark.e2e
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("kind", KINDS)
async def test_http_and_own_protocol_beside_moves_and_calls(kind: str, tmp_path: Path) -> None:
    key = SecretKey.generate()
    with running(kind, tmp_path, key.node_id) as app:
        async with peer(key) as member, peer(authorizer=deny_all()) as stranger:
            member.endpoint.register_call("greet", greet, scope="app")
            there = await member.connect(app.ticket)
            connection = await there.connection()
            assert await connection.call("greet") == f"hello {member.node_id.short}"

            # A tensor moves there and back; meanwhile everything else works, through one loop.
            tensor = torch.arange(MOVE_BYTES // 8).view(-1, 4096)
            moved = anyio.Event()
            waits: list[float] = []

            async def move() -> None:
                ref = await there.put(tensor, "weights")
                assert torch.equal(await ref.get(), tensor)
                await ref.delete()
                moved.set()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(move)
                while not moved.is_set():
                    began = time.monotonic()
                    status, (seen,) = await app.aget("/peers")
                    assert status == 200
                    waits.append(time.monotonic() - began)
                    assert (seen["node_id"], seen["state"]) == (str(member.node_id), "authorized")
                    assert await app.aget(f"/greet/{member.node_id.short}") == (
                        200,
                        "hello from the test",
                    )
                    assert await connection.call("greet") == f"hello {member.node_id.short}"
                    text = f"note {len(waits)}"
                    assert await leave_note(member, app.ticket, text) == "noted"
            assert seen["bytes_received"] + seen["bytes_sent"] > MOVE_BYTES
            assert len(waits) > 3
            assert max(waits) < HTTP_SECONDS
            _, notes = await app.aget("/notes")
            assert notes == [f"note {n + 1}" for n in range(len(waits))][-100:]

            # Another peer is told the app's own reason, by both protocols; nothing reached the app.
            with pytest.raises(AccessDenied) as refused:
                await stranger.connect(app.ticket)
            assert refused.value.why == REASON
            with pytest.raises(AccessDenied) as refused:
                await leave_note(stranger, app.ticket, "let me in")
            assert refused.value.why == REASON
            assert (await app.aget("/notes"))[1] == notes

            # So is who asks the app by HTTP, where a peer refuses the app.
            status, answer = await app.aget(f"/greet/{stranger.ticket().encode()}")
            assert status == 502
            assert "this node admits nobody" in answer["error"]
            assert connection.is_open


def put_for_ever(there: Any) -> None:
    """Put one tensor after another, until that fails."""
    while True:
        there.put(torch.zeros(32 * MIB // 4)).delete()


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("kind", KINDS)
def test_stop(
    kind: str, number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How long our move looks for the way to an app that is gone is not what is tested.
    monkeypatch.setattr(recently_lost, "RETURN_SECONDS", 0.5)
    monkeypatch.setattr(moves, "PATIENCE", 0.5)
    key = SecretKey.generate()
    with (
        running(kind, tmp_path, key.node_id) as app,
        mesh.blocking.Node.embedded(key=key, authorizer=allow_any(), config=LOOPBACK) as member,
        ThreadPoolExecutor() as threads,
    ):
        there = member.connect(app.ticket)
        assert app.get("/peers")[0] == 200
        # Busy: a tensor is on its way, an HTTP client says nothing, a request waits for its peer.
        asked = threading.Event()

        async def never(request: Incoming) -> None:
            asked.set()
            await anyio.sleep_forever()

        async def offer() -> Connection:
            member.endpoint.register_call("greet", never, scope="app")
            connection = member.endpoint.connection(there.node_id)
            assert connection is not None
            return connection

        connection = member.run(offer)
        moving = threads.submit(put_for_ever, there)
        waiting = threads.submit(app.get, f"/greet/{member.node_id.short}")
        port = int(app.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)):
            assert asked.wait(10)
            began = time.monotonic()
            app.daemon.signal(number)
            code = app.daemon.wait(STOP_SECONDS)
        assert time.monotonic() - began < STOP_SECONDS
        assert code == (app.killed_by_term if number == signal.SIGTERM else 0)

        ended = member.run(connection.wait_closed)
        assert (type(ended), ended.why) == (ConnectionClosed, "left")
        assert moving.exception(30) is not None
        assert waiting.exception(30) is not None or waiting.result()[0] >= 500
        told = "\n".join(app.daemon.lines)
        # uvicorn shows where it cut off a request that would not end; nobody else has to complain.
        cut_off = told.count("CancelledError: Task cancelled, timeout graceful shutdown exceeded")
        assert cut_off == (kind == "fastapi"), told
        assert told.count("Traceback") == cut_off, told

        # Its key and its port are free again: it comes back as the same node at the same place.
        (address,) = app.ticket.addresses
        with running(kind, tmp_path, member.node_id, bind=f"{address[0]}:{address[1]}") as returned:
            assert returned.ticket == app.ticket
            assert there.ping() > 0


@pytest.mark.e2e
def test_apps_under_different_loops_share_a_connection(tmp_path: Path) -> None:
    ids = {kind: load_or_create_key(tmp_path / f"{kind}.key").node_id for kind in KINDS}
    with ExitStack() as stack:
        apps = {
            kind: stack.enter_context(running(kind, tmp_path, *others(ids, kind))) for kind in KINDS
        }
        threads = stack.enter_context(ThreadPoolExecutor(20))
        for here, there in itertools.permutations(KINDS, 2):
            # All at once: the first finds no connection, and makes the one that all use.
            path = f"/greet/{apps[there].ticket.encode()}"
            answers = list(threads.map(apps[here].get, [path] * 20))
            assert answers == [(200, f"hello {ids[here].short}")] * 20
        for kind in KINDS:
            _, peers = apps[kind].get("/peers")
            assert {peer["node_id"] for peer in peers} == set(map(str, others(ids, kind)))
            assert {peer["state"] for peer in peers} == {"authorized"}


# -- in this process


@pytest.mark.anyio
async def test_several_apps_in_one_process(tmp_path: Path) -> None:
    keys = {name: load_or_create_key(tmp_path / f"{name}.key") for name in KINDS}
    ids = {name: key.node_id for name, key in keys.items()}
    async with AsyncExitStack() as stack:
        apps = {
            name: await stack.enter_async_context(open_app(options(tmp_path, name, ids)))
            for name in KINDS
        }
        joined: dict[str, list[EndpointEvent]] = {name: [] for name in KINDS}
        for name, app in apps.items():
            app.node.endpoint.subscribe(joined[name].append)
        answers: list[object] = []

        async def ask(here: App, there: App) -> None:
            answers.append(await here.greet_peer(there.node.ticket().encode()))

        async with anyio.create_task_group() as tasks:
            for here, there in itertools.permutations(apps.values(), 2):
                for _ in range(20):
                    tasks.start_soon(ask, here, there)
        assert Counter(answers) == {f"hello {node_id.short}": 40 for node_id in ids.values()}
        for name, app in apps.items():
            open_to = {connection.peer.node_id for connection in app.node.endpoint.connections}
            assert open_to == set(others(ids, name))
            # One connection with each, and never another one.
            met = [event for event in joined[name] if isinstance(event, PeerJoined)]
            assert len(met) == len(open_to)


@pytest.mark.anyio
async def test_ten_starts_and_stops_leave_nothing(tmp_path: Path) -> None:
    key = SecretKey.generate()

    async def start_and_stop() -> None:
        told = options(tmp_path, "app", {"peer": key.node_id})
        async with open_app(told) as app, peer(key) as member:
            there = await member.connect(app.node.ticket())
            assert await (await there.connection()).call("greet")
            assert await leave_note(member, app.node.ticket(), "kilroy") == "noted"

    await leaves_nothing(start_and_stop)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_ten_starts_and_stops_of_one_fastapi_app_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = SecretKey.generate()
    web = make_app(options(tmp_path, "app", {"peer": key.node_id}))

    async def start_and_stop() -> None:
        server = uvicorn.Server(uvicorn.Config(web, port=0, log_config=None))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve)
            await eventually(lambda: server.started)
            ticket = capsys.readouterr().out.strip()
            async with peer(key) as member:
                there = await member.connect(ticket)
                assert await (await there.connection()).call("greet")
                port = server.servers[0].sockets[0].getsockname()[1]
                url = f"http://127.0.0.1:{port}/peers"
                with await anyio.to_thread.run_sync(urllib.request.urlopen, url) as answer:
                    assert len(json.load(answer)) == 1
            server.should_exit = True

    await leaves_nothing(start_and_stop)


def test_an_app_on_a_blocking_node_serves_many_threads(tmp_path: Path) -> None:
    key = SecretKey.generate()
    with (
        mesh.blocking.Node.embedded(
            key=SecretKey.generate(), authorizer=Members([str(key.node_id)]), config=LOOPBACK
        ) as node,
        mesh.blocking.Node.embedded(key=key, authorizer=allow_any(), config=LOOPBACK) as member,
        mesh.blocking.Node.embedded(
            key=SecretKey.generate(), authorizer=allow_any(), config=LOOPBACK
        ) as stranger,
        ThreadPoolExecutor(8) as threads,
    ):

        async def host() -> App:
            return App(node.node)

        app = node.run(host)
        joined: list[EndpointEvent] = []
        node.run(partial(call_soon, partial(node.endpoint.subscribe, joined.append)))

        def use(number: int) -> torch.Tensor:
            there = member.connect(node.ticket())
            ref = there.put(torch.full((1000,), float(number)))
            assert member.run(partial(leave_note, member.node, node.ticket(), str(number)))
            return ref.get()

        for number, tensor in enumerate(threads.map(use, range(16))):
            assert tensor.eq(number).all()
        assert set(app.notes) == {str(number) for number in range(16)}
        alpns = Counter(event.connection.alpn for event in joined if isinstance(event, PeerJoined))
        assert alpns == {"mesh/1": 1, "notes/1": 16}
        with pytest.raises(AccessDenied, match=REASON):
            stranger.connect(node.ticket())


# -- helpers


def others(ids: dict[str, NodeId], name: str) -> list[NodeId]:
    return [node_id for other, node_id in ids.items() if other != name]


def options(folder: Path, name: str, ids: dict[str, NodeId]) -> Namespace:
    """What an app is told on its command line."""
    return Namespace(
        key=folder / f"{name}.key", members=list(map(str, others(ids, name))), bind="127.0.0.1:0"
    )


async def call_soon(function: Callable[[], None]) -> None:
    function()


async def leaves_nothing(start_and_stop: Callable[[], Awaitable[None]]) -> None:
    """Start and stop ten times; fail if tasks, threads or descriptors are left."""
    await start_and_stop()  # the first time loads modules and starts the loop's worker threads
    before = held()
    for _ in range(10):
        await start_and_stop()
    await eventually(lambda: held() == before)


def held() -> tuple[int, int, int]:
    process = psutil.Process()
    return len(anyio.get_running_tasks()), threading.active_count(), process.num_fds()
