"""Runs tests of torch's suites, each in processes of its own that begin with everything loaded.

``python -m tests.conformance.rpc.server``. Orders come one a line on standard input, answers go one
a line to standard output, both JSON. Tests leave their mark on modules, so none follows another in
one process; to load torch and its tests takes far longer than most of them, so the processes fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.conformance.rpc import autograd_views, stand_ins, suites
from tests.conformance.rpc.substitution import replace
from tests.conformance.upstream import reason

TEST_SECONDS = 110.0
"""How long a test may take."""

FAILED_SECONDS = 3.0
"""How long the other workers go on once one has failed: they may wait for it."""

LOG_TAIL = 3000
"""Characters of a worker's output that a failure shows."""


def main() -> None:
    """Load everything, say which tests there are, and run those that are ordered."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    kinds = load()
    _say(
        {
            name: sorted(each for each in dir(kind) if each.startswith("test"))
            for name, kind in kinds.items()
        }
    )
    for line in sys.stdin:
        suite, name, directory = json.loads(line)
        _say(_run(kinds[suite], name, Path(directory)))


def load() -> dict[str, type[Any]]:
    """Return the classes of all tests, on the mesh."""
    from torch.distributed.rpc import functions
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    from mesh.rpc.functions import async_execution

    functions.async_execution = async_execution  # which decorates while they are imported
    kinds = {name: suite.load() for name, suite in suites.SUITES.items()}
    stand_ins.prepare()
    replace(suites.REPLACED)
    for name, kind in kinds.items():
        bases = (stand_ins.Fixture, kind, MultiProcessTestCase)
        kinds[name] = type(name, bases, {"__module__": suites.__name__})
        setattr(suites, name, kinds[name])  # where pickles of its methods find it
    return kinds


def _say(value: Any) -> None:
    print(json.dumps(value), flush=True)


def _run(kind: type[Any], name: str, directory: Path) -> dict[str, Any]:
    began = time.monotonic()
    size = kind.world_size.fget(None)
    pipes: dict[int, int] = {}
    pids: list[int] = []
    for rank in range(size):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            _be(kind, name, rank, directory, write)
        os.close(write)
        pipes[read] = rank
        pids.append(pid)
    answers = [{"why": "", "error": "no answer in time"} for _ in range(size)]
    until = began + TEST_SECONDS
    while pipes:
        ready = select.select(list(pipes), [], [], max(0.0, until - time.monotonic()))[0]
        if not ready:
            break
        for pipe in ready:
            rank = pipes.pop(pipe)
            with os.fdopen(pipe) as stream:
                text = stream.read()
            answers[rank] = json.loads(text) if text else {"why": "", "error": "it has ended"}
            if answers[rank]["error"]:
                until = min(until, time.monotonic() + FAILED_SECONDS)
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for pipe in pipes:
        os.close(pipe)
    errors = [
        f"rank {rank}: {answer['error']}\n{(directory / f'log-{rank}').read_text()[-LOG_TAIL:]}"
        for rank, answer in enumerate(answers)
        if answer["error"]
    ]
    reasons = [answer["why"] for answer in answers]
    return {
        "why": reasons[0] if all(reasons) else "",
        "error": "\n".join(errors),
        "seconds": time.monotonic() - began,
    }


def _be(kind: type[Any], name: str, rank: int, directory: Path, write: int) -> None:
    """Be one worker of a test; never returns."""
    answer = {"why": "", "error": ""}
    try:
        with (directory / f"log-{rank}").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        # After a fork the first of these makes torch's pool anew, and of two at once, from two
        # threads, one finds none.
        torch.set_num_threads(1)
        test = kind(name)
        test.rank, test.file_name = rank, f"{directory}/store"
        autograd_views.is_fast = name in autograd_views.FAST
        answer["why"] = reason(getattr(test, name))
    except BaseException as error:  # whatever it is, it is the test's
        if not isinstance(error, SystemExit) or error.code:
            answer["error"] = traceback.format_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
            with os.fdopen(write, "w") as stream:
                json.dump(answer, stream)
        os._exit(0)


if __name__ == "__main__":
    main()
