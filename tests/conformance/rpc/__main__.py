"""The full form: ``python -m tests.conformance.rpc [SUITE[.TEST] ...]``; without names, all run."""

from __future__ import annotations

import sys
import time

from tests.conformance.rpc import left_out
from tests.conformance.rpc.runner import Server


def main(*wanted: str) -> int:
    """Run what is wanted, print how it went, and return whether anything failed."""
    began, passed, failed = time.monotonic(), 0, 0
    listed = left_out.read()
    with Server() as server:
        names = [
            name
            for name in server.names
            if name in wanted or name.split(".")[0] in wanted or not wanted
        ]
        for outcome in server.run(name for name in names if name in wanted or name not in listed):
            how = "failed" if outcome.error else outcome.why or "passed"
            print(f"{outcome.seconds:6.2f}  {outcome.name}  {how}\n{outcome.error}".rstrip())
            sys.stdout.flush()
            passed, failed = passed + outcome.passed, failed + bool(outcome.error)
    left, seconds = len(names) - passed - failed, time.monotonic() - began
    print(f"{passed} passed, {failed} failed, {left} left out, {seconds:.0f} s")
    return failed


if __name__ == "__main__":
    sys.exit(bool(main(*sys.argv[1:])))
