"""Random programs over several nodes, and what each comes to when one process does all of it.

A program is data: operations on numbered tensors, some of which are calls of programs at other
workers. `Place` runs it, counting what backward executes: each node of the graph by a hook on it,
each hook on a tensor, and each gradient that crosses from one worker to another.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.autograd import Function

__all__ = ["Place", "Twin", "generate", "weights"]

WIDTH = 4
WEIGHTS = 3
DEPTH = 3
CROSSING = "crossing"

Program = dict[str, Any]
Call = Callable[[int, Program, str, Sequence[torch.Tensor]], list[Any]]


class Twin(Function):
    """Two results, one of which passes on no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        ctx.save_for_backward(x)
        return x * 2, y.abs()

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        (x,) = ctx.saved_tensors
        return first * 2 + 0 * x, None


def weights(worker: int, seed: int) -> list[torch.Tensor]:
    """The leaves of a worker: vectors, and a table whose gradients are sparse."""
    numbers = torch.Generator().manual_seed(1000 * seed + worker)
    made = [
        torch.randn(WIDTH, generator=numbers, dtype=torch.float64).requires_grad_()
        for _ in range(WEIGHTS)
    ]
    table = torch.randn(5, WIDTH, generator=numbers, dtype=torch.float64).requires_grad_()
    return [*made, table]


def generate(seed: int, workers: int) -> Program:
    """Return the program of a seed, which worker 0 begins; most are small, some are large."""
    rng = random.Random(seed)
    return _generate(rng, workers, 0, DEPTH if seed % 8 == 7 else 1 + seed % 2, 3, is_alone=False)


def _generate(
    rng: random.Random, workers: int, me: int, depth: int, inputs: int, *, is_alone: bool
) -> Program:
    """A program of one worker; one that is alone shares nothing with others of its worker."""
    ops: list[list[Any]] = []
    count = inputs
    stored = 0

    def pick() -> int:
        return (
            rng.randrange(max(0, count - 6), count) if rng.random() < 0.6 else rng.randrange(count)
        )

    def call(at: int, *, alone: bool) -> list[Any]:
        size = rng.randint(1, 3)
        given = [pick() for _ in range(size)]
        inner = _generate(rng, workers, at, depth - 1, size, is_alone=alone or is_alone)
        return [at, inner, given]

    for _ in range(rng.randint(3, 7)):
        kind = rng.choices(
            ("unary", "binary", "weight", "table", "view", "write", "twin", "detach", "frozen"),
            (3, 4, 4, 1, 1, 2, 1, 0.5, 0.5),
        )[0]
        if depth and rng.random() < 0.3:
            kind = "call" if rng.random() < 0.7 else "calls"
        elif not is_alone and rng.random() < 0.15:
            kind = "load" if stored else "store"
        match kind:
            case "call":
                one = call(rng.randrange(workers), alone=False)
                ops.append([kind, [one]])
                count += len(one[1]["returns"])
            case "calls":
                some = [call(rng.randrange(workers), alone=True) for _ in range(rng.randint(2, 3))]
                ops.append([kind, some])
                count += sum(len(each[1]["returns"]) for each in some)
            case "binary" | "twin":
                ops.append([kind, pick(), pick(), rng.choice("+*-")])
                count += 2 if kind == "twin" else 1
            case "unary":
                ops.append([kind, pick(), rng.choice(("tanh", "sigmoid", "sin"))])
                count += 1
            case "weight" | "table":
                ops.append([kind, pick(), rng.randrange(WEIGHTS), rng.random() < 0.5])
                count += 1
            case "store":
                ops.append([kind, pick()])
                stored += 1
            case _:
                ops.append([kind, pick()])
                count += 1
    returns = [pick() for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.4:
        returns.append(count - 1)
    hooked = [number for number in range(len(ops)) if rng.random() < 0.4]
    return {"ops": ops, "returns": returns, "hooked": hooked}


class Place:
    """Where programs run: a worker, or all of them at once.

    Args:
        call: runs a program at a worker.
        leaves: the weights of each worker that is here.
    """

    def __init__(self, call: Call, leaves: dict[int, list[torch.Tensor]]) -> None:
        self.call = call
        self.leaves = leaves
        self.counts: Counter[str] = Counter()
        self.stored: dict[int, torch.Tensor] = {}

    def run(self, at: int, program: Program, path: str, given: Sequence[torch.Tensor]) -> list[Any]:
        """Run a program of worker `at`; `path` says which it is."""
        values = list(given)
        for number, (kind, *what) in enumerate(program["ops"]):
            here = f"{path}.{number}"
            for result in self._apply(at, kind, what, values, here):
                values.append(result)
                if kind in ("call", "calls"):
                    continue
                if result.requires_grad and result.grad_fn is not None:
                    self._count_node(result, f"node {here}")
                    if number in program["hooked"]:
                        result.register_hook(self._counter(f"hook {here}"))
        return [values[index] for index in program["returns"]]

    def _apply(
        self, at: int, kind: str, what: list[Any], values: list[Any], here: str
    ) -> list[Any]:
        match kind, what:
            case "call", [calls]:
                return self._call(calls[0], values, here)
            case "calls", [calls]:
                import contextvars

                with ThreadPoolExecutor(len(calls)) as threads:
                    futures = [
                        threads.submit(
                            contextvars.copy_context().run,
                            self._call,
                            *(one, values, f"{here}-{index}"),
                        )
                        for index, one in enumerate(calls)
                    ]
                    return [each for future in futures for each in future.result()]
            case "unary", [index, name]:
                return [getattr(torch, name)(values[index])]
            case "binary", [one, other, "+"]:
                return [values[one] + values[other]]
            case "binary", [one, other, "-"]:
                return [values[one] - values[other]]
            case "binary", [one, other, "*"]:
                return [torch.tanh(values[one] * values[other])]
            case "twin", [one, other, _]:
                return list(Twin.apply(values[one], values[other]))
            case "weight", [index, which, _]:
                return [values[index] * self.leaves[at][which]]
            case "table", [index, which, is_sparse]:
                rows = torch.nn.functional.embedding(
                    torch.tensor([which, which + 1]), self.leaves[at][-1], sparse=is_sparse
                )
                return [values[index] + rows.sum(0)]
            case "view", [index]:
                return [torch.cat([values[index][:2], values[index][2:]])]
            case "write", [index]:
                copy = values[index] * 1
                copy[:2].mul_(3)
                return [copy]
            case "detach", [index]:
                return [values[index].detach()]
            case "frozen", [index]:
                with torch.no_grad():
                    return [values[index] * 2]
            case "store", [index]:
                self.stored[at] = values[index]
                return []
            case "load", [index]:
                return [self.stored.get(at, values[index]) * 1]
        raise AssertionError(kind)

    def _call(self, one: list[Any], values: list[Any], here: str) -> list[Any]:
        at, program, given = one
        return self.call(at, program, f"{here}>{at}", [values[index] for index in given])

    def _counter(self, name: str) -> Callable[..., None]:
        def count(*_: Any) -> None:
            self.counts[name] += 1

        return count

    def _count_node(self, result: torch.Tensor, name: str) -> None:
        assert result.grad_fn is not None
        result.grad_fn.register_hook(self._counter(name))

    # -- all in one process

    @classmethod
    def of_all(cls, seed: int, workers: int) -> Place:
        """Return a place where all workers are."""
        place = cls(lambda *_: [], {each: weights(each, seed) for each in range(workers)})
        place.call = place._call_here
        return place

    def _call_here(
        self, at: int, program: Program, path: str, given: Sequence[torch.Tensor]
    ) -> list[Any]:
        results = self.run(at, program, path, self._crossed(given))
        return self._crossed(results)

    def _crossed(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors as a call does, each once, and count the gradients that come back."""
        copies: dict[int, torch.Tensor] = {}
        for each in tensors:
            if id(each) not in copies:
                copy = copies[id(each)] = each.clone()
                if copy.grad_fn is not None:
                    copy.grad_fn.register_prehook(self._cross)
        return [copies[id(each)] for each in tensors]

    def _cross(self, gradients: Any) -> None:
        self.counts[CROSSING] += gradients[0] is not None
