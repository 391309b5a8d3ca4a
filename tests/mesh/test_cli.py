"""The command where no daemon is needed: output, usage, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import mesh.cli.output
from auth import AccessDenied, IdentityError, MeshError, SecretKey, Ticket
from mesh.cli.app import app
from mesh.cli.identity import duration
from mesh.errors import ConnectTimeout, DeadlineExceeded, HomeError, TicketError
from mesh.home import Home

Run = Callable[..., Any]

SOMEBODY = str(SecretKey.from_bytes(bytes(range(32))).node_id)
"""The same one in each process that collects the tests: their names have it in them."""


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def run(home: Home) -> Run:
    """Run the command in `home`, expect an exit code, return the result."""

    def run(*arguments: str, code: int = 0) -> Any:
        result = CliRunner().invoke(app, ["--home", str(home.path), *arguments])
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        return result

    return run


def test_init_makes_a_key_once(run: Run, home: Home) -> None:
    first = run("init")
    assert first.stdout.splitlines()[0] == str(home.key().node_id)
    assert str(home.key_path) in first.stdout
    assert run("init").stdout == f"{home.key().node_id}\n"
    assert json.loads(run("init", "--json").stdout) == {
        "node_id": str(home.key().node_id),
        "home": str(home.path),
        "created": False,
    }


def test_id(run: Run, home: Home) -> None:
    home.create()
    assert run("id").stdout == f"{home.key().node_id}\n"
    assert json.loads(run("id", "--json").stdout)["short"] == home.key().node_id.short


def test_home_from_the_environment(home: Home) -> None:
    home.create()
    result = CliRunner().invoke(app, ["id"], env={"MESH_HOME": str(home.path)})
    assert result.stdout == f"{home.key().node_id}\n"


def test_an_empty_home_is_not_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["--home", "", "init"])
    assert result.exit_code == 2
    assert "--home" in result.stderr
    with pytest.raises(HomeError, match="empty"):
        Home("")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [("id",), ("peers",), ("--version",)])
def test_output_that_can_not_be_written(
    home: Home, arguments: tuple[str, ...], unbuffered: str
) -> None:
    home.create()
    command = [sys.executable, "-m", "mesh", "--home", str(home.path), *arguments]
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=env, check=False
        )
    assert done.returncode == 1
    assert done.stderr == "mesh: writing the output: No space left on device\n"


@pytest.mark.parametrize("verb", ["id", "peers", "invite"])
def test_without_a_key_it_says_what_to_do(run: Run, verb: str) -> None:
    result = run(verb, code=1)
    assert result.stdout == ""
    assert result.stderr.startswith("mesh: ")
    assert "mesh init" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_allow_and_deny(run: Run, home: Home) -> None:
    node_id = SecretKey.generate().node_id
    run("allow", str(node_id), "gpu-a", "--scopes", "tensor:put, node", "--expires", "1h")
    keys = home.authorized_keys(home.key().node_id)
    (entry,) = keys.entries()
    assert (entry.node_id, entry.petname, entry.scopes) == (
        node_id,
        "gpu-a",
        ("node", "tensor:put"),
    )
    assert entry.expires_at is not None
    (listed,) = json.loads(run("peers", "--json").stdout)["peers"]
    assert listed["petname"] == "gpu-a"
    assert listed["scopes"] == ["node", "tensor:put"]
    assert listed["state"] is None
    assert "gpu-a" in run("peers").stdout
    # By its name now, with other scopes.
    run("allow", "gpu-a", "--scopes", "node")
    keys.poll()
    assert keys.entries()[0].scopes == ("node",)
    assert "may no longer use" in run("deny", "gpu-a").stdout
    keys.poll()
    assert keys.entries() == ()
    assert home.peers.entries() == ()
    run("deny", "gpu-a", code=2)


def test_deny_says_what_is_left(run: Run, home: Home) -> None:
    node_id = SecretKey.generate().node_id
    run("allow", str(node_id), "gpu-a")
    assert f"mesh deny {home.key().node_id.short}" in run("deny", "gpu-a").stdout
    # Forgotten, so that its short id is nobody's any more.
    error = run("allow", node_id.short, code=2).stderr
    assert "After `mesh deny`" in error
    assert "mesh id" in error


def test_deny_works_beside_broken_lines(run: Run, home: Home) -> None:
    node_id = SecretKey.generate().node_id
    run("allow", str(node_id), "gpu-a")
    broken = f"{SecretKey.generate().node_id} scopes=\n"
    with home.authorized_keys_path.open("a") as file:
        file.write(broken)
    run("allow", "gpu-a", code=2)
    result = run("deny", "gpu-a")
    assert "gpu-a" in result.stdout
    assert "is not a scope" in result.stderr
    left = home.authorized_keys_path.read_text()
    assert str(node_id) not in left
    assert left.endswith(broken)
    # And so does denying the broken line itself.
    assert run("deny", broken.split()[0]).stderr == ""
    assert broken not in home.authorized_keys_path.read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        ("xyz",),
        ("k7f3-9q2",),
        (SOMEBODY[:-1],),
        (SOMEBODY, "a b"),
        (SOMEBODY, "--scopes", "a b"),
        (SOMEBODY, "--expires", "tomorrow"),
        (SOMEBODY, "--scopes", ""),
        (SOMEBODY, "--scopes", " ,"),
    ],
    ids=" ".join,
)
def test_a_refused_allow_leaves_no_key(run: Run, home: Home, arguments: tuple[str, ...]) -> None:
    error = run("allow", *arguments, code=2).stderr
    assert ".." not in error.replace("...", "")
    assert not home.path.exists()


def test_home_that_is_a_file(run: Run, home: Home) -> None:
    home.path.write_text("")
    for arguments in (("id",), ("init",), ("up",), ("allow", str(SecretKey.generate().node_id))):
        assert "not a directory" in run(*arguments, code=1).stderr


def test_flags_look_like_flags() -> None:
    shown = CliRunner().invoke(app, ["status", "--help"]).stdout
    assert "--json" in shown
    assert "bool" not in shown


def test_lifetimes_are_told_in_days(home: Home) -> None:
    home.create()
    with pytest.raises(IdentityError, match=r"60 days is not within 0 and 30 days"):
        home.invite((("192.0.2.1", 1),), lifetime=60 * 86400.0)


def test_allowing_again_keeps_the_petname(run: Run, home: Home) -> None:
    node_id = SecretKey.generate().node_id
    run("allow", str(node_id), "gpu-a")
    run("allow", str(node_id))
    assert home.authorized_keys(home.key().node_id).entries()[0].petname == "gpu-a"


@pytest.mark.parametrize(
    "arguments",
    [
        ("allow", "xx"),
        ("allow", SOMEBODY, "a b"),
        ("allow", SOMEBODY, "--scopes", "a b"),
        ("allow", SOMEBODY, "--expires", "tomorrow"),
        ("deny", "nobody"),
        ("up", "--bind", "nonsense"),
        ("up", "--bind", "192.0.2.1"),
        ("up", "--bind", "host.example:4433"),
        ("up", "--bind", "2001:db8::1:4433"),
        ("up", "--bind", "192.0.2.1:65536"),
        ("up", "--bind", "203.0.113.7:0"),
        ("up", "--advertise", "1.2.3.4:0"),
        ("up", "--advertise", "host.example:4433"),
        ("join", "mesh1abc"),
        ("join", "nonsense"),
        ("ping", "mesh1abc"),
        ("ping", "x", "--count", "0"),
        ("invite", "--expires", "0s"),
        ("nonsense",),
        ("ping",),
        ("id", "--nonsense"),
    ],
    ids=" ".join,
)
def test_usage_errors(run: Run, home: Home, arguments: tuple[str, ...]) -> None:
    home.create()
    result = run(*arguments, code=2)
    assert result.stdout == ""
    assert result.stderr


@pytest.mark.parametrize("verb", ["status", "invite"])
def test_nothing_runs(run: Run, home: Home, verb: str) -> None:
    home.create()
    assert "mesh up" in run(verb, code=3).stderr


def test_down_where_nothing_runs_is_done(run: Run, home: Home) -> None:
    assert "no daemon runs" in run("down").stdout


def test_ping_without_a_daemon(run: Run, home: Home) -> None:
    home.create()
    assert "'gpu-a'" in run("ping", "gpu-a", code=3).stderr
    stranger = SecretKey.generate().node_id
    assert "mesh join mesh1..." in run("ping", str(stranger), code=3).stderr
    gone = Ticket(stranger, (("127.0.0.1", 9),)).encode()
    assert "127.0.0.1:9" in run("ping", gone, "--timeout", "0.5", code=3).stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MeshError("x"), 1),
        (TicketError("x"), 2),
        (ConnectTimeout("x"), 3),
        (AccessDenied("x", why="not today"), 4),
        (DeadlineExceeded("x"), 5),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(
    run: Run, home: Home, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def fail(_: Home) -> None:
        raise error

    monkeypatch.setattr(Home, "key", fail)
    result = run("id", code=code)
    assert result.stderr == ("" if code == 130 else f"mesh: {error}\n")


def test_bug_is_no_clean_exit(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Home) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Home, "key", fail)
    with pytest.raises(ZeroDivisionError):
        CliRunner().invoke(app, ["id"], catch_exceptions=False)


def test_version_and_help() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout.strip()
    shown = CliRunner().invoke(app, ["--help"]).stdout
    for verb in (
        *("init", "id", "up", "down", "status", "peers", "ping", "invite", "join", "allow", "deny"),
    ):
        assert f" {verb} " in shown
        assert CliRunner().invoke(app, [verb, "-h"]).exit_code == 0


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("12h", 43200), ("30d", 2592000)]
)
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == seconds


def test_numbers_for_people() -> None:
    assert mesh.cli.output.bytes_text(None) == "-"
    assert mesh.cli.output.bytes_text(1023) == "1023 B"
    assert mesh.cli.output.bytes_text(1536) == "1.5 KiB"
    assert mesh.cli.output.bytes_text(3 << 40) == "3.0 TiB"
    assert mesh.cli.output.rtt_text(0.00042) == "0.42 ms"
    assert mesh.cli.output.rtt_text(None) == "-"


def test_tables_show_peers_words_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    mesh.cli.output.table(("a",), [("[red]x[/red]",), ("y" * 120,)], empty="none")
    shown = capsys.readouterr().out
    assert "[red]x[/red]" in shown
    assert "y" * 120 in shown
    mesh.cli.output.table(("a",), [], empty="none")
    assert capsys.readouterr().out == "none\n"


def test_init_protects_a_new_key_with_a_passphrase_and_the_command_then_needs_it(
    tmp_path, monkeypatch
):
    home = str(tmp_path / "home")
    monkeypatch.delenv("MESH_KEY_PASSPHRASE", raising=False)

    def run(*words, **options):
        return CliRunner().invoke(app, ["--home", home, *words], **options)

    assert run("init", "--passphrase", input="secret words\nsecret words\n").exit_code == 0
    refused = run("id")
    assert refused.exit_code == 2
    assert "passphrase" in refused.stderr
    assert run("id", env={"MESH_KEY_PASSPHRASE": "wrong"}).exit_code == 2
    assert run("id", env={"MESH_KEY_PASSPHRASE": "secret words"}).exit_code == 0
    again = run("init", "--passphrase", input="other\nother\n")
    assert again.exit_code == 2
    assert "there is a key already" in again.stderr
    assert "secret words" not in (tmp_path / "home" / "machine.key").read_text()
