"""What a cluster must have before a sandbox is started there, each with its remedy."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from providers.errors import ProviderUnavailable
from providers.runtime.launchers.kubernetes.api import Api, ApiFailure, Object
from providers.runtime.launchers.kubernetes.manifest import APP, APP_LABEL

GVISOR_HANDLERS = ("runsc", "gvisor")
GVISOR_REMEDY = (
    "Install gVisor's runsc on the nodes, and create a RuntimeClass with the handler `runsc`."
)
NETWORK_REMEDY = (
    "Apply deploy/kubernetes/sandboxes-network.yaml to the namespace: a NetworkPolicy that selects "
    "the sandboxes' Pods, has the policy types Ingress and Egress, and allows nothing."
)
# Group, resource, subresource and verbs of what the launcher calls.
_RIGHTS = (
    ("", "pods", "", ("get", "list", "watch", "create", "patch", "delete")),
    ("", "pods", "attach", ("create", "get")),
    ("coordination.k8s.io", "leases", "", ("get", "create", "patch")),
    ("networking.k8s.io", "networkpolicies", "", ("list",)),
)
# The same with warm pools of agent-sandbox's.
_CLAIM_RIGHTS = (
    (
        "extensions.agents.x-k8s.io",
        "sandboxclaims",
        "",
        ("get", "list", "watch", "create", "delete"),
    ),
    ("extensions.agents.x-k8s.io", "sandboxtemplates", "", ("get",)),
    ("extensions.agents.x-k8s.io", "sandboxwarmpools", "", ("get",)),
)
_CLASSES = "/apis/node.k8s.io/v1/runtimeclasses"


async def require_rights(api: Api, *, claims: bool = False) -> None:
    """Raise ProviderUnavailable with the rights that the pool's account lacks, and ApiFailure."""
    wanted = [
        (group, resource, subresource, verb)
        for group, resource, subresource, verbs in (*_RIGHTS, *(_CLAIM_RIGHTS if claims else ()))
        for verb in verbs
    ]
    allowed = await asyncio.gather(*(_may(api, *each) for each in wanted))
    missing: dict[str, list[str]] = {}
    for (_, resource, subresource, verb), may in zip(wanted, allowed, strict=True):
        if not may:
            name = f"{resource}/{subresource}" if subresource else resource
            missing.setdefault(name, []).append(verb)
    if missing:
        named = "; ".join(f"{name}: {', '.join(verbs)}" for name, verbs in missing.items())
        files = "deploy/kubernetes/rbac.yaml"
        if claims:
            files += " and deploy/kubernetes/claims.yaml"
        raise ProviderUnavailable(
            f"Kubernetes: The pool service's account lacks rights in the namespace "
            f"{api.namespace}: {named}. Apply {files}."
        )


async def _may(api: Api, group: str, resource: str, subresource: str, verb: str) -> bool:
    attributes = {
        "namespace": api.namespace,
        "group": group,
        "resource": resource,
        "subresource": subresource,
        "verb": verb,
    }
    answer = await api.call(
        "POST",
        "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        },
    )
    return bool(answer["status"].get("allowed"))


async def require_closed_network(api: Api, labels: Mapping[str, str]) -> None:
    """Raise ProviderUnavailable unless Network policies close the Pods with these labels.

    They close them where one selects them for each direction and none that selects them allows
    anything. Raises ApiFailure.
    """
    path = f"/apis/networking.k8s.io/v1/namespaces/{api.namespace}/networkpolicies"
    found = await api.call("GET", path)
    all_labels = {APP_LABEL: APP, **labels}
    selecting = [each["spec"] for each in found["items"] if _selects(each["spec"], all_labels)]
    closed = {kind for spec in selecting for kind in spec.get("policyTypes") or ()}
    rules = [rule for spec in selecting for rule in _rules(spec)]
    if {"Ingress", "Egress"} <= closed and not rules:
        return
    problem = "allows the sandboxes traffic" if rules else "closes the sandboxes' network"
    raise ProviderUnavailable(
        f"Kubernetes: {'A' if rules else 'No'} NetworkPolicy of the namespace {api.namespace} "
        f"{problem}. {NETWORK_REMEDY}"
    )


def _selects(spec: Object, labels: Mapping[str, str]) -> bool:
    """Whether a policy selects Pods with these labels. One with expressions that are not known here
    counts where it could allow traffic, and not where it would close it."""
    selector: dict[str, Any] = spec.get("podSelector") or {}
    wanted = selector.get("matchLabels") or {}
    is_sure = not selector.get("matchExpressions")
    for name, value in wanted.items():
        # A label of ours that comes later.
        if name.startswith("cofferdam.") and name not in labels:
            is_sure = False
        elif labels.get(name) != value:
            return False
    return is_sure or bool(_rules(spec))


def _rules(spec: Object) -> list[Any]:
    return [*(spec.get("ingress") or ()), *(spec.get("egress") or ())]


async def find_runtime_class(api: Api, wanted: str, *, require_gvisor: bool) -> str:
    """Return the name of the RuntimeClass for Pods, empty for the cluster's default.

    `wanted` is a class's name or handler, `auto` or `runc`. Raises ProviderUnavailable with field
    and remedy, and ApiFailure.
    """
    if wanted == "runc":
        return ""
    try:
        classes = (await api.call("GET", _CLASSES))["items"]
    except ApiFailure as error:
        if error.status != 403:
            raise
        raise ProviderUnavailable(
            "Kubernetes: The pool service's account may not list runtimeclasses. Apply "
            "deploy/kubernetes/rbac.yaml."
        ) from error
    handlers = GVISOR_HANDLERS if wanted == "auto" else (wanted,)
    named = [each for each in classes if each["metadata"]["name"] == wanted]
    for each in [*named, *(each for each in classes if each["handler"] in handlers)]:
        name: str = each["metadata"]["name"]
        return name
    if wanted == "auto" and not require_gvisor:
        return ""
    problem = "of gVisor" if wanted == "auto" else f"with the name or handler {wanted!r}"
    raise ProviderUnavailable(
        f"runtime: The cluster has no RuntimeClass {problem}. {GVISOR_REMEDY}", field="runtime"
    )
