"""A peer's hardware as a `torch.device`: ordinary PyTorch code computes there.

::

    d = mesh.device(ticket, 0)
    model.to(d); loss.backward(); optimizer.step(); y.cpu()

Tensors on ``mesh:k`` are plain `torch.Tensor` objects whose elements lie at a peer. Each storage
has one handle there; views are made here, and the peer hears of them as shape, strides and offset
alone. Operations stream to the peer in batches and nobody waits for them; who reads elements does.

The rooms, and the one idea of each:

``ops``      the positive list: what a client may have run, by name
``templates`` one operation but for its tensors and numbers: pure, strict, bounded
``wire``     batches of messages and answers: the same
``link``     frames that survive the stream they travel on: numbered, kept until acknowledged
``client/``  a torch backend that sends operations on instead of running them
``server/``  one executor process per session, which checks everything and can only harm itself
``api``      `device`, `devices`, `describe`: what programs call
``errors``   the branch of the exception tree

A peer offers devices by name (``mesh up --device cpu``), to programs that are granted the scope
``device``: none has it unless somebody says so, because it is the right to compute.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

from mesh._lazy import lazy_names

if TYPE_CHECKING:
    from mesh.device.api import (
        DeviceInfo,
        close,
        configure,
        describe,
        device_async,
        devices,
        devices_async,
        read,
        synchronize,
        synchronize_async,
    )
    from mesh.device.client.capturing import Captured, capture
    from mesh.device.server.service import DeviceLimits, DeviceService

__all__ = [
    # on the program's side; the module itself, called, is `mesh.device.api.device`
    "Captured",
    "DeviceInfo",
    "capture",
    "close",
    "configure",
    "describe",
    "device_async",
    "devices",
    "devices_async",
    "read",
    "synchronize",
    "synchronize_async",
    # on the peer's side
    "DeviceLimits",
    "DeviceService",
]


class _Callable(types.ModuleType):
    """This module, which is the function to open a device as well: ``mesh.device(ticket)``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from mesh.device.api import device

        return device(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable

if not TYPE_CHECKING:  # Whoever offers no devices, and uses none, does not wait for torch.
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            **dict.fromkeys(
                (
                    "DeviceInfo",
                    "close",
                    "configure",
                    "describe",
                    "device_async",
                    "devices",
                    "devices_async",
                    "read",
                    "synchronize",
                    "synchronize_async",
                ),
                "mesh.device.api",
            ),
            "Captured": "mesh.device.client.capturing",
            "capture": "mesh.device.client.capturing",
            "DeviceLimits": "mesh.device.server.service",
            "DeviceService": "mesh.device.server.service",
        },
    )
