"""What a sandbox claims of its files when they are saved: nothing is stored that is not so."""

from __future__ import annotations

import io
import itertools
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from executions.sessions import capacity
from executions.sessions.models import Blob, Workspace, WorkspaceFile
from executions.sessions.storage import file_saves, quota
from providers.errors import ProviderUnavailable, SandboxError
from providers.sandbox import Changes, FileEntry
from tests.conftest import Caller
from tests.support import kept_here
from tests.support.saved_files import counts_are_right, looked_at, saved
from tests.support.sessions import opened, row

pytestmark = [pytest.mark.usefixtures("own_storage", "kept_here"), pytest.mark.one_database]


def archive(*members: tuple[str, bytes], kind: bytes = tarfile.REGTYPE) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.type, member.size = kind, len(content)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


class Lying:
    """In place of a sandbox's files: claims that are given."""

    def __init__(self, changes: Any, *pieces: bytes) -> None:
        self._changes, self._pieces = changes, pieces

    def changes(self, mark: str = "", *, thorough: bool = False) -> Any:
        return self._changes

    def read_archive(self, path: str = "", only: Sequence[str] = ()) -> Iterator[bytes]:
        return iter(self._pieces)


def lied(monkeypatch: pytest.MonkeyPatch, changes: Any, *pieces: bytes) -> None:
    (sandbox,) = kept_here.sandboxes()
    monkeypatch.setattr(sandbox, "files", Lying(changes, *pieces))


def file(path: str, size: int = 1, **facts: Any) -> FileEntry:
    return FileEntry(path, facts.pop("type", "file"), size, 0o644, 1.0, **facts)


def claims(*entries: FileEntry, removed: Iterable[str] = (), complete: bool = True) -> Changes:
    return Changes("m", list(entries), list(removed), complete)


@pytest.mark.parametrize(
    "changes",
    [
        *(None, "changes", Changes("m", "entries"), Changes(7, [])),  # type: ignore[arg-type]
        Changes("m", [None]),  # type: ignore[list-item]
        *(claims(file("a"), file("a")), claims(file("a", -1)), claims(file("a", 2**70))),
        Changes("m", [FileEntry("a", "file", 1, 0, float("nan"))]),
        Changes("m", [], [7]),  # type: ignore[list-item]
        *(Changes("m", [], unseen="d"), Changes("m", [], unseen=["../d"])),
    ],
)
def test_changes_that_are_none_are_refused(
    alice: Caller, monkeypatch: pytest.MonkeyPatch, changes: Any
) -> None:
    session = opened(alice)
    lied(monkeypatch, changes, archive(("a", b"x")))
    with pytest.raises(ProviderUnavailable):
        file_saves.save(row(session))
    assert saved(session) == {}


@pytest.mark.parametrize(
    "packed",
    [
        *(b"", b"x" * 512, b"x" * 2000, archive(("a", b"x"))[:513]),
        *(archive(("b", b"x")), archive(("a", b"x"), ("a", b"y")), archive(("../a", b"x"))),
        archive(("/etc/passwd", b"x")),
        archive(("a", b"5 path=a\n"), kind=tarfile.XHDTYPE),
        archive(("a", b"x" * 70_000), kind=tarfile.XHDTYPE),
        archive(("a", b""), kind=tarfile.GNUTYPE_SPARSE),
        archive(("a", b""), kind=tarfile.XHDTYPE)[:512] * 200 + archive(("a", b"x")),
        archive(("a", b""), kind=tarfile.XGLTYPE)[:512] * 200 + archive(("a", b"x")),
    ],
)
def test_an_archive_with_anything_else_is_refused(
    alice: Caller, monkeypatch: pytest.MonkeyPatch, packed: bytes
) -> None:
    session = opened(alice)
    lied(monkeypatch, claims(file("a")), packed)
    with pytest.raises(SandboxError):
        file_saves.save(row(session))
    assert saved(session) == {}
    assert looked_at(alice, session)["files"]["saved_at"] is None


def test_a_file_that_trickles_ends_with_the_time_of_a_save(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(alice)
    head = archive(("a", b"x" * 10_000))[:512]
    lied(monkeypatch, claims(file("a", 10_000)), head, *[b"x"] * 9_999)
    clock = SimpleNamespace(monotonic=itertools.count().__next__, sleep=lambda seconds: None)
    monkeypatch.setattr(file_saves, "time", clock)
    with pytest.raises(ProviderUnavailable, match="were not received within"):
        file_saves.save(row(session))
    assert Blob.objects.count() == 0


def test_a_file_that_is_larger_than_was_claimed_is_taken_no_further_than_may_be(
    alice: Caller, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    settings.SESSION_STORAGE_BYTES = 100
    session = opened(alice)
    lied(monkeypatch, claims(file("a", 1)), archive(("a", b"x" * 101)))
    with pytest.raises(quota.QuotaExceeded):
        file_saves.save(row(session))
    assert Blob.objects.count() == 0


@pytest.mark.parametrize(
    "path", ["../up", "/abs", "a/../b", "a//b", "x" * 256, "a\0b", "\ud800", "."]
)
def test_paths_that_no_restored_file_may_have_are_never_asked_for(
    alice: Caller, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    session = opened(alice)
    lied(monkeypatch, claims(file(path), file("d", type="directory")), archive(("d", b"x")))
    file_saves.save(row(session))
    assert saved(session) == {"d": None}


def test_what_cannot_be_read_is_told_and_tried_again(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(alice)
    lied(monkeypatch, claims(file("a"), file("b")), archive(("b", b"y")))
    assert file_saves.save(row(session)).missed == ["a"]
    assert saved(session) == {"b": b"y"}
    found = looked_at(alice, session)["files"]
    assert found["problem"] == "'a' changed while it was read, or cannot be read."
    # Nothing has changed since: what was missed is asked for all the same.
    lied(monkeypatch, claims(complete=False), archive(("a", b"x")))
    assert file_saves.save(row(session)).is_complete
    assert saved(session) == {"a": b"x", "b": b"y"}
    assert looked_at(alice, session)["files"]["problem"] is None
    counts_are_right(session)


def test_with_a_mark_only_what_changed_is_fetched(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(alice)
    lied(monkeypatch, claims(file("a"), file("b")), archive(("a", b"x"), ("b", b"y")))
    file_saves.save(row(session))
    assert Workspace.objects.get().mark == "m"
    told = claims(
        file("b"), file("l", 0, type="symlink", target="a"), removed=["a"], complete=False
    )
    lied(monkeypatch, told, archive(("b", b"z")))
    found = file_saves.save(row(session))
    assert (set(found.changed), found.removed) == ({"b", "l"}, ["a"])
    assert saved(session) == {"b": b"z", "l": None}
    assert WorkspaceFile.objects.get(type="symlink").target == "a"
    counts_are_right(session)


@pytest.mark.parametrize("complete", [True, False])
def test_what_a_program_has_closed_is_not_called_gone_and_not_called_saved(
    alice: Caller, monkeypatch: pytest.MonkeyPatch, complete: bool
) -> None:
    session = opened(alice)
    folder, sibling = file("d", 0, type="directory"), file("dd")
    before = claims(folder, file("d/f"), sibling, file("gone"))
    content = archive(("d/f", b"x"), ("dd", b"y"), ("gone", b"z"))
    lied(monkeypatch, before, content)
    assert file_saves.save(row(session)).is_complete
    other = file("d/f", 0, type="other")
    told = (folder, other, sibling) if complete else (other,)
    removed = [] if complete else ["d/f", "gone"]
    closed = Changes("m2", list(told), removed, complete, unseen=["d"])
    lied(monkeypatch, closed, archive(("dd", b"y")))
    found = file_saves.save(row(session))
    assert (found.missed, found.removed) == (["d"], ["gone"])
    assert saved(session) == {"d": None, "d/f": b"x", "dd": b"y"}
    assert looked_at(alice, session)["files"]["problem"] == (
        "'d' changed while it was read, or cannot be read."
    )
    counts_are_right(session)
    # Its sandbox is the only place where what is in there may be.
    assert not capacity.suspend(row(session).pk, "a test")
    lied(monkeypatch, claims(folder, sibling), archive(("dd", b"y")))
    assert file_saves.save(row(session)).is_complete
    assert saved(session) == {"d": None, "dd": b"y"}


def test_what_went_where_nobody_could_look_does_not_come_back(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is removed, and its folder closed until that was told to be gone."""
    session = opened(alice)
    folder, near = file("d", 0, type="directory"), file("near")
    content = archive(("d/f", b"x"), ("near", b"y"))
    lied(monkeypatch, claims(folder, near, file("d/f")), content)
    file_saves.save(row(session))
    # `""` stands for all folders, where too many are closed.
    for unseen in ("d", ""):
        lied(monkeypatch, Changes("m2", [], ["d/f"], False, unseen=[unseen]))
        assert not file_saves.save(row(session)).is_complete
        assert saved(session).keys() == {"d", "d/f", "near"}

    class Open(Lying):
        def changes(self, mark: str = "", *, thorough: bool = False) -> Any:
            return Changes("m3", [], [], False) if mark == "m2" else self._changes

    (sandbox,) = kept_here.sandboxes()
    opened_again = Open(claims(folder, near), archive(("near", b"y")))
    monkeypatch.setattr(sandbox, "files", opened_again)
    assert file_saves.save(row(session)).removed == ["d/f"]
    assert saved(session).keys() == {"d", "near"}
    assert Workspace.objects.get().mark == "m"
    counts_are_right(session)
