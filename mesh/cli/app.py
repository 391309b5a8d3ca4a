"""The command's frame: global options, subcommands, and what errors turn into.

0 done, 1 failure, 2 usage, 3 unreachable, 4 refused, 5 timeout, 130 interrupted.
"""

from __future__ import annotations

import errno
import getpass
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from auth import MeshError
from mesh.cli import bench, identity, launch, peers, refs, running
from mesh.cli.signals import INTERRUPTED, interruptible
from mesh.home import ENVIRONMENT, Home
from mesh.version import version

__all__ = ["app"]


_OUTPUT_ERRORS = {errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EPIPE, errno.EDQUOT}
"""What writing to a full disk, a dead terminal or a closed pipe fails with."""


class _Group(TyperGroup):
    """Subcommands whose errors end in one clear message and the exit code of their class."""

    def main(self, *args: Any, **settings: Any) -> Any:
        try:
            try:
                return super().main(*args, **settings)
            finally:
                _flush()  # while what goes wrong can still be said
        except OSError as error:
            if error.errno not in _OUTPUT_ERRORS or error.filename is not None:
                raise
            _give_up_output()
            if error.errno != errno.EPIPE:  # whoever reads has seen enough
                print(f"mesh: writing the output: {error.strerror}", file=sys.stderr)
            sys.exit(1)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MeshError as error:
            print(f"mesh: {error}", file=sys.stderr)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _give_up_output() -> None:
    """See to it that the interpreter does not try once more when it ends."""
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


app = typer.Typer(
    cls=_Group,
    name="mesh",
    help="A peer-to-peer compute mesh for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # whose help makes a flag look as if it took a value
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(version())
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    home: Annotated[
        str | None,
        typer.Option(
            "--home",
            envvar=ENVIRONMENT,
            metavar="DIR",
            help="State directory: key, authorized keys, known peers.",
            show_default=False,
        ),
    ] = None,
    _: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", is_eager=True, callback=_show_version
        ),
    ] = False,
) -> None:
    if home == "":
        raise typer.BadParameter("--home names no directory; the current one is '.'")
    context.obj = Home(home, ask_passphrase=_ask_passphrase)


def _ask_passphrase(key: Path) -> str | None:
    if not sys.stdin.isatty():
        return None
    with interruptible():  # so that the terminal shows again what is typed
        return getpass.getpass(f"Passphrase of {key}: ")


for _commands in (identity, running, launch, peers, refs, bench):
    _commands.add_to(app)
