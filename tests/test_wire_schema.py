"""Live traffic is what docs/wire.cddl says."""

from __future__ import annotations

from pathlib import Path

import anyio.lowlevel
import pytest
import torch
from pycddl import Schema, ValidationError

import transport.challenge
import transport.frames
import transport.stream
from auth import AccessDenied, SecretKey, SharedSecret, allow_any
from mesh import Node
from mesh.autograd import reducers
from mesh.device import DeviceService
from mesh.device.errors import SessionLost
from mesh.device.groups import wire as groups
from mesh.device.handover import ARRIVED_CALL, Arrived
from mesh.device.wire import DEVICES_CALL, SERVICE
from mesh.rpc import NotExposed
from tensor_bridge.lanes.shared.host import unavailable
from tests.mesh.autograd.nodes import in_thread, workers
from tests.mesh.nodes import eventually
from tests.mesh.rpc import exposures  # noqa: F401 - exposes what is called
from transport import EndpointConfig, cbor

SCHEMA = Schema((Path(__file__).parents[1] / "docs" / "wire.cddl").read_text())
CONFIG = EndpointConfig(bind="127.0.0.1:0")

pytestmark = pytest.mark.anyio


@pytest.fixture
def frames(monkeypatch):
    """Collect every frame that is taken off the wire."""
    seen: list[bytes] = []

    def decode(data, *, max_size):
        seen.append(bytes(data))
        return cbor.decode(data, max_size=max_size)

    monkeypatch.setattr(transport.frames, "decode", decode)
    monkeypatch.setattr(transport.stream, "decode", decode)
    monkeypatch.setattr(transport.challenge, "decode", decode)
    return seen


def node():
    return Node.embedded(key=SecretKey.generate(), authorizer=allow_any(), config=CONFIG)


async def keep_to_the_schema(frames):
    """Validate each; hundreds of them take a second, in which the event loop is to go on."""
    for data in frames:
        SCHEMA.validate_cbor(data)
        await anyio.lowlevel.checkpoint()


async def test_moves_and_calls_keep_to_the_schema(frames):
    async with node() as client, node() as a, node() as b:
        on_a = await client.connect(a.ticket())
        on_b = await client.connect(b.ticket())
        await on_a.info()
        tensor = torch.randn(3, 5, requires_grad=True).T
        ref = await on_a.put(tensor, name="w")
        copy = await ref.copy_to(on_b)
        assert torch.equal(await copy.get(), tensor)
        large = torch.zeros(1 << 20, dtype=torch.uint8)
        assert torch.equal(await (await on_a.put(large)).get(), large)
        made = await on_a.create("arange", (4,), dtype=torch.int64)
        await (await on_a.tensors()).list()
        await made.delete()
        with pytest.raises(Exception, match="none of that id"):
            await made.get()
        connection = await on_a.connection()
        await connection.call("node.status")
        await connection.call("bench.echo", bytes(64))
        await connection.call("bench.usage")
    await keep_to_the_schema(frames)
    kinds = {key for data in frames for key in cbor.decode(data, max_size=1 << 20)}
    assert kinds >= {"s", "ok", "err", "sent", "received", "moved", "object"}
    if unavailable() is None:
        values = [cbor.decode(data, max_size=1 << 20) for data in frames]
        assert any("lanes" in value["v"] for value in values if value.get("s") == "tensor.read")
        assert any("lane" in (value.get("ok") or {}) for value in values)


async def test_what_is_said_of_devices_keeps_to_the_schema(frames):
    async with node() as client, node() as peer, DeviceService(peer.endpoint, ["cpu"]):
        connection = await (await client.connect(peer.ticket())).connection()
        assert len(await connection.call(DEVICES_CALL)) == 1
        arrived = Arrived(bytes(16), 1, "ab" * 16)
        with pytest.raises(SessionLost):
            await connection.call(ARRIVED_CALL, arrived.encode())
        opening = {"session": bytes(16), "received": 0, "new": False}
        with pytest.raises(SessionLost):
            await (await connection.open_stream(SERVICE, opening)).reply()
        member = groups.Member(peer.node_id, (0,))
        joining = groups.Join(bytes(16), bytes(16), 1, 0, (member,), 5.0)
        pairing = groups.Pairing(bytes(16), 0, bytes(32))
        for service, value in (
            (groups.GROUP_SERVICE, joining.encode()),
            (groups.PAIR_SERVICE, pairing.encode()),
        ):
            with pytest.raises((SessionLost, AccessDenied)):
                await (await connection.open_stream(service, value)).reply()
    await keep_to_the_schema(frames)
    said = {cbor.decode(data, max_size=1 << 20).get("s") for data in frames}
    assert said >= {"device.list", "device.arrived", "device.session"}
    assert said >= {"device.group", "device.pair"}


def test_what_is_said_in_a_group_of_devices_keeps_to_the_schema():
    at = (("127.0.0.1", 4433),)
    error = SessionLost("a group", why="it ended")
    for message in (
        groups.Connect((at, ())),
        groups.Formed(3, True),
        groups.Broken(3, error, (1,)),
    ):
        SCHEMA.validate_cbor(cbor.encode(message.encode(), max_size=1 << 16))
    reply = {"ok": groups.Prepared(at).encode()}
    SCHEMA.validate_cbor(cbor.encode(reply, max_size=1 << 16))


async def test_remote_calls_keep_to_the_schema(frames):
    async with node() as client, node() as peer, node() as third:
        there = await client.connect(peer.ticket())
        other = await client.connect(third.ticket())
        await third.connect(peer.ticket())
        for each in (peer, third):
            await each.rpc()
        large = torch.ones(100_000)
        assert (await there.call(torch.add, large, 1, timeout=5)).sum() == 200_000
        ref = await there.remote(torch.ones, 3)
        await other.call("tests.mesh.rpc.exposures.echo", ref)
        with pytest.raises(NotExposed):
            await (await client.rpc()).invoke(ref, "add_", (1,))
        with pytest.raises(TypeError):
            await there.call(torch.add, large, None)
        items = there.stream("tests.mesh.rpc.exposures.items", large, 2)
        assert [item.shape async for item in items] == [large.shape] * 2
        answer = await (await other.connection()).call("node.refs")
        assert len(answer["references"]) == 1
        with pytest.raises(TypeError):
            await anext(there.stream("tests.mesh.rpc.exposures.items"))
        await eventually(lambda: any(b"rpc.refs" in data for data in frames))
    await keep_to_the_schema(frames)
    values = [cbor.decode(data, max_size=1 << 20) for data in frames]
    assert any(isinstance(value, list) for value in values)  # items of a stream are answers
    said = {value.get("s") for value in values if isinstance(value, dict)}
    assert said >= {"rpc.call", "rpc.part", "rpc.refs", "rpc.stream", "rpc.list", "node.refs"}


async def test_gradients_keep_to_the_schema(frames, monkeypatch):
    def scale(worker, x):
        return x * worker.weight

    def fail(worker, x):
        x.register_hook(lambda _: 1 / 0)
        return x * 2

    def program(a, b):
        x = torch.ones(3, requires_grad=True)
        with a.context() as context_id:
            loss = a.call(b, scale, x * a.weight).sum()
            a.backward(context_id, loss, retain_graph=True)
            a.backward(context_id, loss, fast=True, retain_graph=True)
            a.backward(context_id, loss, atomic=True)
            with pytest.raises(RuntimeError):
                a.backward(context_id, a.call(b, fail, x).sum())

    async with workers(2, scale, fail) as (a, b):
        lenders = {id(each.weight) for each in (a, b)}
        await in_thread(program, a, b)
        monkeypatch.setattr(reducers, "are_there", lambda: True)
        monkeypatch.setattr(reducers, "reduced", lambda: lenders)
        await in_thread(program, a, b)
    await keep_to_the_schema(frames)
    said = {cbor.decode(data, max_size=1 << 20).get("s") for data in frames}
    services = {"mark", "claim", "start", "settle", "release"}
    assert said >= {"rpc.call", *(f"autograd.{each}" for each in services)}


async def test_proofs_of_a_shared_secret_keep_to_the_schema(frames):
    secret = SharedSecret(bytes(32), scopes=["*"])
    one = Node.embedded(key=SecretKey.generate(), authorizer=secret, config=CONFIG, tensors=False)
    two = Node.embedded(key=SecretKey.generate(), authorizer=secret, config=CONFIG, tensors=False)
    async with one, two, node() as stranger:
        await one.connect(two.ticket())
        with pytest.raises(AccessDenied):
            await stranger.connect(two.ticket())
    await keep_to_the_schema(frames)
    values = [cbor.decode(data, max_size=1 << 20) for data in frames]
    assert {key for value in values for key in value} >= {"challenge", "nonce", "ok", "err"}
    assert any("proof" in value.get("ok", {}) for value in values)


@pytest.mark.parametrize(
    "frame",
    [
        {"challenge": bytes(31)},
        {"nonce": bytes(32)},
        {"s": "tensor.delete", "v": {"object": "not an id"}},
        {"s": "tensor.read", "v": {"offset": 0}},
        {"s": "unheard of", "v": None},
        {"ok": {"offset": -1}},
        {"ok": {"offset": 1, "lane": ""}},
        {"s": "tensor.lane", "v": {"nonce": bytes(16), "marks": [bytes(32)] * 5}},
        {"err": {"why": "no code"}},
        {"moved": 1, "more": 2},
        {"s": "device.session", "v": {"session": bytes(15), "received": 0, "new": True}},
        {"s": "rpc.call", "v": {"target": {"kind": "eval", "name": "x"}}},
        {"s": "rpc.call", "v": [b"", b""]},
        {"wanted": -1},
        {"s": "rpc.stream", "v": {"wanted": 1}},
        {"s": "rpc.refs", "v": {"shared": [], "confirmed": [], "dropped": [], "left": [bytes(15)]}},
        {"s": "autograd.release", "v": {"context": [bytes(31), 1]}},
        {"s": "autograd.mark", "v": {"context": [bytes(32), 1], "wanted": []}},
        {"s": "device.arrived", "v": {"session": bytes(16), "arrival": 1}},
    ],
)
def test_the_schema_refuses_other_frames(frame):
    with pytest.raises(ValidationError):
        SCHEMA.validate_cbor(cbor.encode(frame, max_size=1 << 16))
