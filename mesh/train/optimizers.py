"""States of optimizers: one form for all strategies, however they divide the parameters.

The form is that of one optimizer of all parameters of the model, in the model's order, as
``torch.optim.Optimizer.state_dict`` returns it. An optimizer of buckets has a long tensor where
that has one of each parameter, and a number of steps for all of them where that has one for each.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer

from mesh.train.buckets import Bucket
from mesh.train.errors import CheckpointError

__all__ = ["set_state", "of_buckets", "of_parameters"]

State: TypeAlias = dict[str, Any]
"""``state``: by the number of a parameter, values by name; and ``param_groups``."""

_OF_ALL = ("step", "mu_product", "eta", "mu")
"""What torch's optimizers call values that have no element for each of a parameter's."""


def set_state(optimizer: Optimizer, state: State) -> None:
    """Have an optimizer go on from a state, of which it takes nothing over.

    Raises:
        CheckpointError: it is one of other groups of parameters.
    """
    try:
        optimizer.load_state_dict(copy.deepcopy(state))
    except (ValueError, KeyError) as error:
        theirs, ours = (
            [len(group["params"]) for group in groups]
            for groups in (state.get("param_groups", ()), optimizer.param_groups)
        )
        raise CheckpointError(
            "loading of an optimizer's state",
            why=f"it is of groups of {_numbers(theirs)} parameters, and the optimizer that was "
            f"made has groups of {_numbers(ours)} ({error})",
            fix="Make the model and the optimizer as they were made when the state was saved.",
        ) from error


def of_parameters(state: State, buckets: Sequence[Bucket], count: int) -> State:
    """Return the state of an optimizer of whole buckets as one of parameters.

    Args:
        state: by the number of a bucket; long tensors are as long as it, without padding.
        buckets: of the model.
        count: of the model's parameters.

    Returns:
        A state in which parameters may share a tensor; to go on from it, copy each.

    Raises:
        CheckpointError: the optimizer has several groups of options.
    """
    values: dict[int, State] = {}
    for number, bucket in enumerate(buckets):
        for name, value in state["state"].get(number, {}).items():
            is_long = isinstance(value, torch.Tensor) and value.shape == (bucket.numel,)
            parts = bucket.views(value) if is_long else [value] * len(bucket.indices)
            for index, part in zip(bucket.indices, parts, strict=True):
                values.setdefault(index, {})[name] = part
    group = _one_group(state)
    return {"state": values, "param_groups": [{**group, "params": list(range(count))}]}


def of_buckets(state: State, buckets: Sequence[Bucket], count: int) -> State:
    """Return the state of an optimizer of parameters as one of whole buckets.

    Raises:
        CheckpointError: it is of another model, or holds what differs within a bucket.
    """
    group = _one_group(state)
    trained = sorted(index for bucket in buckets for index in bucket.indices)
    numbers = group["params"]
    if len(numbers) not in (count, len(trained)):
        raise _unfit(
            f"it is of {len(numbers)} parameters, and the model has {count}",
            "Load it into a model like the one that was trained.",
        )
    indices = range(count) if len(numbers) == count else trained
    places = dict(zip(indices, numbers, strict=True))
    values: dict[int, State] = {}
    for number, bucket in enumerate(buckets):
        parts = [state["state"].get(places[index], {}) for index in bucket.indices]
        if any(part.keys() != parts[0].keys() for part in parts):
            raise _differing("some of them have no state: they never had a gradient")
        joined = {name: _joined(name, [part[name] for part in parts], bucket) for name in parts[0]}
        if joined:
            values[number] = joined
    return {"state": values, "param_groups": [{**group, "params": list(range(len(buckets)))}]}


def _joined(name: str, values: Sequence[Any], bucket: Bucket) -> Any:
    """Return one value for a bucket, of those of its parameters."""
    tensors = [each for each in values if isinstance(each, torch.Tensor)]
    if len(tensors) == len(values) and name not in _OF_ALL:
        if [each.shape for each in tensors] != bucket.shapes:
            raise _differing(f"{name!r} does not have the shapes of the parameters")
        return torch.cat([each.reshape(-1) for each in tensors])
    first = values[0]
    if any(_plain(each) != _plain(first) for each in values[1:]):
        raise _differing(f"{name!r} differs: they had gradients in different steps")
    return first


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _one_group(state: State) -> State:
    groups = state["param_groups"]
    if len(groups) != 1:
        raise _unfit(
            f"it has {len(groups)} groups of options, and parameters that are updated in one "
            "piece have one",
            "Give all parameters the same options, or train by `ddp`.",
        )
    group: State = groups[0]
    return group


def _differing(why: str) -> CheckpointError:
    return _unfit(
        f"parameters that are updated in one piece can't have been updated apart, and {why}",
        "Go on by the strategy that has saved it, `ddp` or `single`.",
    )


def _unfit(why: str, fix: str) -> CheckpointError:
    return CheckpointError("state of a sharded optimizer", why=why, fix=fix)


def _numbers(values: Iterable[int]) -> str:
    return ", ".join(map(str, values)) or "no"
