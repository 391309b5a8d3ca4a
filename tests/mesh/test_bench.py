"""What `mesh bench` measures between two nodes, for whom, and what it leaves behind."""

from __future__ import annotations

import anyio
import pytest
import typer

from auth import AccessDenied, AccessRequest, Denial, Grant, Quotas, allow_any
from mesh import Node, Peer
from mesh.bench import (
    ECHO_CALL,
    MAX_ECHO,
    QUIET_SHARE,
    USAGE_CALL,
    WARM_UP,
    Link,
    Plan,
    Result,
    Transfer,
    Trips,
    Usage,
    Way,
    measure,
)
from mesh.cli.bench import size_in_bytes
from mesh.errors import ProtocolError, QuotaExceeded, ServiceUnknown
from tests.mesh.nodes import eventually, node

pytestmark = pytest.mark.anyio

KIB = 1 << 10
SHORT = Plan(sizes=(64 * KIB, 4 * KIB), rounds=2, calls=20, seconds=5.0)


@pytest.fixture(autouse=True)
def _glance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.bench.LOOK_SECONDS", 0.02)


class Few:
    """Lets everybody hold so many bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._grant = Grant(frozenset({"*"}), quotas=Quotas(max_bytes=max_bytes))

    async def authorize(self, request: AccessRequest) -> Grant | Denial:
        return self._grant


async def measured(peer: Peer, plan: Plan = SHORT) -> list[Result]:
    results: list[Result] = []
    await measure(peer, plan, found=results.append)
    return results


def tensors(of: Node) -> int:
    return of.table_sizes()["tensors"]


async def test_both_ways_and_what_lies_between() -> None:
    steps: list[tuple[str, float]] = []
    results: list[Result] = []
    async with node() as here, node(tensors=True) as there:
        peer = await here.connect(there.ticket())
        await measure(
            peer, SHORT, found=results.append, moved=lambda what, share: steps.append((what, share))
        )
        link, trips, *transfers = results
        assert isinstance(link, Link)
        assert link.label == peer.label
        assert link.path == f"127.0.0.1:{there.endpoint.port}"
        assert link.lane == "in-process"
        assert isinstance(trips, Trips)
        assert (trips.nbytes, trips.count) == (64, 20)
        assert 0 < trips.p50 <= trips.p99 < 5
        moves = [each for each in transfers if isinstance(each, Transfer)]
        assert [(each.way, each.nbytes) for each in moves] == [
            (way, nbytes) for nbytes in (4 * KIB, 64 * KIB) for way in (Way.PUT, Way.GET)
        ]
        for each in moves:
            assert each.rounds >= SHORT.rounds
            assert 0 < each.least <= each.rate <= each.most
            assert each.cpu_here > 0
            assert each.cpu_there > 0
        assert {what for what, _ in steps} >= {"warming up", "round trips", "get of 64 KiB"}
        assert all(0 <= share <= 1 for _, share in steps)
        assert tensors(there) == 0


async def test_without_messages() -> None:
    async with node() as here, node(tensors=True) as there:
        plan = Plan(sizes=(KIB,), rounds=1, calls=0, seconds=0.1)
        kinds = [type(each) for each in await measured(await here.connect(there.ticket()), plan)]
        assert kinds == [Link, Transfer, Transfer]


async def test_it_takes_what_tensors_take() -> None:
    async with (
        node() as here,
        node(allow_any(("node",)), tensors=True) as strict,
        node(allow_any(("tensor:put", "tensor:read", "tensor:delete")), tensors=True) as lax,
    ):
        connection = await (await here.connect(strict.ticket())).connection()
        for call in (ECHO_CALL, USAGE_CALL):
            with pytest.raises(AccessDenied):
                await connection.call(call, b"")
        with pytest.raises(AccessDenied):
            await measured(await here.connect(strict.ticket()))
        assert await measured(await here.connect(lax.ticket()))  # positive control


async def test_a_node_without_tensors_says_so() -> None:
    async with node() as here, node() as there:
        with pytest.raises(ServiceUnknown):
            await measured(await here.connect(there.ticket()))


async def test_quotas_hold() -> None:
    # The warm-up is the least that has to fit; what does not is left out, with the reason.
    plan = Plan(sizes=(KIB, 2 * WARM_UP), rounds=1, calls=0, seconds=0.1)
    async with node() as here, node(Few(WARM_UP), tensors=True) as there:
        _, *transfers = await measured(await here.connect(there.ticket()), plan)
        small, large = transfers[:2], transfers[2:]
        assert [each.why for each in small if isinstance(each, Transfer)] == [None, None]
        assert all(isinstance(each, Transfer) and each.why for each in large)
        assert tensors(there) == 0
    async with node() as here, node(Few(KIB), tensors=True) as there:
        peer = await here.connect(there.ticket())
        with pytest.raises(QuotaExceeded):
            await measured(peer, plan)
        assert await measured(peer, Plan(sizes=(KIB,), rounds=1, calls=0, seconds=0.1))


async def test_what_would_take_too_long_is_left_out() -> None:
    plan = Plan(sizes=(KIB, 1 << 30), rounds=1, calls=0, seconds=1e-6)
    async with node() as here, node(tensors=True) as there:
        *_, put, get = await measured(await here.connect(there.ticket()), plan)
        for each in (put, get):
            assert isinstance(each, Transfer)
            assert each.nbytes == 1 << 30
            assert each.why is not None
            assert each.why.startswith("takes ")


@pytest.mark.parametrize("step", ["warming up", "put of 256 KiB", "get of 256 KiB"])
async def test_cancelled_it_leaves_nothing_behind(step: str) -> None:
    plan = Plan(sizes=(256 * KIB,), rounds=1, calls=0, seconds=1.0)
    async with node() as here, node(tensors=True) as there:
        peer = await here.connect(there.ticket())
        with anyio.CancelScope() as scope:

            def moved(what: str, share: float) -> None:
                if what == step:
                    scope.cancel()

            await measure(peer, plan, found=lambda result: None, moved=moved)
        assert scope.cancelled_caught
        await eventually(lambda: tensors(there) == 0)


@pytest.mark.parametrize("value", [bytes(MAX_ECHO + 1), "text", None, 1])
async def test_an_echo_is_of_a_few_bytes(value: object) -> None:
    async with node() as here, node(tensors=True) as there:
        connection = await (await here.connect(there.ticket())).connection()
        with pytest.raises(ProtocolError):
            await connection.call(ECHO_CALL, value)  # type: ignore[arg-type]
        assert await connection.call(ECHO_CALL, bytes(MAX_ECHO)) == bytes(MAX_ECHO)


@pytest.mark.parametrize(
    "fields", [{"cpu": -1.0}, {"cpu": 1}, {"busy": float("inf")}, {"datagram": -1}, {"cpu": None}]
)
async def test_usage_that_can_not_be_is_refused(fields: dict[str, object]) -> None:
    message = Usage(1.0, 2.0, 1.0, 1200).as_message()
    assert Usage.from_message(message) == Usage(1.0, 2.0, 1.0, 1200)
    with pytest.raises(ProtocolError):
        Usage.from_message(message | fields)  # type: ignore[arg-type, operator]


async def test_a_busy_machine_is_named() -> None:
    link = Link("gpu-b", "192.0.2.1:1", "quic", 0.001, 1452, 1452, QUIET_SHARE / 2, 0.5)
    assert link.noise == ("gpu-b is 50% busy",)


async def test_sizes_are_written_as_people_do() -> None:
    assert size_in_bytes("64K") == size_in_bytes("64KiB") == size_in_bytes(" 65536 ") == 65536
    assert size_in_bytes("2g") == 2 << 30
    for wrong in ("", "K", "4X", "-1", "0", "65G", "1.5M", "9" * 13):
        with pytest.raises(typer.BadParameter):
            size_in_bytes(wrong)
