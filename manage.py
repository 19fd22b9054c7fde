#!/usr/bin/env python3
"""The command line of this project: Django's, and `pool`, which needs no Django."""

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
    if sys.argv[1:2] == ["pool"] or sys.argv[1:3] == ["help", "pool"]:
        from sandbox_site import pool

        pool.main(sys.argv[2:] if sys.argv[1] == "pool" else ["--help"])
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
