"""Packages that our dependencies load where they are installed, and that this service never uses.

They would cost each installation 8 MiB. Their importers take them as not installed.
"""

import sys

# The fields of PostgreSQL alone, which no model has and which load psycopg, and the command line of
# httpx with all that it colours.
_UNUSED = ("django.contrib.postgres.fields", "httpx._main")


def leave_out() -> None:
    """Have an import of these raise ImportError. Before the packages that import them."""
    for name in _UNUSED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
