"""MCP over standard input and output: the SDK's client starts the command."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from tests.support.mcp_client import called, go, over_stdio, refusal
from tests.support.processes import ROOT, clean_environment
from tests.support.site import MANAGE, Site


def test_a_client_on_this_machine_runs_code_with_a_key_from_a_file(
    streaming_site: Site, tmp_path: Path
) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(f"{streaming_site.alice}\n")

    async def work() -> None:
        async with over_stdio(streaming_site.data_dir, "--key-file", str(key_file)) as client:
            opened = await called(client, "session_open")
            here = {"session_id": opened["session_id"]}
            await called(client, "session_run", code="n = 20", **here)
            assert (await called(client, "session_run", code="n + 1", **here))["outputs"] == ["21"]
            has_begun = asyncio.Event()

            async def hear(progress: float, total: float | None, message: str | None) -> None:
                has_begun.set()

            code = "import time\nprint('on', flush=True)\ntime.sleep(80)"
            arguments = {"code": code, "timeout": 80, **here}
            running = asyncio.ensure_future(
                client.call_tool("session_run", arguments, progress_callback=hear)
            )
            await has_begun.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            script: str = ""
            while '"status":"cancelled"' not in script.replace(" ", ""):
                read = await client.read_resource(
                    f"cofferdam://sessions/{here['session_id']}/transcript"
                )
                script = read.contents[0].text  # type: ignore[union-attr]
            await called(client, "session_close", **here)
        async with over_stdio(streaming_site.data_dir, "--tenant", "elsewhere") as client:
            assert "ot found." in await refusal(client, "session_run", code="1", **here)

    go(work)


def test_nothing_is_done_for_a_tenant_that_is_not_active(streaming_site: Site) -> None:
    """Its keys could do nothing either."""
    options = ("--tenant", "elsewhere")

    def make(is_active: int) -> None:
        file = streaming_site.data_dir / "cofferdam.sqlite3"
        with closing(sqlite3.connect(file, timeout=20)) as database:
            change = "UPDATE executions_tenant SET is_active = ? WHERE slug = 'elsewhere'"
            database.execute(change, [is_active])
            database.commit()

    async def work() -> None:
        async with over_stdio(streaming_site.data_dir, *options) as client:
            assert await called(client, "session_list")
            make(0)
            for name in ("run_code", "session_list"):
                assert "not active" in await refusal(client, name, code="1")

    try:
        go(work)
        assert "not active" in _complaint(streaming_site, *options)
    finally:
        make(1)


def _complaint(site: Site, *options: str) -> str:
    """Of a command that does not start."""
    done = subprocess.run(
        [*MANAGE, "mcp", *options],
        env=clean_environment(site.data_dir),
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert (done.returncode != 0, done.stdout) == (True, "")
    return done.stderr


def test_without_a_valid_key_or_a_tenant_it_says_what_is_wrong(db: None, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("cfd_wrong")
    for options, said in (
        (["--key-file", str(wrong)], "is not valid"),
        (["--key-file", str(tmp_path / "none")], "cannot be read"),
        (["--tenant", "nobody"], "create_tenant"),
        ([], "required"),
    ):
        with pytest.raises(CommandError, match=said):
            call_command("mcp", *options)
