"""The settings of what runs code: executions, sessions, the other APIs, the pool service."""

from __future__ import annotations

from providers.launcher_names import KINDS
from providers.runtime.guest.protocol import MOST_KNOWN
from sandbox_site.settings_table.setting import (
    Group,
    addresses,
    choice,
    flag,
    host,
    networks,
    number,
    secret,
    text,
)

_EIB = 2**60
_YEAR_SECONDS = 31_536_000

EXECUTIONS: Group = Group(
    "Executions",
    (
        number(
            "SANDBOX_TIMEOUT_SEC",
            30,
            1,
            86_400,
            "Time limit of a run that names none, at a provider whose configuration has no "
            "timeout. A provider's own timeout takes precedence: it is the time limit of a run "
            "that names none, and the maximum that a run may request there.",
            unit="s",
            shown="30 s, or `SANDBOX_MAX_TIMEOUT_SEC` if that is less",
        ),
        number(
            "SANDBOX_MAX_TIMEOUT_SEC",
            300,
            1,
            86_400,
            "The maximum that a caller may request; over the bridge, `COMPONENT_EXEC_TIMEOUT`.",
            unit="s",
            is_common=True,
        ),
        number(
            "SANDBOX_MAX_OUTPUT_KB",
            1000,
            1,
            65_536,
            "The part that is kept of stdout and of stderr; the rest is dropped and flagged.",
            unit="kB",
        ),
        number(
            "SANDBOX_MAX_BODY_BYTES",
            64 * 1024 * 1024,
            1024,
            1024 * 1024 * 1024,
            "The maximum size of a request.",
            unit="bytes",
        ),
        choice(
            "SANDBOX_STORE_CODE",
            "always",
            ("always", "on_error", "never"),
            "When to keep code in the record; its hash is always kept.",
        ),
        number(
            "SANDBOX_KEEP_CODE_DAYS",
            0,
            0,
            32_767,
            "Days until code is erased, if the tenant has no number of its own; 0 keeps for ever.",
            unit="days",
        ),
        number("SANDBOX_KEEP_OUTPUT_DAYS", 0, 0, 32_767, "The same for the output.", unit="days"),
        number("SANDBOX_KEEP_ARTIFACTS_DAYS", 0, 0, 32_767, "The same for artifacts.", unit="days"),
        number("SANDBOX_KEEP_RECORDS_DAYS", 0, 0, 32_767, "The same for records.", unit="days"),
        number(
            "SANDBOX_MIN_RECORD_RETENTION_DAYS",
            184,
            1,
            32_767,
            "The minimum retention of records, whatever `SANDBOX_KEEP_RECORDS_DAYS` or a tenant "
            "says. The default is six months, as auditors ask: from the first of March they have "
            "184 days.",
            unit="days",
        ),
        number(
            "SANDBOX_MAX_RUNNING",
            10,
            0,
            10_000,
            "Executions of a tenant that run at the same time, if the tenant has no number of its "
            "own.",
        ),
        number(
            "SANDBOX_MAX_QUEUED",
            100,
            0,
            100_000,
            "Executions of a tenant that wait for a worker, if the tenant has no number of its "
            "own; one more is refused with SB008.",
        ),
        number(
            "SANDBOX_MAX_REQUESTS_PER_MINUTE",
            6000,
            0,
            10_000_000,
            "API requests of a tenant in a minute, with all its keys ([quotas](quotas.md)).",
        ),
        number(
            "SANDBOX_MAX_EXECUTIONS_PER_DAY",
            1_000_000,
            0,
            1_000_000_000,
            "Executions of a tenant in a day (UTC).",
        ),
        number(
            "SANDBOX_MAX_SECONDS_PER_DAY",
            8_640_000,
            0,
            1_000_000_000,
            "The seconds that these executions may run; each reserves its timeout until it ends. "
            "The default is a hundred runs around the clock.",
            unit="s",
        ),
        number(
            "SANDBOX_MAX_STORED_MIB",
            5 * 1024,
            0,
            100 * 1024 * 1024,
            "What a tenant may store in a day (UTC): queued requests, code, output, results and "
            "artifacts together.",
            unit="MiB",
        ),
        choice(
            "SANDBOX_TYPE",
            "",
            ("", "local", "docker", "e2b"),
            "What `get_sandbox()` uses: `local` if it is empty, `docker`, `e2b`. Upper case is "
            "the same.",
        ),
        choice(
            "MINIMUM_ISOLATION",
            "namespaces",
            ("microvm", "gvisor", "namespaces", "none"),
            "No code runs in a sandbox with weaker isolation. "
            "[Routes and tenants](routing.md#minimum-isolation) may require more.",
            is_common=True,
        ),
        text(
            "SANDBOX_LOCAL_PYTHON",
            "Interpreter of a virtual environment, such as `/opt/venv/bin/python`: Python "
            "programs on this machine run with it and its packages. Sandboxes may read the whole "
            "environment.",
            shown="that of `manage.py packages`, else the system's",
        ),
        flag(
            "SANDBOX_LOCAL_UNISOLATED",
            "On a developer's machine without bubblewrap: run code without any isolation. Takes "
            "effect only with `MINIMUM_ISOLATION=none`. Logged, and recorded as isolation `none`.",
        ),
    ),
)

SESSIONS: Group = Group(
    "Sessions",
    (
        number(
            "SESSIONS_PER_TENANT",
            20,
            0,
            10_000,
            "Open [sessions](sessions.md) of one tenant. Beyond it, the session that was unused "
            "longest makes room.",
        ),
        number(
            "SANDBOX_MAX_TOTAL",
            200,
            0,
            100_000,
            "Open sessions of all tenants. Beyond it, the session that was unused longest makes "
            "room.",
        ),
        number(
            "SESSION_MAX_SECONDS",
            86_400,
            1,
            _YEAR_SECONDS,
            "The longest lifetime that a session may request.",
            unit="s",
        ),
        number(
            "SANDBOX_REAPER_INTERVAL",
            15,
            1,
            60,
            "How often sessions are closed, put to sleep and renewed according to their times.",
            unit="s",
        ),
        number(
            "SESSION_QUEUE_TIMEOUT",
            30,
            1,
            3600,
            "How long a cell waits for earlier cells in its context.",
            unit="s",
        ),
        number(
            "SESSION_STORAGE_BYTES",
            2 * 2**30,
            0,
            _EIB,
            "The part of one session's files that is saved. It is never more bytes than the "
            "sandbox holds. Beyond it no more of the session is saved, and the session reports "
            "that (SB008).",
            unit="bytes",
        ),
        number(
            "SESSION_STORAGE_FILES",
            20_000,
            0,
            MOST_KNOWN,
            "The same in files and folders.",
        ),
        number(
            "TENANT_STORAGE_BYTES",
            20 * 2**30,
            0,
            _EIB,
            "The same for all sessions and snapshots of a tenant; equal contents count once, "
            "however many files have them.",
            unit="bytes",
        ),
        number("TENANT_STORAGE_FILES", 1_000_000, 0, 2**40, "The same in files and folders."),
        flag(
            "DELETE_S3_ON_CLEANUP",
            "Saved files are deleted when their session is closed or exceeds its total age. `0` "
            "keeps them: a conversation of `/v1` that continues gets them back, and so does a "
            "session that is opened `from` the ended one.",
            True,
        ),
        flag(
            "DELETE_S3_ON_DELETE",
            "`1` removes the bytes of a file that was deleted in its sandbox at the next save, "
            "with the links to them; `0` keeps them until the links have expired.",
        ),
    ),
)

AGENT_SANDBOX: Group = Group(
    "The API of Agent Sandbox",
    (
        secret(
            "SANDBOX_API_KEY",
            "A key of the tenant `agent-sandbox`, created at start; 16 printable ASCII characters "
            "at least.",
        ),
        number(
            "SANDBOX_TTL_SECONDS",
            1800,
            1,
            _YEAR_SECONDS,
            "The maximum age of a conversation's session; `SESSION_MAX_SECONDS` at most.",
            unit="s",
        ),
        number(
            "SANDBOX_IDLE_SECONDS",
            600,
            1,
            _YEAR_SECONDS,
            "How long that session may be unused before it sleeps; `SESSION_MAX_SECONDS` at most.",
            unit="s",
        ),
        number(
            "SANDBOX_EXEC_TIMEOUT_SECONDS",
            10,
            1,
            86_400,
            "Time limit of a run; `SANDBOX_MAX_TIMEOUT_SEC` at most.",
            unit="s",
        ),
        number(
            "MAX_OUTPUT_BYTES",
            200_000,
            1,
            64 * 2**20,
            "Maximum size of `output`; a longer one ends with `[output truncated]`.",
            unit="bytes",
        ),
        number(
            "MAX_UPLOAD_BYTES",
            50 * 2**20,
            1,
            64 * 2**30,
            "Maximum size of a file that is uploaded or fetched by URL. For the request of an "
            "upload, `SANDBOX_MAX_BODY_BYTES` applies as well.",
            unit="bytes",
        ),
    ),
    "For callers of the Agent Sandbox API, below `/v1`, only. "
    "[compatibility.md](compatibility.md#the-variables-of-agent-sandbox)\nsays what happens to "
    "each variable of Agent Sandbox, and which of two variables counts.",
)

BRIDGE: Group = Group(
    "The bridge",
    (
        number(
            "COMPONENT_EXEC_TIMEOUT",
            600,
            1,
            86_400,
            "Time limit of a run that names none, and the maximum that a run may name; cut to "
            "what the provider supports. If only `SANDBOX_MAX_TIMEOUT_SEC` is set, the smaller of "
            "600 and that.",
            unit="s",
        ),
        secret(
            "CODE_EXEC_API_KEY",
            "The key whose tenant owns the runs; none: the tenant `internal`.",
        ),
        text(
            "CODE_EXEC_PROVIDER_TYPE",
            "The id of a provider, in place of routes and the active one.",
        ),
        host(
            "SANDBOX_HOST",
            "`host` or `host:port` (9385) of RAGFlow's executor, used if no provider is "
            "configured.",
        ),
    ),
    "For [the bridge](bridge.md#settings), `manage.py code_exec`, only.",
)

POOL: Group = Group(
    "The pool service",
    (
        text(
            "POOL_HOST",
            "Where `manage.py pool` listens; beyond this machine only with a token. If it names "
            "another machine, `bootstrap` makes `self_managed` with that endpoint the active "
            "provider.",
            "127.0.0.1",
            is_common=True,
        ),
        number("POOL_PORT", 9385, 1, 65_535, "The port where the pool service listens."),
        secret(
            "POOL_TOKEN",
            "The bearer token that the pool service requires; the provider's configuration needs "
            "the same.",
            is_common=True,
        ),
        flag(
            "POOL_AUTOSTART",
            "A process that needs the pool service for the provider `local`, and finds none in "
            "`DATA_DIR`, starts it. It ends some seconds after its last use. Set to `false` "
            "where something else starts it, as `manage.py up` and the systemd units do.",
            default=True,
        ),
        networks(
            "NETWORK_ALLOWED_ADDRESSES",
            "Addresses that are not public, and that sandboxes may reach where a network list "
            "allows their host: `10.0.0.0/8`, `10.1.2.3:8443`, or a host name with or without a "
            "port. Never those where a cloud describes a machine.",
        ),
        text(
            "NETWORK_CA_FILE",
            "A file of certificates in PEM. Where TLS is opened for a rule or credential, servers "
            "that have one of these are trusted, in addition to those this machine trusts.",
        ),
        addresses(
            "POOL_ALLOWED_ADDRESSES",
            "Networks that may connect, separated by commas. Others are disconnected before a "
            "byte is read, with or without a token. Behind a proxy the proxy's address counts.",
            shown="loopback, if it listens on loopback; else all",
        ),
        choice(
            "POOL_LAUNCHER",
            "auto",
            KINDS,
            "The isolation tool; `auto` takes the first that works. `manage.py up` starts the "
            "pool's port if one is named, and with `auto` if Docker answers. A "
            "[gVisor kernel per tenant](security.md#a-gvisor-kernel-per-tenant) needs `gvisor`, "
            "as root or with a delegated cgroup. `kubernetes`: [Pods of a "
            "cluster](providers/kubernetes.md).",
        ),
        text(
            "POOL_NAME",
            "The pool's name among those that share a Docker engine or a Kubernetes namespace. "
            "Only one service at a time can have it.",
            shown="`port-` and POOL_PORT",
        ),
        text(
            "KUBECONFIG",
            "The file that names the cluster of `kubernetes`, and the account there.",
            shown="the account of the Pod that the pool service runs in",
        ),
        text(
            "KUBERNETES_NAMESPACE",
            "The namespace of the sandboxes' Pods.",
            shown="that of the kubeconfig or the service account",
        ),
        choice(
            "POOL_GVISOR_PLATFORM",
            "systrap",
            ("systrap", "ptrace", "kvm"),
            "The platform of `gvisor` without Docker.",
        ),
        text("DOCKER_HOST", "The Docker engine.", shown="the usual socket"),
        number("SANDBOX_EXECUTOR_MANAGER_POOL_SIZE", 10, 1, 100, "Idle sandboxes per language."),
        text("SANDBOX_MAX_MEMORY", "Memory of each sandbox.", "256m"),
        text(
            "SANDBOX_TIMEOUT",
            "Time limit of a run through RAGFlow's `POST /run`: `60`, `60s`, `1m30s`, `500ms`.",
            "10s",
        ),
        text(
            "SANDBOX_BASE_PYTHON_IMAGE",
            "Another image for Python. Without Docker, one of `manage.py pool_images`.",
            shown="`cofferdam/...`",
        ),
        text(
            "SANDBOX_BASE_NODEJS_IMAGE",
            "Another image for JavaScript. Without Docker, one of `manage.py pool_images`.",
            shown="`cofferdam/...`",
        ),
    ),
    "`manage.py pool` keeps idle sandboxes ready and runs code in them over HTTP. The "
    "`self_managed` provider, whose\nconfiguration is in the admin, pushes its settings to the "
    "pool service; until then these apply.\n"
    "[providers/self_managed.md](providers/self_managed.md#the-pool-service) says more.",
)
