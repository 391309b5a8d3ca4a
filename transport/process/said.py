"""The log of an endpoint process is part of its program's, and where there are several, of each.

What is logged while a program is served is that program's: it is found by the context, which the
tasks of its server have, and what they have called.
"""

from __future__ import annotations

import contextvars
import logging
import weakref
from collections.abc import Callable
from typing import TypeAlias

__all__ = ["log_from", "pass_log_on", "say_to"]

Say: TypeAlias = Callable[[str, int, str], None]
"""Takes the name of a logger, a level and a text."""

_Listener: TypeAlias = weakref.WeakMethod[Say]

_listener: contextvars.ContextVar[_Listener | None] = contextvars.ContextVar(
    "listener", default=None
)


def say_to(say: Say) -> None:
    """Have what is logged in this context from now on passed on to `say`, a method.

    It is not kept for that: a context may outlast all that runs in it, in timers that were stopped.
    """
    _listener.set(weakref.WeakMethod(say))


def log_from(level: int) -> None:
    """Have records made from `level` on, or from where another program wants them."""
    log = logging.getLogger("quicmesh")
    if not log.level or level < log.level:
        log.setLevel(level)


def pass_log_on() -> None:
    """Have the log of this process passed on; what is nobody's goes where it otherwise would."""
    log = logging.getLogger("quicmesh")
    log.addHandler(_PassOn())
    log.propagate = False


class _PassOn(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        listener = _listener.get()
        say = None if listener is None else listener()
        try:
            if say is not None:
                say(record.name, record.levelno, self.format(record))
            elif logging.lastResort is not None:
                logging.lastResort.handle(record)
        except Exception:
            self.handleError(record)
