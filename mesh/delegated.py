"""A program that runs for longer than its machine's word for it holds."""

from __future__ import annotations

import logging
import time

import anyio
import anyio.to_thread

from auth import Delegation, MeshError
from mesh.home import Home
from transport import Endpoint

__all__ = ["LOOK_SECONDS", "keep_delegated"]

LOOK_SECONDS = 600.0
"""Between two looks at the clock: one that was set, or a machine that slept, is noticed by then."""

_log = logging.getLogger("quicmesh.node")


async def keep_delegated(endpoint: Endpoint, home: Home, delegation: Delegation) -> None:
    """Renew the delegation that `endpoint` acts under whenever half of its life is over.

    A machine's key that can't be read then is logged, and tried again: half of a life is left.
    """
    while True:
        half = (delegation.issued_at + delegation.expires_at) / 2
        await anyio.sleep(min(max(half - time.time(), 0.0), LOOK_SECONDS))
        if time.time() < half:
            continue
        try:
            delegation = await anyio.to_thread.run_sync(home.renewed, delegation)
            await endpoint.present(delegation)
        except MeshError as error:
            _log.warning("this program's delegation could not be renewed: %s", error)
            await anyio.sleep(min((delegation.expires_at - half) / 4, LOOK_SECONDS))
