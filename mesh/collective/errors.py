"""The branch of the exception tree that belongs to collectives (its root is in ``auth.errors``).

    MeshError
    ├── CollectiveError         an operation of a group failed, and every later one will
    │   ├── CollectiveTimeout   its deadline passed; names the ranks that are still awaited
    │   ├── CollectiveMismatch  two ranks called different things; names both sides
    │   ├── RankLost            the connection to a rank broke
    │   ├── RankLeft            a rank left the group while it was still needed
    │   ├── RankFailed          an operation raised on another rank
    │   └── GroupAborted        the group was aborted, here or on another rank
    └── UnsupportedCollective   arguments that can't be worked with; nothing is broken

All of `CollectiveError` are `RuntimeError` too, which is what programs written for
``torch.distributed`` catch; `UnsupportedCollective` is a `ValueError`, raised at the call.
"""

from __future__ import annotations

from typing import Self

from auth import MeshError

__all__ = [
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "GroupAborted",
    "RankFailed",
    "RankLeft",
    "RankLost",
    "UnsupportedCollective",
    "error_class",
]


class CollectiveError(MeshError, RuntimeError):
    """An operation of a group failed, and with it the group: leave it and form a new one.

    Args:
        what: the operation: ``"all_reduce #5 of group 'default_pg' on rank 0"``.
        ranks: the ranks at fault, in the group's numbering. Empty if none is.
        peer: as in `MeshError`, and so are the others.
    """

    code = "collective"

    ranks: tuple[int, ...] = ()

    def __init__(
        self,
        what: str,
        *,
        ranks: tuple[int, ...] = (),
        peer: object | None = None,
        stage: str | None = None,
        after: float | None = None,
        why: str | None = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(what, peer=peer, stage=stage, after=after, why=why, fix=fix)
        self.ranks = ranks

    def during(self, what: str, *, after: float | None = None) -> Self:
        """Return the same error about another operation: each waiter raises its own instance."""
        return type(self)(
            what,
            ranks=self.ranks,
            peer=self.peer,
            stage=self.stage,
            after=self.after if after is None else after,
            why=self.why,
            fix=self.fix,
        )


class CollectiveTimeout(CollectiveError):
    """The deadline of an operation passed. ``ranks`` are those still awaited."""

    code = "collective-timeout"
    exit_code = 5


class CollectiveMismatch(CollectiveError):
    """Two ranks differ in operation, order, dtype or size. ``why`` names both sides."""

    code = "collective-mismatch"
    exit_code = 2


class RankLost(CollectiveError):
    """The connection to a rank broke: its process was killed, its host or network is gone."""

    code = "rank-lost"
    exit_code = 3


class RankLeft(CollectiveError):
    """A rank left the group on purpose, and this operation needed it."""

    code = "rank-left"
    exit_code = 3


class RankFailed(CollectiveError):
    """An operation raised on another rank. ``why`` is what it told."""

    code = "rank-failed"


class GroupAborted(CollectiveError):
    """The group was aborted or shut down, here or on the ranks in ``ranks``."""

    code = "group-aborted"


class UnsupportedCollective(MeshError, ValueError):
    """A dtype, layout, device, reduction or arrangement of tensors that can't be done."""

    code = "unsupported-collective"
    exit_code = 2


_CLASSES: dict[str, type[CollectiveError]] = {
    kind.code: kind
    for kind in (
        CollectiveTimeout,
        CollectiveMismatch,
        RankLost,
        RankLeft,
        RankFailed,
        GroupAborted,
    )
}


def error_class(code: str) -> type[CollectiveError]:
    """Return the class that `code` names in another rank's report; `RankFailed` if none."""
    return _CLASSES.get(code, RankFailed)
