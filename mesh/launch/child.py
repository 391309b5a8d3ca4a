"""Becomes a rank's program, which ends when its launcher does, however that ends.

Run as a file, by ``python -I -S child.py LAUNCHER COMMAND ARGUMENT ...``: the standard library
alone, and no time lost. The wish to end survives the exec.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2)


def main() -> None:
    """Ask the kernel for a SIGKILL at the launcher's end, and run the command."""
    launcher, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it ended before that
            os._exit(128 + signal.SIGKILL)
    os.execv(command[0], command)  # noqa: S606 - the command that the user gave


if __name__ == "__main__":
    main()
