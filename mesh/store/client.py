"""A job's store from afar."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from auth import IdentityError, NodeId
from mesh.store.service import FAMILY, MAX_WAIT, Member, StoreService
from transport import CborValue, DeadlineExceeded, Endpoint, PeerAddress, ProtocolError

__all__ = ["StoreClient"]

REPLY_SECONDS = 10.0
"""Beyond what an operation waits for: how long its answer may take."""


class StoreClient:
    """The store of one job, at the node that keeps it, or in this very node.

    All methods run in the endpoint's event loop.

    Args:
        endpoint: this node's, open.
        keeper: the node that keeps the store; None for `service`.
        job: the job.
        service: this node's own, if it keeps the store.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        keeper: PeerAddress | None,
        job: str,
        service: StoreService | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._keeper = keeper
        self._job = job
        self._service = service

    async def do(self, operation: str, *, timeout: float = 0.0, **fields: CborValue) -> Any:
        """Do one operation; see `mesh.store.service`.

        Args:
            operation: its name.
            timeout: seconds to wait for what it needs.
            fields: what it takes.

        Raises:
            DeadlineExceeded: what was waited for did not come.
            MeshError: the keeper is out of reach, refuses, or the operation can't be done.
        """
        began = time.monotonic()
        while True:
            left = began + timeout - time.monotonic()
            value: CborValue = {"op": operation, "timeout": min(max(left, 0.0), MAX_WAIT), **fields}
            try:
                return await self._ask(value, min(max(left, 0.0), MAX_WAIT) + REPLY_SECONDS)
            except DeadlineExceeded as error:
                if time.monotonic() < began + timeout:
                    continue  # it was asked to wait for a part of the time
                error.after = time.monotonic() - began
                raise

    async def enrol(
        self, rank: int, size: int, addresses: Sequence[str], timeout: float
    ) -> list[Member]:
        """Say who has `rank`, and return who has each, once all are known.

        Raises:
            AccessDenied: another key has that rank.
            DeadlineExceeded: names the ranks that did not come.
        """
        found = await self.do(
            "enrol", timeout=timeout, rank=rank, size=size, addresses=list(addresses)
        )
        try:
            members = [Member(NodeId.parse(node), tuple(map(str, where))) for node, where in found]
        except (TypeError, ValueError, IdentityError) as error:
            raise ProtocolError("enrolment as a rank of a job", why=str(error)) from error
        if len(members) != size:
            raise ProtocolError("enrolment as a rank of a job", why="ranks are missing")
        return members

    async def _ask(self, value: CborValue, timeout: float) -> CborValue:
        if self._service is not None:
            return await self._service.answer(self._job, value, self._endpoint.node_id)
        assert self._keeper is not None
        connection = await self._endpoint.connect(self._keeper, timeout=REPLY_SECONDS)
        return await connection.call(f"{FAMILY}:{self._job}", value, timeout=timeout)
