"""A program that is one worker of random programs, and, as worker 0, compares what they come to.

python -m tests.mesh.autograd.random_workers RANK SIZE FILE FIRST COUNT
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from typing import Any

import torch

from auth import SecretKey, allow_any
from mesh import autograd, blocking, rpc
from mesh.autograd.nodes import Origin
from mesh.autograd.run import Run
from mesh.rpc import MeshRpcBackendOptions
from tests.mesh.autograd.random_programs import CROSSING, WIDTH, Place, generate, weights
from tests.placements import placed
from transport import EndpointConfig

places: dict[int, Place] = {}
lock = threading.Lock()


def place(seed: int, rank: int) -> Place:
    """Return where a program runs; there is one at a time."""
    with lock:
        if seed not in places:
            places.clear()
            places[seed] = Place(_call(seed, rank), {rank: weights(rank, seed)})
        return places[seed]


@rpc.exposed
def run(seed: int, at: int, program: Any, path: str, given: list[torch.Tensor]) -> list[Any]:
    return place(seed, at).run(at, program, path, given)


@rpc.exposed
def collect(seed: int, rank: int, context_id: int) -> tuple[list[Any], list[Any], dict[str, int]]:
    """Return the gradients of a worker, what stands in ``.grad``, and its counts."""
    here = place(seed, rank)
    leaves = here.leaves[rank]
    try:
        gradients = autograd.get_gradients(context_id)
    except autograd.ContextGone:
        gradients = {}
    return (
        [gradients.get(leaf) for leaf in leaves],
        [each.grad for each in leaves],
        dict(here.counts),
    )


def _call(seed: int, rank: int) -> Any:
    rng = random.Random(seed)

    def call(at: int, program: Any, path: str, given: Any) -> Any:
        arguments = (seed, at, program, path, list(given))
        # What a worker refers to of its own, it has as it is, and nothing crosses.
        match rng.randrange(3 if at != rank else 2):
            case 0:
                return rpc.rpc_sync(at, run, arguments)
            case 1:
                return rpc.rpc_async(at, run, arguments).wait()
            case _:
                return rpc.remote(at, run, arguments).to_here()

    return call


def compare(seed: int, size: int) -> int:
    """Run the program of a seed both ways; return how many gradients crossed."""
    workers = random.Random(seed).randint(2, size)
    program = generate(seed, workers)
    numbers = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(WIDTH, generator=numbers, dtype=torch.float64) for _ in range(3)]
    mine = [each.clone().requires_grad_() for each in inputs]
    theirs = [each.clone().requires_grad_() for each in inputs]
    alone = Place.of_all(seed, workers)
    expected = [each for each in alone.run(0, program, "", theirs) if each.requires_grad]
    backwards = 2 if seed % 3 == 0 else 1
    with autograd.context() as context_id:
        results = [each for each in place(seed, 0).run(0, program, "", mine) if each.requires_grad]
        assert len(results) == len(expected), "another graph"
        if not results or not any(each.grad_fn is not None for each in results):
            return 0
        for number in range(backwards):
            last = number == backwards - 1
            autograd.backward(context_id, _losses(results, seed), retain_graph=not last)
            torch.autograd.backward(_losses(expected, seed), retain_graph=not last)
        got = autograd.get_gradients(context_id)
        for ours, reference in zip(mine, theirs, strict=True):
            _same(got.get(ours), reference.grad, "an input")
            assert ours.grad is None
        counts: Counter[str] = Counter()
        others = [
            rpc.rpc_async(each, collect, (seed, each, context_id)) for each in range(1, workers)
        ]
        everybody = [collect(seed, 0, context_id), *(each.wait() for each in others)]
        for each, (gradients, left, theirs_counts) in enumerate(everybody):
            for index, leaf in enumerate(alone.leaves[each]):
                _same(gradients[index], leaf.grad, f"leaf {index} of worker {each}")
            assert left == [None] * len(left)
            counts.update(theirs_counts)
        assert counts == alone.counts, _difference(counts, alone.counts)
    return counts[CROSSING]


def _losses(results: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    sums = [each.sum() for each in results]
    return sums if seed % 2 else [torch.stack(sums).sum()]


def _same(ours: Any, reference: Any, what: str) -> None:
    if ours is None or reference is None:
        assert ours is None, f"{what}: one too many"
        assert reference is None, f"{what}: none"
        return
    assert ours.layout == reference.layout, what
    torch.testing.assert_close(ours.to_dense(), reference.to_dense(), msg=lambda m: f"{what}: {m}")


def _difference(ours: Counter[str], reference: Counter[str]) -> str:
    names = {*ours, *reference}
    return str({n: (ours[n], reference[n]) for n in names if ours[n] != reference[n]})


def main() -> None:
    rank, size, first, count = (int(sys.argv[index]) for index in (1, 2, 4, 5))
    torch.set_num_threads(1)
    send = Run.send

    def counted(self: Run, origin: Origin, gradients: list[Any]) -> None:
        crossed = sum(each is not None for each in gradients)
        if crossed:
            for each in places.values():
                each.counts[CROSSING] += crossed
        send(self, origin, gradients)

    Run.send = counted  # type: ignore[method-assign]
    config = EndpointConfig(bind="127.0.0.1:0", liveness=15.0, **placed())
    node = blocking.Node.embedded(key=SecretKey.generate(), authorizer=allow_any(), config=config)
    with node:
        rpc.init_rpc(
            f"worker{rank}",
            rank=rank,
            world_size=size,
            rpc_backend_options=MeshRpcBackendOptions(
                init_method=f"file://{sys.argv[3]}", node=node, rpc_timeout=20
            ),
        )
        began, crossed = time.monotonic(), 0
        if rank == 0:
            for seed in range(first, first + count):
                try:
                    crossed += compare(seed, size)
                except BaseException as error:
                    error.add_note(f"in the program of seed {seed}")
                    raise
            print("passed:", count, "crossed:", crossed, f"in {time.monotonic() - began:.1f} s")
        rpc.shutdown()


if __name__ == "__main__":
    main()
