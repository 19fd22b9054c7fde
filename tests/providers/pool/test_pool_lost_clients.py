"""What a pool service has lent to a process that has ended is ended, used or not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.pool_service import provider_of, running

CREATES = """
import os, sys
import django
django.setup()
from tests.support.pool_service import provider_of
with provider_of(sys.argv[1]) as provider:
    print(provider.create_instance("python", owner="alice").instance_id, flush=True)
    os.kill(os.getpid(), 9)
"""


def test_an_instance_of_a_process_that_was_killed_right_after_its_creation_is_ended(
    tmp_path: Path,
) -> None:
    often = {"providers.runtime.service.pool_manager.CLIENTS_SECONDS": 0.2}
    with running(tmp_path / "log", constants=often) as pool, provider_of(pool.url) as living:
        mine = living.create_instance("python", owner="alice")
        environment = os.environ | {"PYTHONPATH": ".", "DJANGO_SETTINGS_MODULE": "tests.settings"}
        created = subprocess.run(
            [sys.executable, "-c", CREATES, pool.url],
            capture_output=True,
            text=True,
            env=environment,
        )
        assert created.returncode == -9, created.stderr
        assert created.stdout.strip()
        pool.wait_for(lambda stats: stats["instances"] == 1)
        # That of a process that lives is its own.
        assert living.execute_code(mine.instance_id, "print(1)", "python").stdout == "1\n"
