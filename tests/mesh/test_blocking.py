"""The node for threads: same names, no ``await``, anywhere, and a clean end."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import pytest
import torch

from auth import SecretKey, Ticket, allow_any
from mesh import Home, PeerState, blocking
from mesh.errors import NodeError, UnknownPeer, Unreachable
from tests.mesh.nodes import LOOPBACK
from transport import EndpointConfig, RemoteError
from transport.process import ProcessEngine, sharing
from transport.process.sharing import SharedProcess
from transport.process.spawn import Child

CONFIG = dataclasses.replace(LOOPBACK, placement=None, share=None, connect_timeout=30.0)
"""On a machine where much else runs, the first connection waits for two processes to come up."""

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has endpoint processes")
PLACEMENTS = [
    "loop",
    pytest.param("shared", marks=LINUX),
    pytest.param("process", marks=[LINUX, pytest.mark.slow]),  # half a second for each node
]

GONE = Ticket(SecretKey.generate().node_id, (("127.0.0.1", 9),))


@pytest.fixture(autouse=True, params=PLACEMENTS)
def placement(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the packets of the test's nodes are moved."""
    name: str = request.param
    monkeypatch.setattr(blocking, "PLACEMENT", "loop" if name == "loop" else "process")
    if name == "shared":
        path = request.getfixturevalue("endpoint_process")
        monkeypatch.setattr(sharing, "JOIN_SECONDS", 30.0)
        monkeypatch.setitem(globals(), "CONFIG", dataclasses.replace(CONFIG, share=path))
    return name


def node(*, tensors: bool = False) -> blocking.Node:
    return blocking.Node.embedded(
        key=SecretKey.generate(), authorizer=allow_any(), config=CONFIG, tensors=tensors
    )


@pytest.fixture
def pair() -> Iterator[tuple[blocking.Node, blocking.Node]]:
    with node() as here, node() as there:
        yield here, there


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait until `condition` holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def threads_of_mesh() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("mesh-")]


def test_each_has_its_packets_moved_where_it_should(
    pair: tuple[blocking.Node, blocking.Node], placement: str
) -> None:
    engines = [each.endpoint._engine for each in pair]
    children = [each._child for each in engines if isinstance(each, ProcessEngine)]
    kinds = {"loop": [], "shared": [SharedProcess] * 2, "process": [Child] * 2}
    assert [type(each) for each in children] == kinds[placement]


def test_peer(pair: tuple[blocking.Node, blocking.Node]) -> None:
    here, there = pair
    peer = here.connect(there.ticket())
    assert peer.node_id == there.node_id
    assert 0 < peer.ping() < 3
    assert peer.info()["node_id"] == str(there.node_id)
    assert [status.state for status in here.peers()] == [PeerState.AUTHORIZED]
    assert here.label(there.node_id) == peer.label == there.node_id.short
    peer.close()
    assert peer.ping() > 0
    assert there.addresses == there.ticket().addresses


def test_tensors() -> None:
    with node(tensors=True) as a, node(tensors=True) as b, node() as here:
        tensor = torch.randn(300, 200).t()
        at_a = here.connect(a.ticket()).put(tensor, "w")
        at_b = at_a.copy_to(here.connect(b.ticket()))
        assert torch.equal(at_b.get(), tensor)
        assert at_b.peer.node_id == b.node_id
        assert b.node_id.short in repr(at_b)
        at_b.delete()
        at_a.delete()


def test_inside_a_running_loop(pair: tuple[blocking.Node, blocking.Node]) -> None:
    here, there = pair

    async def cell() -> float:
        asyncio.get_running_loop()
        return here.connect(there.ticket()).ping()

    assert anyio.run(cell) > 0


def test_many_threads(pair: tuple[blocking.Node, blocking.Node]) -> None:
    here, there = pair
    peer = here.connect(there.ticket())
    with ThreadPoolExecutor(8) as pool:
        assert all(rtt > 0 for rtt in pool.map(lambda _: peer.ping(timeout=10), range(64)))


def test_on_trio() -> None:
    with node() as there:
        inner = node()
        with blocking.Node(inner.node, backend="trio") as here:
            assert here.connect(there.ticket()).ping() > 0


def test_errors_come_through(pair: tuple[blocking.Node, blocking.Node]) -> None:
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:9"):
        pair[0].connect(GONE, timeout=0.3)
    with pytest.raises(UnknownPeer):
        pair[0].connect("nobody")


def test_close_tells_peers_and_ends_the_thread() -> None:
    before = threads_of_mesh()
    with node() as there:
        here = node().open()
        here.connect(there.ticket())
        here.close()
        here.close()
        assert [status.reason for status in there.peers()] == ["left"]
        with pytest.raises(NodeError, match="not open"):
            here.connect(there.ticket())
    assert threads_of_mesh() == before


def test_failing_to_open_leaves_no_thread(tmp_path: Path) -> None:
    before = threads_of_mesh()
    config = EndpointConfig(bind="127.0.0.1:0", connect_timeout=0.3)
    here = blocking.Node.client(GONE, home=tmp_path, config=config)
    with pytest.raises(Unreachable):
        here.open()
    assert threads_of_mesh() == before
    with pytest.raises(NodeError, match="opened before"):
        here.open()


def test_before_it_is_open() -> None:
    with pytest.raises(NodeError, match="not open"):
        node().connect(GONE)


def test_from_its_own_loop(pair: tuple[blocking.Node, blocking.Node]) -> None:
    async def inside() -> None:
        pair[0].peers()

    with pytest.raises(NodeError, match="wait for itself"):
        pair[0].run(inside)


def test_handlers_are_registered_in_its_loop(pair: tuple[blocking.Node, blocking.Node]) -> None:
    here, there = pair

    async def answer(request: object) -> str:
        return threading.current_thread().name

    async def register() -> None:
        there.node.endpoint.register_call("app.thread", answer, scope="app")

    async def call() -> object:
        return await (await here.node.dial(there.node_id)).call("app.thread")

    there.run(register)
    here.connect(there.ticket())
    assert here.run(call) == f"mesh-{there.node_id.short}"


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
def test_a_handler_does_not_end_its_loop(
    pair: tuple[blocking.Node, blocking.Node], raised: type[BaseException]
) -> None:
    here, there = pair

    async def leave(request: object) -> None:
        raise raised("as was expected")

    async def register() -> None:
        there.node.endpoint.register_call("app.leave", leave, scope="app")

    async def call() -> object:
        return await (await here.node.dial(there.node_id)).call("app.leave")

    there.run(register)
    peer = here.connect(there.ticket())
    with pytest.raises(RemoteError, match="handler failed"):
        here.run(call)
    assert peer.ping() > 0


def test_a_loop_that_has_ended_is_named_and_leaves_nothing() -> None:
    before = threads_of_mesh()
    with node() as here:
        here.portal.start_task_soon(here.portal.stop, True)
        eventually(lambda: threads_of_mesh() == before)
        with pytest.raises(NodeError, match="its event loop has ended"):
            here.peers()


def test_interrupt_cancels_what_is_waited_for(pair: tuple[blocking.Node, blocking.Node]) -> None:
    here = pair[0]
    entered, cancelled = threading.Event(), threading.Event()

    async def wait() -> None:
        entered.set()
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()

    def interrupt() -> None:
        assert entered.wait(10)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        here.run(wait)
    thread.join()
    assert cancelled.wait(10)
    assert here.peers() == ()  # it lives on


def test_closing_ends_waits_of_other_threads() -> None:
    here = node().open()
    entered = threading.Event()

    async def wait() -> None:
        entered.set()
        await anyio.sleep_forever()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(here.run, wait)
        assert entered.wait(10)
        began = time.monotonic()
        here.close()
        with pytest.raises(NodeError, match="closed meanwhile"):
            waiting.result(10)
        assert time.monotonic() - began < 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_is_refused(pair: tuple[blocking.Node, blocking.Node]) -> None:
    here, there = pair
    peer = here.connect(there.ticket())
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            peer.ping()
        except NodeError as error:
            os.write(writer, str(error).encode())
        except BaseException as error:
            os.write(writer, repr(error).encode())
        here.close()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    assert f"it belongs to process {os.getpid()}, from which this one was forked" in told
    assert peer.ping() > 0


def test_where_packets_are_moved_unless_it_is_said(
    placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(**settings: str) -> tuple[str | None, str | None]:
        given = EndpointConfig(bind="127.0.0.1:0", **settings)  # type: ignore[arg-type]
        found = blocking.Node.worker(home, config=given).node._config
        return found.placement, found.share

    home, where = Home(tmp_path), "loop" if placement == "loop" else "process"
    path = str(home.endpoint_path)
    assert config() == (where, None)
    home.endpoint_path.touch()
    assert config() == (where, None if where == "loop" else path)
    assert config(placement="process") == ("process", None)
    assert config(placement="loop") == ("loop", None)
    assert blocking.Node.client(home=home).node._config.share == (config()[1])
    monkeypatch.undo()
    assert ("process" if sys.platform == "linux" else "loop") == blocking.PLACEMENT


@pytest.mark.parametrize(
    ("system", "executable", "is_frozen", "where"),
    [
        ("linux", "/usr/bin/python3.12", False, "process"),
        ("darwin", "/usr/bin/python3.12", False, "loop"),
        ("linux", "/opt/app/python-app", True, "loop"),
        ("linux", "/usr/bin/uwsgi", False, "loop"),
        ("linux", "", False, "loop"),
        ("linux", None, False, "loop"),
    ],
)
def test_a_program_is_not_started_in_place_of_an_interpreter(
    system: str, executable: str | None, is_frozen: bool, where: str
) -> None:
    assert blocking._placement(system, executable, is_frozen=is_frozen) == where
