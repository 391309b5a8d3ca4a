"""Ways to make two nodes speak less than both of them can, each beside the honest way.

QUIC's own version negotiation is unprotected (RFC 9000 section 6): what an attacker puts into it
must be found out by what TLS protects. The mesh's hello travels inside TLS: an attacker can offer
less, but not in another's name, and gets nothing for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import anyio
import pytest
from aioquic.quic.packet import QuicProtocolVersion, encode_quic_version_negotiation

from auth import AccessDenied, MeshError, SecretKey, SharedSecret, deny_all
from tests.attacks.raw import hello, raw_client, request
from tests.transport.nodes import at, config, endpoint
from tests.transport.pair import Address, End, Host, World
from transport import Endpoint, ProtocolError
from transport.protocol import hello as hello_module
from transport.protocol.hello import Hello, Welcome

pytestmark = pytest.mark.attack

V1, V2 = int(QuicProtocolVersion.VERSION_1), int(QuicProtocolVersion.VERSION_2)
FUTURE = 0x1A2A3A4A

ALPN = "mesh/1"


# -- QUIC's version


def dial_with_forged_negotiation(versions: list[int]) -> tuple[World, End, Host]:
    """Dial; an attacker on the way answers the first datagram with a version negotiation."""
    world = World()
    here, there = world.host(1), world.host(2)
    forged = 0

    def tap(data: bytes, source: Address, target: Address) -> bytes | None:
        nonlocal forged
        if target == there.address and not forged:
            forged += 1
            destination = data[6 : 6 + data[5]]
            at_source = 7 + data[5]
            own = data[at_source : at_source + data[at_source - 1]]
            negotiation = encode_quic_version_negotiation(
                source_cid=destination, destination_cid=own, supported_versions=versions
            )
            world.send(negotiation, there.address, here.address)
            return None  # the honest answer never comes
        return data

    world.tap = tap
    end = here.dial(there)
    world.run(lambda: end.handshake or end.core.ended, seconds=8)
    world.run(seconds=1)
    assert forged == 1
    return world, end, there


def test_without_an_attacker_the_first_version_is_spoken() -> None:
    """The positive control."""
    world = World()
    here, there = world.host(1), world.host(2)
    end = here.dial(there)
    assert world.run(lambda: end.handshake)
    assert end.core.quic._version == V1


@pytest.mark.parametrize("versions", [[V1], [V2, V1], [FUTURE, V1]])
def test_a_negotiation_that_names_the_version_spoken_is_ignored(versions: list[int]) -> None:
    """RFC 9000 section 6.2: it can't be an answer to what was sent."""
    _, end, there = dial_with_forged_negotiation(versions)
    assert end.handshake
    assert there.end.handshake
    assert end.core.quic._version == V1


def test_a_negotiation_that_leaves_the_best_version_out_comes_to_nothing() -> None:
    """The dialer tries the other, and says under TLS which it would rather speak: both turn back
    to that (RFC 9368 section 2.3)."""
    _, end, there = dial_with_forged_negotiation([V2])
    assert end.core.quic._version_negotiated_incompatible, "the forgery was acted upon"
    assert end.handshake
    assert there.end.handshake
    assert end.core.quic._version == V1
    assert there.end.core.quic._version == V1


@pytest.mark.parametrize("versions", [[FUTURE], [], [0]])
def test_a_negotiation_without_a_common_version_ends_the_dial_and_no_more(
    versions: list[int],
) -> None:
    world, end, there = dial_with_forged_negotiation(versions)
    assert end.handshake is None
    world.tap = lambda data, *_: data
    again = end.host.dial(there)
    assert world.run(lambda: again.handshake)
    assert again.core.quic._version == V1


def test_a_negotiation_after_the_first_answer_is_ignored() -> None:
    world = World()
    here, there = world.host(1), world.host(2)
    end = here.dial(there)
    assert world.run(lambda: end.handshake)
    forged = encode_quic_version_negotiation(
        source_cid=end.core.quic._peer_cid.cid,
        destination_cid=end.core.quic.host_cid,
        supported_versions=[V2],
    )
    world.send(forged, there.address, here.address)
    world.run(seconds=1)
    assert end.core.ended is None
    assert end.core.quic._version == V1


@pytest.mark.parametrize("seed", range(40))
def test_no_change_on_the_way_leads_to_less(seed: int) -> None:
    """A man in the middle changes handshake datagrams as he likes: all or nothing."""
    world = World(seed)
    here, there = world.host(1), world.host(2)
    draw = random.Random(seed)

    def tap(data: bytes, source: Address, target: Address) -> bytes | None:
        if draw.random() < 0.5:
            return data
        changed = bytearray(data)
        for _ in range(draw.choice((1, 1, 4))):
            changed[draw.randrange(min(len(changed), draw.choice((6, 30, 1200))))] = draw.choice(
                (0, 1, 0x80, 0xFF, draw.randrange(256))
            )
        return bytes(changed)

    world.tap = tap
    end = here.dial(there)
    world.run(lambda: end.handshake and there.end.handshake, seconds=10)
    for each in (end, *there.ends.values()):
        if each.handshake:
            other = there if each is end else here
            assert each.handshake.peer == other.key.node_id
            assert each.handshake.alpn == ALPN
            assert each.core.quic._version == V1
            schedule = each.core.quic.tls.key_schedule
            assert schedule is not None
            assert schedule.cipher_suite.name == "AES_256_GCM_SHA384"


# -- the hello


@pytest.mark.anyio
@pytest.mark.parametrize("versions", [[1, 1], [1, 9], [1, 1 << 40]])
async def test_a_range_that_overlaps_gets_the_newest_of_both(versions: list[int]) -> None:
    """The positive control."""
    async with endpoint() as node, raw_client(node.port, SecretKey.generate()) as client:
        client.send(hello(versions=versions), fin=True)
        await client.until(lambda: client.reply())
        assert client.reply()["ok"]["version"] == 1  # type: ignore[index]


@pytest.mark.anyio
@pytest.mark.parametrize("versions", [[0, 0], [0, 1], [2, 3], [2, 1], [-1, 1], [], [1], "11"])
async def test_no_version_but_those_spoken_is_agreed_on(versions: object) -> None:
    async with endpoint() as node, raw_client(node.port, SecretKey.generate()) as client:
        client.send(hello(versions=versions), fin=True)
        await client.until(lambda: client.reply())
        reply = client.reply()
        assert isinstance(reply, dict)
        assert reply["err"]["code"] == "protocol"
        client.quic._remote_max_streams_bidi = 100
        client.send(request("echo", 5), stream_id=4, fin=True)
        await client.until(lambda: client.ended)
        assert client.data(4) == b""


@pytest.mark.anyio
async def test_the_second_of_two_versions_is_refused_by_a_node_that_needs_the_newer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A later release that no longer speaks version 1 can't be talked back into it."""
    monkeypatch.setattr(hello_module, "VERSIONS", (2, 3))
    monkeypatch.setattr(hello_module.negotiate, "__defaults__", ((2, 3),))
    async with endpoint() as node:
        for versions, accepted in (([1, 1], None), ([1, 2], 2), ([1, 9], 3)):
            async with raw_client(node.port, SecretKey.generate()) as client:
                client.send(hello(versions=versions), fin=True)
                await client.until(lambda it=client: it.reply())  # type: ignore[misc]
                reply = client.reply()
                assert isinstance(reply, dict)
                if accepted is None:
                    assert "they speak 1 to 1, we speak 2 to 3" in reply["err"]["why"]
                else:
                    assert reply["ok"]["version"] == accepted
                client.close()


@pytest.mark.anyio
@pytest.mark.parametrize("version", [2, 9, 1 << 40])
async def test_a_listener_can_not_choose_what_the_dialer_has_not_offered(
    version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with endpoint() as node, endpoint() as dialer:
        honest = Welcome.to_value

        def forged(self: Welcome) -> object:
            value = honest(self)
            assert isinstance(value, dict)
            return {**value, "version": version}

        monkeypatch.setattr(Welcome, "to_value", forged)
        with pytest.raises(MeshError, match=f"they speak {version} to {version}"):
            await dialer.connect(at(node))
        assert dialer.connections == ()
        monkeypatch.undo()
        await dialer.connect(at(node))  # the positive control


def without_proof(value: object) -> object:
    assert isinstance(value, dict)
    return {**value, "features": [name for name in value["features"] if name != "proof"]}


@pytest.mark.anyio
@pytest.mark.parametrize("strip", [None, without_proof])
async def test_to_leave_out_the_feature_of_proofs_is_no_way_past_a_secret(
    strip: Callable[[object], object] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = SharedSecret(b"a secret of more than sixteen bytes", scopes=["*"])
    key = SecretKey.generate()
    async with (
        endpoint(secret) as node,
        Endpoint(key, deny_all(), config(), secret=secret) as dialer,
    ):
        if strip is None:  # the positive control
            assert await (await dialer.connect(at(node))).call("echo", 1) == 1
            return
        honest = Hello.to_value
        monkeypatch.setattr(Hello, "to_value", lambda self: strip(honest(self)))
        with pytest.raises(AccessDenied):
            await dialer.connect(at(node))


@pytest.mark.anyio
async def test_features_that_nobody_has_enable_nothing() -> None:
    async with endpoint() as node, raw_client(node.port, SecretKey.generate()) as client:
        client.send(hello(features=["no-limits", "no-auth", "x" * 100]), fin=True)
        await client.until(lambda: client.reply())
        assert client.reply()["ok"]["features"] == []  # type: ignore[index]
        client.send(request("echo", 5), stream_id=4, fin=True)
        await client.until(lambda: client.reply(4))
        assert client.reply(4) == {"ok": 5}


@pytest.mark.anyio
async def test_another_protocol_name_is_no_way_around_the_hello() -> None:
    """TLS protects the choice of a protocol; what is not offered ends the handshake."""
    async with endpoint() as node:
        for alpn in ("mesh/0", "mesh", "h3", ""):
            async with raw_client(node.port, SecretKey.generate(), alpn=alpn) as client:
                client.send(request("echo", 5), fin=True)
                with anyio.move_on_after(0.3):
                    await client.until(lambda it=client: it.ended)  # type: ignore[misc]
                assert not client.handshaken
                assert client.data() == b""


def test_protocol_errors_are_what_a_bad_choice_is_called() -> None:
    with pytest.raises(ProtocolError, match="Upgrade the older"):
        hello_module.negotiate((2, 2), (1, 1))
