#!/usr/bin/env python3
"""Django's command line for this project."""

import importlib
import logging.config
import os
import sys

from sandbox_site import __version__

# Commands of processes that are there as long as the service, and need no app for it: loading all
# would triple the memory of each.
_WITHOUT_APPS = {
    "pool": "providers.management.commands.pool",
    "up": "sandbox_site.management.commands.up",
}


def main() -> None:
    # Django answers these two itself, with its own version.
    if sys.argv[1:] in (["version"], ["--version"]):
        print(__version__)  # noqa: T201
        return
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sandbox_site.settings")
    from django.core.exceptions import ImproperlyConfigured
    from django.core.management import execute_from_command_line

    try:
        if module := _WITHOUT_APPS.get("".join(sys.argv[1:2])):
            _run_without_apps(module)
        else:
            execute_from_command_line(sys.argv)
    except ImproperlyConfigured as error:
        sys.exit(f"Configuration: {error}")


def _run_without_apps(module: str) -> None:
    from django.conf import settings

    logging.config.dictConfig(settings.LOGGING)
    importlib.import_module(module).Command().run_from_argv(sys.argv)


if __name__ == "__main__":
    main()
