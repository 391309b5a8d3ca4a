"""Receives from whichever rank has a message: kept beside the links until one has.

All of it runs in the event loop of the node.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping

from mesh.collective import CollectiveError, Transfer
from mesh.collective.exchange import Channel, Check
from mesh.distributed.link import Link, PostedReceive

__all__ = ["AnySource", "PostedAny"]


@dataclasses.dataclass(frozen=True, slots=True)
class PostedAny:
    """A place for a message of any rank. `check` is made once it is known of which."""

    channel: Channel
    check: Callable[[int], Check]
    into: memoryview
    transfer: Transfer


class AnySource:
    """The receives of one group that name no rank.

    A receive is handed to the link whose message nobody else waits for, and is an ordinary one from
    then on. Receives that name the rank come first.

    Args:
        links: to each other rank.
    """

    def __init__(self, links: Mapping[int, Link]) -> None:
        self._links = links
        self._pending: dict[Channel, deque[PostedAny]] = {}

    def post(self, receive: PostedAny) -> None:
        """Take a receive; it has a message at once if one has come."""
        for link in self._links.values():
            if link.has_unmatched(receive.channel):
                _hand(receive, link)
                return
        self._pending.setdefault(receive.channel, deque()).append(receive)
        self.departed()

    def match(self, peer: int, channel: Channel) -> None:
        """Give a message of `peer` that nobody waits for to a receive, if there is one."""
        while queue := self._pending.get(channel):
            receive = queue.popleft()
            if not queue:
                del self._pending[channel]
            if not receive.transfer.done:  # as when its time ran out
                _hand(receive, self._links[peer])
                return

    def departed(self) -> None:
        """Fail all receives if no rank is left that could send."""
        gone = [link.gone for link in self._links.values()]
        errors = [error for error in gone if error is not None]
        if errors and len(errors) == len(gone):
            self.fail(errors[-1])

    def fail(self, error: CollectiveError) -> None:
        """Fail all receives."""
        while self._pending:
            _, queue = self._pending.popitem()
            for receive in queue:
                receive.transfer.finish(error)


def _hand(receive: PostedAny, link: Link) -> None:
    receive.transfer.peer = link.peer
    check = receive.check(link.peer)
    link.post_receive(PostedReceive(receive.channel, check, receive.into, receive.transfer))
