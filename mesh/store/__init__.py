"""Where the ranks of a job meet: keys and values, kept by one node, for members of the job alone.

Knows no torch: daemon and launcher keep stores, too. `mesh.distributed.store` is torch's ``Store``.
"""

from __future__ import annotations

from mesh.store.client import StoreClient
from mesh.store.keyvalues import KeyValues, StoreLimits
from mesh.store.service import Member, StoreService

__all__ = ["KeyValues", "Member", "StoreClient", "StoreLimits", "StoreService"]
