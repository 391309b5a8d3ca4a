"""Modules at other workers: what `mesh.nn.RemoteModule` is, and what it calls there.

Its class has to be exposed where it is to be, as any other that is called; then whoever holds the
module can run it. Nothing else of it travels than arguments and results.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch.utils._pytree import tree_map

from auth import IdentityError, NodeId
from mesh.rpc.calling.asking import positional
from mesh.rpc.errors import NotExposed, RpcError
from mesh.rpc.futures import CallFuture
from mesh.rpc.names.exposed import library
from mesh.rpc.names.types import registered_types
from mesh.rpc.refs.reference import RRef

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["RemoteModule", "remote_place"]


def remote_place(text: str) -> tuple[str | int | NodeId | None, torch.device]:
    """Return the worker and its device that a text names.

    Args:
        text: ``"trainer/cuda:0"``, ``"rank:0/cuda:0"`` or a node id in place of the name; the
            device is ``cpu`` if there is none, and the worker this one, None, if there is none.

    Raises:
        ValueError: it is none of these.
        RuntimeError: there is no such kind of device.
    """
    parts = text.split("/")
    if len(parts) == 1:
        return (None, torch.device(text)) if _is_device(text) else (_worker(text, text), _CPU)
    if len(parts) > 2:
        raise _wrong(text)
    return _worker(parts[0], text), torch.device(parts[1])


class RemoteModule(torch.nn.Module):
    """A module at another worker: called like one of this program's, it runs there.

    It can stand in a `torch.nn.Sequential`, and be an argument or a result of calls. Its
    parameters stay where they are, see `remote_parameters`; what needs them here is refused.

    Args:
        remote_device: where it is to be; see `remote_place`.
        module_cls: its class, or a function that returns it; exposed by that worker.
        args, kwargs: what it is made of, and travels as the arguments of any call.

    Raises:
        RpcError: this program is no worker, or there is none of that name.
        Unsendable: an argument does not travel.
    """

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., torch.nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        from mesh.rpc import api

        super().__init__()
        where, device = remote_place(remote_device)
        given = (module_cls, positional(args), dict(kwargs or {}), str(device))
        to = api.get_worker_info() if where is None else where
        self._become(where, str(device), api.remote(to, create_module, given))

    @classmethod
    def init_from_module_rref(cls, remote_device: str, module_rref: RRef[Any]) -> RemoteModule:
        """Return a remote module of a module that is there already.

        Args:
            remote_device: where it is; see `remote_place`.
            module_rref: the reference to it.
        """
        where, device = remote_place(remote_device)
        return cls._of(where, str(device), module_rref)

    @classmethod
    def _of(cls, on: Any, device: Any, module_rref: Any) -> Self:
        # A peer may have said it.
        if not isinstance(module_rref, RRef) or not isinstance(device, str):
            raise TypeError("a remote module is a reference and the name of a device")
        made = cls.__new__(cls)
        torch.nn.Module.__init__(made)
        made._become(on, device, module_rref)
        return made

    def _become(self, on: str | int | NodeId | None, device: str, ref: RRef[Any]) -> None:
        self.on = on
        self.device = device
        self.module_rref = ref

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``forward`` where it is and return the result.

        Raises:
            Exception: what it raised, or what its making did.
        """
        return self.forward_async(*args, **kwargs).wait()

    def forward_async(self, *args: Any, **kwargs: Any) -> CallFuture[Any]:
        """Run the module's ``forward`` where it is and return a future of the result."""
        from mesh.rpc import api

        given = (self.module_rref, self.device, args, kwargs)
        return api.rpc_async(self.module_rref.owner_id, forward_module, given)

    def remote_parameters(self, recurse: bool = True) -> list[RRef[torch.nn.Parameter]]:
        """Return references to the module's parameters.

        Args:
            recurse: also those of its submodules.
        """
        from mesh.rpc import api

        found: list[RRef[torch.nn.Parameter]] = api.rpc_sync(
            self.module_rref.owner_id, module_parameters, (self.module_rref, recurse)
        )
        return found

    def get_module_rref(self) -> RRef[Any]:
        """Return the reference to the module."""
        return self.module_rref

    def train(self, mode: bool = True) -> Self:
        """Set the module's training mode, where it is."""
        from mesh.rpc import api

        api.rpc_sync(self.module_rref.owner_id, train_module, (self.module_rref, mode))
        return self

    def named_modules(
        self,
        memo: set[torch.nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """For a module that this one is in: it has no parts here."""
        if memo is None:
            _refuse("named_modules")
        memo.add(self)
        return iter([(prefix, self)])

    def reduce(self) -> tuple[Callable[..., RemoteModule], tuple[Any, ...]]:
        """Return what makes it again at the reader of a pickle, which references travel in."""
        return type(self)._of, (self.on, self.device, self.module_rref)

    def __getstate__(self) -> NoReturn:
        raise RpcError(
            "pickling of a remote module",
            why="Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled "
            "when using RPC",
        )


def _refuse(name: str) -> NoReturn:
    hint = " Please use ``remote_parameters`` instead." if name == "parameters" else ""
    raise ValueError(f"Method ``{name}`` not supported for RemoteModule.{hint}")


def _refusing(name: str) -> Callable[..., NoReturn]:
    def method(self: RemoteModule, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(name)

    method.__name__, method.__doc__ = name, "Raise ValueError: the module is elsewhere."
    return method


for _name in (
    *("register_buffer", "register_parameter", "add_module", "apply", "extra_repr"),
    *("cuda", "ipu", "xpu", "cpu", "type", "float", "double", "half", "bfloat16", "to"),
    *("register_backward_hook", "register_forward_pre_hook", "register_forward_hook"),
    *("state_dict", "load_state_dict", "parameters", "named_parameters", "buffers"),
    *("named_buffers", "children", "named_children", "modules", "requires_grad_", "zero_grad"),
    "share_memory",
):
    setattr(RemoteModule, _name, _refusing(_name))


# -- at the worker that has the module


_created: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Modules that were made for remote modules: whoever holds one of these may run it."""


@library
def create_module(
    module_cls: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], device: str
) -> torch.nn.Module:
    """Make a module of a class that this program exposes, on a device."""
    if not (inspect.isclass(module_cls) or inspect.isroutine(module_cls)):
        raise NotExposed("making of a module", why="what is to make it is no class or function")
    if torch.device(device).type not in ("cpu", "cuda"):
        # Another may be a peer's, and this node's to use but not its caller's.
        raise NotExposed(f"making of a module on {device!r:.40}", why="that is no device for it")
    module = module_cls(*args, **kwargs)
    if not isinstance(module, torch.nn.Module):
        raise ValueError(  # noqa: TRY004 - as upstream
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but it "
            f"returns an instance of {type(module)}."
        )
    module.to(device)
    _created.add(module)
    return module


@library
def forward_module(
    ref: RRef[Any], device: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run a module; where it is on a CUDA device, so are the tensors that it gets."""
    module = _module(ref, "forward")
    if torch.device(device).type == "cuda":
        args, kwargs = tree_map(
            lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
        )
    return module.forward(*args, **kwargs)


@library
def module_parameters(ref: RRef[Any], recurse: bool) -> list[RRef[Any]]:
    """Return references to a module's parameters."""
    module = _module(ref, "parameters")
    return [ref.another(parameter) for parameter in module.parameters(recurse)]


@library
def train_module(ref: RRef[Any], mode: bool) -> None:
    """Set a module's training mode."""
    _module(ref, "train").train(mode)


def _module(ref: RRef[Any], method: str) -> torch.nn.Module:
    """Return a module that a peer holds, if the peer may call that method of it."""
    module = ref.local_value()
    if not isinstance(module, torch.nn.Module):
        raise NotExposed(f"use of a {type(module).__name__}", why="it is no module")
    if module not in _created:
        ref.agent.exposures.method(module, method)
    return module


registered_types.add_made(
    RemoteModule, "mesh.nn.RemoteModule", ("on", "device", "module_rref"), RemoteModule._of
)

_CPU = torch.device("cpu")


def _worker(name: str, text: str) -> str | int | NodeId:
    kind, colon, rank = name.partition(":")
    if kind == "rank" and rank.isdecimal():
        return int(rank)
    if not name or colon:
        raise _wrong(text)
    try:
        return NodeId.parse(name)
    except IdentityError:
        return name


def _is_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


def _wrong(text: str) -> ValueError:
    return ValueError(
        f"Could not parse remote_device: {text}. The valid format is '<workername>/<device>' or "
        "'rank:<rank>/<device>' or '<device>'"
    )
