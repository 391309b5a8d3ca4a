"""Every parser, of all four packages."""

from __future__ import annotations

from tests.parsers import (
    of_auth,
    of_autograd,
    of_devices,
    of_groups,
    of_mesh,
    of_rpc,
    of_tensor_bridge,
    of_transport,
)
from tests.parsers.parser import Parser

__all__ = ["PARSERS"]

PARSERS: list[Parser] = [
    *of_auth.PARSERS,
    *of_transport.PARSERS,
    *of_tensor_bridge.PARSERS,
    *of_mesh.PARSERS,
    *of_rpc.PARSERS,
    *of_autograd.PARSERS,
    *of_devices.PARSERS,
    *of_groups.PARSERS,
]
