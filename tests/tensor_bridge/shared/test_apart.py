"""Two on one host that are not of one user, or not in one namespace: they use QUIC, and say why."""

from __future__ import annotations

import os

import pytest

from tensor_bridge.lanes.shared.host import FACTS, unavailable
from tests.lab.network import lab, missing
from tests.tensor_bridge.shared.program import hear, start

needs_root = pytest.mark.skipif(
    unavailable() is not None or os.geteuid() != 0,
    reason=unavailable() or "another user, or another namespace, needs root",
)
needs_lab = pytest.mark.skipif(missing() is not None, reason=str(missing()))

NOBODY = 65534


def lane_between(
    here: dict[str, object], there: dict[str, object], host: str = "127.0.0.1"
) -> tuple[str, str | None]:
    """Return the lane that a node uses to move to another, and why.

    They are processes of their own, one on either event loop.
    """
    with start("asyncio", **there) as server:
        try:
            said = hear(server)
            peer = (said["node"], host, said["port"])
            with start("trio", peer=peer, **here) as mover:
                try:
                    hear(mover)
                    said = hear(mover)
                finally:
                    mover.kill()
        finally:
            server.kill()
    return said["lane"], said["reason"]


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_two_that_are_together_share_memory() -> None:
    assert lane_between({}, {}) == ("shared-memory", None)


@needs_root
@pytest.mark.parametrize("who", ["the mover", "the server", "both"])
def test_two_users_use_quic(who: str) -> None:
    here = {"user": NOBODY} if who != "the server" else {}
    there = {"user": NOBODY} if who != "the mover" else {}
    expected = ("shared-memory", None) if who == "both" else ("quic", FACTS["user"])
    assert lane_between(here, there) == expected


@needs_root
def test_two_mount_namespaces_use_quic() -> None:
    lane = lane_between({"mounts": True}, {})
    assert lane == ("quic", FACTS["mount namespace"])


@needs_lab
def test_two_network_namespaces_use_quic() -> None:
    with lab() as net:
        a, b = net.host("a"), net.host("b")
        net.link(a, b, "eth0", "10.7.0.1/24", "10.7.0.2/24")
        here = {"namespace": a.namespace, "bind": "10.7.0.1:0"}
        there = {"namespace": b.namespace, "bind": "10.7.0.2:0"}
        lane = lane_between(here, there, "10.7.0.2")
        assert lane == ("quic", FACTS["network namespace"])
        alike = {"namespace": b.namespace, "bind": "10.7.0.2:0"}
        assert lane_between(alike, there, "10.7.0.2") == ("shared-memory", None)
