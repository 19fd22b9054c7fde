"""A process that owns a local provider, for tests that end it or give it another user.

`python -m tests.support.local_process CONFIG`: CONFIG is JSON with the provider's configuration, "data_dir"
and optionally "uid", "unisolated" and the "owner" of the runs. Each line on stdin is a run as JSON;
each line on stdout is what came of it. The first line says that the provider is ready, or why not.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from django.conf import settings


def main() -> None:
    # Whoever was started in the background of a shell has inherited that it is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config: dict[str, Any] = json.loads(sys.argv[1])
    settings.configure(
        DATA_DIR=Path(config.pop("data_dir")),
        MINIMUM_ISOLATION="none" if config.get("unisolated") else "namespaces",
        POOL_AUTOSTART=True,
        POOL_TOKEN="",
        SANDBOX_LOCAL_PYTHON="",
        SANDBOX_LOCAL_UNISOLATED=config.pop("unisolated", False),
    )
    # Before the user changes: the project may lie where only the first one can read.
    from providers.errors import SandboxError
    from providers.local import service
    from providers.local.provider import LocalProvider
    from tests.support import service_here

    service.start = service_here.start_here

    owner = config.pop("owner", "")
    if uid := config.pop("uid", None):
        os.chdir("/")
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    provider = LocalProvider()
    try:
        provider.initialize(LocalProvider.check_config(config))
    except SandboxError as error:
        tell(error=error.code, message=error.message)
        service_here.close_all()
        return
    tell(ready=True)
    for line in sys.stdin:
        job = json.loads(line)
        instance = provider.create_instance(job["language"], owner=owner)
        tell(started=True)
        result = provider.execute_code(
            instance.instance_id, job["code"], job["language"], job["timeout"]
        )
        provider.destroy_instance(instance.instance_id)
        tell(
            stdout=result.stdout,
            stderr=result.stderr,
            exit_code=result.exit_code,
            timed_out=result.timed_out,
            out_of_memory=result.out_of_memory,
            runtime=result.metadata["runtime"],
            metadata=result.metadata,
        )
    provider.close()
    service_here.close_all()


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
