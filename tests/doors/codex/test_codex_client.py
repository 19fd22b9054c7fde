"""Codex itself, unmodified, with a scripted model: its commands run in a sandbox of ours."""

from __future__ import annotations

import sqlite3
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.support.codex_door import make_key
from tests.support.codex_model import scripted
from tests.support.codex_program import make_home, run_codex
from tests.support.cut_relay import relayed
from tests.support.raw_http import ask
from tests.support.site import EXECUTIONS, Site
from tests.support.waiting import wait_until


@pytest.fixture
def home(streaming_site: Site, tmp_path: Path) -> Path:
    """Codex's own folder, with the block that the command prints."""
    return make_home(streaming_site, tmp_path, streaming_site.service.port)


def test_its_command_runs_in_a_sandbox_and_the_model_is_told(
    streaming_site: Site, home: Path
) -> None:
    script = "echo $((6 * 7)) | tee answer; pwd; cat /proc/net/dev | wc -l"
    with scripted(script, "cat answer") as model:
        said = run_codex(home, model)
    assert "All is done." in said
    first, second = model.outputs
    assert "42\n/workspace\n3" in first
    assert "42" in second
    rows = ask(streaming_site.service, "GET", f"{EXECUTIONS}?limit=2", key=streaming_site.alice)
    assert [each["status"] for each in rows.json["results"]] == ["succeeded", "succeeded"]
    with closing(sqlite3.connect(streaming_site.data_dir / "cofferdam.sqlite3")) as database:
        query = (
            "SELECT code, conversation, request_id FROM executions_execution"
            " ORDER BY created_at DESC LIMIT 2"
        )
        (_, thread, call), (code, same, former) = database.execute(query).fetchall()
    assert (code, former, call) == (script, "call_0", "call_1")
    assert thread == same
    assert len(thread) == 36


def test_a_program_is_written_to_while_it_runs(home: Path) -> None:
    script = "read line; echo got $line; test -t 0 && echo terminal"
    first = ("exec_command", {"cmd": script, "tty": True, "yield_time_ms": 1000})
    second = ("write_stdin", {"session_id": "{session}", "chars": "hello\n"})
    with scripted(first, second) as model:
        run_codex(home, model)
    assert "got hello" in model.outputs[1]
    assert "terminal" in model.outputs[1]


def test_what_a_policy_refuses_is_told_to_the_model(streaming_site: Site, tmp_path: Path) -> None:
    make_key(streaming_site, "ruled", "ruled", {"languages": "python"})
    port = streaming_site.service.port
    with scripted("echo never") as model:
        run_codex(make_home(streaming_site, tmp_path, port, "ruled", "ruled"), model)
    assert "policy" in model.outputs[0]


def test_a_broken_connection_loses_no_output(streaming_site: Site, tmp_path: Path) -> None:
    script = "echo begun; until test -e go; do sleep 0.1; done; echo ended"
    call = ("exec_command", {"cmd": script, "yield_time_ms": 30_000})
    with relayed(streaming_site.service.port) as relay, ThreadPoolExecutor(1) as threads:
        home = make_home(streaming_site, tmp_path, relay.port)
        with scripted(call) as model:
            running = threads.submit(run_codex, home, model)
            begun = b64encode(b"begun\n")
            wait_until(lambda: b"sandboxType" in relay.heard and begun in relay.heard, 60)
            query = f"{EXECUTIONS}?limit=1"
            found = ask(streaming_site.service, "GET", query, key=streaming_site.alice).json
            session = found["results"][0]["session"]
            relay.cut()
            wait_until(lambda: relay.count == 2, 60)
            path = f"/api/v1/sessions/{session}/files/content?path=go"
            url = f"{streaming_site.service.url}{path}"
            headers = {"X-API-Key": streaming_site.alice}
            assert httpx.put(url, content=b"", headers=headers, verify=False).status_code < 300
            running.result(120)
    assert "begun\nended\n" in model.outputs[0]


def test_a_patch_is_applied_to_the_files_of_the_session(home: Path) -> None:
    patch = "*** Begin Patch\n*** Add File: made.txt\n+by a patch\n*** End Patch\n"
    with scripted(f"apply_patch <<'EOF'\n{patch}EOF", "cat made.txt") as model:
        run_codex(home, model, "--sandbox", "workspace-write")
    assert "by a patch" in model.outputs[1]
    assert not (home.parent / "work" / "made.txt").exists()
