#!/usr/bin/env python3
"""The command line of this project: Django's, and `pool` and `pool_images`, which need none."""

import logging.config
import os
import sys

from sandbox_site import __version__


def main() -> None:
    # Django answers these two itself, with its own version.
    if sys.argv[1:] in (["version"], ["--version"]):
        print(__version__)  # noqa: T201
        return
    # The processes of these two are there as long as the service. The pool service needs no Django,
    # and `up` no app: loading all would triple the memory of each.
    is_help = sys.argv[1:2] == ["help"]
    name = next(iter(sys.argv[2:3] if is_help else sys.argv[1:2]), "")
    if name in ("pool", "pool_images"):
        from sandbox_site import pool

        pool.main(name, ["--help"] if is_help else sys.argv[2:])
        return
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sandbox_site.settings")
    from django.core.exceptions import ImproperlyConfigured
    from django.core.management import execute_from_command_line

    try:
        if sys.argv[1:2] == ["up"]:
            _run_up()
        else:
            execute_from_command_line(sys.argv)
    except ImproperlyConfigured as error:
        sys.exit(f"Configuration: {error}")


def _run_up() -> None:
    from django.conf import settings

    from sandbox_site.management.commands.up import Command

    logging.config.dictConfig(settings.LOGGING)
    Command().run_from_argv(sys.argv)


if __name__ == "__main__":
    main()
