"""What is asked of a session's files is answered alike, whether it sleeps or is awake: with a real
sandbox beside storage.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executions.kernel import background
from executions.sessions import capacity
from providers.leases import close_all
from providers.manager import manager
from tests.conftest import Caller, require
from tests.support.kept_service import sessions_service
from tests.support.running import LOCAL, activate
from tests.support.saved_files import packed
from tests.support.session_files import got, put
from tests.support.sessions import URL, cell, opened, row

pytestmark = pytest.mark.one_database


@pytest.fixture
def own_pool(transactional_db: None, tmp_path: Path, settings: Any) -> Iterator[None]:
    require("bwrap")
    settings.DATA_DIR = tmp_path
    with sessions_service(tmp_path, tmp_path / "log"):
        activate("local", LOCAL)
        manager.close()
        yield
        assert background.wait_for_keyed_work()
        close_all()
        manager.close()


FILES = """
import os
os.makedirs('d/inner'); os.makedirs('empty')
open('d/inner/x', 'w').write('x' * 1000); open('f', 'w').write('0123456789')
os.chmod('f', 0o640)
os.symlink('d', 'l'); os.symlink('/etc/passwd', 'd/away')
"""


def asked(caller: Caller, session: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a caller may ask, one after the other, and what is answered but for times."""
    url = f"{URL}/{session['id']}/files"
    client = caller.client

    def told(name: str, answer: Any) -> tuple[str, Any]:
        if answer.streaming:
            return name, (answer.status_code, b"".join(answer.streaming_content))
        body = answer.json() if answer.content else None
        several = body.get("entries") if body else None
        for entry in several if isinstance(several, list) else [body or {}]:
            entry.pop("modified_at", None)
            if entry.get("type") == "directory":
                entry.pop("size_bytes")
        return name, (answer.status_code, body)

    def listed(**query: Any) -> Any:
        return client.get(url, query)

    for query in ({}, {"depth": 9}, {"path": "d", "depth": 2}, {"path": "d/", "after": "d/b"}):
        yield told(f"list {query}", listed(**query))
    for path in ("nothing", "f", "l", "d/inner/x", "l/inner", "a/../b", "/workspace/d"):
        yield told(f"list {path}", listed(path=path))
    for path in (
        "f",
        "d",
        "l",
        "d/away",
        "nothing",
        "nothing/x",
        "f/x",
        "l/inner/x",
        "..",
        "/workspace/f",
    ):
        yield told(f"read {path}", got(caller, session, path))
    for part in ("bytes=0-0", "bytes=-3", "bytes=5-", "bytes=99-", "bytes=4-2"):
        yield told(part, got(caller, session, "f", HTTP_RANGE=part))
    for path in (
        "f",
        "new/er/file",
        "d",
        "l",
        "l/x",
        "f/x",
        "x" * 256,
        "/workspace/abs",
        "a//b/./c",
    ):
        yield told(f"write {path}", put(caller, session, path, b"written"))
    for path in ("m/n", "m/n", "m", "f", "l", "l/x", "f/x", "m//o/"):
        yield told(f"mkdir {path}", client.post(f"{url}/mkdir", {"path": path}))
    for source, target in (
        *(("f", "g"), ("nothing", "h"), ("g", "d"), ("d", "g"), ("d", "d/e"), ("g", "no/where")),
        *(("l", "l2"), ("l2/inner", "i"), ("g", "l2/g"), ("g", "g"), ("d", "d"), ("d", "moved")),
        *(("g", "new/er/file"), ("f/x", "y"), ("new/er/file", "m/n/f")),
    ):
        answer = client.post(f"{url}/move", {"from": source, "to": target})
        yield told(f"move {source} {target}", answer)
    for members in (
        (("t/a", b"a", ""), ("t/l", b"", "a"), ("t/h", b"", "=t/a"), ("./u", None, "")),
        (("t/a", b"again", ""), ("t/l", b"a file now", "")),
        (("t", b"a file", ""),),
        (("t/a/b", b"below a file", ""),),
        (("../x", b"out", ""),),
        (("l2/x", b"through a link", ""),),
        (("t/h2", b"", "=nothing"),),
        (("t/h2", b"", "=t"),),
    ):
        name = str([member[0] for member in members])
        yield told(f"unpack {name}", put(caller, session, "", packed(*members), "archive"))
    yield told("no archive", put(caller, session, "", b"no" * 999, "archive"))
    yield told("cut archive", put(caller, session, "", packed(("c", b"c", ""))[:512], "archive"))
    yield told("unpack below", put(caller, session, "v/w", packed(("a", b"a", "")), "archive"))
    yield told("unpack in a link", put(caller, session, "l2", packed(("a", b"a", "")), "archive"))
    for path in ("nothing", "nothing/x", "l2", "moved/inner", "m", "t/a/x", "x/y"):
        yield told(f"remove {path}", client.delete(f"{url}?path={path}"))
    yield told("at last", listed(depth=9))
    for path in ("", "moved", "nothing", "u"):
        answer = client.get(f"{url}/archive", {"path": path})
        if answer.status_code != 200:
            yield told(f"pack {path}", answer)
            continue
        content = b"".join(answer.streaming_content)
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            found = sorted(
                (each.name, each.type, each.size, each.mode, each.linkname)
                for each in archive.getmembers()
            )
        yield f"pack {path}", (answer.status_code, found)


def test_every_answer_is_the_same_asleep_and_awake(own_pool: None, alice: Caller) -> None:
    awake, sleeper = opened(alice), opened(alice)
    for session in (awake, sleeper):
        assert cell(alice, session, FILES).json()["status"] == "succeeded"
    assert background.wait_for_keyed_work()
    assert capacity.suspend(row(sleeper).pk, "a test")
    live, saved = dict(asked(alice, awake)), dict(asked(alice, sleeper))
    assert (row(awake).state, row(sleeper).state) == ("open", "asleep")
    assert saved.keys() == live.keys()
    differing = {name: (live[name], saved[name]) for name in live if live[name] != saved[name]}
    assert differing == {}
    listing = "import os; print(sorted((a, sorted(b), sorted(c)) for a, b, c in os.walk('.')))"
    assert (
        cell(alice, sleeper, listing).json()["stdout"]
        == cell(alice, awake, listing).json()["stdout"]
    )


def test_a_folder_of_the_longest_path_is_woken_with_its_session(
    own_pool: None, alice: Caller
) -> None:
    """An archive has a slash behind it, which is no part of its path."""
    longest = "/".join(["x", *["x" * 255] * 15, "x" * 254])
    assert len(longest) == 4096
    session, copy = opened(alice), opened(alice)
    for each in (session, copy):
        cell(alice, each, "open('f', 'w').close()")
    assert background.wait_for_keyed_work()
    assert capacity.suspend(row(session).pk, "a test")
    client, url = alice.client, f"{URL}/{session['id']}/files"
    assert client.post(f"{url}/mkdir", {"path": longest}).status_code == 201

    assert cell(alice, session, "print(1)").json()["stdout"] == "1\n"

    archive = b"".join(client.get(f"{url}/archive").streaming_content)
    target = f"{URL}/{copy['id']}/files/archive"
    for state in ("open", "asleep"):
        assert row(copy).state == state
        answer = client.put(target, archive, content_type="application/x-tar")
        assert answer.status_code == 200, answer.content[-200:]
        assert capacity.suspend(row(copy).pk, "a test") or state == "asleep"
