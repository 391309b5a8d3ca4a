"""Makes the device type ``mesh`` known to torch: kernels, guard, module, random numbers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from mesh.device import wire
from mesh.device.client import autocast, patches, special
from mesh.device.client.entries import Entry, operator_name
from mesh.device.client.kernels import emit, fast_kernel
from mesh.device.client.session import Request, forked
from mesh.device.client.tensors import BACKEND, Device, device_of, devices, handle_of
from mesh.device.errors import DeviceError, UnsupportedOnDevice
from mesh.device.ops import allows

__all__ = ["ask_wait", "register", "synchronize"]

aten = torch.ops.aten

_lock = threading.Lock()
_kept: list[Any] = []
"""What torch keeps by pointers alone, and the libraries, which take their kernels with them."""

_META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)


def register() -> None:
    """Register everything, once in a process; the first call takes one or two seconds.

    Raises:
        DeviceError: another backend has torch's one place for such.
    """
    with _lock:
        if _kept:
            return
        taken = torch._C._get_privateuse1_backend_name()
        if taken not in ("privateuseone", BACKEND):
            raise DeviceError(
                f"registration of the device type {BACKEND!r}",
                why=f"this process has the device type {taken!r}, and torch allows one such",
                fix="Use mesh devices in a process of their own.",
            )
        rename_privateuse1_backend(BACKEND)
        generate_methods_for_privateuse1_backend()
        hook, guard = _Hook(), _Guard()
        module: Any = _Module()
        torch_: Any = torch
        torch_._register_device_module(BACKEND, module)
        torch._C._acc.register_python_privateuseone_hook(hook)
        torch._C._acc.register_python_privateuseone_device_guard(guard)
        library, everything = (torch_.library.Library(name, "IMPL") for name in ("aten", "_"))
        _kept.extend((hook, guard, module, library, everything))
        _register_kernels(library)
        _register_lookalikes(library)
        for key in ("PrivateUse1", "SparsePrivateUse1"):
            everything.fallback(_refuse, key)
        autocast.register(library, everything)
        patches.patch()
        # torch takes a fused layer of a transformer that is evaluated for its own devices and for
        # ones like these, which have it in parts.
        torch.backends.mha.set_fastpath_enabled(False)
        _load_inference()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=forked)


def synchronize(device: Device) -> None:
    """Wait until the peer has done everything that was sent before.

    Raises:
        MeshError: the session is lost. What an operation has failed with is told to who reads.
    """
    device.session.result(ask_wait(device))


def ask_wait(device: Device) -> Request:
    """Ask for a word once the peer has done everything that was sent before."""
    entry = _own_entry(device, wire.WAIT)
    return device.session.ask(entry.number, entry.layout, (), "synchronization of a device")


class _Hook(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def has_primary_context(self, index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


class _Current(threading.local):
    """The device that `_Context` says."""

    index = 0


_current = _Current()


class _Context:
    """``with torch.mesh.device(k)``: whose state of random numbers is meant where none is named.

    That is how ``torch.utils.checkpoint`` keeps those of its arguments' devices. New tensors are on
    the device that they are made for all the same.
    """

    def __init__(self, device: Any) -> None:
        self._index = _index_of(device)
        self._before = 0

    def __enter__(self) -> None:
        self._before, _current.index = _current.index, self._index

    def __exit__(self, *exception: object) -> None:
        _current.index = self._before


class _Module:
    """``torch.mesh``: what torch looks up on the module of a device type."""

    device = _Context

    @property
    def _initialized(self) -> bool:
        """Whether ``torch.utils.checkpoint`` is to keep the state of random numbers."""
        return bool(devices)

    def is_initialized(self) -> bool:
        return bool(devices)

    def is_available(self) -> bool:
        return bool(devices)

    def _is_in_bad_fork(self) -> bool:
        return os.getpid() != _process

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return len(devices)

    def set_device(self, device: Any) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        for each in _chosen(device):
            synchronize(each)

    def manual_seed(self, seed: int) -> None:
        _seed(devices[:1], seed)

    def manual_seed_all(self, seed: int) -> None:
        _seed(devices, seed)

    def seed(self) -> None:
        self.manual_seed(int.from_bytes(os.urandom(8), "little"))

    def seed_all(self) -> None:
        self.manual_seed_all(int.from_bytes(os.urandom(8), "little"))

    def get_rng_state(self, device: Any = BACKEND) -> torch.Tensor:
        chosen = _one(device)
        entry = _own_entry(chosen, wire.GET_RNG)
        session = chosen.session
        request = session.ask(entry.number, entry.layout, (), "state of random numbers")
        state = session.result(request)
        if not isinstance(state, bytes):
            raise DeviceError("state of random numbers", why="the peer answered something else")
        return torch.frombuffer(bytearray(state), dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = BACKEND) -> None:
        chosen = _one(device)
        there = state.to(chosen.torch_device)
        geometry = wire.Geometry(torch.uint8, tuple(there.shape), there.stride())
        entry = _own_entry(chosen, wire.SET_RNG, wire.TensorOf(geometry))
        emit(entry, (handle_of(there).id,), (), (there,), {})

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_process = os.getpid()
_own: dict[Any, Entry] = {}


def _own_entry(device: Device, name: str, *arguments: wire.Argument) -> Entry:
    key = (device, name, arguments)
    entry = _own.get(key)
    if entry is None:
        template = wire.Template(name, device.remote, arguments)
        entry = _own[key] = Entry(device, template, None, lambda: _own.pop(key, None))
    return entry


def _seed(chosen: Iterable[Device], seed: int) -> None:
    for device in chosen:
        if device.session.error is None:  # torch.manual_seed is for all devices, lost ones too
            device.session.emit(wire.seed(device.remote, seed))


def _one(device: Any) -> Device:
    return device_of(torch.device(BACKEND, _index_of(device)))


def _index_of(device: Any) -> int:
    index: int | None = device if isinstance(device, int) else torch.device(device).index
    return _current.index if index is None else index


def _chosen(device: Any) -> list[Device]:
    return list(devices) if device is None else [_one(device)]


def _load_inference() -> None:
    """Have torch load what it infers shapes with: a second or two, not for a first operation."""
    meta = torch.ones(2, device="meta")
    torch.add(meta, 1, out=torch.empty(0, device="meta"))


def _register_kernels(library: Any) -> None:
    done = set(special.KERNELS)
    for name, kernel in special.KERNELS.items():
        library.impl(name, kernel, "PrivateUse1")
    for name in special.LOCAL:
        base, _, overload = name.partition(".")
        operator = getattr(getattr(aten, base), overload or "default")
        library.impl(name, _on_meta(operator), "PrivateUse1")
        done.add(name)
    for operator in _operators():
        name = operator_name(operator).removeprefix("aten::")
        if name not in done:
            kernel = fast_kernel(operator)
            if _sees_bits(f"aten::{name}"):
                kernel = special.resolving(operator, kernel)
            library.impl(name, kernel, "PrivateUse1")


def _operators() -> Iterable[Any]:
    """Yield the operators that are sent: those on the list that autograd sees whole."""
    for name in torch._C._dispatch_get_all_op_names():
        if not allows(name) or name.partition(".")[0] == "aten::_to_copy":
            continue
        # Some that have a kernel of the CPU's besides round in between when made of others.
        composed = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        if composed and name not in _WHOLE:
            continue
        base, _, overload = name.removeprefix("aten::").partition(".")
        operator = getattr(getattr(aten, base), overload or "default", None)
        if operator is not None and torch._C._dispatch_has_kernel(name):
            yield operator


_WHOLE = frozenset({"aten::mish_backward", "aten::silu_backward"})


def _sees_bits(name: str) -> bool:
    """Return whether torch leaves conjugate and negative bits to an operator's kernels."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(name, "Conjugate") or has(name, "Negative")


def _on_meta(operator: Any) -> Callable[..., Any]:
    """Return a kernel that changes how a tensor lies in its storage, here alone."""
    redispatch = operator._handle.redispatch_boxed

    def run(*args: Any, **kwargs: Any) -> Any:
        return redispatch(_META, *args, **kwargs)

    return run


def _refuse(operator: Any, *args: Any, **kwargs: Any) -> Any:
    raise UnsupportedOnDevice(
        f"operation {operator_name(operator)}",
        why="it is not one that mesh devices have",
        fix="Move the tensors here first, with .cpu().",
    )


def _register_lookalikes(library: Any) -> None:
    """Register what torch would choose on a CPU where it can't know that it is one."""
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        # Module.to then changes parameters in place, so that optimizers keep theirs.
        library.impl("_has_compatible_shallow_copy_type", lambda one, other: True, key)
        library.impl("scaled_dot_product_attention", _attention, key)
        for name in ("lstm.input", "lstm.data", "gru.input", "gru.data"):
            library.impl(name, _decomposition(name), key)
    library.impl("_pin_memory", lambda tensor, device=None: tensor.clone(), "CPU")
    for key in ("CPU", "PrivateUse1"):
        library.impl("is_pinned", lambda tensor, device=None: False, key)


def _decomposition(name: str) -> Callable[..., Any]:
    """Return a recurrent layer made of simpler operators: torch has it fused for its own alone."""
    import torch._decomp.decompositions

    base, _, overload = name.partition(".")
    operator = getattr(getattr(aten, base), overload)
    found = torch._decomp.decomposition_table.get(operator)
    if found is None:
        found = operator.py_kernels[torch._C.DispatchKey.CompositeImplicitAutograd]
    kernel: Callable[..., Any] = found
    return kernel


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention by the operator that a CPU would choose (ATen's sdp_utils_cpp)."""
    fused = (
        dropout_p == 0.0
        and not enable_gqa
        and query.dim() == 4
        and query.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
        and all(each.shape[-2] and each.stride(-1) == 1 for each in (query, key, value))
        and query.shape[:2] == key.shape[:2] == value.shape[:2]
        and not (attn_mask is not None and attn_mask.requires_grad)
    )
    if not fused:
        result: torch.Tensor = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
        return result
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        zeros = torch.zeros(attn_mask.shape, dtype=query.dtype, device=query.device)
        attn_mask = zeros.masked_fill_(~attn_mask, float("-inf"))
    output: torch.Tensor = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return output
