"""Which device the tensors of calls are put on where they arrive.

A caller's device maps decide it both ways: its request names the callee's device for each tensor,
and a result goes to that one of its own which maps to the device that the result was on. What no
map speaks of arrives in the memory of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from auth import NodeId
from mesh.rpc.errors import RpcError
from mesh.rpc.workers import aside

__all__ = ["DeviceMap", "Placement", "check_maps", "own_device"]

DeviceMap = Mapping[torch.device, torch.device]

CPU = torch.device("cpu")


class Placement:
    """Where one node's tensors go.

    Attributes:
        map_to: the device map for a callee.
        devices: the CUDA devices that peers may have tensors put on; empty for all there are.
    """

    def __init__(self) -> None:
        self.map_to: Callable[[NodeId], DeviceMap] = lambda _: {}
        self.devices: tuple[torch.device, ...] = ()

    def has_map(self, to: NodeId) -> bool:
        """Return whether there is a device map for a callee."""
        return bool(self.map_to(to))

    def towards(self, to: NodeId) -> Callable[[torch.device], str | None]:
        """Return what names the callee's device for a tensor that is on one of this node's."""
        mapped = self.map_to(to)
        return lambda device: _name(mapped.get(device, CPU))

    async def ordered(
        self, tensors: Sequence[torch.Tensor], names: Sequence[str | None]
    ) -> Sequence[torch.Tensor]:
        """Return the tensors of a request on the devices that its caller has named.

        Raises:
            RpcError: there is no such device for it.
        """
        if not any(names):
            return tensors
        places = [CPU if name is None else self.device(name) for name in names]
        return await aside(lambda: _put_all(tensors, places))

    async def answered(
        self, tensors: Sequence[torch.Tensor], names: Sequence[str | None], by: NodeId
    ) -> Sequence[torch.Tensor]:
        """Return the tensors of an answer on the devices that the map for its callee says.

        Raises:
            RpcError: the callee names what is no device.
        """
        if not self.map_to(by):
            return tensors
        return await aside(lambda: self.answered_in_thread(tensors, names, by))

    def answered_in_thread(
        self, tensors: Sequence[torch.Tensor], names: Sequence[str | None], by: NodeId
    ) -> Sequence[torch.Tensor]:
        """Return the same as `answered`, to a thread."""
        back = {theirs: mine for mine, theirs in self.map_to(by).items()}
        if not back:
            return tensors
        return _put_all(tensors, [back.get(_parsed(name), CPU) for name in names])

    def device(self, name: str) -> torch.device:
        """Return the device of that name.

        Raises:
            RpcError: there is none, or none that peers may have tensors put on.
        """
        device = _parsed(name)
        allowed = self.devices or tuple(
            torch.device("cuda", number) for number in range(torch.cuda.device_count())
        )
        if device != CPU and device not in allowed:
            raise RpcError(
                f"placing of a tensor on {name!r:.40}",
                why="the callee has no such device for remote calls",
                fix="Map to one that it has: set_device_map().",
            )
        return device


def own_device(device: torch.device) -> str | None:
    """Name the device that a tensor of an answer is on, for its reader to look up in its map."""
    return _name(device)


def check_maps(
    name: str,
    maps: Mapping[str, DeviceMap],
    devices: Sequence[torch.device],
    counts: Mapping[str, int],
) -> None:
    """Return if a worker's device maps can hold in its job.

    Args:
        name: the worker's.
        maps: for each worker that it calls.
        devices: its own that it has named, if any.
        counts: how many CUDA devices each worker of the job has.

    Raises:
        ValueError: they name a worker or a device that there is not.
    """
    strangers = sorted(maps.keys() - counts.keys())
    if strangers:
        raise ValueError(
            f"Node {name} has invalid target node names in its device maps: {', '.join(strangers)}"
        )
    _check(f"Node {name} has devices with invalid indices", devices, counts[name])
    for to, device_map in maps.items():
        _check(
            f"Node {name} has source devices with invalid indices in its device map for {to}",
            device_map.keys(),
            counts[name],
        )
        _check(
            f"Node {name} has target devices with invalid indices in its device map for {to}",
            device_map.values(),
            counts[to],
        )
        if devices and not set(device_map) - {CPU} <= set(devices):
            raise ValueError(
                f"Node {name} has unexpected source devices in its device map for {to}: those that "
                f"it uses are {', '.join(map(str, devices))}"
            )


def _check(what: str, devices: object, count: int) -> None:
    found: list[torch.device] = list(devices)  # type: ignore[call-overload]
    wrong = [each for each in found if each.type == "cuda" and not 0 <= (each.index or 0) < count]
    if wrong:
        raise ValueError(f"{what}: {', '.join(map(str, wrong))}, of {count}")


def _name(device: torch.device) -> str | None:
    return None if device == CPU else str(device)


def _parsed(name: str | None) -> torch.device:
    try:
        return CPU if name is None else torch.device(name)
    except RuntimeError as error:
        raise RpcError(f"placing of a tensor on {name!r:.40}", why="that is no device") from error


def _put_all(tensors: Sequence[torch.Tensor], places: Sequence[torch.device]) -> list[torch.Tensor]:
    return [_put(tensor, place) for tensor, place in zip(tensors, places, strict=True)]


def _put(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # Not recorded: it is another's graph that the tensor is part of.
    return tensor.detach().to(device).requires_grad_(tensor.requires_grad)
