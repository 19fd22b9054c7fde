"""A running site on which E2B's SDK builds templates, from an index that tests fill."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.package_index import PackageIndex, package_index
from tests.support.processes import ROOT, clean_environment
from tests.support.required import require
from tests.support.site import Site, prepare, serving
from tests.support.uv_environment import uv_environment

LISTS = """
from executions.capabilities.network.models import NetworkList
from executions.tenants.models import ApiKey
NetworkList.objects.create(mode="allowlist", rules={rules!r})
for key in ApiKey.objects.all():
    key.scopes = f"{{key.scopes}} templates"
    key.save()
"""


class TemplateDoor:
    """A running site, whose worker carries out builds, and the index of its packages."""

    def __init__(self, site: Site, index: PackageIndex, environment: dict[str, str]) -> None:
        self.site, self.index, self.environment = site, index, environment

    def ask(self, method: str, path: str, **body: Any) -> Any:
        """Return what the native API answers the owner, or raise for a refusal."""
        answer = httpx.request(
            method,
            f"{self.site.service.url}/api/v1{path}",
            headers={"X-API-Key": self.site.alice},
            json=body or None,
            timeout=60,
        )
        answer.raise_for_status()
        return answer.json()

    def shell(self, script: str) -> None:
        command = [sys.executable, "manage.py", "shell", "-c", script]
        subprocess.run(command, env=self.environment, cwd=ROOT, check=True, timeout=120)


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
