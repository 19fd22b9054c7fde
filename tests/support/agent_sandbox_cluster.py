"""A test's cluster with agent-sandbox: its CRDs, and its controllers as
`tests.support.agent_sandbox_controllers` imitates them.
"""

from __future__ import annotations

import sys
import urllib.error
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tests.support.kubernetes import ADMIN, Cluster

CRDS = Path(__file__).with_name("agent_sandbox_crds")
EXTENSIONS = "/apis/extensions.agents.x-k8s.io/v1beta1"


class AgentSandboxCluster(Cluster):
    """A cluster whose garbage collector and quotas know agent-sandbox's kinds from the beginning:
    they look for new kinds every 30 s."""

    def _start_controllers(self, kubeconfig: Path) -> None:
        definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        for path in sorted(CRDS.glob("*.yaml")):
            definition = yaml.safe_load(path.read_text())
            self.request("POST", definitions, definition)
            names = definition["spec"]
            kinds = f"/apis/{names['group']}/v1beta1/{names['names']['plural']}"
            self._wait(partial(self._has, kinds), f"the API server has no {kinds}")
        super()._start_controllers(kubeconfig)
        self.start_agent_sandbox()

    def start_agent_sandbox(self) -> None:
        """Start the controllers."""
        options = {
            "--api": self.url,
            "--authority": str(self.folder / "ca.pem"),
            "--identity": str(self.identity(ADMIN)),
        }
        arguments = [word for option in options.items() for word in option]
        module = "tests.support.agent_sandbox_controllers"
        self._spawn("agent-sandbox", [sys.executable, "-m", module, *arguments])

    def stop_agent_sandbox(self) -> None:
        """End the controllers. What they have made stays as it is."""
        self._end("agent-sandbox", gently=False)

    def apply(self, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object of one of agent-sandbox's extensions. Raises HTTPError."""
        path = f"{EXTENSIONS}/namespaces/{namespace}/{body['kind'].lower()}s"
        made: dict[str, Any] = self.request("POST", path, body)
        return made

    def claims(self, namespace: str) -> list[dict[str, Any]]:
        """The SandboxClaims of a namespace."""
        path = f"{EXTENSIONS}/namespaces/{namespace}/sandboxclaims"
        found: list[dict[str, Any]] = self.request("GET", path)["items"]
        return found

    def warm_pool(self, namespace: str, name: str) -> dict[str, Any]:
        """A SandboxWarmPool."""
        path = f"{EXTENSIONS}/namespaces/{namespace}/sandboxwarmpools/{name}"
        found: dict[str, Any] = self.request("GET", path)
        return found

    def _has(self, path: str) -> bool:
        try:
            self.request("GET", path)
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return False
        return True
