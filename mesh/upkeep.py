"""What a node sees to while it is open: keys that change, and its own machine's word for it."""

from __future__ import annotations

import logging
import time
from collections import deque

import anyio
import anyio.to_thread

from auth import AuthorizedKeys, Delegation, MeshError, NodeId
from mesh.home import Home
from transport import Endpoint

__all__ = ["LOOK_SECONDS", "keep_delegated", "watch_keys"]

POLL_SECONDS = 1.0
"""How often the file of authorized keys is looked at: a removed peer is cut off within this."""

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


async def watch_keys(keys: AuthorizedKeys, endpoint: Endpoint) -> None:
    """Have changes of a file of keys take effect on the connections of `endpoint`."""
    removed: deque[NodeId] = deque()
    changed: deque[NodeId] = deque()
    # Called in whichever thread notices; connections are seen to here, in the loop.
    unsubscribe = keys.subscribe(removed.append, changed=changed.append)
    try:
        while True:
            keys.poll()
            while removed:
                endpoint.revoke(removed.popleft(), "its key is no longer authorized")
            while changed:
                await endpoint.reconsider(changed.popleft())
            await anyio.sleep(POLL_SECONDS)
    finally:
        unsubscribe()
