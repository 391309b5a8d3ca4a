"""Admits the ranks of jobs, on the word of the node that a job's ticket names."""

from __future__ import annotations

from collections.abc import Iterable

from auth import AccessRequest, Denial, Grant, NodeId

__all__ = ["JobMembers"]


class JobMembers:
    """An authorizer: who was vouched for may take part in the job, and do nothing else.

    Each rank proves its key to the node that the ticket names, which tells all ranks those keys.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, frozenset[NodeId]] = {}

    def vouch(self, job: str, members: Iterable[NodeId]) -> None:
        """Admit `members`, and nobody else any longer, to `job`."""
        self._jobs[job] = frozenset(members)

    async def authorize(self, request: AccessRequest) -> Grant | Denial:
        """See `auth.Authorizer`."""
        node_id = request.peer.node_id
        jobs = [job for job, members in self._jobs.items() if node_id in members]
        if not jobs:
            return Denial("not-a-member", "its key is no rank's of a job here")
        return Grant(frozenset(f"collective:{job}" for job in jobs))
