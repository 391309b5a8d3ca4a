"""The full form: ``python -m tests.conformance [BACKEND RANKS [TEST ...]]``, or ``--list``.

Without arguments every form runs. ``--list`` writes the list of what is left out, too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from tests.conformance import left_out
from tests.conformance.runner import Outcome, Suite


def main(*arguments: str) -> int:
    if arguments[:1] not in ((), ("--list",)):
        backend, size, *names = arguments
        return any(outcome.error for outcome in _run(f"{backend} {size}", names))
    found = {form: _run(form, ()) for form in left_out.FORMS}
    if arguments:
        left_out.write(
            {form: {one.name: one.why for one in ones if one.why} for form, ones in found.items()}
        )
    return any(outcome.error for outcomes in found.values() for outcome in outcomes)


def _run(form: str, names: Sequence[str]) -> list[Outcome]:
    backend, size = form.split()
    began = time.monotonic()
    outcomes = []
    with Suite(backend, int(size)) as suite:
        for outcome in suite.run(names or suite.names):
            outcomes.append(outcome)
            how = "failed" if outcome.error else outcome.why or "passed"
            print(f"{outcome.seconds:6.2f}  {outcome.name}  {how}\n{outcome.error}".rstrip())
            sys.stdout.flush()
    passed = sum(outcome.passed for outcome in outcomes)
    failed = sum(bool(outcome.error) for outcome in outcomes)
    left = len(outcomes) - passed - failed
    seconds = time.monotonic() - began
    print(f"{form} ranks: {passed} passed, {failed} failed, {left} left out, {seconds:.0f} s")
    return outcomes


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
