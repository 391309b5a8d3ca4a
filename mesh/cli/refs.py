"""What remote calls keep alive: ``refs``."""

from __future__ import annotations

import sys
from typing import Any

import typer

from mesh.cli.output import JsonOption, age_text, bytes_text, json_out, table
from mesh.cli.running import ask
from mesh.cli.signals import run

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(refs)


def refs(context: typer.Context, json: JsonOption = False) -> None:
    """List the remote references that are alive here.

    They are those at this machine's programs, and those that its programs hold elsewhere.

    The daemon asks every peer that is connected with it, as programs of this machine are which
    have called `mesh.rpc.init_rpc`. Another machine tells of references held by this one's alone.
    """
    answer = run(ask, context.obj, "node.refs", None)
    if json:
        json_out(answer)
        return
    table(
        ("reference", "value", "size", "age", "owner", "holders"),
        [_row(each) for each in answer["references"]],
        empty="No references: nothing that remote calls have left at a node is held by another.",
    )
    if answer["left_out"]:
        print(f"and {answer['left_out']} more")
    for each in answer["silent"]:
        print(f"mesh: {each['label']} has not answered: {each['why']}", file=sys.stderr)


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    holders = [holder["label"] for holder in row["holders"]]
    more = row["holders_in_all"] - len(holders)
    return (
        row["ref"][:8],
        row["kind"],
        bytes_text(row["bytes"]),
        age_text(row["age"]),
        row["owner"]["label"],
        "\n".join([*holders, f"and {more} more"] if more else holders),
    )
