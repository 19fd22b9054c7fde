"""Codex itself, unmodified, as the tests start it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support.codex_door import manage
from tests.support.codex_model import Model
from tests.support.required import missing
from tests.support.site import Site

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


def require_codex() -> None:
    if not CODEX.exists():
        missing("Codex is not installed: .ci/install-codex")


def environment_of(home: Path, **extra: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(home), "CODEX_HOME": str(home), **extra}


def make_home(
    site: Site, folder: Path, port: int, tenant: str = "wonderland", key: str = "attack"
) -> Path:
    """Its own folder, with the block that `codex_config` prints, and a folder to work in."""
    require_codex()
    found, work = folder / "home", folder / "work"
    found.mkdir()
    work.mkdir()
    options = ("--tenant", tenant, "--key", key, "--url", f"ws://127.0.0.1:{port}")
    block = manage(site, "codex_config", *options, "--folder", str(work))
    (found / "environments.toml").write_text(block)
    return found


def run_codex(home: Path, model: Model, *options: str, **extra: str) -> str:
    """What it says, once it has ended. `extra` are variables of its environment."""
    (home / "config.toml").write_text(_CONFIG.format(url=model.url))
    done = subprocess.run(
        [str(CODEX), "exec", "--skip-git-repo-check", *options, "Do it."],
        cwd=home.parent / "work",
        env=environment_of(home, **extra),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
