"""What a tensor is, apart from its bytes: element type, shape, order in memory, quantization.

A `TensorMeta` says how the elements of a tensor follow each other as bytes, so that a receiver can
allocate once and let the bytes land in place:

* A tensor that is dense in memory, whatever the order of its dimensions (contiguous, transposed,
  channels_last), travels in that order and keeps it on the other side, as ``torch.clone`` with
  ``torch.preserve_format`` does. Strides of dimensions of size one mean nothing and are not kept.
* Every other view (sliced, overlapping, expanded) travels as its own elements, each once and in row
  order, without the storage around them, and arrives contiguous.
* Conjugate and negative bits are resolved on the way; the values are the same on the other side.

Elements are little-endian, as on every platform the project runs on.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import struct
from collections.abc import Sequence

import torch

from tensor_bridge.errors import UnsupportedTensor
from tensor_bridge.fields import MAX_BYTES, Fields
from transport import CborValue, cbor

__all__ = [
    "DTYPES",
    "Quantization",
    "TensorMeta",
    "decode_meta",
    "describe",
    "dtype_name",
    "dtype_of",
    "encode_meta",
    "is_plain",
    "memory_order",
]

MAX_DIMS = 64
"""Most dimensions of a tensor: torch's own kernels iterate over no more."""

MAX_CHANNELS = 1024
"""Most channels of a per-channel quantized tensor. Each takes 16 bytes of a message's 64 KiB."""

MAX_ENCODED = 32 * 1024
"""Most bytes of an encoded description: the channels and, generously, everything else."""

_NAMES = (
    "bool",
    *("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    "float4_e2m1fn_x2",
    # Types without arithmetic: torch stores one element per byte (bits16: two).
    *(f"{sign}int{width}" for sign in ("", "u") for width in range(1, 8)),
    *("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"),
    *("qint8", "quint8", "qint32"),
)

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES}
"""Every element type that moves, by its name on the wire, which is torch's own.

All of torch 2.13 but ``quint4x2`` and ``quint2x4``: how those pack elements is not public.
"""

_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}
_PLAIN = frozenset(
    DTYPES[name]
    for name in [
        "float32",
        "float64",
        "float16",
        "bfloat16",
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
    ]
)
"""Types whose elements are neither complex, and so perhaps conjugated, nor quantized."""

_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32})


@dataclasses.dataclass(frozen=True, slots=True)
class Quantization:
    """Affine quantization: ``value = scale * (stored - zero_point)``, whole or along one dimension.

    Attributes:
        scales: one float64 per channel; exactly one if `axis` is None.
        zero_points: one int64 per channel, as many as scales.
        axis: the dimension of the channels (``torch.per_channel_affine``), or None
            (``torch.per_tensor_affine``).
    """

    scales: tuple[float, ...]
    zero_points: tuple[int, ...]
    axis: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class TensorMeta:
    """The description of one tensor, enough to allocate its twin.

    Attributes:
        dtype: element type, one of `DTYPES`.
        shape: sizes in elements; ``()`` is a scalar.
        order: the dimensions from the outermost to the innermost in memory, a permutation of
            ``range(len(shape))``. ``(0, 2, 3, 1)`` is ``torch.channels_last``.
        requires_grad: whether the twin is a leaf that wants a gradient.
        quantization: for quantized types, and only for them.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...]
    requires_grad: bool = False
    quantization: Quantization | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, and in memory on the other side."""
        return self.numel * self.dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides, in elements, of the dense tensor that has this order."""
        return _dense_strides(self.shape, self.order)

    def digest(self) -> bytes:
        """Return 32 bytes that stand for this description: SHA-256 of its encoding."""
        return hashlib.sha256(cbor.encode(encode_meta(self), max_size=MAX_ENCODED)).digest()


def describe(tensor: torch.Tensor) -> TensorMeta:
    """Return the description of `tensor`.

    Raises:
        UnsupportedTensor: its elements are not plain bytes on the CPU or a CUDA device, with what
            to do instead.
    """
    if is_plain(tensor):
        return _plain_meta(tensor.dtype, tuple(tensor.shape), tensor.requires_grad)
    _refuse_unsupported(tensor)
    shape, rows = tuple(tensor.shape), tuple(range(tensor.dim()))
    return TensorMeta(
        dtype=tensor.dtype,
        shape=shape,
        order=memory_order(shape, tensor.stride()) or rows,
        requires_grad=tensor.requires_grad,
        quantization=_quantization(tensor) if tensor.is_quantized else None,
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of the commonest kind: the CPU's, and its rows one after another.

    Of a few others this may return False.
    """
    if not (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.dtype in _PLAIN
        and tensor.is_cpu
        and not tensor.is_nested
        and not tensor.is_neg()
        and tensor.is_contiguous()
        and tensor.dim() <= MAX_DIMS
        and (
            tensor.dim() < 2
            or 1 not in tensor.shape  # else order is a matter of strides alone
            or tensor.stride() == _row_strides(tensor.shape)
        )
    ):
        return False
    try:
        return tensor.data_ptr() != 0 or not tensor.numel()
    except RuntimeError:  # inside a transform of torch.func
        return False


@functools.lru_cache(1024)
def _plain_meta(dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> TensorMeta:
    return TensorMeta(dtype, shape, tuple(range(len(shape))), requires_grad)


@functools.lru_cache(1024)
def _row_strides(shape: torch.Size) -> tuple[int, ...]:
    return _dense_strides(shape, range(len(shape)))


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Return the dimensions from outermost to innermost if the elements fill one span of memory.

    Returns:
        The order, row order where there is no element; None if elements overlap or leave gaps.
    """
    rows = tuple(range(len(shape)))
    if 0 in shape:
        return rows
    # Between equal strides the dimension of size one is the inner one: (1, 1, 4, 4) with strides
    # (16, 1, 4, 1) is channels_last.
    order = tuple(sorted(rows, key=lambda dim: (-strides[dim], shape[dim] == 1)))
    dense = _dense_strides(shape, order)
    if all(shape[dim] == 1 or strides[dim] == dense[dim] for dim in rows):
        return order
    return None


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of `dtype` on the wire: ``"float32"``.

    Raises:
        UnsupportedTensor: elements of this type don't move.
    """
    try:
        return _NAME_OF[dtype]
    except KeyError:
        raise UnsupportedTensor(
            f"moving of elements of type {dtype}",
            why="how torch packs them is not public",
            fix="Move the dequantized tensor.",
        ) from None


def dtype_of(name: str) -> torch.dtype:
    """Return the element type that `name` stands for on the wire.

    Raises:
        UnsupportedTensor: no such type here.
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise UnsupportedTensor(
            f"reading of elements of type {name!r:.40}", why="this node's torch has no such type"
        ) from None


def encode_meta(meta: TensorMeta) -> dict[str, CborValue]:
    """Return `meta` as it travels."""
    value: dict[str, CborValue] = {"grad": True} if meta.requires_grad else {}
    value["dtype"] = dtype_name(meta.dtype)
    if meta.order != tuple(range(len(meta.shape))):
        value["order"] = list(meta.order)
    value["shape"] = list(meta.shape)
    if meta.quantization is not None:
        value["quantization"] = _encode_quantization(meta.quantization)
    return value


def decode_meta(value: CborValue) -> TensorMeta:
    """Return the description in `value`, checked so that allocating by it is safe.

    What `encode_meta` would have written otherwise is refused: a description has one digest.

    Raises:
        ProtocolError: not a description, or one that no tensor has.
        UnsupportedTensor: an element type that this node's torch lacks.
    """
    fields = Fields(value, "tensor description")
    dtype = dtype_of(fields.text("dtype", longest=32))
    shape = fields.integers("shape", longest=MAX_DIMS)
    # Zeros left out: strides of an empty tensor are computed from its other sizes.
    if math.prod(max(size, 1) for size in shape) * dtype.itemsize > MAX_BYTES:
        raise fields.wrong("its elements would take more than 2^63 bytes")
    order = rows = tuple(range(len(shape)))
    if fields.has("order"):
        order = fields.integers("order", longest=MAX_DIMS)
        if order == rows:
            raise fields.wrong("'order' is left out where it is that of rows")
    if tuple(sorted(order)) != rows:
        raise fields.wrong("'order' is no permutation of its dimensions")
    grad = fields.has("grad")
    if grad and not fields.flag("grad"):
        raise fields.wrong("'grad' is left out where there is none")
    if grad and not (dtype.is_floating_point or dtype.is_complex):
        raise fields.wrong(f"elements of type {dtype} have no gradient")
    if fields.has("quantization") != (dtype in _QUANTIZED):
        raise fields.wrong("quantization goes with quantized types, and only with them")
    quantization = None
    if dtype in _QUANTIZED:
        quantization = _decode_quantization(fields.value("quantization"), shape)
    fields.finish()
    return TensorMeta(dtype, shape, order, grad, quantization)


def _dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def _refuse_unsupported(tensor: torch.Tensor) -> None:
    """Raise unless the elements of `tensor` are plain bytes that this process can read."""
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedTensor(
            f"moving of a {type(tensor).__name__}",
            why="it is no torch.Tensor",
            fix="Make one of it first: torch.tensor(...).",
        )
    what = f"moving of a {type(tensor).__name__}"
    if tensor.is_nested:
        raise UnsupportedTensor(
            what, why="a nested tensor has no one shape", fix="Move its parts, from unbind()."
        )
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise UnsupportedTensor(
            what,
            why="a wrapper subclass keeps its elements elsewhere",
            fix="Move the tensors it wraps, such as DTensor.to_local().",
        )
    if tensor.layout is not torch.strided:
        raise UnsupportedTensor(
            what,
            why=f"its layout is {tensor.layout}",
            fix="Move to_dense(), or the index and value tensors.",
        )
    if tensor.is_meta:
        raise UnsupportedTensor(
            what,
            why="it is on the device 'meta', where tensors have a shape and no elements",
            fix="Give it elements first: torch.empty_like(tensor, device='cpu').",
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise UnsupportedTensor(
            what,
            why=f"its device is '{tensor.device}', whose memory can't be read here",
            fix="Copy it to the CPU first: tensor.cpu().",
        )
    if tensor.dim() > MAX_DIMS:
        raise UnsupportedTensor(what, why=f"it has more than {MAX_DIMS} dimensions")
    dtype_name(tensor.dtype)
    try:
        address = tensor.data_ptr()
    except RuntimeError as error:  # inside vmap, grad and the other transforms of torch.func
        raise UnsupportedTensor(
            what, why="it has no memory of its own", fix="Move it outside of the transform."
        ) from error
    if not address and tensor.numel():
        raise UnsupportedTensor(what, why="its storage holds no memory; it may have been freed")


def _quantization(tensor: torch.Tensor) -> Quantization:
    scheme = tensor.qscheme()
    if scheme == torch.per_tensor_affine:
        return Quantization((tensor.q_scale(),), (tensor.q_zero_point(),))
    if scheme != torch.per_channel_affine:
        raise UnsupportedTensor(
            "moving of a quantized tensor",
            why=f"its scheme is {scheme}",
            fix="Move it per tensor or per channel affine, or dequantized.",
        )
    scales = tuple(tensor.q_per_channel_scales().tolist())
    if len(scales) > MAX_CHANNELS:
        raise UnsupportedTensor(
            "moving of a quantized tensor",
            why=f"it has {len(scales)} channels, and at most {MAX_CHANNELS} travel",
            fix="Move it in slices along its channel dimension.",
        )
    zero_points = tuple(tensor.q_per_channel_zero_points().tolist())
    return Quantization(scales, zero_points, tensor.q_per_channel_axis())


def _encode_quantization(quantization: Quantization) -> dict[str, CborValue]:
    count = len(quantization.scales)
    value: dict[str, CborValue] = {
        "scales": struct.pack(f"<{count}d", *quantization.scales),
        "zero_points": struct.pack(f"<{count}q", *quantization.zero_points),
    }
    if quantization.axis is not None:
        value["axis"] = quantization.axis
    return value


def _decode_quantization(value: CborValue, shape: tuple[int, ...]) -> Quantization:
    fields = Fields(value, "quantization")
    axis, count = None, 1
    if fields.has("axis"):
        if not shape:
            raise fields.wrong("a scalar has no channels")
        axis = fields.integer("axis", high=len(shape) - 1)
        count = shape[axis]
        if count > MAX_CHANNELS:
            raise fields.wrong(f"more than {MAX_CHANNELS} channels")
    scales = fields.data("scales", shortest=8 * count, longest=8 * count)
    zero_points = fields.data("zero_points", shortest=8 * count, longest=8 * count)
    fields.finish()
    return Quantization(
        struct.unpack(f"<{count}d", scales), struct.unpack(f"<{count}q", zero_points), axis
    )
