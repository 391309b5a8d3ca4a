"""What ``init_rpc`` can be told beside names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias

import torch

from mesh.rpc.agent import DEFAULT_TIMEOUT, DEFAULT_WORKERS
from mesh.rpc.errors import RpcError

if TYPE_CHECKING:
    from mesh.blocking import Node

__all__ = ["DEFAULT_INIT_METHOD", "DEFAULT_TIMEOUT", "MeshRpcBackendOptions", "RpcBackendOptions"]

DEFAULT_INIT_METHOD = "env://"

Device: TypeAlias = int | str | torch.device


@dataclasses.dataclass(kw_only=True)
class RpcBackendOptions:
    """Options that every backend has.

    Attributes:
        rpc_timeout: seconds that a call may take unless it is told otherwise; 0 for no limit.
        init_method: where workers find each other: a URL of ``torch.distributed.rendezvous``.
    """

    rpc_timeout: float = DEFAULT_TIMEOUT
    init_method: str = DEFAULT_INIT_METHOD


@dataclasses.dataclass(kw_only=True)
class MeshRpcBackendOptions(RpcBackendOptions):
    """Options of ``init_rpc``, with the names and defaults of ``TensorPipeRpcBackendOptions``.

    Attributes:
        rpc_timeout, init_method: as `RpcBackendOptions`.
        num_worker_threads: functions that block which run at a time, beside those that wait for
            another call.
        device_maps: for each worker that is called, by name, on which of its devices what is on one
            of this worker's arrives; results come back the other way.
        devices: this worker's CUDA devices that calls may use; by default all.
        pickles: write pickles where nothing else will do, as upstream does; each peer reads them if
            it grants this program the scope ``rpc:pickle`` by that name. Whoever has it can run any
            code there.
        node: this worker's node, open; by default a new one of this machine, `mesh.Node.worker`.
    """

    num_worker_threads: int = DEFAULT_WORKERS
    device_maps: Mapping[str, Mapping[Device, Device]] | None = None
    devices: Iterable[Device] | None = None
    pickles: bool = False
    node: Node | None = None

    def __post_init__(self) -> None:
        timeout = self.rpc_timeout
        if not isinstance(timeout, int | float):
            raise TypeError(
                f"incompatible constructor arguments: rpc_timeout is a {type(timeout).__name__}, "
                "not a number of seconds"
            )
        if self.num_worker_threads < 1:
            raise RpcError(
                "options of remote calls",
                why=f"num_worker_threads is {self.num_worker_threads}, and must be 1 at least",
            )
        if not 0 <= timeout < 1e9:
            raise RpcError(
                "options of remote calls",
                why=f"rpc_timeout is {timeout}, not a number of seconds from 0 on",
            )
        given, self.device_maps = self.device_maps or {}, {}
        for to, device_map in given.items():
            self.set_device_map(to, device_map)
        self.set_devices(self.devices or ())

    def set_device_map(self, to: str, device_map: Mapping[Device, Device]) -> None:
        """Add to the device map for one worker.

        Args:
            to: the worker's name.
            device_map: this worker's devices, and that one's for each.

        Raises:
            ValueError: together with what is there already it does not map one to one.
        """
        maps: dict[str, dict[torch.device, torch.device]] = self.device_maps  # type: ignore[assignment]
        whole = dict(maps.get(to, {}))
        for key, value in device_map.items():
            mine, theirs = torch.device(key), torch.device(value)
            known = whole.get(mine, theirs)
            if known != theirs:
                raise ValueError(
                    "`set_device_map` only supports 1-to-1 mapping, trying to map "
                    f"{mine} to {theirs} and {known}"
                )
            taken = next((each for each, other in whole.items() if other == theirs), mine)
            if taken != mine:
                raise ValueError(
                    "`device_map` only supports 1-to-1 mapping, trying to map "
                    f"{mine} and {taken} to {theirs}"
                )
            whole[mine] = theirs
        maps[to] = whole

    def set_devices(self, devices: Iterable[Device]) -> None:
        """Say which CUDA devices of this worker's calls may use.

        Raises:
            ValueError: one is no CUDA device.
        """
        found = [torch.device(each) for each in devices]
        for each in found:
            if each.type != "cuda":
                raise ValueError(
                    f"`set_devices` expect a list of CUDA devices, but got device type {each.type}."
                )
        self.devices = found
