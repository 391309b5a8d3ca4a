"""The command line of the apps, the same for all."""

from __future__ import annotations

import argparse

__all__ = ["parse_options"]


def parse_options() -> argparse.Namespace:
    """Read it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("members", nargs="*", help="node ids to let in; `mesh id` prints one")
    parser.add_argument("--key", default="app.key", help="the app's key, made if missing")
    parser.add_argument("--bind", default="[::]:0", help="UDP address for peers")
    parser.add_argument("--http", type=int, default=8000, help="TCP port on 127.0.0.1")
    return parser.parse_args()
