"""Sandboxes in the Pods of a Kubernetes cluster, reached over the API server."""

from providers.runtime.launchers.kubernetes.claims import warm_pool_manifests
from providers.runtime.launchers.kubernetes.launcher import KubernetesLauncher
from providers.runtime.launchers.kubernetes.settings import KubernetesSettings

__all__ = ["KubernetesLauncher", "KubernetesSettings", "warm_pool_manifests"]
