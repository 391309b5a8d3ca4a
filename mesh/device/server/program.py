"""A template made ready to run: the operator found, the places of tensors and numbers known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from mesh.device import wire
from mesh.device.groups.working import Call, check_call
from mesh.device.server.later import Step
from transport import ProtocolError

__all__ = ["Made", "Program"]

_OPERATORS: dict[str, Any] = {}

_OTHERS = -1
"""Stands, among handles, for what others wait for. Results of a group are waited for on the one
thread there is, and so not before all that has been done that other members may need for them."""

_GROUPS = -2
"""The group of number n stands at this less n: its operations are done in order."""


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """One result, as the client expects it."""

    position: int
    geometry: wire.Geometry
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


class Program:
    """A template on one device.

    Args:
        template: as it came off the wire; its operator is on the positive list.
        device: the hardware.
        intern: returns the one object for equal geometries.

    Attributes:
        tensors: geometries of the tensors it takes.
        written: which of those it writes to.
        made: what it makes, as far as the client can tell.
        count: how many handles it makes.
        nbytes: of all that it makes, as far as the client can tell.
        is_random: whether it draws random numbers.
        aliases: whether its results share memory; None until it has run.
        takes_numbers: whether numbers come with each operation.
        call: what a group of devices is to do; None for all else.
        waits: whether results of that are waited for, where they are taken.

    Raises:
        ProtocolError: torch has no such operator, or its arguments are not such.
    """

    def __init__(
        self,
        template: wire.Template,
        device: torch.device,
        intern: Callable[[wire.Geometry], wire.Geometry],
    ) -> None:
        self.template = template
        self.device = device
        self.layout = wire.Layout(template)
        self.tensors = tuple(map(intern, self.layout.tensors))
        self.count = self.layout.made
        self.aliases: bool | None = None
        self.made = tuple(
            Made(
                output.position,
                intern(output.geometry),
                torch.Size(output.geometry.shape),
                output.geometry.strides,
                output.geometry.dtype,
                output.nbytes,
            )
            for output in template.outputs or ()
        )
        self.nbytes = sum(made.nbytes for made in self.made)
        self.written: tuple[int, ...] = ()
        self.is_random = False
        self.operator: Any = None
        self.call: Call | None = None
        self.waits = True
        if template.name.startswith("mesh::"):
            self._check_own()
        else:
            self.operator = _find(template.name)
            self._look_at_schema()
        self._first_number = len(self.tensors) + self.count
        self.takes_numbers = self.layout.body.size > 8 * self._first_number
        self._builders = tuple(self._builder(each) for each in self._flat_arguments())
        self._is_plain = all(
            not isinstance(each, wire.Items) or not _has_inputs(each)
            for each in self._flat_arguments()
        )
        self._names = tuple(name for name, _ in template.kwargs)
        self._positional = len(template.args)
        if self._is_plain:
            self._prepare_plain()

    def arguments(
        self, tensors: Sequence[torch.Tensor], values: Sequence[Any]
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return what the operator is called with."""
        if self._is_plain:
            flat = self._constant.copy()
            for place, tensor in zip(self._tensor_places, tensors, strict=True):
                flat[place] = tensor
            if self._number_places:
                numbers = values[self._first_number :]
                for (place, dtype), number in zip(self._number_places, numbers, strict=True):
                    flat[place] = number if dtype is None else torch.tensor(number, dtype=dtype)
        else:
            taken, drawn = iter(tensors), iter(values[self._first_number :])
            flat = [build(taken, drawn) for build in self._builders]
        if not self._names:
            return flat, {}
        count = self._positional
        return flat[:count], dict(zip(self._names, flat[count:], strict=True))

    def operate(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call the operator, with torch's default type as it is at the client."""
        before, floats = torch.get_default_dtype(), self.template.floats
        if before is floats:
            return self.operator(*args, **kwargs)
        torch.set_default_dtype(floats)
        try:
            return self.operator(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)

    def step(self, values: Sequence[Any], run: Callable[[Program, Sequence[Any]], object]) -> Step:
        """Return what runs it with these values, and what that depends on."""
        name, start = self.template.name, len(self.tensors)
        draws = self.is_random or name in (wire.GET_RNG, wire.SET_RNG)
        uses: tuple[int, ...] = tuple(values[:start])
        changes: tuple[int, ...] = (
            *values[start : start + self.count],
            *(values[index] for index in self.written),
        )
        if name in (wire.READ, wire.START):
            uses += (_OTHERS,)
        if name in (wire.START, wire.TAKE):
            changes += (_GROUPS - values[-2],)
        if name == wire.TAKE:
            changes += (_OTHERS,)
        return Step(
            partial(run, self, values),
            uses,
            changes,
            (self.template.device,) if draws else (),
            name == wire.WAIT,
        )

    def _prepare_plain(self) -> None:
        self._constant: list[Any] = []
        self._tensor_places: list[int] = []
        self._number_places: list[tuple[int, torch.dtype | None]] = []
        for place, argument in enumerate(self._flat_arguments()):
            constant = None
            if isinstance(argument, wire.TensorOf):
                self._tensor_places.append(place)
            elif isinstance(argument, wire.Number):
                self._number_places.append((place, argument.dtype))
            else:
                constant = self._builders[place](iter(()), iter(()))
            self._constant.append(constant)

    def _flat_arguments(self) -> tuple[wire.Argument, ...]:
        return (*self.template.args, *(value for _, value in self.template.kwargs))

    def _builder(self, argument: wire.Argument) -> Callable[[Any, Any], Any]:
        match argument:
            case wire.TensorOf():
                return lambda tensors, numbers: next(tensors)
            case wire.Number(_, None):
                return lambda tensors, numbers: next(numbers)
            case wire.Number(_, torch.dtype() as dtype):
                return lambda tensors, numbers: torch.tensor(next(numbers), dtype=dtype)
            case wire.DeviceOf():
                device = self.device
                return lambda tensors, numbers: device
            case wire.Items(items):
                builders = tuple(map(self._builder, items))
                return lambda tensors, numbers: [build(tensors, numbers) for build in builders]
            case wire.Literal(value):
                return lambda tensors, numbers: value
        raise TypeError(f"{argument!r} is no argument")

    def _look_at_schema(self) -> None:
        schema = self.operator._schema
        self.is_random = torch.Tag.nondeterministic_seeded in self.operator.tags
        written: list[int] = []
        index = 0
        by_name = {argument.name: argument for argument in schema.arguments}
        if len(self.template.args) > len(schema.arguments):
            raise self._bad("it takes fewer arguments")
        described = [
            *zip(schema.arguments, self.template.args, strict=False),
            *((by_name.get(name), value) for name, value in self.template.kwargs),
        ]
        for argument, value in described:
            if argument is None:
                raise self._bad("it has no argument of that name")
            _check_kind(self, str(argument.type), value)
            count = _count(value)
            if argument.alias_info is not None and argument.alias_info.is_write:
                written.extend(range(index, index + count))
            index += count
        self.written = tuple(written)

    def _check_own(self) -> None:
        """Check the shape of this project's own operations."""
        name, made = self.template.name, self.template.outputs
        arguments = self._flat_arguments()
        if name in (wire.START, wire.TAKE):
            self._check_group(arguments)
            return
        takes = 1 if name in (wire.READ, wire.MOVE, wire.SET_RNG) else 0
        makes = 1 if name in (wire.ALLOCATE, wire.MOVE) else 0
        if (
            made is None
            or len(made) != makes
            or len(arguments) != takes
            or not all(isinstance(argument, wire.TensorOf) for argument in arguments)
        ):
            raise self._bad("its arguments are not such")

    def _check_group(self, arguments: tuple[wire.Argument, ...]) -> None:
        """Check the shape of an operation of a group: group and number, what it is, and tensors."""
        starts = self.template.name == wire.START
        numbers, rest = arguments[:2], arguments[2:]
        values = [each.value for each in rest if isinstance(each, wire.Literal)]
        if (
            numbers != (wire.Number("q"),) * 2
            or self.template.outputs is None
            or starts == bool(self.made)
            or starts != bool(self.tensors)
            or len(values) != (3 if starts else 1)
            or len(rest) != len(values) + len(self.tensors)
        ):
            raise self._bad("its arguments are not such")
        if starts:
            self.call = check_call(*values)
        else:
            self.waits = values[0] is True

    def _bad(self, why: str) -> ProtocolError:
        return ProtocolError(f"definition of {self.template.name!r}", why=why)


def _find(name: str) -> Any:
    """Return the operator; its name is on the positive list."""
    found = _OPERATORS.get(name)
    if found is None:
        base, _, overload = name.removeprefix("aten::").partition(".")
        try:
            found = getattr(getattr(torch.ops.aten, base), overload or "default")
        except AttributeError:
            found = None
        if not isinstance(found, torch._ops.OpOverload):
            raise ProtocolError(f"definition of {name!r}", why="this peer's torch has none such")
        if any(
            result.alias_info is not None and not result.alias_info.is_write
            for result in found._schema.returns
        ):
            raise ProtocolError(f"definition of {name!r}", why="views are made by the client")
        _OPERATORS[name] = found
    return found


def _check_kind(program: Program, kind: str, value: wire.Argument) -> None:
    """Refuse what would reach torch as something else than its schema says."""
    if "Generator" in kind or "Storage" in kind or "Stream" in kind:
        if value != wire.Literal(None):
            raise program._bad(f"arguments of type {kind} don't travel")
    elif "Device" in kind and not (isinstance(value, wire.DeviceOf) or value == wire.Literal(None)):
        raise program._bad("the device is the session's")
    elif "Device" not in kind and isinstance(value, wire.DeviceOf):
        raise program._bad("a device was given for something else")


def _count(argument: wire.Argument) -> int:
    if isinstance(argument, wire.TensorOf):
        return 1
    if isinstance(argument, wire.Items):
        return sum(map(_count, argument.items))
    return 0


def _has_inputs(argument: wire.Argument) -> bool:
    if isinstance(argument, wire.Items):
        return any(map(_has_inputs, argument.items))
    return isinstance(argument, wire.TensorOf | wire.Number)
