"""Answering at once, in the event loop that reads the call: operators that take a moment.

A thread that runs the function would take longer to begin than the function takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mesh.rpc.encoding.exceptions import encode_exception
from mesh.rpc.encoding.patterns import KEPT, Pattern, request_pattern, write_answer
from mesh.rpc.encoding.values import Packer
from mesh.rpc.names.operators import prompt_operator, result_bound
from mesh.rpc.refs.passing import Outgoing
from mesh.rpc.tensors.carriage import beside
from mesh.rpc.wire import Answer
from transport import NOT_NOW, CborValue, Incoming, NotNow

if TYPE_CHECKING:
    from mesh.rpc.agent import Agent
    from mesh.rpc.tensors.parts import Parts

__all__ = ["Prompt"]


class Prompt:
    """Answers the calls to an agent that can be answered at once.

    Args:
        agent: whose calls they are.
        parts: where large results wait to be fetched.
    """

    def __init__(self, agent: Agent, parts: Parts) -> None:
        self._agent = agent
        self._parts = parts

    def answer(self, incoming: Incoming) -> CborValue | NotNow:
        """Answer a call of an operator that takes a moment; for no other, and do nothing then.

        Raises:
            ProtocolError: it is malformed.
        """
        match incoming.value:
            case [bytes(head), bytes(items), bytes(content)]:
                pattern = request_pattern(head, items)
            case _:
                return NOT_NOW
        found = None if pattern is None else _operator_of(pattern)
        if pattern is None or found is None or found[1] > result_bound(incoming.grant):
            return NOT_NOW
        args, kwargs = pattern.arguments(pattern.read(content))
        try:
            value = found[0](*args, **kwargs)
        except Exception as error:
            return Answer(error=encode_exception(error)).encode()
        return write_answer(value) or self._packed(value, incoming)

    def _packed(self, value: Any, incoming: Incoming) -> CborValue:
        agent, peer = self._agent, incoming.peer.node_id
        packer = Packer(agent.types, Outgoing(agent, peer))
        packer.pack(value, "the result")
        packed = packer.packed
        what, key = beside(packed.tensors), b""
        if what.apart:
            key = self._parts.offer(peer, incoming.grant, packed.tensors, what)
        return Answer(packed.items, what, key).encode()


@functools.lru_cache(KEPT)
def _operator_of(pattern: Pattern) -> tuple[Callable[..., Any], int] | None:
    target = pattern.target
    if target is None or target.kind != "operator":
        return None
    return prompt_operator(target.name, *pattern.arguments(pattern.values))
