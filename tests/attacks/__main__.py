"""``python -m tests.attacks``: print what each flood leaves of a transfer."""

from __future__ import annotations

import sys

from tests.attacks.floods.attackers import FLOODS
from tests.attacks.floods.measure import HEADING, ROUNDS, arena


def main() -> None:
    print(HEADING, flush=True)
    with arena() as floor:
        for flood in sys.argv[1:] or FLOODS:
            print(floor.measure(flood, ROUNDS[-1]), flush=True)


if __name__ == "__main__":
    main()
