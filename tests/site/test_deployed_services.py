"""An installation made from deploy/ has sessions, tools and E2B's door, by what its files start."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.conftest import require
from tests.support.deployed import (
    SYSTEMD,
    as_in_compose,
    running,
    services_of_compose,
    units_of_target,
)
from tests.support.docker_engine import Containers, missing
from tests.support.processes import Service, free_port
from tests.support.raw_http import ask

pytest_plugins = ["tests.support.docker_engine"]

SECONDS = 120


def _until(done: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (found := done()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def _assert_has_all_doors(web: Service, data_dir: Path) -> None:
    found = re.search(r"^API_KEY=(.+)$", (data_dir / "credentials.txt").read_text(), re.M)
    assert found
    # What the proxy says of its client: HTTPS_ONLY is on.
    call = partial(ask, web, key=found[1], X_Forwarded_Proto="https")

    opened = call("POST", "/api/v1/sessions", {})
    assert opened.status == 201, opened.body
    cells = f"/api/v1/sessions/{opened.json['id']}/executions"
    for code, text in (("x = 41", ""), ("print(x + 1)", "42\n")):
        answer = call("POST", cells, {"code": code})
        assert answer.status == 200, answer.body
        assert answer.json["stdout"] == text

    # By a worker, whose call the web server passes on.
    code = "from tools import double\nprint(double(n=21))"
    tool = {"name": "double", "parameters": {"type": "object"}}
    asked = {"code": code, "tools": [tool], "mode": "async", "timeout": 30}
    accepted = call("POST", "/api/v1/executions", asked)
    assert accepted.status == 202, accepted.body
    run = f"/api/v1/executions/{accepted.json['id']}"

    def called() -> Any:
        state = call("GET", run).json
        assert state["status"] in ("queued", "running"), state["error"]
        return call("GET", f"{run}/tool_calls").json["results"]

    (waiting,) = _until(called)
    assert call("POST", f"{run}/tool_calls/{waiting['id']}", {"result": 42}).status == 200
    ended = _until(
        lambda: (state := call("GET", run).json)["status"] not in ("queued", "running") and state
    )
    assert (ended["status"], ended["stdout"]) == ("succeeded", "42\n")

    sandbox = call("POST", "/sandboxes", {"templateID": "base", "timeout": 60})
    assert sandbox.status == 201, sandbox.body
    assert call("DELETE", f"/sandboxes/{sandbox.json['sandboxID']}").status == 204


def test_the_units_of_a_host_start_all_of_it(tmp_path: Path) -> None:
    for program in ("bwrap", "openssl"):
        require(program)
    parts = units_of_target(tmp_path, free_port())
    assert [part.name for part in parts] == [
        "cofferdam-pool.service",
        "cofferdam-web.service",
        "cofferdam-worker.service",
    ]
    with running(parts, tmp_path) as services:
        web = services["cofferdam-web.service"]
        web.wait_until_ready(SECONDS)
        _assert_has_all_doors(web, tmp_path / "data")


def test_the_units_that_are_wanted_are_there_and_are_stopped_in_the_other_order() -> None:
    wanted = re.findall(r"^Wants=(.+)$", (SYSTEMD / "cofferdam.target").read_text(), re.M)[0]
    for name in wanted.split():
        unit = (SYSTEMD / name).read_text()
        assert "\nPartOf=cofferdam.target\n" in unit
        assert "\nWantedBy=cofferdam.target\n" in unit
    # What runs in the pool has to be finished first.
    for name in ("web", "worker"):
        after = re.findall(
            r"^After=(.+)$", (SYSTEMD / f"cofferdam-{name}.service").read_text(), re.M
        )
        assert "cofferdam-pool.service" in after[0].split()


def test_the_services_of_the_compose_file_are_all_of_it(
    tmp_path: Path, under_runc: Containers
) -> None:
    if os.geteuid() != 0:
        missing("a name for the pool needs root")
    require("openssl")
    require("unshare")
    parts = services_of_compose(tmp_path, free_port(), free_port())
    assert [part.name for part in parts] == ["pool", "setup", "web", "worker"]
    with running(parts, tmp_path, partial(as_in_compose, tmp_path)) as services:
        services["web"].wait_until_ready(SECONDS)
        _assert_has_all_doors(services["web"], tmp_path / "data")
