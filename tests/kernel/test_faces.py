"""What of each package may be imported from outside of it: its face. The rest is its own.

A module that is added is private until it is listed here. The lists may only become shorter, or be
changed with a reason.
"""

from __future__ import annotations

import pytest

from tests.kernel.import_graph import PACKAGES, ROOT, graph_of, modules_in

FACES = {
    "executions.kernel": (
        "audit background bodies bucket claims coroutines database declarations file_watch http "
        "ordered_work own_process postgresql presentation process_pool processes public_suffixes "
        "storage text"
    ),
    "executions.ledger": "append bindings checkpoints entry erasures marks models progress trust verification",
    "executions.tenants": "keys models quotas service",
    "executions.runs": (
        "active_runs admission advice artifacts event_log event_stream extensions heartbeat journal "
        "ledger_checks models network orphaned_runs payloads provider_calls "
        "queue queue_wake record requests results rights routing service shapes standby statistics "
        "tool_schemas worker"
    ),
    "executions.sessions": (
        "background_commands capacity cell_order cells control ending file_events files "
        "maintenance models networks queries requests session_sandbox storage storage.blobs "
        "storage.browse storage.carry_over storage.drafts storage.quota storage.snapshots "
        "storage.wake waiting_commands"
    ),
    "executions.doors.native": (
        "authentication deferred downloads frame rendering schema session_files sessions"
    ),
    "executions.doors.claude": "calls serving tools worker",
    "executions.doors.codex": ("attachments configuration connection credentials http_requests"),
    "executions.doors.e2b": "credentials frame urls",
    "executions.doors.mcp": "server views",
    "executions.admin": "execution_page executions frame ledger pages sessions tenants tool_calls",
    "executions.capabilities.alerts": "models service",
    "executions.capabilities.dashboard": "admin service",
    "executions.capabilities.fetching": "filenames service",
    "executions.capabilities.network": "credentials lists models secrets sources",
    "executions.capabilities.observability": (
        "audit_export capability counters destinations metrics models otlp"
    ),
    "executions.capabilities.playground": "admin service",
    "executions.capabilities.policies": "approvals models service",
    "executions.capabilities.reports": "models reading service signing",
    "executions.capabilities.retention": "capability service",
    "executions.capabilities.schedules": "models service",
    "executions.capabilities.search": "admin export models service",
    "executions.capabilities.spending": "models service",
    "executions.capabilities.templates": "advisories builds defaults documents drafts models names requests",
    "executions.capabilities.threads": "models service",
    "executions.capabilities.tools": "models",
    "executions.capabilities.webhooks": "models service",
    "providers.services": (
        "approvers breaker configuration exchange guarded_rows health history "
        "impact preload probing rotation route_order row_changes settings_cache "
        "this_machine trial"
    ),
    "providers.admin": "routing",
    "providers.remote": (
        "base bounded checked_httpx checked_urllib3 deadline output receiver reclaim sandbox "
        "secret service templates"
    ),
    "providers.local": "node_packages packages",
    "providers.self_managed": "client images images.build kept",
    "providers.e2b": "",
    "providers.aliyun_codeinterpreter": "",
    "providers.runtime.pool": (
        "background cgroup claims hardening kept launcher pool protocol requests sandbox settings "
        "shelf state_store template"
    ),
    "providers.runtime.launchers": "bubblewrap docker guest_files images kubernetes oci unisolated",
    "providers.runtime.service": (
        "command docker_check image_command kubernetes_template launchers messages operations "
        "pool_manager settings unix_socket"
    ),
    "providers.runtime.guest": (
        "advice archive child display kept kernel lanes names network notebook paths "
        "processes program protocol root wire"
    ),
    "sandbox_site.web": "admission bridge places",
}


@pytest.fixture(scope="module")
def users() -> dict[str, set[str]]:
    """For each module those that import it."""
    graph = graph_of(modules_in(ROOT, PACKAGES))
    found: dict[str, set[str]] = {module: set() for module in graph}
    for module, imported in graph.items():
        for name in imported:
            found[name].add(module)
    return found


@pytest.mark.parametrize("package", FACES)
def test_a_package_is_imported_by_its_face(package: str, users: dict[str, set[str]]) -> None:
    inside = f"{package}."
    used = {
        module.removeprefix(inside)
        for module, importers in users.items()
        if module.startswith(inside)
        and any(not f"{each}.".startswith(inside) for each in importers)
    }
    assert used == set(FACES[package].split())
