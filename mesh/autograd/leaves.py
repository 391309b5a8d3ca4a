"""Gradients at the leaves go to the context, and not to ``.grad``.

Where nothing looks on, a hook before the leaf's node takes the gradient, and leaves the node
nothing to do. Where a leaf has hooks that look at ``.grad``, the node does its work, on the
context's gradient: it stands in ``.grad`` just for that long. Where a reducer of
``DistributedDataParallel`` reads ``.grad`` when all is done, it stands there for the whole run;
such runs come one after another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from mesh.autograd.contexts import Context
from mesh.autograd.reducers import reduced
from mesh.rpc.errors import RpcTimeout

__all__ = ["Leaves"]


class Leaves:
    """The leaves of one run.

    Args:
        context: what the gradients go to.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._handles: list[Any] = []
        self._open: dict[torch.Tensor, tuple[threading.Lock, torch.Tensor | None]] = {}
        self._lent: list[tuple[torch.Tensor, threading.Lock, torch.Tensor | None]] = []
        self._shared: dict[int, torch.Tensor] = {}

    def divert(self, nodes: Iterable[Any], is_mine: Callable[[], bool], seconds: float) -> None:
        """Have the gradients of these leaves' nodes go to the context.

        Args:
            nodes: the leaves'.
            is_mine: whether the node that is executed now, is so for this run: leaves are shared.
            seconds: how long another run may have leaves that a reducer reads; 0 for no limit.

        Raises:
            RpcTimeout: one had them for longer.
        """
        of_reducers = reduced()
        # In one order, so that two runs do not wait for each other.
        for node in sorted(nodes, key=lambda each: id(each.variable)):
            if id(node.variable) in of_reducers:
                self._lend_all_along(node.variable, seconds)
            elif _is_watched(node):
                self._handles += self._lend(node, is_mine)
            else:
                self._handles.append(self._take(node, is_mine))

    def restore(self) -> None:
        """Leave the leaves as they were, also after a failure in the midst of one."""
        for handle in self._handles:
            handle.remove()
        for leaf, (lock, before) in self._open.items():
            leaf.grad = before
            lock.release()
        for leaf, lock, before in self._lent:
            gradient, leaf.grad = leaf.grad, before
            if gradient is not None:
                # What the reducer has made a part of its own memory, it writes to again.
                is_own = gradient._base is None
                with self._context.gradients_lock:
                    self._context.gradients[leaf] = gradient if is_own else gradient.clone()
            lock.release()
        self._handles, self._open, self._lent, self._shared = [], {}, [], {}

    def _take(self, node: Any, is_mine: Callable[[], bool]) -> Any:
        leaf = node.variable

        def before(gradients: tuple[Any, ...]) -> Any:
            if not is_mine() or gradients[0] is None:
                return None
            self._add(leaf, gradients[0], is_shared=gradients[0]._use_count() > _ALONE)
            return (None,)

        return node.register_prehook(before)

    def _add(self, leaf: torch.Tensor, gradient: torch.Tensor, *, is_shared: bool) -> None:
        """Do what the leaf's node would, with the context's gradient."""
        gradients = self._context.gradients
        with self._context.gradients_lock, torch.no_grad():
            known = gradients.get(leaf)
            if known is None:
                is_shared = is_shared or id(gradient) in self._shared
                if is_shared:
                    self._shared[id(gradient)] = gradient  # its next holder has it not alone, too
                gradients[leaf] = _own(leaf, gradient, is_shared=is_shared)
            elif known.layout is torch.strided:
                known.add_(gradient)
            else:
                gradients[leaf] = known + gradient

    def _lend_all_along(self, leaf: torch.Tensor, seconds: float) -> None:
        lock = _lock_of(leaf)
        if not lock.acquire(timeout=seconds or threading.TIMEOUT_MAX):
            raise RpcTimeout(
                "backward",
                after=seconds,
                why="another backward has the parameters of a DistributedDataParallel module",
            )
        self._lent.append((leaf, lock, leaf.grad))
        with self._context.gradients_lock:
            leaf.grad = self._context.gradients.get(leaf)

    def _lend(self, node: Any, is_mine: Callable[[], bool]) -> list[Any]:
        leaf, gradients = node.variable, self._context.gradients

        def before(_: Any) -> None:
            if not is_mine():
                return
            lock = _lock_of(leaf)
            lock.acquire()
            self._open[leaf] = (lock, leaf.grad)
            with self._context.gradients_lock:
                leaf.grad = gradients.get(leaf)

        def after(*_: Any) -> None:
            if not is_mine():
                return
            lock, previous = self._open.pop(leaf)
            gradient, leaf.grad = leaf.grad, previous
            if gradient is not None:
                with self._context.gradients_lock:
                    gradients[leaf] = gradient
            lock.release()

        return [node.register_prehook(before), node.register_hook(after)]


_locks = WeakIdKeyDictionary()
_locks_lock = threading.Lock()


def _lock_of(leaf: torch.Tensor) -> threading.Lock:
    with _locks_lock:
        lock: threading.Lock = _locks.setdefault(leaf, threading.Lock())  # type: ignore[no-untyped-call]
        return lock


def _is_watched(node: Any) -> bool:
    """Return whether something is called after the node of a leaf, which may look at ``.grad``."""
    mine = node.register_hook(lambda *_: None)
    others = mine.hooks_dict_ref()
    mine.remove()
    return bool(others) or bool(getattr(node.variable, "_post_accumulate_grad_hooks", None))


def _own(leaf: torch.Tensor, gradient: torch.Tensor, *, is_shared: bool) -> torch.Tensor:
    """Return a gradient that is nobody else's."""
    if gradient.layout is not torch.strided:
        return gradient.clone() if is_shared else gradient.detach()
    is_dense = gradient.stride() == leaf.stride() or gradient.is_contiguous()
    if is_shared or not is_dense:
        return torch.empty_like(leaf, dtype=gradient.dtype).copy_(gradient)
    return gradient.detach()


def _count_alone() -> int:
    """Return the use count of a gradient that nobody else has, as a hook sees it."""
    seen = []
    leaf = torch.ones(1, requires_grad=True)
    loss = leaf * 2
    loss.grad_fn.next_functions[0][0].register_prehook(  # type: ignore[union-attr]
        lambda gradients: seen.append(gradients[0]._use_count())
    )
    loss.backward()  # type: ignore[no-untyped-call]
    return int(seen[0])


_ALONE = _count_alone()
