"""Codex itself, unmodified, with a scripted model: its commands run in a sandbox of ours."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.codex_door import manage
from tests.support.codex_model import Model, scripted
from tests.support.raw_http import ask
from tests.support.required import missing
from tests.support.site import EXECUTIONS, Site

CODEX = Path("/usr/local/lib/cofferdam-codex/codex")
_CONFIG = """\
model = "scripted"
model_provider = "scripted"
approval_policy = "never"
web_search = "disabled"

[analytics]
enabled = false

[model_providers.scripted]
name = "scripted"
base_url = "{url}"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


@pytest.fixture
def home(streaming_site: Site, tmp_path: Path) -> Path:
    """Codex's own folder, with the block that the command prints."""
    if not CODEX.exists():
        missing("Codex is not installed: .ci/install-codex")
    found = tmp_path / "home"
    found.mkdir()
    url = f"ws://127.0.0.1:{streaming_site.service.port}"
    work = tmp_path / "work"
    work.mkdir()
    options = ("--tenant", "wonderland", "--key", "attack", "--url", url, "--folder", str(work))
    (found / "environments.toml").write_text(manage(streaming_site, "codex_config", *options))
    return found


def run_codex(home: Path, model: Model, *options: str) -> str:
    (home / "config.toml").write_text(_CONFIG.format(url=model.url))
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "CODEX_HOME": str(home)}
    done = subprocess.run(
        [str(CODEX), "exec", "--skip-git-repo-check", *options, "Do it."],
        cwd=home.parent / "work",
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


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
