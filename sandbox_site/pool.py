"""`manage.py pool`: the pool service, which needs no Django, no database and no key.

deploy/pool-requirements.txt has all the packages that it needs.
"""

from __future__ import annotations

import argparse
import logging.config
import os
import sys
import time

from environ.compat import ImproperlyConfigured

from providers.errors import SandboxError
from providers.runtime.service import command
from sandbox_site.private_files import write_privately


def main(arguments: list[str]) -> None:
    """Serve until SIGTERM. Exits with what is wrong with a setting or an argument."""
    try:
        from sandbox_site import pool_settings
    except ImproperlyConfigured as error:
        sys.exit(f"Configuration: {error}")
    os.environ["TZ"] = pool_settings.TIME_ZONE
    time.tzset()
    logging.config.dictConfig(pool_settings.LOGGING)
    write_privately(pool_settings.DATA_DIR)
    parser = argparse.ArgumentParser(prog="manage.py pool", description=command.HELP)
    command.add_arguments(parser, pool_settings)
    try:
        command.run(pool_settings, vars(parser.parse_args(arguments)), _say)
    except SandboxError as error:
        sys.exit(error.message)


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201
