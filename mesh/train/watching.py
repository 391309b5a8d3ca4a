"""Whether a program that has run would do the same if it ran again, as far as that can be seen.

What a function depends on is what it can reach: its closure and defaults, the globals that it
names, attributes of objects, of modules and of their parts, and so on from there. As long as each
of those is the very object that it was, and running has changed none of them, drawn no random
number here, and read no element of a device, running it again would do the same.
"""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import chain
from operator import is_
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from torch.optim import Optimizer

from mesh.device.client.tensors import Handle, handle_of, is_mesh

__all__ = ["NotUnderstood", "Watch", "mode_of_torch", "random_states"]

MAX_OBJECTS = 1 << 16
"""Objects that are looked at; whoever reaches more is not understood."""

MAX_ELEMENTS = 1 << 8
"""Of a tensor here, all of which are looked at each time: whoever has more is not understood."""

_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, range, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)

_HOOKS = frozenset(name for name in vars(nn.Module()) if name.endswith(("hooks", "with_kwargs")))

_OF_CLASSES = frozenset(
    {
        *("__annotations__", "__dict__", "__doc__", "__module__", "__orig_bases__"),
        *("__parameters__", "__weakref__", "_abc_impl"),
    }
)
"""Attributes of classes that say how they were written."""

_OWN_HOOKS = 1
"""Hooks of a parameter that are the strategy's."""


class _Nothing:
    """As much memory has an object with nothing but attributes: more holds what can't be seen."""


class NotUnderstood(Exception):
    """A function depends on what can't be seen."""


class Watch:
    """What functions and objects depend on, as it is now.

    Args:
        roots: functions, modules, optimizers, and whatever else.

    Raises:
        NotUnderstood: they reach something that may change unseen.
    """

    def __init__(self, roots: Iterable[object]) -> None:
        whole = tuple(roots)
        self._roots = _anatomies(whole)
        self._seen: set[int] = set()
        self._alive: list[object] = []
        """Whatever was seen: another object of the same id may be no other one."""
        self._empty: list[Any] = []
        self._tables: list[tuple[Mapping[Any, Any], tuple[Any, ...]]] = []
        self._lists: list[tuple[Any, tuple[Any, ...]]] = []
        self._names: list[tuple[Mapping[str, Any], tuple[str, ...], tuple[Any, ...]]] = []
        self._cells: list[tuple[Any, Any]] = []
        self._functions: list[tuple[FunctionType, tuple[object, ...]]] = []
        self._kinds: list[tuple[object, type]] = []
        self._classes: list[tuple[type, tuple[str, ...]]] = []
        self._modules: list[ModuleType] = []
        self._named: dict[str, None] = {}
        """What functions name, which may be an attribute of a module."""
        self._here: list[tuple[torch.Tensor, object]] = []
        self._there: list[tuple[Any, Handle, object]] = []
        self._grads: list[tuple[torch.Tensor, object]] = []
        self._sees_grads = not any(isinstance(root, Optimizer) for root in whole)
        """Gradients are what an optimizer is given, and what all else may add to."""
        self._left: deque[object] = deque(whole)
        self._see_all()

    def holds(self, roots: Iterable[object]) -> bool:
        """Return whether all of that is as it was, and `roots` are those."""
        now = _anatomies(roots)
        return (
            len(now) == len(self._roots)
            and all(map(is_, self._roots, now))
            and not any(self._empty)
            and all(
                2 * len(table) == len(saved) and all(map(is_, saved, chain(table.values(), table)))
                for table, saved in self._tables
            )
            and all(
                each.untyped_storage()._mesh is handle and _state(each) == saved
                for each, handle, saved in self._there
            )
            and all(tensor.grad is saved for tensor, saved in self._grads)
            and all(_version(tensor) == saved for tensor, saved in self._here)
            and all(
                len(items) == len(saved) and all(map(is_, saved, items))
                for items, saved in self._lists
            )
            and all(
                all(map(is_, saved, map(space.get, names))) for space, names, saved in self._names
            )
            and all(_inside(cell) is saved for cell, saved in self._cells)
            and all(all(map(is_, _parts(each), saved)) for each, saved in self._functions)
            and all(type(each) is kind for each, kind in self._kinds)
            and all(_names_in(each) == saved for each, saved in self._classes)
        )

    def _see_all(self) -> None:
        """See what is left, and what functions may find in modules."""
        known = None
        while known != (known := (len(self._modules), len(self._named))):
            for module in self._modules:
                self._see_names(vars(module), self._named)
            while self._left:
                self._see(self._left.popleft())

    def _see(self, value: object) -> None:
        if isinstance(value, _PLAIN) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._alive.append(value)
        if len(self._seen) > MAX_OBJECTS:
            raise NotUnderstood("it reaches too much")
        if isinstance(value, torch.Tensor):
            self._see_tensor(value)
        elif isinstance(value, dict):
            self._see_table(value)
            self._left.append(getattr(value, "__dict__", None))
        elif isinstance(value, list | tuple | set | frozenset | deque):
            self._lists.append((value, tuple(value)))
            self._left.extend(value)
            self._left.append(getattr(value, "__dict__", None))
        elif isinstance(value, BuiltinMethodType):
            self._left.append(value.__self__)
        elif isinstance(value, FunctionType):
            self._see_function(value)
        elif isinstance(value, MethodType):
            self._left += (value.__func__, value.__self__)
        elif isinstance(value, functools.partial):
            self._left += (value.func, value.args, value.keywords)
        elif isinstance(value, ModuleType):
            if not _is_of_others(value.__name__):
                self._modules.append(value)
        elif isinstance(value, staticmethod | classmethod):
            self._left.append(value.__func__)
        elif isinstance(value, property):
            self._left.append(value.fget)
        elif isinstance(value, type):
            self._see_class(value)
        elif not _is_known(value):
            self._see_object(value)

    def _see_tensor(self, tensor: torch.Tensor) -> None:
        needs, is_hooked, hooks = _of_gradients(tensor)
        if is_hooked or hooks > _OWN_HOOKS:
            raise NotUnderstood("a tensor has hooks")
        self._left.append(vars(tensor))
        if self._sees_grads and needs and tensor.is_leaf and not hooks:
            self._grads.append((tensor, tensor.grad))
        if is_mesh(tensor):
            self._there.append((tensor, handle_of(tensor), _state(tensor)))
        elif not _is_small(tensor):
            raise NotUnderstood("it depends on a large tensor here")
        else:
            self._here.append((tensor, _version(tensor)))

    def _see_table(self, table: dict[Any, Any]) -> None:
        if table:
            self._tables.append((table, (*table.values(), *table)))
            self._left.extend(table.values())
        else:
            self._empty.append(table)

    def _see_function(self, function: FunctionType) -> None:
        if _is_of_others(function.__module__):
            return
        for cell in function.__closure__ or ():
            content = _inside(cell)
            self._cells.append((cell, content))
            self._left.append(content)
        self._functions.append((function, _parts(function)))
        self._left.append(function.__defaults__)
        self._left.append(function.__kwdefaults__)
        self._left.append(vars(function))
        names = _names_of(function.__code__)
        self._named |= dict.fromkeys(names)
        self._see_names(function.__globals__, names)
        self._left.extend(map(sys.modules.get, names))  # it may import them itself

    def _see_names(self, space: Mapping[str, Any], names: Iterable[str]) -> None:
        """See what is called so there; whether there is something is seen, too."""
        chosen = tuple(names)
        values = tuple(map(space.get, chosen))
        self._names.append((space, chosen, values))
        self._left.extend(values)

    def _see_class(self, kind: type) -> None:
        for each in kind.__mro__:
            if _is_of_others(each.__module__):
                continue
            if vars(each).get("__slots__"):
                raise NotUnderstood(f"{each.__name__} has slots")
            names = _names_in(each)
            self._classes.append((each, names))
            self._see_names(vars(each), names)

    def _see_object(self, value: object) -> None:
        is_torch = isinstance(value, nn.Module | Optimizer)
        if not is_torch and (
            _is_of_others(type(value).__module__) or not hasattr(value, "__dict__")
        ):
            raise NotUnderstood(f"it depends on a {type(value).__name__}")
        if type(value).__basicsize__ > _Nothing.__basicsize__:
            raise NotUnderstood(f"a {type(value).__name__} has more than its attributes")
        content = vars(value)
        if isinstance(value, nn.Module) and any(content.get(name) for name in _HOOKS):
            raise NotUnderstood("a module has hooks")
        self._kinds.append((value, type(value)))
        self._see_table(content)
        self._see_class(type(value))


def mode_of_torch() -> tuple[object, ...] | None:
    """Return how torch does what it is told; None where something looks on."""
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return None
    if _has_any_global_hook():  # type: ignore[no-untyped-call]
        return None
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("mesh"),
        torch.get_autocast_dtype("mesh"),
        torch.is_autocast_cache_enabled(),
    )


def random_states() -> tuple[object, ...]:
    """Return the states of what random numbers are drawn of here."""
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy is not None else ()
    return (
        random.getstate(),
        torch.get_rng_state().numpy().tobytes(),
        tuple(each if isinstance(each, str | int | float) else each.tobytes() for each in drawn),
    )


def _anatomies(roots: Iterable[object]) -> tuple[object, ...]:
    """Return parts of functions in their place: the same function may be made again and again."""
    found: list[object] = []
    for root in roots:
        if isinstance(root, MethodType):
            found += (*_anatomies([root.__func__]), root.__self__)
        elif isinstance(root, functools.partial):
            found += (*_anatomies([root.func]), *root.args, *root.keywords.values())
        elif isinstance(root, FunctionType) and not _is_of_others(root.__module__):
            defaults = (*(root.__defaults__ or ()), *(root.__kwdefaults__ or {}).values())
            found += (*map(_inside, root.__closure__ or ()), *defaults, root.__globals__)
            found.append(root.__code__)
        else:
            found.append(root)
    return tuple(found)


def _is_small(tensor: torch.Tensor) -> bool:
    is_plain = tensor.device.type == "cpu" and tensor.layout is torch.strided
    is_odd = tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return is_plain and not is_odd and tensor.numel() <= MAX_ELEMENTS


def _version(tensor: torch.Tensor) -> object:
    """Return what a tensor here is: others may write to its memory, and torch would not know."""
    content = bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist())
    return (tensor.data_ptr(), tensor._version, content, _of_gradients(tensor))


def _state(tensor: torch.Tensor) -> object:
    """Return how a tensor lies in a device's memory."""
    lies = (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
    return (lies, _of_gradients(tensor))


def _of_gradients(tensor: torch.Tensor) -> tuple[bool, bool, int]:
    """Return what becomes of gradients for a tensor."""
    hooks: Any = tensor._post_accumulate_grad_hooks
    return (tensor.requires_grad, bool(tensor._backward_hooks), len(hooks or ()))


def _parts(function: FunctionType) -> tuple[object, ...]:
    return (function.__code__, function.__defaults__, function.__kwdefaults__)


def _names_in(kind: type) -> tuple[str, ...]:
    return tuple(name for name in vars(kind) if name not in _OF_CLASSES)


def _inside(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return cell


def _names_of(code: CodeType) -> tuple[str, ...]:
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= dict.fromkeys(_names_of(constant))
    return tuple(names)


def _is_known(value: object) -> bool:
    """Return whether a value is a function or a class of what does not change."""
    if not callable(value) or isinstance(value, nn.Module | Optimizer):
        return type(value) in _DESCRIPTORS
    return type(value).__module__ in ("builtins", "torch._ops") or type(value) in _DESCRIPTORS


_DESCRIPTORS = frozenset(
    map(type, (vars(type)["__dict__"], vars(type)["__basicsize__"], dict.get, object.__init__))
)


def _is_of_others(name: str | None) -> bool:
    """Return whether a module belongs to torch or to Python."""
    root = (name or "").partition(".")[0]
    return root == "torch" or root in sys.stdlib_module_names
