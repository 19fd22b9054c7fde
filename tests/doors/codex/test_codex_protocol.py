"""Codex's protocol over a real socket: processes and files of a session, each with its record."""

from __future__ import annotations

import sqlite3
from base64 import b64decode, b64encode
from contextlib import closing
from uuid import UUID

from tests.support.codex_door import CWD, Client, Refused, refused
from tests.support.raw_http import ask
from tests.support.site import EXECUTIONS, Site
from tests.support.waiting import wait_until


def last_record(site: Site) -> dict[str, object]:
    """The tenant's last execution, with what the API does not tell of it."""
    (found,) = ask(site.service, "GET", f"{EXECUTIONS}?limit=1", key=site.alice).json["results"]
    path = f"{EXECUTIONS}/{found['id']}"
    record: dict[str, object] = ask(site.service, "GET", path, key=site.alice).json
    with closing(sqlite3.connect(site.data_dir / "cofferdam.sqlite3", timeout=20)) as database:
        columns = "code, request_id"
        query = f"SELECT {columns} FROM executions_execution ORDER BY created_at DESC LIMIT 1"
        ((code, request_id),) = database.execute(query).fetchall()
    return {**record, "code": code, "request_id": request_id}


def path_of(name: str) -> str:
    return f"{CWD}/{name}"


def write(client: Client, name: str, content: bytes) -> None:
    data = b64encode(content).decode()
    assert client.call("fs/writeFile", path=path_of(name), dataBase64=data) == {}


def content_of(client: Client, name: str) -> bytes:
    return b64decode(client.call("fs/readFile", path=path_of(name))["dataBase64"])


def test_a_process_is_an_execution_with_thread_and_tool_call(
    streaming_site: Site, client: Client
) -> None:
    told = {"threadId": "0199a7b2-7c4f-7000-8000-000000000001", "toolCallId": "call_1"}
    script = "echo said; echo wrong >&2; exit 3"
    assert client.run("a", script, metadata=told) == (3, "said\n")
    assert client.output("a", "stderr") == "wrong\n"
    record = last_record(streaming_site)
    assert (record["language"], record["exit_code"], record["code"]) == ("bash", 3, script)
    assert (record["agent"], record["conversation"]) == ("tests", told["threadId"])
    assert record["request_id"] == "call_1"
    assert record["receipt"]


def test_a_program_with_arguments_is_recorded_as_a_command(
    streaming_site: Site, client: Client
) -> None:
    env, policy = {"ONE": "1"}, {"set": {"ONE": "0", "TWO": "2"}, "inherit": "none"}
    client.start("args", "sh", "-c", "echo $ONE $TWO; pwd", env=env, envPolicy=policy)
    assert client.output("args") == "1 2\n/workspace\n"
    assert last_record(streaming_site)["language"] == "command"


def test_numbers_of_a_process_go_on_without_a_gap(client: Client) -> None:
    client.run("numbers", "for i in 1 2 3; do echo $i; echo e$i >&2; done")
    of_it = [each for each in client.told if each["params"]["processId"] == "numbers"]
    numbers = [each["params"]["seq"] for each in of_it]
    assert numbers == list(range(1, len(numbers) + 1))
    assert [each["method"] for each in of_it[-2:]] == ["process/exited", "process/closed"]


def test_output_can_be_read_again_and_waited_for(client: Client) -> None:
    client.start("slow", "bash", "-c", "read a; echo $a; read b; exit 4", pipeStdin=True)
    assert client.call("process/read", processId="slow", waitMs=0)["chunks"] == []
    reading = client.begin("process/read", processId="slow", waitMs=60_000)
    line = b64encode(b"one\n").decode()
    wanted = {"processId": "slow", "chunk": line, "writeId": "w1"}
    assert client.call("process/write", **wanted) == {"status": "accepted"}
    # A client that lost its connection sends it again.
    assert client.call("process/write", **wanted) == {"status": "accepted"}
    seen = client.answer_to(reading)
    assert [b64decode(each["chunk"]) for each in seen["chunks"]] == [b"one\n"]
    assert (seen["exited"], seen["closed"], seen["nextSeq"]) == (False, False, 2)
    client.call("process/write", processId="slow", chunk=line, writeId="w2")
    client.wait_for("process/closed", "slow")
    last = client.call("process/read", processId="slow", afterSeq=1)
    assert (last["exited"], last["exitCode"], last["closed"]) == (True, 4, True)
    status = client.call("process/write", processId="slow", chunk=line, writeId="w3")
    assert status == {"status": "stdinClosed"}


def test_signals_end_processes(client: Client) -> None:
    client.start("asked", "bash", "-c", "trap 'echo caught; exit 5' INT; echo; sleep 60 & wait")
    client.wait_for("process/output", "asked")
    assert client.call("process/signal", processId="asked", signal="interrupt") == {}
    assert client.output("asked") == "\ncaught\n"
    client.start("killed", "sleep", "60")
    assert client.call("process/terminate", processId="killed") == {"running": True}
    assert client.wait_for("process/exited", "killed")["exitCode"] == 137
    client.wait_for("process/closed", "killed")
    assert client.call("process/terminate", processId="killed") == {"running": False}
    assert client.call("process/terminate", processId="never") == {"running": False}


def test_a_terminal_puts_out_one_stream(client: Client) -> None:
    client.start("tty", "bash", "-c", "test -t 0 && stty size; echo e >&2", tty=True)
    assert client.output("tty", "pty") == "24 80\r\ne\r\n"


def test_files_are_written_read_and_told_of(client: Client) -> None:
    write(client, "d/f", b"\0\xff of it")
    assert content_of(client, "d/f") == b"\0\xff of it"
    seen = client.call("fs/getMetadata", path=path_of("d/f"))
    assert (seen["isFile"], seen["isDirectory"], seen["isSymlink"]) == (True, False, False)
    assert seen["size"] == 8
    assert seen["modifiedAtMs"] > 1_600_000_000_000
    assert client.run("files", "cat d/f | wc -c; ln -s d/f link; ln -s nowhere broken")[0] == 0
    assert client.call("fs/getMetadata", path=path_of("link"))["isSymlink"]
    assert client.call("fs/canonicalize", path=path_of("link")) == {"path": path_of("d/f")}
    entries = client.call("fs/readDirectory", path=CWD)["entries"]
    assert {"fileName": "d", "isDirectory": True, "isFile": False} in entries
    options = {"maxDepth": 4, "maxDirectories": 100, "maxEntries": 1000}
    walked = client.call("fs/walk", path=CWD, options=options)
    assert {"path": path_of("d/f"), "kind": "file"} in walked["entries"]
    assert (walked["errors"], walked["truncated"]) == ([], False)
    assert client.call("fs/walk", path=CWD, options={**options, "maxEntries": 1})["truncated"]


def test_a_file_is_read_in_blocks(client: Client) -> None:
    write(client, "blocks", bytes(range(10)))
    assert client.call("fs/open", handleId="h", path=path_of("blocks")) == {"handleId": "h"}
    first = client.call("fs/readBlock", handleId="h", offset=0, len=6)
    assert (b64decode(first["chunk"]), first["eof"]) == (bytes(range(6)), False)
    last = client.call("fs/readBlock", handleId="h", offset=6, len=6)
    assert (b64decode(last["chunk"]), last["eof"]) == (bytes(range(6, 10)), True)
    assert refused(client, "fs/open", handleId="h", path=path_of("blocks")).code == -32600
    assert client.call("fs/close", handleId="h") == {}
    assert refused(client, "fs/readBlock", handleId="h", offset=0, len=1).code == -32004


def test_files_are_copied_and_removed(client: Client) -> None:
    write(client, "from/a", b"a")
    write(client, "from/b/c", b"c")
    one = {"sourcePath": path_of("from/a"), "destinationPath": path_of("copy"), "recursive": False}
    assert client.call("fs/copy", **one) == {}
    assert content_of(client, "copy") == b"a"
    tree = {"sourcePath": path_of("from"), "destinationPath": path_of("to")}
    assert "recursive" in refused(client, "fs/copy", **tree, recursive=False).message
    assert client.call("fs/copy", **tree, recursive=True) == {}
    assert content_of(client, "to/b/c") == b"c"
    within = {**tree, "destinationPath": path_of("from/within")}
    assert "within" in refused(client, "fs/copy", **within, recursive=True).message
    assert "empty" in refused(client, "fs/remove", path=path_of("to"), recursive=False).message
    assert client.call("fs/remove", path=path_of("to")) == {}
    assert refused(client, "fs/remove", path=path_of("to"), force=False).code == -32004
    assert client.call("fs/remove", path=path_of("to")) == {}
    assert client.call("fs/createDirectory", path=path_of("new/deep")) == {}
    deep = refused(client, "fs/createDirectory", path=path_of("no/deep"), recursive=False)
    assert deep.code == -32004


def test_what_is_not_there_is_not_found(client: Client) -> None:
    for method in ("fs/getMetadata", "fs/readFile", "fs/canonicalize", "fs/readDirectory"):
        assert refused(client, method, path=path_of("is/not/there")).code == -32004
    missing = refused(client, "process/read", processId="never")
    assert (missing.code, missing.message) == (-32600, "unknown process id never")


def test_paths_elsewhere_are_those_of_the_sandbox(streaming_site: Site, client: Client) -> None:
    hidden = f"file://{streaming_site.data_dir}/cofferdam.sqlite3"
    assert refused(client, "fs/readFile", path=hidden).code == -32004
    up = f"{CWD}/../../../..{streaming_site.data_dir}/cofferdam.sqlite3"
    assert refused(client, "fs/readFile", path=up).code == -32004
    assert client.call("fs/getMetadata", path="file:///")["isDirectory"]
    assert client.run("tmp", "echo t > /tmp/t")[0] == 0
    assert b64decode(client.call("fs/readFile", path="file:///tmp/t")["dataBase64"]) == b"t\n"


def test_the_folder_of_a_client_is_the_workspace(streaming_site: Site, path: str) -> None:
    folder = "/home/ann/my project"
    client = Client(streaming_site.service, f"{path}?folder=/home/ann/my%20project")
    answer = client.call("initialize", clientName="tests")
    client.send({"method": "initialized"})
    uri = "file:///home/ann/my%20project"
    assert answer["environmentInfo"]["cwd"] == uri
    assert client.run("a", "echo in > f; pwd", cwd=uri) == (0, "/workspace\n")
    assert client.call("fs/canonicalize", path=f"{uri}/f") == {"path": f"{uri}/f"}
    assert refused(client, "fs/readFile", path=f"file://{folder.rpartition('/')[0]}/f").code < 0
    client.close()


def test_reconnecting_finds_session_and_processes(streaming_site: Site, path: str) -> None:
    first = Client(streaming_site.service, path)
    session_id = first.initialize()
    assert UUID(session_id)
    first.start("stays", "bash", "-c", "echo before; read a; echo got $a", pipeStdin=True)
    first.wait_for("process/output", "stays")
    other = Client(streaming_site.service, path)
    assert refused(other, "initialize", resumeSessionId=session_id).code == -32010
    first.close()

    def resumed() -> bool:
        try:
            other.initialize(resumeSessionId=session_id)
        except Refused as error:
            return error.code != -32010
        return True

    wait_until(resumed, 60)
    again = other.call("process/read", processId="stays")
    assert [b64decode(each["chunk"]) for each in again["chunks"]] == [b"before\n"]
    other.call("process/write", processId="stays", chunk=b64encode(b"x\n").decode(), writeId="1")
    assert other.output("stays") == "got x\n"
    other.close()
