"""``mesh run``: starts a job's ranks on this machine and ends them together. Knows no torch."""

from __future__ import annotations
