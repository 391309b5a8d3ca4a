"""A remote reference: a value at one node, which others may use without having it.

The names and rules are those of ``torch.distributed.rpc.RRef``. What waits comes twice: blocking
(`RRef.to_here`), for threads, and as a coroutine (`RRef.fetch`), for the node's event loop.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from auth import NodeId
from mesh.rpc.errors import RpcError
from mesh.rpc.job.roster import WorkerInfo
from mesh.rpc.refs.holding import Held
from mesh.rpc.refs.owned import Owned, new_id

if TYPE_CHECKING:
    from mesh.rpc.agent import Agent

__all__ = ["RRef"]

_Value = TypeVar("_Value")


class RRef(Generic[_Value]):
    """A reference to a value at its owner.

    It may be an argument or a result of calls, also to third nodes. The value lives as long as
    anybody has a reference to it.

    Args:
        value: of this program's own, for others to refer to; `mesh.rpc.init_rpc` must have been
            called. References to values elsewhere are made by calls.
        type_hint: taken for programs that give one.
    """

    def __init__(self, value: _Value, type_hint: object = None) -> None:
        from mesh.rpc import api

        agent = api.current_agent()
        owned = Owned(new_id(), agent.now())
        owned.outcome.set_result(value)
        self._become(agent, owned)

    @classmethod
    def _of(cls, agent: Agent, state: Owned | Held) -> RRef[Any]:
        ref: RRef[Any] = cls.__new__(cls)
        ref._become(agent, state)
        return ref

    def _become(self, agent: Agent, state: Owned | Held) -> None:
        self._agent = agent
        self._state = state
        if isinstance(state, Held):
            agent.holdings.hold(state)
            # Without the state, whose error may lead back here by its traceback. And an interpreter
            # that ends tells nobody: its peers notice that it is gone.
            released = agent.holdings.released
            weakref.finalize(self, released, state.owner, state.fork).atexit = False

    def __repr__(self) -> str:
        name = self._fork_name()
        return f"<RRef {name} at {self._agent.label(self.owner_id)}>"

    def __reduce__(self) -> NoReturn:
        raise RpcError(
            "pickling of a remote reference",
            why="Can not pickle rref in python pickler: its owner has to know who has it",
            fix="Pass it as an argument or a result of a remote call.",
        )

    @property
    def owner_id(self) -> NodeId:
        """The node that has the value."""
        return self._agent.node_id if isinstance(self._state, Owned) else self._state.owner

    def is_owner(self) -> bool:
        """Return whether the value is at this node."""
        return isinstance(self._state, Owned)

    def confirmed_by_owner(self) -> bool:
        """Return whether the owner is known to have the reference.

        Raises:
            Exception: why it has not, once that is known.
        """
        if isinstance(self._state, Owned):
            return True
        if not self._state.created.done():
            return False
        self._state.created.result()
        return True

    def local_value(self) -> _Value:
        """Return the value itself, at its owner, waiting for it if it is still being computed.

        Raises:
            RpcError: this node is not the owner.
            Exception: what the function raised that should have made it.
        """
        if not isinstance(self._state, Owned):
            raise RpcError(
                "use of a remote reference",
                peer=self._agent.label(self.owner_id),
                why="the value is at its owner, and this node is another",
                fix="Use to_here() for a copy, or rpc_sync() to call a method of it there.",
            )
        value: _Value = self._agent.bridge.wait(self._state.outcome)
        return value

    def to_here(self, timeout: float | None = None) -> _Value:
        """Return a copy of the value, or the value itself at its owner; for threads.

        Args:
            timeout: seconds; by default the agent's.

        Raises:
            RpcTimeout: the value was not there in time.
            RefLost: it is gone, as when its owner has left.
            Exception: what the function raised that should have made it.
        """
        from mesh.rpc import api

        value: _Value = api.wait_for(self._agent, lambda: self.fetch(timeout))
        return value

    def owner(self) -> WorkerInfo:
        """Return who has the value, of a job of `mesh.rpc.init_rpc`.

        Raises:
            RpcError: it is no worker of it.
        """
        from mesh.rpc import api

        return api.worker_of(self.owner_id)

    def owner_name(self) -> str:
        """Return the name of the worker that has the value; raises as `owner`."""
        return self.owner().name

    def rpc_sync(self, timeout: float | None = None) -> MethodCalls:
        """Return an object whose methods call those of the value, at its owner, and wait."""
        from mesh.rpc import api

        return MethodCalls(self, api.invoke_sync, timeout)

    def rpc_async(self, timeout: float | None = None) -> MethodCalls:
        """Return an object whose methods call those of the value, and return futures."""
        from mesh.rpc import api

        return MethodCalls(self, api.invoke_async, timeout)

    def remote(self, timeout: float | None = None) -> MethodCalls:
        """Return an object whose methods call those of the value, and return references."""
        from mesh.rpc import api

        return MethodCalls(self, api.invoke_remote, timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Go backward from the value, a scalar tensor, at its owner; for threads.

        Args:
            dist_autograd_ctx_id: the autograd context; at the owner it may be left out: gradients
                go to ``.grad`` there then.
            retain_graph: keep the graph, to go backward again.

        Raises:
            RpcError: the value is no tensor, or this node is not the owner and names no context.
            Exception: what `mesh.autograd.backward` raises.
        """
        from mesh.autograd import api

        if dist_autograd_ctx_id == -1 and not self.is_owner():
            raise RpcError(
                "RRef.backward()",
                peer=self._agent.label(self.owner_id),
                why="User RRefs require 'dist_autograd_ctx_id' to be specified",
                fix="Go backward in a context: with mesh.autograd.context() as context_id.",
            )
        api.backward_from(self._agent, self, dist_autograd_ctx_id, retain_graph)

    async def fetch(self, timeout: float | None = None) -> _Value:
        """Return the same as `to_here`, as a coroutine for the node's event loop."""
        value: _Value = await self._agent.fetch(self, timeout)
        return value

    def another(self, value: Any) -> RRef[Any]:
        """Return a reference to another value of this node's."""
        return self._agent.own(value)

    # -- called by the agent

    @property
    def agent(self) -> Agent:
        """Whose part in calls it belongs to."""
        return self._agent

    @property
    def state(self) -> Owned | Held:
        """What this node knows of the reference."""
        return self._state

    @property
    def created(self) -> Future[None] | None:
        """Done once the owner is known to have it; None at the owner."""
        return None if isinstance(self._state, Owned) else self._state.created

    def _fork_name(self) -> str:
        state: Any = self._state
        ref: bytes = state.ref if isinstance(state, Owned) else state.fork.ref
        return ref.hex()[:8]


class MethodCalls:
    """The public methods of a reference's value, to be called as if it were here."""

    def __init__(self, ref: RRef[Any], invoke: Callable[..., Any], timeout: float | None) -> None:
        self._ref = ref
        self._invoke = invoke
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._invoke(self._ref, name, args, kwargs, self._timeout)

        return call
