"""Which cluster, what is started there, and whose it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from providers.runtime.launchers.container_guest import DEFAULT_IMAGES
from providers.runtime.pool.state_store import StateStore


@dataclass(frozen=True)
class KubernetesSettings:
    """The settings of one launcher.

    `pool` is the name of the pool in its namespace: one process at a time has it. `namespace` is
    that of the sandboxes; empty is the one of the kubeconfig's context or of the service account.
    `kubeconfig` is a file; None is the one of KUBECONFIG, else the account of the Pod that this
    process runs in.
    `images` maps a language or a template's name to an image. `runtime` is the name of a
    RuntimeClass or of its handler; "auto" is one with gVisor's handler where there is one, and
    "runc" is none. `pull_secret` is the Secret with the credentials of the registry of images.
    `registry` is the repository that images of templates are pushed to, with the `user:password` of
    `registry_credential`; what is pushed lies in `data_dir` meanwhile.
    `claims` names SandboxWarmPools of agent-sandbox's by template, by "" that of all others; the
    rest are plain Pods.
    With a `memory` kept sandboxes outlive this process, and with a secret `key` of the pool they
    are found from other machines. Without `filter_system_calls` only the seccomp profile of the
    cluster's container runtime holds.
    """

    pool: str = "default"
    namespace: str = ""
    kubeconfig: Path | None = None
    images: Mapping[str, str] = field(default_factory=lambda: dict(DEFAULT_IMAGES))
    runtime: str = "auto"
    require_gvisor: bool = False
    filter_system_calls: bool = True
    pull_secret: str = ""
    registry: str = ""
    registry_credential: str = field(default="", repr=False)
    data_dir: Path | None = None
    claims: Mapping[str, str] = field(default_factory=dict)
    memory: StateStore | None = None
    key: str = field(default="", repr=False)
