#!/usr/bin/env python3
"""Django's command line for this project."""

import os
import sys

from sandbox_site import __version__


def main() -> None:
    # Django answers these two itself, with its own version.
    if sys.argv[1:] in (["version"], ["--version"]):
        print(__version__)  # noqa: T201
        return
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sandbox_site.settings")
    from django.core.exceptions import ImproperlyConfigured
    from django.core.management import execute_from_command_line

    try:
        execute_from_command_line(sys.argv)
    except ImproperlyConfigured as error:
        sys.exit(f"Configuration: {error}")


if __name__ == "__main__":
    main()
