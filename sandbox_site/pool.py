"""`manage.py pool` and `pool_images`: the pool service, which needs no Django, database or key.

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
from providers.runtime.service import command, image_command
from sandbox_site.private_files import write_privately

COMMANDS = {"pool": command, "pool_images": image_command}


def main(name: str, arguments: list[str]) -> None:
    """Carry out one of COMMANDS. Exits with what is wrong with a setting or an argument."""
    try:
        from sandbox_site import pool_settings
    except ImproperlyConfigured as error:
        sys.exit(f"Configuration: {error}")
    os.environ["TZ"] = pool_settings.TIME_ZONE
    time.tzset()
    logging.config.dictConfig(pool_settings.LOGGING)
    write_privately(pool_settings.DATA_DIR)
    chosen = COMMANDS[name]
    parser = argparse.ArgumentParser(prog=f"manage.py {name}", description=chosen.HELP)
    chosen.add_arguments(parser, pool_settings)
    try:
        chosen.run(pool_settings, vars(parser.parse_args(arguments)), _say)
    except SandboxError as error:
        sys.exit(error.message)


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201
