"""MCP over HTTP: the SDK's own client, and what it is told."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest
from mcp.shared.exceptions import MCPError

from tests.support.mcp_client import called, connected, go, refusal
from tests.support.raw_http import ask
from tests.support.site import EXECUTIONS, Site

ALL = (
    *("run_code", "session_open", "session_list", "session_run", "session_reset", "session_close"),
    *("command_run", "command_start", "command_output", "command_signal"),
    *("file_list", "file_read", "file_write", "execution_output"),
)


LANGUAGES = "/api/v1/languages"


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_code_runs_and_is_answered_as_an_object_and_as_text(
    streaming_site: Site, mode: str
) -> None:
    async def work() -> None:
        async with connected(streaming_site, mode=mode) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            assert tuple(tools) == ALL
            there = ask(streaming_site.service, "GET", LANGUAGES, key=streaming_site.alice)
            for name in ("run_code", "session_open"):
                language = tools[name].input_schema["properties"]["language"]
                assert language["enum"] == there.json["languages"]
            says_packages = " can import " in str(tools["run_code"].description)
            assert says_packages == bool(there.json["packages"])
            for tool in tools.values():
                assert tool.description
                # With the names of packages, of which there are 15 at most.
                assert len(tool.description) < 700
                assert tool.output_schema
            told: list[str] = []

            async def hear(progress: float, total: float | None, message: str | None) -> None:
                told.append(message or "")

            code = (
                "import os, time\n"
                "def main(n):\n"
                "    print('first', flush=True)\n"
                "    time.sleep(0.5)\n"
                "    print('second')\n"
                "    os.makedirs('artifacts/a b')\n"
                "    open('artifacts/a b/ü.txt', 'w').write('kept')\n"
                "    return {'twice': 2 * n}\n"
            )
            result = await client.call_tool(
                "run_code",
                {"code": code, "arguments": {"n": 21}},
                progress_callback=hear,
            )
            said: dict[str, Any] = result.structured_content
            assert said["status"] == "succeeded", said
            assert said["result"] == {"twice": 42}
            assert said["stdout"] == "first\nsecond\n"
            assert json.loads(result.content[0].text) == said  # type: ignore[union-attr]
            assert told[0] == "first\n"
            assert "".join(told) == "first\nsecond\n"
            link = result.content[-1]
            assert link.type == "resource_link"
            read = await client.read_resource(link.uri)
            assert read.contents[0].text == "kept"  # type: ignore[union-attr]
            listed = [each.uri for each in (await client.list_resources()).resources]
            assert link.uri in listed
            record = await client.read_resource(f"cofferdam://executions/{said['execution_id']}")
            assert json.loads(record.contents[0].text)["receipt"]  # type: ignore[union-attr]
            native = ask(
                streaming_site.service,
                "GET",
                f"{EXECUTIONS}/{said['execution_id']}",
                key=streaming_site.alice,
            )
            assert native.json["stdout"] == said["stdout"]

    go(work)


def test_who_misses_a_module_is_advised(streaming_site: Site) -> None:
    async def work() -> None:
        async with connected(streaming_site) as client:
            said = await called(client, "run_code", code="import no_such_package")
            assert "There is no module 'no_such_package'" in said["advice"][0]
            assert "Advice" not in said["stderr"]
            said = await called(client, "run_code", code="1")
            assert said["advice"] == []
            opened = await called(client, "session_open")
            here = {"session_id": opened["session_id"]}
            started = await called(
                client, "command_start", command="python3 -m no_such_package", **here
            )
            ended: dict[str, Any] = {"state": "running"}
            while ended["state"] == "running":
                ended = await called(client, "command_output", pid=started["pid"], wait=30, **here)
            assert "There is no module 'no_such_package'" in ended["advice"][0]
            await called(client, "session_close", **here)

    go(work)


def test_a_page_of_files_may_end_at_a_name_that_is_no_utf8(streaming_site: Site) -> None:
    async def work() -> None:
        async with connected(streaming_site) as client:
            opened = await called(client, "session_open")
            here = {"session_id": opened["session_id"]}
            # Beside them there is the folder of artifacts.
            names = [*(b"a%d" % n for n in range(198)), b"b\xff", b"c\xff"]
            code = f"for name in {names}: open(name, 'w').close()"
            await called(client, "session_run", code=code, **here)
            page = await called(client, "file_list", **here)
            rest = await called(client, "file_list", after=page["next"], **here)
            assert (len(page["entries"]), len(rest["entries"])) == (200, 1)
            assert rest["next"] is None
            await called(client, "session_close", **here)

    go(work)


def test_what_is_left_out_of_a_run_is_said(streaming_site: Site) -> None:
    async def work() -> None:
        async with connected(streaming_site) as client:
            opened = await called(client, "session_open")
            here = {"session_id": opened["session_id"]}
            code = (
                "import os\nos.symlink('x', 'artifacts/link')\nos.mkdir('artifacts/closed', 0)\n"
                "for n in range(21): display(n)"
            )
            files = [
                {"name": "link", "reason": "a symbolic link: links are not followed"},
                {"name": "closed/", "reason": "unreadable"},
            ]
            outputs = [{"name": "output 21", "reason": "too many outputs: at most 20 are kept"}]
            said = await called(client, "session_run", code=code, **here)
            assert (said["artifacts_skipped"], said["outputs_skipped"]) == (files, outputs)
            # Of what an earlier cell has left nothing is said again.
            said = await called(client, "session_run", code="1", **here)
            assert (said["artifacts_skipped"], said["outputs_skipped"]) == ([], [])
            said = await called(client, "run_code", code=code)
            assert (said["artifacts_skipped"], said["outputs_skipped"]) == (files, outputs)
            await called(client, "session_close", **here)

    go(work)


def test_code_has_the_environment_variables_of_its_call(streaming_site: Site) -> None:
    async def work() -> None:
        async with connected(streaming_site) as client:
            code = "import os; print(os.environ.get('NAME'))"
            said = await called(client, "run_code", code=code, env={"NAME": "value"})
            assert said["stdout"] == "value\n"
            said = json.loads(await refusal(client, "run_code", code=code, env={"1": "value"}))
            assert said["error"]["field"] == "env"
            assert (await called(client, "run_code", code=code))["stdout"] == "None\n"

    go(work)


def test_a_session_keeps_its_variables_its_files_and_its_processes(streaming_site: Site) -> None:
    async def work() -> None:
        async with connected(streaming_site) as client:
            opened = await called(client, "session_open", name="of mcp")
            here = {"session_id": opened["session_id"]}
            await called(client, "session_run", code="n = 20", **here)
            said = await called(client, "session_run", code="n + 1", **here)
            assert said["outputs"] == ["21"]
            assert said["context_kept"] is True
            text = "ü" * 40_000
            await called(client, "file_write", path="a/b.txt", text=text, **here)
            part = await called(client, "file_read", path="a/b.txt", **here)
            assert part["size_bytes"] == 80_000
            rest = await called(
                client, "file_read", path="a/b.txt", offset=part["next_offset"], **here
            )
            assert part["text"] + rest["text"] == text
            assert rest["next_offset"] is None
            content = base64.b64encode(b"\xff\x00").decode()
            await called(client, "file_write", path="c", content_base64=content, **here)
            assert (await called(client, "file_read", path="c", **here))[
                "content_base64"
            ] == content
            listed = await called(client, "file_list", depth=2, **here)
            assert {"a", "a/b.txt", "c"} <= {each["path"] for each in listed["entries"]}
            counted = await called(client, "command_run", command="wc -c < a/b.txt", **here)
            assert counted["stdout"].strip() == "80000"
            command = "echo ready; read -t 60 < <(sleep 60); echo never"
            started = await called(client, "command_start", command=command, **here)
            process = {**here, "pid": started["pid"]}
            seen: dict[str, Any] = {"stdout": "", "next": 0}
            while not seen["stdout"]:
                seen = await called(client, "command_output", after=seen["next"], **process)
            assert (seen["stdout"], seen["state"]) == ("ready\n", "running")
            assert await called(client, "command_signal", signal="SIGKILL", **process) == {
                "signalled": True
            }
            while seen["state"] == "running":
                seen = await called(client, "command_output", after=seen["next"], wait=2, **process)
            assert seen["exit_code"] == 137
            script = await client.read_resource(
                f"cofferdam://sessions/{opened['session_id']}/transcript"
            )
            cells = json.loads(script.contents[0].text)["cells"]  # type: ignore[union-attr]
            assert [cell["code"] for cell in cells][:2] == ["n = 20", "n + 1"]
            await called(client, "session_reset", **here)
            said = await called(client, "session_run", code="n", **here)
            assert said["status"] == "failed"
            assert "NameError" in said["stderr"]
            await called(client, "session_close", **here)
            assert "conflict" in await refusal(client, "session_run", code="1", **here)

    go(work)


def test_what_is_long_comes_cut_and_is_read_to_its_end(streaming_site: Site) -> None:
    async def work() -> None:
        async with connected(streaming_site) as client:
            code = "print('x' * 40_000)"
            said = await called(client, "run_code", code=code)
            assert len(said["stdout"]) == 16_000
            assert said["cut"] == ["stdout"]
            text, offset = "", 0
            while offset is not None:
                part = await called(
                    client,
                    "execution_output",
                    execution_id=said["execution_id"],
                    offset=offset,
                )
                text, offset = text + part["text"], part["next_offset"]
            assert text == "x" * 40_000 + "\n"

    go(work)


def test_what_is_asked_wrongly_says_how_it_is_right(streaming_site: Site) -> None:
    async def work() -> None:
        async with connected(streaming_site) as client:
            said = json.loads(await refusal(client, "run_code", code="1", timeout=-1))
            assert said["error"]["field"] == "timeout"
            assert "Known are" in await refusal(client, "run_code", code="1", extra=1)
            assert "language" in await refusal(client, "run_code", code="1", language="klingon")
            assert "session_id" in await refusal(client, "session_run", session_id="x", code="1")
            unknown = "cofferdam://executions/01a20ae2-eeb9-7ca8-8000-000000000000/artifacts"
            for uri in ("cofferdam://executions/x", "file:///etc/passwd", f"{unknown}/%00"):
                with pytest.raises(MCPError, match="ot found"):
                    await client.read_resource(uri)
            opened = await called(client, "session_open")
            here = {"session_id": opened["session_id"]}
            for path in (5, None, [], "../x", "a\0b"):
                assert '"field": "path"' in await refusal(client, "file_read", path=path, **here)
            assert '"field": "depth"' in await refusal(client, "file_list", depth="x", **here)
            assert '"field": "after"' in await refusal(client, "file_list", after=1, **here)
            assert '"field": "state"' in await refusal(client, "session_list", state=[1])
            await called(client, "session_close", **here)
            with pytest.raises(MCPError, match="Unknown tool"):
                await client.call_tool("rm", {})

    go(work)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_call_that_is_cancelled_ends_its_run(streaming_site: Site, mode: str) -> None:
    async def work() -> None:
        async with connected(streaming_site, mode=mode) as client:
            has_begun = asyncio.Event()

            async def hear(progress: float, total: float | None, message: str | None) -> None:
                has_begun.set()

            code = "import time\nprint('on', flush=True)\ntime.sleep(80)"
            running = asyncio.ensure_future(
                client.call_tool("run_code", {"code": code, "timeout": 80}, progress_callback=hear)
            )
            await has_begun.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            while (last := _last(streaming_site))["status"] == "running":
                await asyncio.sleep(0.1)
            assert last["status"] == "cancelled"

    go(work)


def _last(site: Site) -> dict[str, Any]:
    found = ask(site.service, "GET", f"{EXECUTIONS}?limit=1", key=site.alice).json["results"]
    last: dict[str, Any] = found[0]
    return last
