"""Which ways there are to be a worker: one of the mesh's own, and those that a program registers.

The names and rules are those of ``torch.distributed.rpc.backend_registry``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mesh.rpc.errors import RpcError
from mesh.rpc.job.options import DEFAULT_INIT_METHOD, DEFAULT_TIMEOUT, RpcBackendOptions

if TYPE_CHECKING:
    from mesh.rpc.job.worker import Worker

__all__ = [
    "BackendType",
    "backend_for",
    "backend_registered",
    "construct_rpc_backend_options",
    "register_backend",
]

MakeOptions = Callable[..., RpcBackendOptions]
Init = Callable[..., "Worker"]


class _Registry(type):
    """Finds backends by name, as an enumeration: ``BackendType.MESH``, ``BackendType["MESH"]``."""

    def __getattr__(cls, name: str) -> BackendType:
        try:
            return _backends[name]
        except KeyError:
            raise AttributeError(f"there is no RPC backend {name!r}") from None

    def __getitem__(cls, name: str) -> BackendType:
        return _backends[name]

    def __iter__(cls) -> Iterator[BackendType]:
        return iter(tuple(_backends.values()))


class BackendType(metaclass=_Registry):
    """One way to be a worker. Those that there are, are its class's attributes, by name.

    Attributes:
        name: what it is called.
        make_options: makes its options: of a timeout, an init method, and keywords of its own.
        init: makes the worker: of ``store``, ``name``, ``rank``, ``world_size`` and
            ``rpc_backend_options``.
    """

    def __init__(self, name: str, make_options: MakeOptions, init: Init) -> None:
        self.name = name
        self.make_options = make_options
        self.init = init

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"


_backends: dict[str, BackendType] = {}
_lock = threading.Lock()


def backend_registered(backend_name: str) -> bool:
    """Return whether there is a backend of that name."""
    return backend_name in _backends


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: MakeOptions,
    init_backend_handler: Init,
) -> BackendType:
    """Add a backend, which `mesh.rpc.init_rpc` can be given, or finds by its options' type.

    Args:
        backend_name: what it is called.
        construct_rpc_backend_options_handler, init_backend_handler: see `BackendType`.

    Raises:
        RpcError: there is one of that name.
    """
    with _lock:
        if backend_name in _backends:
            raise RpcError(f"RPC backend {backend_name}", why="already registered")
        made = BackendType(
            backend_name, construct_rpc_backend_options_handler, init_backend_handler
        )
        _backends[backend_name] = made
        return made


def construct_rpc_backend_options(
    backend: BackendType,
    rpc_timeout: float = DEFAULT_TIMEOUT,
    init_method: str = DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> RpcBackendOptions:
    """Return options of a backend."""
    return backend.make_options(rpc_timeout, init_method, **kwargs)


def backend_for(options: RpcBackendOptions) -> BackendType:
    """Return the backend whose options these are.

    Raises:
        TypeError: they are nobody's.
    """
    for backend in BackendType:
        if isinstance(options, type(construct_rpc_backend_options(backend))):
            return backend
    raise TypeError(f"Could not infer backend for options {options!r}")
