"""`manage.py pool`: its settings, from the environment and as a provider pushes them."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool_service import PoolService, assert_error, running
from tests.support.processes import ROOT, clean_environment

pytest_plugins = ["tests.support.pool_fixtures"]


def put(pool: PoolService, **settings: object) -> None:
    assert pool.ask("PUT", "/v1/settings", settings).status == 200


def test_settings_are_converged_to_without_dropping_what_runs(pool: PoolService) -> None:
    put(pool, pool_size=1)
    instance_id = pool.create()
    with ThreadPoolExecutor(1) as executor:
        code = "import time\ntime.sleep(0.8)\nprint('undisturbed')"
        answer = executor.submit(pool.run, instance_id, code)
        time.sleep(0.2)
        put(pool, pool_size=4)
        pool.wait_for(lambda stats: stats["idle"] == 4)
        put(pool, pool_size=2, max_memory="128m")
        pool.wait_for(lambda stats: stats["idle"] == 2)
        limits = pool.run(pool.create()).body["metadata"]["limits"]
        assert limits["memory_bytes"] == 128 << 20
        assert answer.result().body["stdout"] == "undisturbed\n"
    pool.wait_for(lambda stats: stats["retired_pools"] == 0)


def test_a_switch_that_sandboxes_are_made_with_renews_them(pool: PoolService) -> None:
    put(pool, pool_size=1)
    assert "advice" not in pool.run(pool.create(), "import socket").body["metadata"]
    put(pool, pool_size=1, enable_ast_analysis=True)
    assert pool.run(pool.create(), "import socket").body["metadata"]["advice"]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"pool_size": 0}, "pool_size"),
        ({"pool_size": 101}, "pool_size"),
        ({"max_memory": "3g"}, "max_memory"),
        ({"pool_sise": 3}, "pool_sise"),
        ({"isolation": "none"}, "isolation"),
        ({"preload": "numpy; import os"}, "preload"),
        ({"templates": "science"}, "templates"),
        ({"templates": "python:python=x"}, "templates"),
        ({"require_gvisor": True, "runtime": "runc"}, "require_gvisor"),
    ],
)
def test_settings_that_are_refused_change_nothing(
    pool: PoolService, settings: dict[str, Any], field: str
) -> None:
    before = pool.stats()["size"]
    assert_error(pool.ask("PUT", "/v1/settings", settings), 400, "SB002", field=field)
    assert pool.stats()["size"] == before


def test_what_cannot_be_had_is_refused_and_the_former_goes_on(pool: PoolService) -> None:
    refused = pool.ask("PUT", "/v1/settings", {"require_gvisor": True})
    assert_error(refused, 503, "SB009")
    assert "require_gvisor" in refused.body["error"]["message"]
    assert pool.run(pool.create()).body["stdout"] == "ran\n"


def test_ragflow_s_settings_mean_what_they_say(tmp_path: Path) -> None:
    extra = {"SANDBOX_TIMEOUT": "1500ms", "SANDBOX_MAX_MEMORY": "96m"}
    with running(tmp_path / "log", SANDBOX_EXECUTOR_MANAGER_POOL_SIZE="2", **extra) as pool:
        assert pool.stats()["size"] == 2
        answer = pool.ragflow("import time\ndef main():\n    time.sleep(9)").body
        assert 1400 < answer["time_used_ms"] < 8500
        limits = pool.run(pool.create()).body["metadata"]["limits"]
        assert limits["memory_bytes"] == 96 << 20


@pytest.mark.parametrize(
    ("name", "value"), [("SANDBOX_TIMEOUT", "soon"), ("SANDBOX_MAX_MEMORY", "much")]
)
def test_a_setting_that_is_not_understood_is_an_error(
    tmp_path: Path, name: str, value: str
) -> None:
    refused = subprocess.run(
        [sys.executable, "manage.py", "pool", "--launcher", "bubblewrap"],
        env=clean_environment(tmp_path / "data", **{name: value}),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert refused.returncode == 1
    assert value in refused.stderr
