#!/usr/bin/env python3
"""The command line of this project: Django's, and `pool` and `pool_images`, which need none."""

import os
import sys

from sandbox_site import __version__


def main() -> None:
    # Django answers these two itself, with its own version.
    if sys.argv[1:] in (["version"], ["--version"]):
        print(__version__)  # noqa: T201
        return
    # The pool service needs no Django: loading all would triple its memory.
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
            # Not as Django finds it, which loads all apps before anything is checked.
            from sandbox_site.management.commands.up import Command

            Command().run_from_argv(sys.argv)
        else:
            execute_from_command_line(sys.argv)
    except ImproperlyConfigured as error:
        sys.exit(f"Configuration: {error}")


if __name__ == "__main__":
    main()
