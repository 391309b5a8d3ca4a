"""One rank of torch's own suite: ``python -m tests.conformance.worker BACKEND RANK SIZE LOG``.

Tests come one a line on standard input, each with a directory of its own, and go one after the
other through this process: starting one takes longer than most of them. Answers go, one line of
JSON each, to standard output; what the tests print goes to a file.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch

import mesh.blocking
import mesh.distributed
from auth import SecretKey, allow_any
from tests.conformance import upstream
from tests.mesh.distributed.nodes import LOOPBACK


def main(backend: str, rank: int, size: int, log: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    with Path(log).open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    suite = upstream.load(backend, size)
    node = mesh.blocking.Node.embedded(
        key=SecretKey.generate(), authorizer=allow_any(), config=LOOPBACK, tensors=False
    )
    with node, mesh.distributed.use(node, job="conformance"):
        print(json.dumps(upstream.names(suite)), file=answers, flush=True)
        for line in sys.stdin:
            name, directory = json.loads(line)
            began = time.monotonic()
            answer = {"why": "", "error": ""}
            try:
                answer["why"] = upstream.outcome(suite, name, rank, directory)
            except BaseException:  # whatever it is, it is the test's
                answer["error"] = traceback.format_exc()
            answer["seconds"] = time.monotonic() - began
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
