"""The Python client holds conversations with a running service: runs, sessions, files, receipts."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from cofferdam import AsyncCofferdam, Cofferdam, check_receipt, run_python_code, tool
from cofferdam.errors import Conflict, InvalidRequest, NotFound
from cofferdam.receipts import NotCheckable

from tests.support.processes import free_port
from tests.support.site import Site


@pytest.fixture(scope="module")
def client(streaming_site: Site) -> Iterator[Cofferdam]:
    with Cofferdam(streaming_site.service.url, streaming_site.alice) as client:
        yield client


def test_code_is_run_and_what_came_of_it_is_typed(client: Cofferdam, tmp_path: Path) -> None:
    done = client.run(
        "import pathlib\n"
        "def main(name):\n"
        "    pathlib.Path('artifacts').mkdir(exist_ok=True)\n"
        "    pathlib.Path('artifacts/a b.txt').write_text(pathlib.Path('in/x').read_text())\n"
        "    return {'hello': name}",
        arguments={"name": "ada"},
        files={"in/x": "ünï"},
        conversation="talk",
    )
    assert (done.status, done.result, done.exit_code) == ("succeeded", {"hello": "ada"}, 0)
    assert done.created_at.tzinfo is not None
    assert done.conversation == "talk"
    [path] = client.save_artifacts(done, tmp_path)
    assert (path.name, path.read_text()) == ("a b.txt", "ünï")
    failed = client.run("1 / 0")
    assert (failed.status, failed.exit_code) == ("failed", 1)
    assert "ZeroDivisionError" in failed.stderr
    slow = client.run("while True: pass", timeout=1)
    assert slow.error is not None
    assert (slow.status, slow.exit_code, slow.error.code) == ("timed_out", None, "SB005")
    assert "python" in client.languages()
    assert all(isinstance(each, str) for each in client.packages().values())
    assert client.usage().tenant == "wonderland"


def test_refusals_are_errors_by_what_to_do(client: Cofferdam, streaming_site: Site) -> None:
    with pytest.raises(InvalidRequest) as told:
        client.run("print(1)", timeout=400)
    assert (told.value.code, told.value.field, told.value.status) == ("SB002", "timeout", 400)
    mine = client.run("print(1)")
    charlie = Cofferdam(streaming_site.service.url, streaming_site.charlie)
    with charlie as stranger, pytest.raises(NotFound):
        stranger.execution(mine.id)
    with pytest.raises(ValueError, match="not a valid name"):
        client.artifact(mine.id, "../../sessions")
    with pytest.raises(Conflict):
        client.cancel(mine.id)


def test_the_same_key_is_the_same_execution(client: Cofferdam) -> None:
    key = f"once-{free_port()}"
    first = client.run("print(1)", idempotency_key=key)
    assert client.run("print(1)", idempotency_key=key).id == first.id
    with pytest.raises(InvalidRequest) as told:
        client.run("print(2)", idempotency_key=key)
    assert told.value.field == "idempotency_key"
    assert client.run("print(1)").id != first.id


def test_pages_are_followed_to_the_end(client: Cofferdam) -> None:
    agent = f"pages-{free_port()}"
    sent = [client.submit("print(1)", agent=agent).id for _ in range(5)]
    assert [each.id for each in client.executions(agent=agent, limit="2")] == sent[::-1]
    assert {client.wait(each).status for each in sent} == {"succeeded"}


def test_a_stream_has_every_byte_in_order(client: Cofferdam) -> None:
    # The second line has characters that end lines, elsewhere than in JSON.
    code = "import sys; print('one', flush=True); print('\\u2028\\x85two', flush=True)\nsys.stdout.buffer.write(b'\\xff')"
    with client.stream(code) as events:
        told = list(events)
    assert {event.type for event in told} == {"started", "stdout", "done"}
    written = b"".join(event.content for event in told if event.type == "stdout")
    assert written == "one\n\u2028\x85two\n".encode() + b"\xff"
    assert told[-1].execution is events.execution is not None
    assert events.id == events.execution.id


def test_a_session_keeps_state_files_and_commands(client: Cofferdam) -> None:
    with client.open_session(metadata={"of": "test"}) as session:
        assert session.run("x = 41").context_kept
        assert session.run("x + 1").outputs == [{"text/plain": "42"}]
        with session.stream("print(x)") as events:
            assert events.until_done().stdout == "41\n"

        files = session.files
        assert files.write("in/a.bin", bytes(range(256))).size_bytes == 256
        assert files.read("in/a.bin") == bytes(range(256))
        assert {each.path for each in files.list(depth=2)} >= {"in", "in/a.bin"}
        archive = io.BytesIO()
        assert files.download_archive(archive, "in") == len(archive.getvalue())
        assert files.unpack(archive.getvalue(), "copy") == 1
        assert files.move("copy/a.bin", "moved").path == "moved"
        assert (files.mkdir("empty"), files.mkdir("empty")) == (True, False)
        files.remove("in")
        with pytest.raises(NotFound):
            files.read("in/a.bin")

        assert session.command("echo $((6 * 7))").stdout == "42\n"
        assert session.command(["echo", "a  b"]).stdout == "a  b\n"
        cat = session.start("cat", stdin=True)
        cat.write(b"hello\n", close=True)
        assert (cat.wait().stdout, cat.info.pid) == ("hello\n", cat.pid)
        sleeper = session.start(["sleep", "60"])
        assert sleeper.signal("SIGKILL")
        assert sleeper.wait().exit_code == 137

        session.create_context("bash", id="sh")
        assert session.run("echo $0", context="sh").stdout == "bash\n"
        assert session.restart_context("sh").language == "bash"
        session.end_context("sh")
        assert [each.id for each in session.contexts()] == ["default"]
        assert not session.interrupt()
        kept = session.snapshot()
        assert session.reset().metadata == {"of": "test"}
        assert session.change(metadata={"of": "me"}).metadata == {"of": "me"}
        assert client.session(session.id).info.metadata == {"of": "me"}
    with pytest.raises(Conflict):
        session.run("x")
    assert session.refresh().state == "closed"
    with client.open_session(snapshot=kept.id) as again:
        assert again.files.read("moved") == bytes(range(256))


def test_a_receipt_is_checked_without_the_service(
    client: Cofferdam, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = client.ledger_keys()
    done = client.run("print(6 * 7)")
    # Of the Pythons that the script is for not all have this name.
    monkeypatch.delattr("datetime.UTC")
    found = check_receipt(done, keys, code="print(6 * 7)")
    assert (found.is_valid, found.not_compared) == (True, ())
    assert check_receipt(done.raw["receipt"], keys).not_compared == ("the code (--code FILE)",)
    for changed in ({**done.raw, "stdout": "43\n"}, {**done.raw, "exit_code": 1}):
        assert not check_receipt(changed, keys).is_valid
    assert check_receipt(done, keys, code="print(6*7)").problems == (
        "code_hash: the given file is not the code that was run",
    )
    assert not check_receipt(done, {"keys": []}).is_valid
    for nothing in ({}, {**done.raw, "receipt": None}, {"receipt": {}}):
        with pytest.raises(NotCheckable):
            check_receipt(nothing, keys)


def test_the_tool_tells_in_words(streaming_site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COFFERDAM_URL", streaming_site.service.url)
    monkeypatch.setenv("COFFERDAM_API_KEY", streaming_site.alice)
    assert run_python_code("print('hi')") == "hi\n"
    failed = run_python_code("import sys; sys.exit('no')")
    assert failed == "Error (exit_code=1): no\n"
    slow = run_python_code("while True: pass", timeout=1)
    assert slow == "Error (exit_code=-1): Execution timed out"
    assert run_python_code("1", timeout=400).startswith("Error (exit_code=-1): SB002: timeout")
    # A model may write half of a character.
    assert run_python_code("print('\ud83d')").startswith("Error (exit_code=-1): ")
    long = run_python_code("print('a' * 50_000 + 'end')")
    assert len(long) < tool.MOST_CHARACTERS + 100
    assert "characters left out" in long
    assert long.endswith("end\n")
    monkeypatch.delenv("COFFERDAM_API_KEY")
    assert run_python_code("1").startswith("Error (exit_code=-1): COFFERDAM_API_KEY")


def test_with_await_a_session_does_the_same(streaming_site: Site) -> None:
    async def talk() -> None:
        async with AsyncCofferdam(streaming_site.service.url, streaming_site.alice) as client:
            queued = await client.submit("print('later')")
            async with await client.open_session() as session:
                await session.files.write("a", "1")
                both = await asyncio.gather(
                    session.run("print(open('a').read())"), session.command("cat a")
                )
                assert [each.stdout for each in both] == ["1\n", "1"]
                async with session.stream_command("echo $HOME; exit 4") as events:
                    assert [event.type async for event in events][-1] == "done"
                assert events.execution is not None
                assert events.execution.exit_code == 4
                process = await session.start("sleep 0.2; echo end")
                assert (await process.wait()).stdout == "end\n"
                assert [each.path async for each in session.files.list()] == ["a", "artifacts"]
            assert (await client.wait(queued.id)).stdout == "later\n"

    asyncio.run(talk())
