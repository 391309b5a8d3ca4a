"""Calls by threads, the short way: where a peer of this host shares memory, without the event loop.

A call of little takes less time than it takes a thread to ask a loop for it and to be woken. So the
thread that makes it writes and reads its messages itself, where nothing in them needs the loop:
no references, no tensors that travel apart, no pickles, no autograd context. All else is as in
`Agent.call`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from auth import MeshError, NodeId
from mesh.rpc.bridge import ended
from mesh.rpc.encoding.exceptions import decode_exception
from mesh.rpc.encoding.patterns import answer_pattern, write_request
from mesh.rpc.encoding.values import Packer, Unpacker
from mesh.rpc.errors import RpcError, as_runtime_error
from mesh.rpc.limits import GRACE, timed_out
from mesh.rpc.links import current_context
from mesh.rpc.names.targets import target_of
from mesh.rpc.refs.reference import RRef
from mesh.rpc.tensors.carriage import beside, together
from mesh.rpc.wire import CALL_SERVICE, Answer, Request
from mesh.rpc.workers import may_block
from transport import NOT_NOW, CborValue, Connection, DeadlineExceeded, NotNow

if TYPE_CHECKING:
    from mesh.rpc.agent import Agent

__all__ = ["call_quickly"]


class _NeedsLoop(Exception):
    """Something of a message does."""


class _NoRefs:
    """References of a message: none."""

    def pack(self, ref: Any) -> list[CborValue] | None:
        if isinstance(ref, RRef):
            raise _NeedsLoop
        return None

    def unpack(self, item: list[CborValue]) -> Any:
        raise _NeedsLoop


def call_quickly(
    agent: Agent,
    to: NodeId,
    function: Callable[..., Any] | str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    seconds: float,
    is_over: Callable[[], bool],
) -> Any | NotNow:
    """Call a function at a peer and return its result, in a thread that is not the loop's.

    Args:
        agent: whose call it is; the others as `Agent.call`, `seconds` 0 for no limit.
        is_over: whether this program is no worker any more.

    Returns:
        The result; `NOT_NOW` where there is no short way, and nothing was called.

    Raises:
        Exception: as `Agent.call`.
    """
    connection = agent.short_way(to)
    if connection is None or current_context.get() is not None or not _has_memory():
        return NOT_NOW
    is_mapped = agent.placement.has_map(to)
    request = None if is_mapped else write_request(function, args, kwargs, seconds)
    if request is None:
        request = _written(agent, to, function, args, kwargs, seconds)
    if request is None:
        return NOT_NOW
    agent.activity.begin()
    try:
        with may_block():
            value = connection.call_in_thread(
                CALL_SERVICE, request, timeout=(seconds or math.inf) + GRACE, is_over=is_over
            )
    except BaseException as error:
        what = str(target_of(function))
        agent.asking.name_in(error, what)
        if is_over():
            raise ended() from error
        if isinstance(error, DeadlineExceeded) and not isinstance(error, RpcError):
            raise timed_out(what, agent.label(to), seconds) from error
        if isinstance(error, MeshError) and not isinstance(error, RuntimeError):
            raise as_runtime_error(error) from error.__cause__
        raise
    finally:
        agent.activity.end()
    if isinstance(value, NotNow):
        return value
    match value:
        case [bytes(head), bytes(items), bytes(content)]:
            pattern = answer_pattern(head, items)
            if pattern is not None and not is_mapped:
                return pattern.result(pattern.read(content))
    answer = Answer.decode(value)
    if answer.error is not None:
        raised = decode_exception(answer.error, peer=agent.label(to), what=str(target_of(function)))
        if isinstance(raised, MeshError) and not isinstance(raised, RuntimeError):
            raise as_runtime_error(raised) from raised.__cause__
        raise raised
    if answer.key or any(_needs_loop(item) for item in answer.items):
        return agent.bridge.block_on(lambda: _rest(agent, connection, to, answer))
    return _value_of(agent, to, answer)


def _written(
    agent: Agent,
    to: NodeId,
    function: Callable[..., Any] | str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    seconds: float,
) -> list[CborValue] | None:
    """Return a request as it travels, None if there is something in it that needs the loop."""
    target = target_of(function)
    packer = Packer(agent.types, _NoRefs())
    try:
        packer.pack(args, "args")
        packer.pack(dict(kwargs), "kwargs")
    except _NeedsLoop:
        return None
    packed = packer.packed
    if any(tensor.requires_grad or tensor.device.type != "cpu" for tensor in packed.tensors):
        return None
    what = beside(packed.tensors, agent.placement.towards(to))
    return None if what.apart else Request(target, packed.items, what, seconds).encode()


async def _rest(agent: Agent, connection: Connection, to: NodeId, answer: Answer) -> Any:
    parts: Mapping[int, torch.Tensor] = await agent.asking.fetch_parts(connection, answer)
    what = answer.beside
    tensors = await agent.placement.answered(together(what, parts), what.devices, to)
    return await agent.asking.value_of(answer.items, tensors, connection)


def _value_of(agent: Agent, to: NodeId, answer: Answer) -> Any:
    what = answer.beside
    tensors = agent.placement.answered_in_thread(together(what, {}), what.devices, to)
    unpacker = Unpacker(answer.items, tensors, agent.types, _NoRefs(), agent.exposures)
    value = unpacker.unpack()
    unpacker.finish()
    return value


def _has_memory() -> bool:
    """Return whether tensors that this thread makes have memory to be written to.

    Those of a ``FakeTensorMode`` have none, nor those inside a transform of ``torch.func``; the
    loop's thread is in no such mode.
    """
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def _needs_loop(item: CborValue) -> bool:
    return isinstance(item, list) and bool(item) and item[0] in ("R", "K")
