"""`python bundle/load.py`: load every module of the service once.

So its bytecode is there, and that of what it uses, for a service that may not write beside its code
and would compile all of it at every start. To compile all that is installed takes a minute of a
processor, nearly all of it for what nobody loads.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from pathlib import Path

# Modules that the service itself does not load in every installation.
_OTHERS = (
    # They act when they are loaded: one reads a program from descriptor 0 and ends the process.
    "providers.runtime.guest",
    # A plugin for the tests of providers' authors, who have pytest.
    "providers.pytest_contract",
    # With requirements-otel.txt and requirements-kubernetes.txt alone.
    "executions.capabilities.observability.otlp",
    "providers.runtime.launchers.kubernetes",
)


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    # Whatever the environment says: this is what it is for.
    sys.dont_write_bytecode = False
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sandbox_site.settings")
    import django

    django.setup()
    for package in ("providers", "executions", "sandbox_site"):
        found = importlib.import_module(package)
        for module in pkgutil.walk_packages(found.__path__, f"{package}."):
            if not module.name.startswith(_OTHERS):
                importlib.import_module(module.name)


if __name__ == "__main__":
    main()
