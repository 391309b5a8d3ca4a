"""The barrier that tells who is missing."""

from __future__ import annotations

from mesh.collective.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout
from mesh.collective.operation import Operation

__all__ = ["monitored_barrier"]


def monitored_barrier(operation: Operation, *, name_all: bool) -> None:
    """Return once every rank has come here, as rank 0 sees it.

    Texts of errors begin as those of ``torch.distributed.monitored_barrier``, which programs look
    for.

    Args:
        operation: entered by the caller.
        name_all: on rank 0, name all missing ranks in the text and not the first alone; ``ranks``
            of the error has all of them either way.

    Raises:
        CollectiveTimeout: on rank 0: ranks did not come in time.
        CollectiveError: on the others, if rank 0 failed.
    """
    if operation.rank == 0:
        _collect(operation, name_all)
        for peer in operation.others:
            operation.send(peer, memoryview(b""))
        operation.finish()
        return
    operation.send(0, memoryview(b""))
    operation.receive(0, memoryview(bytearray()))
    try:
        operation.finish()
    except CollectiveMismatch:
        raise
    except CollectiveError as error:
        why = (
            f"Rank {operation.rank} successfully reached monitoredBarrier, but received errors "
            f"while waiting for send/recv from rank 0: {error.why}"
        )
        raise type(error)(
            error.what, ranks=error.ranks, after=error.after, why=why, fix=error.fix
        ) from error


def _collect(operation: Operation, name_all: bool) -> None:
    for peer in operation.others:
        operation.receive(peer, memoryview(bytearray()))
    try:
        operation.finish()
    except CollectiveTimeout as error:
        if not error.ranks or operation.rank in error.ranks:  # or another's time ran out first
            raise
        named = error.ranks if name_all else error.ranks[:1]
        who = f"Rank{'s' if len(named) > 1 else ''} {', '.join(map(str, named))}"
        labels = ", ".join(map(operation.exchange.label, error.ranks))
        raise CollectiveTimeout(
            error.what,
            ranks=error.ranks,
            after=error.after,
            why=f"{who} failed to pass monitoredBarrier; missing: {labels}",
            fix=error.fix,
        ) from error
