"""A running site on which E2B's SDK builds templates, from an index that tests fill."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from tests.support.package_index import PackageIndex, package_index
from tests.support.processes import ROOT, clean_environment
from tests.support.required import require
from tests.support.site import Site, prepare, serving
from tests.support.uv_environment import uv_environment

T = TypeVar("T")

LISTS = """
from executions.capabilities.network.models import NetworkList
from executions.tenants.models import ApiKey
NetworkList.objects.create(mode="allowlist", rules={rules!r})
for key in ApiKey.objects.all():
    key.scopes = f"{{key.scopes}} templates"
    key.save()
"""
BUILD = """
from executions.capabilities.templates.builds import build_waiting
build_waiting()
"""


class TemplateDoor:
    """A running site whose builds are carried out when a test says so."""

    def __init__(self, site: Site, index: PackageIndex, environment: dict[str, str]) -> None:
        self.site, self.index, self.environment = site, index, environment

    def shell(self, script: str) -> None:
        command = [sys.executable, "manage.py", "shell", "-c", script]
        subprocess.run(command, env=self.environment, cwd=ROOT, check=True, timeout=120)

    def building(self, call: Callable[[], T]) -> T:
        """What a call of the SDK returns that waits for a build."""
        with ThreadPoolExecutor(1) as threads:
            waited = threads.submit(call)
            while not waited.done():
                self.shell(BUILD)
            return waited.result()


@contextmanager
def template_door(folder: Path, **settings: str) -> Iterator[TemplateDoor]:
    require("bwrap")
    with package_index() as index, uv_environment() as python:
        # Templates lie below it, where sandboxes have nothing of their own.
        prepared = prepare(python.parents[2] / "data")
        extra = {
            "NETWORK_ALLOWED_ADDRESSES": "127.0.0.0/8",
            "PACKAGE_INDEX_URL": index.simple,
            "NPM_REGISTRY_URL": index.url,
            "SANDBOX_LOCAL_PYTHON": str(python),
            **settings,
        }
        environment = clean_environment(prepared.data_dir, **extra)
        with (
            serving(prepared, folder / "log", **extra) as site,
            pytest.MonkeyPatch.context() as patch,
        ):
            opened = TemplateDoor(site, index, environment)
            opened.shell(LISTS.format(rules=index.url.removeprefix("http://")))
            patch.setenv("E2B_API_URL", site.service.url)
            patch.setenv("E2B_SANDBOX_URL", site.service.url)
            patch.setenv("E2B_API_KEY", site.alice)
            yield opened
