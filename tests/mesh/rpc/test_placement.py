"""Which device tensors arrive on, by maps of callers; ``meta`` stands for one of the callee's."""

from __future__ import annotations

import pytest
import torch

from mesh.rpc import RpcError
from mesh.rpc.tensors.placement import Placement, check_maps, own_device
from tests.mesh.rpc import exposures
from tests.mesh.rpc.nodes import agents

CPU, META = torch.device("cpu"), torch.device("meta")
FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


@pytest.mark.anyio
@pytest.mark.parametrize("count", [2, 60_000])
async def test_arguments_go_where_the_map_says(count: int) -> None:
    async with agents(2) as (a, b):
        assert await a.call(b.node_id, exposures.device_of, (torch.zeros(count),)) == "cpu"
        a.placement.map_to = lambda to: {CPU: META} if to == b.node_id else {}
        with pytest.raises(RpcError, match="no such device"):
            await a.call(b.node_id, exposures.device_of, (torch.zeros(count),))
        b.placement.devices = (META,)
        assert await a.call(b.node_id, exposures.device_of, (torch.zeros(count),)) == "meta"
        assert await b.call(a.node_id, exposures.device_of, (torch.zeros(count),)) == "cpu"


@pytest.mark.anyio
async def test_results_come_back_the_other_way() -> None:
    placement = Placement()
    tensor = torch.zeros(2, requires_grad=True)
    assert (await placement.answered([tensor], [None], None))[0] is tensor  # type: ignore[arg-type]
    placement.map_to = lambda _: {META: FIRST}
    there, here = await placement.answered([tensor, tensor], ["cuda:0", None], None)  # type: ignore[arg-type]
    assert (there.device, here.device) == (META, CPU)
    assert there.requires_grad
    assert there.is_leaf
    assert placement.towards(None)(META) == "cuda:0"  # type: ignore[arg-type]
    assert placement.towards(None)(CPU) is None  # type: ignore[arg-type]
    assert (own_device(CPU), own_device(SECOND)) == (None, "cuda:1")


@pytest.mark.parametrize("name", ["nonsense", "cuda:9999", "mesh:0"])
@pytest.mark.anyio
async def test_what_is_no_device_here_is_refused(name: str) -> None:
    with pytest.raises(RpcError, match="placing of a tensor"):
        await Placement().ordered([torch.zeros(1)], [name])


def test_maps_fit_their_job() -> None:
    counts = {"a": 1, "b": 2}
    check_maps("a", {"b": {FIRST: SECOND, CPU: FIRST}}, (), counts)
    check_maps("a", {"b": {FIRST: SECOND, CPU: FIRST}}, (FIRST,), counts)
    for maps, devices, text in (
        ({"c": {FIRST: FIRST}}, (), "invalid target node names"),
        ({"b": {SECOND: FIRST}}, (), "source devices with invalid indices"),
        ({"a": {FIRST: SECOND}}, (), "target devices with invalid indices"),
        ({}, (SECOND,), "devices with invalid indices"),
    ):
        with pytest.raises(ValueError, match=text):
            check_maps("a", maps, devices, counts)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unexpected source devices"):
        check_maps("b", {"a": {FIRST: FIRST}}, (SECOND,), counts)
