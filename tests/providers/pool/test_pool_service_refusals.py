"""`manage.py pool`: what is asked wrongly, or by whom it does not serve, is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool_service import PoolService, assert_error, running
from tests.support.processes import ROOT, clean_environment, free_port

pytest_plugins = ["tests.support.pool_fixtures"]


@pytest.mark.parametrize(
    ("job", "field"),
    [
        ({"code": 5}, "code"),
        ({"code": "\ud800"}, "code"),
        ({"language": "nodejs"}, "language"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": "60"}, "timeout"),
        ({"timeout": True}, "timeout"),
        ({"arguments": []}, "arguments"),
        ({"arguments": {"a": "\ud800"}}, "arguments"),
        ({"entrypoint": "other"}, "entrypoint"),
        ({"files": [{"path": "../x", "content_base64": ""}]}, "files"),
        ({"files": [{"path": "/x", "content_base64": ""}]}, "files"),
        ({"files": [{"path": "artifacts", "content_base64": ""}]}, "files"),
        ({"files": [{"path": "x", "content_base64": "!"}]}, "files"),
        ({"limits": {"memory_bytes": 1}}, "limits"),
        ({"limits": {"output_bytes": -1}}, "limits"),
        ({"session": "x"}, "session"),
    ],
)
def test_a_job_that_is_refused_uses_up_no_instance(
    pool: PoolService, job: dict[str, Any], field: str
) -> None:
    instance_id = pool.create()
    body = {"code": "print(1)", "language": "python", **job}
    refused = pool.ask("POST", f"/v1/instances/{instance_id}/run", body)
    assert_error(refused, 400, "SB002", field=field, started=False)
    assert pool.run(instance_id).body["stdout"] == "ran\n"


def test_an_unknown_template_and_an_unknown_path_are_refused(pool: PoolService) -> None:
    unknown = pool.ask("POST", "/v1/instances", {"template": "cobol"})
    assert_error(unknown, 400, "SB002", field="language")
    assert pool.ask("GET", "/v2").status == 404
    assert pool.ask("PUT", "/v1/instances").status == 405


def test_a_web_page_cannot_run_code_through_a_browser(pool: PoolService) -> None:
    answer = pool.ask("POST", "/run", {"code_b64": "YQ=="}, Origin="http://evil.example")
    assert answer.status == 403


def test_a_token_is_demanded_off_loopback(tmp_path: Path) -> None:
    refused = subprocess.run(
        [sys.executable, "manage.py", "pool", "--host", "0.0.0.0", "--port", str(free_port())],
        env=clean_environment(tmp_path / "data"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert refused.returncode == 1
    assert "POOL_TOKEN" in refused.stderr


def test_nothing_but_the_health_is_told_without_the_token(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("a secret of ours\n")
    arguments = ("--host", "0.0.0.0", "--token-file", str(token_file))
    with running(tmp_path / "log", *arguments) as pool:
        assert pool.ask("GET", "/healthz").body == {"status": "ok"}
        for token in ("", "a secret of theirs"):
            for method, path in (
                ("POST", "/run"),
                ("POST", "/v1/instances"),
                ("PUT", "/v1/settings"),
                ("GET", "/v1/stats"),
                ("DELETE", "/v1/instances/x"),
            ):
                answer = pool.ask(method, path, {}, token=token)
                assert_error(answer, 401, "SB003", started=False)
        assert pool.ask("GET", "/v1/stats", token="a secret of ours").status == 200
        assert "a secret of ours" not in pool.service.output
