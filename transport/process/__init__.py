"""An endpoint's engine in a process of its own, so that packets don't take a program's GIL.

`ProcessEngine` stands in the program for what `transport.loop_engine` does there by itself. It
starts ``python -m transport.process``, which has the socket, the cryptography and the state of each
QUIC connection, and runs nothing of the user's. The two talk over a pair of sockets, in packets of
small records (`records`); bytes of bulk transfers cross in shared memory (`memory`).
"""

from transport.process.client import ProcessEngine

__all__ = ["ProcessEngine"]
