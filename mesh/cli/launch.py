"""``run``: starts a training on this machine, or this machine's part of one."""

from __future__ import annotations

import os
import re
import secrets
import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from mesh.cli.peers import enrol
from mesh.cli.signals import held, wait_for_signal
from mesh.cli.signals import run as run_to_end

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

    from mesh.launch.job import Job

__all__ = ["add_to"]

# Windows has no SIGHUP, and none of the notices.
_SIGNALS = tuple(s for s in signal.Signals if s.name in ("SIGINT", "SIGTERM", "SIGHUP"))
_NOTICES = tuple(s for s in signal.Signals if s.name in ("SIGUSR1", "SIGUSR2"))
"""By which schedulers say that the time of a job is nearly over."""


def add_to(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(
        "run",
        # What follows the program is the program's.
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    )(run)


def run(
    context: typer.Context,
    program: Annotated[
        str, typer.Argument(metavar="PROGRAM", help="Python file, or module with -m.")
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGUMENT", help="Arguments of the program.", show_default=False),
    ] = None,
    nproc_per_node: Annotated[
        int, typer.Option("--nproc-per-node", min=1, help="Ranks on each machine.")
    ] = 1,
    nnodes: Annotated[
        int | None,
        typer.Option(
            "--nnodes", min=1, help="Machines; by default as Slurm or Kubernetes say, or 1."
        ),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(
            "--node-rank",
            min=0,
            help="This machine's number; by default likewise, or in the order of arrival.",
        ),
    ] = None,
    ticket: Annotated[
        str | None,
        typer.Option(
            help="Of the node where ranks meet: another machine's launcher, which prints it, or "
            "any machine's daemon, which this machine joins first if there is an invite in it. By "
            "default this launcher.",
            show_default=False,
        ),
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(
            help="The job's name, the same on all machines and new for each run. By default "
            "Slurm's number, or drawn at random.",
            show_default=False,
        ),
    ] = None,
    bind: Annotated[str, typer.Option(metavar="WHERE", help="Where ranks listen.")] = "[::]:0",
    module: Annotated[
        bool, typer.Option("--module", "-m", help="The program is a module's name.")
    ] = False,
) -> None:
    """Start the ranks of a PyTorch program on this machine.

    They find each other without address or port, and have torchrun's environment variables and the
    backend "mesh". Signals go to all of them; when one fails the others are ended, and its exit
    code is the command's.
    """
    import anyio

    from auth import Ticket
    from mesh.launch.job import Job, Plan
    from mesh.launch.places import machines
    from transport import parse_bind

    parse_bind(bind).address()
    told_machine, told_machines = machines()
    if ticket is not None and job is None and _job_of_scheduler() is None:
        raise typer.BadParameter("--ticket needs --job: the name that the first machine printed")
    plan = Plan(
        command=(sys.executable, "-u", *(("-m",) if module else ()), program, *(arguments or ())),
        job=job or _job_of_scheduler() or f"run-{secrets.token_hex(6)}",
        ranks=nproc_per_node,
        machines=nnodes or told_machines or 1,
        machine=told_machine if node_rank is None else node_rank,
        ticket=None if ticket is None else Ticket.decode(ticket),
        bind=bind,
    )
    with held():
        context.obj.create()
    if plan.ticket is not None and plan.ticket.invite:
        run_to_end(enrol, context.obj, plan.ticket)
    raise typer.Exit(anyio.run(_run, Job(context.obj, plan, _say)))


async def _run(job: Job) -> int:
    from mesh.tasks import helpers

    async with helpers() as tasks:
        await tasks.start(wait_for_signal, job.stop, _SIGNALS)
        if _NOTICES:
            await tasks.start(_pass_on, job)
        return await job.run()
    raise AssertionError  # helpers swallows nothing


async def _pass_on(job: Job, *, task_status: TaskStatus[None]) -> None:
    """Let ranks have the notices, which end nothing by themselves."""
    import anyio

    with anyio.open_signal_receiver(*_NOTICES) as received:
        task_status.started()
        async for number in received:
            job.notify(number)


def _job_of_scheduler() -> str | None:
    number = os.environ.get("SLURM_JOB_ID") or os.environ.get("PET_RDZV_ID")
    return re.sub(r"[^A-Za-z0-9_.-]", "-", f"job-{number}")[:64] if number else None


def _say(text: str) -> None:
    print(f"mesh: {text}", file=sys.stderr, flush=True)
