"""Gradients at the leaves go to the context, and not to ``.grad``.

Where nothing looks on, a hook before the leaf's node takes the gradient, and leaves the node
nothing to do. Where a leaf has hooks that look at ``.grad``, the node does its work, on the
context's gradient: it stands in ``.grad`` just for that long. Where a reducer of
``DistributedDataParallel`` reads ``.grad`` when all is done, it stands there for the whole run;
such runs come one after another. Of several nodes, see `mesh.autograd.claims`.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, TypeAlias

import torch

from mesh.autograd import reducers
from mesh.autograd.contexts import Aside, Context
from mesh.rpc.errors import RpcTimeout
from mesh.rpc.workers import may_block

__all__ = ["Leaves", "Rank", "add_all"]

Rank: TypeAlias = tuple[Any, ...]
"""The age of a backward, and who has begun it: the lower, the older."""

LOOK_SECONDS = 0.1
"""Between two looks whether leaves are still wanted, which other runs have."""


class Leaves:
    """The leaves of one run.

    Args:
        context: what the gradients go to.

    Attributes:
        aside: what they go to instead, if they are put aside.
    """

    def __init__(self, context: Context) -> None:
        self._into: Context | Aside = context
        self.aside: Aside | None = None
        self._lock = threading.Lock()
        self._is_over = False
        self._claimed: frozenset[int] | None = None
        self._handles: list[Any] = []
        self._open: dict[torch.Tensor, torch.Tensor | None] = {}
        self._lent: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._shared: dict[int, torch.Tensor] = {}

    def put_aside(self) -> None:
        """Have the gradients go elsewhere than to the context, where they count for nothing yet."""
        self._into = self.aside = Aside()

    def claim(self, nodes: Iterable[Any], rank: Rank | None, seconds: float = 0.0) -> bool:
        """Have what reducers read of these leaves for this run alone, until it is `restore`d.

        Args:
            nodes: the leaves'.
            rank: the age of the run's backward; None if it claims nothing anywhere else.
            seconds: how long others may have some of it; 0 for no limit.

        Returns:
            Whether it does; not if an older one has some of it, the time is up, or it is restored.
        """
        of_reducers = reducers.reduced() if reducers.are_there() else frozenset()
        wanted = frozenset(id(each.variable) for each in nodes) & of_reducers
        if not _loans.take(wanted, rank, seconds, lambda: self._is_over):
            return False
        with self._lock:
            if not self._is_over:
                self._claimed = wanted
                return True
        _loans.give(wanted)
        return False

    def divert(
        self,
        nodes: Sequence[Any],
        is_mine: Callable[[], bool],
        is_in_use: Callable[[torch.Tensor], bool],
        seconds: float,
    ) -> None:
        """Have the gradients of these leaves' nodes go to the context.

        Args:
            nodes: the leaves'.
            is_mine: whether the node that is executed now, is so for this run: leaves are shared.
            is_in_use: whether a gradient is somebody else's as well, whom the engine does not know.
            seconds: how long another run may have leaves that a reducer reads; 0 for no limit.

        Raises:
            RpcTimeout: one had them for longer.
        """
        with may_block() if reducers.are_there() else contextlib.nullcontext():
            is_claimed = self._claimed is not None or self.claim(nodes, None, seconds)
        if not is_claimed or self._claimed is None:
            raise RpcTimeout(
                "backward",
                after=seconds,
                why="another backward has the parameters of a DistributedDataParallel module",
            )

        def alone(gradients: tuple[Any, ...]) -> Any:
            """Have what takes a gradient for its own, and writes to it, take one that is."""
            if is_mine() and gradients[0] is not None and is_in_use(gradients[0]):
                return (gradients[0].clone(),)
            return None

        for node in nodes:
            if id(node.variable) in self._claimed:
                self._lend_all_along(node.variable)
                self._handles.append(node.register_prehook(alone))
            elif _is_watched(node):
                self._handles += [node.register_prehook(alone), *self._lend(node, is_mine)]
            else:
                self._handles.append(self._take(node, is_mine, is_in_use))

    def restore(self) -> None:
        """Leave the leaves as they were, also after a failure in the midst of one."""
        for handle in self._handles:
            handle.remove()
        for leaf, before in self._open.items():
            leaf.grad = before
            _loans.give({id(leaf)})
        for leaf, before in self._lent:
            gradient, leaf.grad = leaf.grad, before
            if gradient is not None:
                # What the reducer has made a part of its own memory, it writes to again.
                is_own = gradient._base is None
                with self._into.gradients_lock:
                    self._into.gradients[leaf] = gradient if is_own else gradient.clone()
        self._handles, self._open, self._lent, self._shared = [], {}, [], {}
        with self._lock:
            self._is_over = True
            claimed, self._claimed = self._claimed, None
        if claimed:
            _loans.give(claimed)

    def _take(
        self,
        node: Any,
        is_mine: Callable[[], bool],
        is_in_use: Callable[[torch.Tensor], bool],
    ) -> Any:
        leaf = node.variable

        def before(gradients: tuple[Any, ...]) -> Any:
            gradient = gradients[0]
            if not is_mine() or gradient is None:
                return None
            is_shared = gradient._use_count() > _ALONE or is_in_use(gradient)
            self._add(leaf, gradient, is_shared=is_shared)
            return (None,)

        return node.register_prehook(before)

    def _add(self, leaf: torch.Tensor, gradient: torch.Tensor, *, is_shared: bool) -> None:
        """Do what the leaf's node would, with the context's gradient."""
        with self._into.gradients_lock:
            if leaf not in self._into.gradients:
                is_shared = is_shared or id(gradient) in self._shared
                if is_shared:
                    self._shared[id(gradient)] = gradient  # its next holder has it not alone, too
                gradient = _own(leaf, gradient, is_shared=is_shared)
            _add(self._into.gradients, leaf, gradient)

    def _lend_all_along(self, leaf: torch.Tensor) -> None:
        self._lent.append((leaf, leaf.grad))
        with self._into.gradients_lock:
            leaf.grad = self._into.gradients.get(leaf)

    def _lend(self, node: Any, is_mine: Callable[[], bool]) -> list[Any]:
        leaf, gradients = node.variable, self._into.gradients

        def before(_: Any) -> None:
            if not is_mine():
                return
            _loans.take({id(leaf)}, None, 0.0, lambda: False)
            self._open[leaf] = leaf.grad
            with self._into.gradients_lock:
                leaf.grad = gradients.get(leaf)

        def after(*_: Any) -> None:
            if not is_mine():
                return
            previous = self._open.pop(leaf)
            gradient, leaf.grad = leaf.grad, previous
            if gradient is not None:
                with self._into.gradients_lock:
                    gradients[leaf] = gradient
            _loans.give({id(leaf)})

        return [node.register_prehook(before), node.register_hook(after)]


class _Loans:
    """Which leaves of this process have a run's gradients in ``.grad``, and those alone."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._holders: dict[int, Rank | None] = {}

    def take(
        self, leaves: Set[int], rank: Rank | None, seconds: float, is_over: Callable[[], bool]
    ) -> bool:
        """Take all of these leaves, or none: who waits, has none of them. See `Leaves.claim`."""
        until = time.monotonic() + seconds if seconds else math.inf
        with self._news:
            while not is_over():
                holders = [self._holders[each] for each in leaves if each in self._holders]
                if not holders:
                    self._holders.update(dict.fromkeys(leaves, rank))
                    return True
                if rank is not None and any(each is not None and each < rank for each in holders):
                    return False
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self._news.wait(min(left, LOOK_SECONDS))
            return False

    def give(self, leaves: Set[int]) -> None:
        """Give leaves back."""
        with self._news:
            for each in leaves:
                del self._holders[each]
            self._news.notify_all()


_loans = _Loans()


def add_all(context: Context, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Add gradients that were put aside to those of a context; not in the event loop."""
    with context.gradients_lock:
        for leaf, gradient in gradients.items():
            _add(context.gradients, leaf, gradient)


def _add(
    gradients: dict[torch.Tensor, torch.Tensor], leaf: torch.Tensor, gradient: torch.Tensor
) -> None:
    """Add a gradient; the first of a leaf stays itself, and must be nobody else's."""
    known = gradients.get(leaf)
    with torch.no_grad():
        if known is None:
            gradients[leaf] = gradient
        elif known.layout is torch.strided:
            known.add_(gradient)
        else:
            gradients[leaf] = known + gradient


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
