from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from auth import (
    DEFAULT_SCOPES,
    AccessDenied,
    AuthorizedKey,
    AuthorizedKeys,
    ConnectRequest,
    Credential,
    Delegation,
    Denial,
    FetchRequest,
    Grant,
    IdentityError,
    Invite,
    InviteBook,
    MintRequest,
    NodeId,
    PeerIdentity,
    SecretKey,
    ServiceRequest,
    Ticket,
    decide,
)
from auth.keys_file import MAX_FILE_BYTES, parse_authorized_keys, remove_key, salvage

MACHINE = SecretKey.from_bytes(bytes(32))
ALICE = SecretKey.from_bytes(bytes([1]) * 32)
BOB = SecretKey.from_bytes(bytes([2]) * 32)
PROGRAM = SecretKey.from_bytes(bytes([3]) * 32)
NOW = 1.8e9

posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such permission bits")


def connect(
    key: SecretKey, credential: bytes = b"", delegation: Delegation | None = None
) -> ConnectRequest:
    peer = PeerIdentity(key.node_id, delegation)
    return ConnectRequest(peer, "mesh/1", Credential(credential))


async def admitted(keys: AuthorizedKeys, request: ConnectRequest) -> Grant:
    return await decide(keys, request, clock=lambda: NOW)


async def refused(
    keys: AuthorizedKeys, request: ConnectRequest | ServiceRequest | MintRequest | FetchRequest
) -> str:
    with pytest.raises(AccessDenied) as caught:
        await decide(keys, request, clock=lambda: NOW)
    assert caught.value.denial is not None
    return caught.value.denial.code


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "authorized_keys"


@pytest.fixture
def keys(path: Path, tmp_path: Path) -> AuthorizedKeys:
    invites = InviteBook(tmp_path / "spent")
    return AuthorizedKeys(path, machine=MACHINE.node_id, invites=invites, clock=lambda: NOW)


def write(path: Path, *lines: str) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    path.chmod(0o600)


class TestParser:
    def test_each_part_of_a_line(self) -> None:
        text = f"""\
# a comment

{ALICE.node_id}
  {str(BOB.node_id).upper()}\tbob  scopes=tensor:put,collective:*  expires=2030-01-31T00:00:00Z # hi
{PROGRAM.node_id} expires=2030-01-31T01:00:00.5+01:00 prog\r
"""
        assert parse_authorized_keys(text) == (
            AuthorizedKey(ALICE.node_id),
            AuthorizedKey(BOB.node_id, "bob", ("tensor:put", "collective:*"), 1896048000.0),
            AuthorizedKey(PROGRAM.node_id, "prog", DEFAULT_SCOPES, 1896048000.5),
        )

    @pytest.mark.parametrize("text", ["", "\n", "# only a comment\n"])
    def test_nothing_is_nobody(self, text: str) -> None:
        assert parse_authorized_keys(text) == ()

    @pytest.mark.parametrize(
        ("rest", "why"),
        [
            ("a b", "second petname"),
            ("scopes=a scopes=b", "second scopes"),
            ("scopes=", "not a scope"),
            ("scopes=a,", "not a scope"),
            ("scopes=a b,c", "petname"),
            ("scope=a", "'scope' is no option"),
            ("petname=a", "'petname' is no option"),
            ("expires=", "not a time"),
            ("expires=soon", "not a time"),
            ("expires=2030-01-31", "no time zone"),
            ("expires=2030-01-31T00:00:00", "no time zone"),
            ("expires=0001-01-01T00:00:00Z", "impossible"),
            ("bad/name", "petname"),
            ("abcd-2345", "taken for a node id"),
            ("expires=2030-01-31T00:00:00Z expires=2031-01-31T00:00:00Z", "second expires"),
        ],
    )
    def test_a_bad_line_is_named_with_its_reason(self, rest: str, why: str) -> None:
        with pytest.raises(ValueError, match=rf"line 2: .*{why}"):
            parse_authorized_keys(f"# first\n{ALICE.node_id} {rest}\n")

    @pytest.mark.parametrize(
        ("line", "why"),
        [
            ("hello", "node id"),
            (str(ALICE.node_id)[:-1], "51 characters"),
            (f"{ALICE.node_id} again", "there twice"),
            (f"{BOB.node_id} alice", "petname 'alice' is there twice"),
        ],
    )
    def test_a_bad_or_repeated_key_is_named(self, line: str, why: str) -> None:
        with pytest.raises(ValueError, match=rf"line 2: .*{why}"):
            parse_authorized_keys(f"{ALICE.node_id} alice\n{line}\n")

    def test_a_half_written_line_does_not_grant_more(self) -> None:
        line = f"{ALICE.node_id} scopes=tensor:put\n"
        for cut in range(1, len(line)):
            with pytest.raises(ValueError, match="newline"):
                parse_authorized_keys(line[:cut])
        assert parse_authorized_keys(line)[0].scopes == ("tensor:put",)

    @given(st.text(max_size=200))
    def test_arbitrary_text_is_read_or_refused(self, text: str) -> None:
        try:
            parse_authorized_keys(text)
        except ValueError:
            return
        assert all(not line.partition("#")[0].strip() for line in text.split("\n"))

    @given(
        st.lists(
            st.builds(
                AuthorizedKey,
                st.binary(min_size=32, max_size=32)
                .map(NodeId)
                .filter(lambda node_id: not node_id.is_weak),
                st.none() | st.from_regex(r"\A[a-z]{1,8}\Z"),
                st.lists(st.sampled_from(["tensor", "a:b", "collective:*", "*"]), min_size=1).map(
                    tuple
                ),
                st.none() | st.integers(0, 10**11).map(float),
            ),
            max_size=5,
            unique_by=(
                lambda key: key.node_id,
                lambda key: key.petname if key.petname is not None else key.node_id,
            ),
        )
    )
    def test_what_is_written_is_read_back(self, keys: list[AuthorizedKey]) -> None:
        text = "".join(f"{key.line()}\n" for key in keys)
        assert parse_authorized_keys(text) == tuple(keys)


@pytest.mark.anyio
class TestAdmission:
    async def test_a_key_in_the_file_is_admitted_and_no_other(
        self, keys: AuthorizedKeys, path: Path
    ) -> None:
        write(path, f"{ALICE.node_id} scopes=tensor expires=2030-01-31T00:00:00Z")
        grant = await admitted(keys, connect(ALICE))
        assert grant == Grant(frozenset({"tensor"}), 1896048000.0)
        assert await refused(keys, connect(BOB)) == "not-authorized"

    async def test_without_a_file_nobody_is_admitted(self, keys: AuthorizedKeys) -> None:
        assert await refused(keys, connect(ALICE)) == "not-authorized"

    async def test_the_machine_itself_may_everything(self, path: Path) -> None:
        own = AuthorizedKeys(path, machine=MACHINE.node_id, clock=lambda: NOW)
        assert (await admitted(own, connect(MACHINE))).scopes == {"*"}
        assert await refused(AuthorizedKeys(path), connect(MACHINE)) == "not-authorized"

    async def test_an_expired_key_is_refused(self, keys: AuthorizedKeys, path: Path) -> None:
        write(path, f"{ALICE.node_id} expires=2026-01-31T00:00:00Z")
        assert await refused(keys, connect(ALICE)) == "expired"

    async def test_a_program_enters_as_its_machine(self, keys: AuthorizedKeys, path: Path) -> None:
        write(path, f"{ALICE.node_id} scopes=tensor,node")
        delegation = Delegation.issue(ALICE, PROGRAM.node_id, ["tensor:put", "admin"], 100, NOW)
        grant = await admitted(keys, connect(PROGRAM, delegation=delegation))
        assert grant == Grant(frozenset({"tensor:put"}), NOW + 160)
        assert await refused(keys, connect(PROGRAM)) == "not-authorized"

    async def test_own_programs_may_what_their_delegation_says(self, keys: AuthorizedKeys) -> None:
        for scopes in (["*"], ["tensor"]):
            delegation = Delegation.issue(MACHINE, PROGRAM.node_id, scopes, 100, NOW)
            grant = await admitted(keys, connect(PROGRAM, delegation=delegation))
            assert grant.scopes == set(scopes)

    async def test_a_delegation_is_verified(self, keys: AuthorizedKeys, path: Path) -> None:
        write(path, str(ALICE.node_id))
        late = Delegation.issue(ALICE, PROGRAM.node_id, ["*"], 100, NOW - 200)
        foreign = Delegation.issue(ALICE, BOB.node_id, ["*"], 100, NOW)
        chained = Delegation.issue(BOB, PROGRAM.node_id, ["*"], 100, NOW)
        assert await refused(keys, connect(PROGRAM, delegation=late)) == "delegation"
        assert await refused(keys, connect(PROGRAM, delegation=foreign)) == "delegation"
        assert await refused(keys, connect(PROGRAM, delegation=chained)) == "not-authorized"

    async def test_a_service_needs_the_key_still_in_the_file(
        self, keys: AuthorizedKeys, path: Path
    ) -> None:
        write(path, f"{ALICE.node_id} scopes=tensor")
        grant = await admitted(keys, connect(ALICE))
        request = ServiceRequest(PeerIdentity(ALICE.node_id), "tensor", "tensor:put", grant)
        await decide(keys, request, clock=lambda: NOW)
        write(path, f"{ALICE.node_id} scopes=tensor:get")
        assert await refused(keys, request) == "scope"
        write(path, str(BOB.node_id))
        assert await refused(keys, request) == "not-authorized"

    async def test_asked_directly_it_answers_for_the_scope_too(
        self, keys: AuthorizedKeys, path: Path
    ) -> None:
        write(path, f"{ALICE.node_id} scopes=tensor")
        everything = Grant(frozenset({"*"}))
        request = ServiceRequest(PeerIdentity(ALICE.node_id), "node", "node", everything)
        answer = await keys.authorize(request)
        assert isinstance(answer, Denial)
        assert answer.code == "scope"

    async def test_minting_needs_its_scope(self, keys: AuthorizedKeys, path: Path) -> None:
        everything = Grant(frozenset({"*"}))
        peer = PeerIdentity(ALICE.node_id)
        request = MintRequest(peer, everything, "read", "object", 8, BOB.node_id)
        write(path, f"{ALICE.node_id} scopes=tensor:copy")
        await decide(keys, request, clock=lambda: NOW)
        write(path, f"{ALICE.node_id} scopes=tensor:put,tensor:fetch")
        assert await refused(keys, request) == "scope"

    async def test_a_fetch_needs_its_scope_and_a_source_that_could_enter(
        self, keys: AuthorizedKeys, path: Path
    ) -> None:
        def order(source: NodeId | PeerIdentity) -> FetchRequest:
            peer = PeerIdentity(ALICE.node_id)
            return FetchRequest(peer, Grant(frozenset({"*"})), source, 8)

        delegation = Delegation.issue(BOB, PROGRAM.node_id, ["*"], 100, NOW)
        program = PeerIdentity(PROGRAM.node_id, delegation)
        write(path, str(ALICE.node_id), str(BOB.node_id))
        for source in (BOB.node_id, PeerIdentity(BOB.node_id), program, MACHINE.node_id):
            await decide(keys, order(source), clock=lambda: NOW)
        assert await refused(keys, order(PROGRAM.node_id)) == "source"
        write(path, str(ALICE.node_id), f"{BOB.node_id} expires=2026-01-31T00:00:00Z")
        for source in (BOB.node_id, program):
            assert await refused(keys, order(source)) == "source"
        write(path, f"{ALICE.node_id} scopes=tensor:copy", str(BOB.node_id))
        assert await refused(keys, order(BOB.node_id)) == "scope"


@pytest.mark.anyio
class TestInvites:
    def invite(self, petname: str | None = None, key: SecretKey = MACHINE) -> bytes:
        return Invite.issue(key, ["tensor"], 3600, NOW, petname).encode()

    async def test_an_invite_enrols_once(self, keys: AuthorizedKeys, path: Path) -> None:
        ticket = Ticket(MACHINE.node_id, invite=self.invite("laptop"))
        invite = Ticket.decode(ticket.encode()).invite
        assert invite is not None
        assert (await admitted(keys, connect(ALICE, invite))).scopes == {"tensor"}
        assert keys.entries() == (AuthorizedKey(ALICE.node_id, "laptop", ("tensor",)),)
        assert await refused(keys, connect(BOB, invite)) == "invite"
        # Enrolled for good: without the invite, with it, and after a restart.
        for request in (connect(ALICE), connect(ALICE, invite)):
            await admitted(keys, request)
            await admitted(AuthorizedKeys(path), request)

    async def test_a_spent_invite_survives_a_restart(
        self, keys: AuthorizedKeys, path: Path, tmp_path: Path
    ) -> None:
        invite = self.invite()
        await admitted(keys, connect(ALICE, invite))
        again = AuthorizedKeys(
            path,
            machine=MACHINE.node_id,
            invites=InviteBook(tmp_path / "spent"),
            clock=lambda: NOW,
        )
        assert await refused(again, connect(BOB, invite)) == "invite"
        again.remove(ALICE.node_id)
        assert await refused(again, connect(ALICE, invite)) == "invite"

    async def test_of_many_at_once_one_is_enrolled(self, keys: AuthorizedKeys) -> None:
        invite = self.invite("guest")
        answers: list[str] = []

        async def knock(key: SecretKey) -> None:
            try:
                await decide(keys, connect(key, invite), timeout=30, clock=lambda: NOW)
                answers.append("in")
            except AccessDenied as error:
                answers.append(error.denial.code if error.denial else "none")

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                for _ in range(8):
                    tasks.start_soon(knock, SecretKey.generate())
        assert sorted(answers) == ["in"] + ["invite"] * 7
        assert len(keys.entries()) == 1

    @pytest.mark.parametrize("case", ["expired", "another machine's", "forged", "for long ago"])
    async def test_a_bad_invite_is_refused_in_the_same_words(
        self, keys: AuthorizedKeys, case: str
    ) -> None:
        good = Invite.issue(MACHINE, ["tensor"], 3600, NOW)
        bad = {
            "expired": Invite.issue(MACHINE, ["tensor"], 1, NOW - 1).encode(),
            "another machine's": self.invite(key=BOB),
            "forged": good.encode().replace(good.signature, bytes(64)),
            "for long ago": Invite.issue(MACHINE, ["tensor"], 1, 0).encode(),
        }[case]
        with pytest.raises(AccessDenied, match="not valid here, has expired, or was used"):
            await admitted(keys, connect(ALICE, bad))
        assert keys.entries() == ()
        await admitted(keys, connect(ALICE, good.encode()))

    async def test_another_credential_is_left_alone(self, keys: AuthorizedKeys) -> None:
        assert await refused(keys, connect(ALICE, b"a shared secret")) == "not-authorized"

    async def test_an_invite_does_nothing_on_an_outbound_connection(
        self, keys: AuthorizedKeys
    ) -> None:
        inbound = connect(ALICE, self.invite())
        outbound = ConnectRequest(inbound.peer, inbound.alpn, inbound.credential, outbound=True)
        assert await refused(keys, outbound) == "not-authorized"
        await admitted(keys, inbound)

    async def test_without_a_book_no_invite_counts(self, path: Path) -> None:
        keys = AuthorizedKeys(path, machine=MACHINE.node_id, clock=lambda: NOW)
        assert await refused(keys, connect(ALICE, self.invite())) == "not-authorized"

    async def test_a_program_enrols_its_machine(self, keys: AuthorizedKeys) -> None:
        delegation = Delegation.issue(ALICE, PROGRAM.node_id, ["*"], 100, NOW)
        await admitted(keys, connect(PROGRAM, self.invite(), delegation))
        assert [key.node_id for key in keys.entries()] == [ALICE.node_id]

    async def test_a_petname_that_is_taken_gets_a_number(self, keys: AuthorizedKeys) -> None:
        keys.add(BOB.node_id, "laptop")
        await admitted(keys, connect(ALICE, self.invite("laptop")))
        assert [key.petname for key in keys.entries()] == ["laptop", "laptop-2"]

    async def test_a_file_that_can_not_be_edited_costs_no_invite(
        self, keys: AuthorizedKeys, path: Path
    ) -> None:
        invite = self.invite()
        write(path, "nonsense")
        assert await refused(keys, connect(ALICE, invite)) == "authorizer-failed"
        write(path)
        await admitted(keys, connect(ALICE, invite))

    async def test_a_spent_invite_takes_nothing_from_an_expired_key(
        self, keys: AuthorizedKeys
    ) -> None:
        invite = self.invite()
        await admitted(keys, connect(BOB, invite))
        keys.add(ALICE.node_id, expires=NOW - 1)
        assert await refused(keys, connect(ALICE, invite)) == "invite"
        assert len(keys.entries()) == 2

    async def test_an_expired_key_is_renewed(self, keys: AuthorizedKeys) -> None:
        keys.add(ALICE.node_id, "alice", expires=NOW - 1)
        await admitted(keys, connect(ALICE, self.invite()))
        assert keys.entries() == (AuthorizedKey(ALICE.node_id, "alice", ("tensor",)),)

    async def test_an_invite_is_in_no_log(
        self, keys: AuthorizedKeys, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        invite = Invite.issue(MACHINE, ["tensor"], 3600, NOW)
        await admitted(keys, connect(ALICE, invite.encode()))
        await refused(keys, connect(BOB, invite.encode()))
        assert "enrolled" in caplog.text
        for form in (repr(invite.nonce), invite.nonce.hex(), repr(invite.encode())[2:40]):
            assert form not in caplog.text


class TestReload:
    def test_an_edit_takes_effect_at_once(self, keys: AuthorizedKeys, path: Path) -> None:
        for key in (ALICE, BOB, PROGRAM):
            write(path, str(key.node_id))
            keys.poll()
            assert [entry.node_id for entry in keys.entries()] == [key.node_id]

    @pytest.mark.parametrize("age", [0, 100])
    def test_an_edit_of_the_same_size_is_seen(
        self, keys: AuthorizedKeys, path: Path, age: int
    ) -> None:
        for key in (ALICE, BOB):
            write(path, str(key.node_id))
            when = time.time_ns() - age * 10**9
            os.utime(path, ns=(when, when))
            keys.poll()
            assert keys.entries()[0].node_id == key.node_id

    def test_a_fresh_time_stamp_is_not_trusted(
        self, keys: AuthorizedKeys, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # As on a file system whose clock is coarse: two edits, one stamp.
        same = (time.time_ns(), 0, 0, 0)
        monkeypatch.setattr("auth.authorized_keys._stamp", lambda status: same)
        for key in (ALICE, BOB):
            write(path, str(key.node_id))
            keys.poll()
            assert keys.entries()[0].node_id == key.node_id

    def test_an_unchanged_file_is_not_read_again(
        self, keys: AuthorizedKeys, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(path, str(ALICE.node_id))
        os.utime(path, (1e9, 1e9))
        keys.poll()
        monkeypatch.setattr("auth.authorized_keys.parse_lines", None)
        keys.poll()
        assert len(keys.entries()) == 1

    @pytest.mark.parametrize("age", [0, 100])
    def test_a_broken_edit_keeps_the_last_good_set(
        self, keys: AuthorizedKeys, path: Path, caplog: pytest.LogCaptureFixture, age: int
    ) -> None:
        removed: list[NodeId] = []
        keys.subscribe(removed.append)
        write(path, str(ALICE.node_id))
        keys.poll()
        write(path, str(BOB.node_id), f"{ALICE.node_id} scopes=")
        when = time.time() - age
        os.utime(path, (when, when))
        for _ in range(3):
            keys.poll()
            assert [entry.node_id for entry in keys.entries()] == [ALICE.node_id]
        assert caplog.text.count("line 2") == 1
        assert str(path) in caplog.text
        assert removed == []
        write(path, str(BOB.node_id))
        keys.poll()
        assert [entry.node_id for entry in keys.entries()] == [BOB.node_id]
        assert removed == [ALICE.node_id]

    def test_a_broken_edit_keeps_nobody_in_whose_line_is_gone(
        self, keys: AuthorizedKeys, path: Path
    ) -> None:
        removed: list[NodeId] = []
        keys.subscribe(removed.append)
        write(path, str(ALICE.node_id), str(BOB.node_id))
        keys.poll()
        write(path, str(BOB.node_id), f"{PROGRAM.node_id} scopes=", "nonsense")
        keys.poll()
        assert [entry.node_id for entry in keys.entries()] == [BOB.node_id]
        assert removed == [ALICE.node_id]

    @pytest.mark.parametrize("age", [0, 100])
    def test_a_half_written_file_is_waited_for(
        self, keys: AuthorizedKeys, path: Path, age: int
    ) -> None:
        write(path, str(ALICE.node_id), str(BOB.node_id))
        keys.poll()
        path.write_text(f"{ALICE.node_id}\n{str(BOB.node_id)[:9]}")
        when = time.time() - age
        os.utime(path, (when, when))
        keys.poll()
        left = {ALICE.node_id} if age else {ALICE.node_id, BOB.node_id}
        assert {entry.node_id for entry in keys.entries()} == left

    @posix
    @pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
    def test_a_file_that_others_can_change_is_not_read(
        self, keys: AuthorizedKeys, path: Path, caplog: pytest.LogCaptureFixture, mode: int
    ) -> None:
        write(path, str(ALICE.node_id))
        path.chmod(mode)
        keys.poll()
        assert keys.entries() == ()
        assert f"chmod 600 {path}" in caplog.text
        path.chmod(0o644)
        keys.poll()
        assert len(keys.entries()) == 1

    def test_a_file_that_is_gone_admits_nobody(self, keys: AuthorizedKeys, path: Path) -> None:
        removed: list[NodeId] = []
        keys.subscribe(removed.append)
        write(path, str(ALICE.node_id))
        keys.poll()
        path.unlink()
        keys.poll()
        assert keys.entries() == ()
        assert removed == [ALICE.node_id]

    @pytest.mark.parametrize(
        ("content", "why"),
        [(b"nonsense\n", "line 1"), (b"\xff\n", "UTF-8"), (b"#" * MAX_FILE_BYTES + b"\n", "bytes")],
    )
    def test_a_broken_file_is_refused_at_the_start(
        self, path: Path, content: bytes, why: str
    ) -> None:
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(IdentityError, match=why) as caught:
            AuthorizedKeys(path)
        assert str(path) in str(caught.value)

    def test_a_line_that_says_something_else_is_told_as_well(
        self, keys: AuthorizedKeys, path: Path
    ) -> None:
        told: list[tuple[str, NodeId]] = []
        keys.subscribe(
            lambda node_id: told.append(("removed", node_id)),
            changed=lambda node_id: told.append(("changed", node_id)),
        )
        keys.add(ALICE.node_id, "alice")
        keys.add(BOB.node_id)
        assert told == []
        keys.add(ALICE.node_id, "alice", scopes=["tensor"])
        keys.add(BOB.node_id, "bob")  # a name is no right
        keys.add(ALICE.node_id, "alice", scopes=["tensor"], expires=2e9)
        assert told == [("changed", ALICE.node_id)] * 2
        told.clear()
        write(path, f"{BOB.node_id} scopes=node")
        keys.poll()
        assert sorted(told) == sorted([("removed", ALICE.node_id), ("changed", BOB.node_id)])

    def test_a_subscriber_that_fails_does_not_stop_the_others(
        self, keys: AuthorizedKeys, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fails(node_id: NodeId) -> None:
            raise RuntimeError("broken")

        removed: list[NodeId] = []
        keys.subscribe(fails)
        unsubscribe = keys.subscribe(removed.append)
        for _ in range(2):
            keys.add(ALICE.node_id)
            assert keys.remove(ALICE.node_id)
            unsubscribe()
        assert removed == [ALICE.node_id]
        assert "a subscriber failed" in caplog.text


class TestEditing:
    def test_a_key_is_added_replaced_and_removed(self, keys: AuthorizedKeys, path: Path) -> None:
        keys.add(ALICE.node_id, "alice", ["tensor"], NOW)
        keys.add(BOB.node_id)
        keys.add(ALICE.node_id, "alice2")
        assert keys.entries() == (
            AuthorizedKey(ALICE.node_id, "alice2"),
            AuthorizedKey(BOB.node_id),
        )
        assert AuthorizedKeys(path).entries() == keys.entries()
        assert keys.remove(ALICE.node_id)
        assert not keys.remove(ALICE.node_id)
        assert keys.entries() == (AuthorizedKey(BOB.node_id),)

    def test_comments_and_other_lines_stay(self, keys: AuthorizedKeys, path: Path) -> None:
        write(path, "# mine", "", f"{ALICE.node_id} a # her \u2028 laptop", str(BOB.node_id))
        keys.remove(BOB.node_id)
        keys.add(PROGRAM.node_id)
        assert path.read_text(encoding="utf-8") == (
            f"# mine\n\n{ALICE.node_id} a # her \u2028 laptop\n{PROGRAM.node_id}\n"
        )

    def test_an_empty_file_is_edited(self, keys: AuthorizedKeys, path: Path) -> None:
        write(path)
        keys.add(ALICE.node_id)
        assert path.read_text() == f"{ALICE.node_id}\n"

    @posix
    def test_a_new_file_is_private(self, keys: AuthorizedKeys, path: Path) -> None:
        keys.add(ALICE.node_id)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def test_a_link_is_followed(self, path: Path, tmp_path: Path) -> None:
        target = tmp_path / "dotfiles" / "keys"
        target.parent.mkdir()
        write(target, str(ALICE.node_id))
        path.symlink_to(target)
        keys = AuthorizedKeys(path)
        keys.add(BOB.node_id)
        assert path.is_symlink()
        assert len(keys.entries()) == len(AuthorizedKeys(target).entries()) == 2

    def test_a_broken_file_is_not_edited(self, keys: AuthorizedKeys, path: Path) -> None:
        write(path, "nonsense")
        with pytest.raises(IdentityError, match="line 1"):
            keys.add(ALICE.node_id)
        assert not keys.remove(ALICE.node_id)
        assert path.read_text() == "nonsense\n"

    @pytest.mark.parametrize(
        "broken",
        [b"nonsense\n", b"%b scopes=\n" % str(BOB.node_id).encode(), b"# \xff\n", b"half writ"],
    )
    def test_a_key_is_removed_whatever_the_other_lines_are(
        self, keys: AuthorizedKeys, path: Path, broken: bytes
    ) -> None:
        removed: list[NodeId] = []
        keys.subscribe(removed.append)
        keys.add(ALICE.node_id)
        line = f"{ALICE.node_id} alice\n".encode()
        path.write_bytes(line + line + broken)
        when = time.time() - 100
        os.utime(path, (when, when))
        keys.poll()
        assert keys.remove(ALICE.node_id)
        assert path.read_bytes() == broken
        os.utime(path, (when, when))
        keys.poll()
        assert keys.entries() == ()
        assert removed == [ALICE.node_id]

    def test_a_key_in_a_broken_last_line_is_removed(self, path: Path) -> None:
        path.write_bytes(f"{BOB.node_id}\n{ALICE.node_id} scopes=".encode())
        path.chmod(0o600)
        found = salvage(path)
        assert set(found.names) == {ALICE.node_id, BOB.node_id}
        assert "newline" in found.complaints[0]
        assert "line 2" in found.complaints[1]
        assert remove_key(path, ALICE.node_id)
        assert path.read_text() == f"{BOB.node_id}\n"
        assert salvage(path).complaints == ()

    def test_a_key_without_a_scope_is_refused(self, keys: AuthorizedKeys, path: Path) -> None:
        with pytest.raises(ValueError, match="no scope"):
            keys.add(ALICE.node_id, scopes=())
        assert not path.exists()

    def test_a_key_that_anybody_can_sign_with_is_refused(
        self, keys: AuthorizedKeys, path: Path
    ) -> None:
        with pytest.raises(IdentityError, match="anybody"):
            keys.add(NodeId(bytes(32)))
        assert not path.exists()

    def test_a_petname_that_is_taken_or_bad_is_refused(self, keys: AuthorizedKeys) -> None:
        keys.add(ALICE.node_id, "gpu")
        with pytest.raises(IdentityError, match="another key has this petname"):
            keys.add(BOB.node_id, "gpu")
        with pytest.raises(IdentityError, match="petname"):
            keys.add(BOB.node_id, "a b")
        with pytest.raises(ValueError, match="not a scope"):
            keys.add(BOB.node_id, scopes=["a b"])
        keys.add(ALICE.node_id, "gpu")
        assert len(keys.entries()) == 1

    def test_edits_at_once_are_all_kept(self, keys: AuthorizedKeys, path: Path) -> None:
        added = [SecretKey.generate().node_id for _ in range(24)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(keys.add, added))
        assert {key.node_id for key in AuthorizedKeys(path).entries()} == set(added)

    def test_edits_of_several_processes_are_all_kept(self, path: Path) -> None:
        code = """
import sys
from auth import AuthorizedKeys, SecretKey
keys = AuthorizedKeys(sys.argv[1])
for _ in range(5):
    keys.add(SecretKey.generate().node_id)
"""
        running = [subprocess.Popen([sys.executable, "-c", code, str(path)]) for _ in range(3)]
        assert [process.wait(timeout=30) for process in running] == [0, 0, 0]
        assert len(AuthorizedKeys(path).entries()) == 15
