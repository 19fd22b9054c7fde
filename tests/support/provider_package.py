"""Packages as pip would have installed them, for tests of what another package can add."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from providers import registry


class Packages:
    """Installs distributions into a folder on `sys.path`; the registry then finds them itself."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch

    def install(
        self, name: str, entry_points: Mapping[str, str], modules: Mapping[str, str]
    ) -> Path:
        """A distribution `name` with source `modules`, declaring providers by id."""
        site = self.folder / name
        dist_info = site / f"{name}-1.0.dist-info"
        dist_info.mkdir(parents=True)
        (dist_info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = "".join(f"{key} = {value}\n" for key, value in entry_points.items())
        (dist_info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{lines}")
        for module, source in modules.items():
            (site / f"{module}.py").write_text(source)
        self._monkeypatch.syspath_prepend(str(site))
        registry.refresh()
        return site


# A provider that notes what happens to it. The class is made anew for each installed package, so
# what one test notes is not seen by another.
PROBE = """
import os
import threading
import time

from providers.base import Health, SandboxInstance, SandboxProvider
from providers.values import ExecutionResult
from providers.errors import ConnectionFailed, InvalidConfiguration
from providers.schema import ConfigField

started = []
closed = []
gate = threading.Event()
gate.set()


class Probe(SandboxProvider):
    id = "probe"
    name = "Probe"
    description = "Notes <what> happens to it."
    isolation = "namespaces"
    config_fields = {
        "endpoint": ConfigField(
            "string", "Endpoint", required=True, placeholder="http://localhost:9385",
            description="Where the <service> listens.", min=4, max=200,
        ),
        "token": ConfigField("string", "Token", secret=True, required=True, min=4),
        "proxy_password": ConfigField("string", "Proxy password", secret=True),
        "size": ConfigField("integer", "Pool size", default=10, min=1, max=100),
        "factor": ConfigField("number", "Factor", default=1.5, min=0, max=9.5),
        "memory": ConfigField("string", "Memory", default="256m", options=("128m", "256m", "1g")),
        "strict": ConfigField("boolean", "Strict", default=True),
        "behaviour": ConfigField(
            "string", "Behaviour", default="start",
            options=("start", "refuse", "crash", "wait", "no"),
        ),
    }

    def initialize(self, config):
        self.config = config
        self.pid = os.getpid()
        self.closed = False
        started.append(self)
        if config["behaviour"] == "refuse":
            raise ConnectionFailed("The probe cannot be reached.", field="endpoint")
        if config["behaviour"] == "crash":
            raise RuntimeError("no luck with " + config["token"])
        if config["behaviour"] == "wait" and not gate.wait(60):
            raise RuntimeError("nobody opened the gate")
        return config["behaviour"] != "no"

    def validate_config(self, config):
        if config["endpoint"].startswith("ftp:"):
            return False, "The endpoint must be an HTTP address."
        return True, None

    def create_instance(self, template="python", *, owner=""):
        return SandboxInstance("1", self.id, "running")

    def execute_code(self, instance_id, code, language, timeout=10, arguments=None, **options):
        return ExecutionResult("", "", 0, 0.0)

    def destroy_instance(self, instance_id):
        return True

    def health_check(self):
        return Health(True)

    def get_supported_languages(self):
        return ["python"]

    def close(self):
        self.closed = True
        closed.append(self)
"""


def install_probe(packages: Packages, module: str) -> None:
    """The provider `probe`, from a module whose name no other test uses."""
    packages.install(f"package_of_{module}", {"probe": f"{module}:Probe"}, {module: PROBE})
