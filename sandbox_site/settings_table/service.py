"""The settings of the service itself: server, keys, data, network, observability."""

from __future__ import annotations

from sandbox_site.settings_table.setting import (
    Group,
    addresses,
    choice,
    flag,
    networks,
    number,
    secret,
    several,
    text,
)

SERVER: Group = Group(
    "Server and data folder",
    (
        text(
            "DATA_DIR",
            "The folder of the database, generated keys, artifacts and run-time files. Every "
            "process makes it accessible to its own user alone (0700 and 0600). It does the same "
            "with the folder of `LEDGER_CHECKPOINTS` and with an SQLite file elsewhere. One that "
            "stays open to others is refused.",
            "var",
            is_common=True,
        ),
        text(
            "ENV_FILE",
            "Another file in place of `.env`; `/dev/null` for none.",
            ".env",
        ),
        text(
            "HOST",
            "The address where the web server listens.",
            "127.0.0.1",
            is_common=True,
        ),
        number("PORT", 8000, 1, 65_535, "The port where the web server listens.", is_common=True),
        text(
            "INSTANCE",
            "The name of this host or container wherever a process is named: in the admin, in "
            "logs, and in the record of a run whose process died.",
            shown="the host's name",
            is_common=True,
        ),
        text("TIME_ZONE", "The time zone of the admin's pages.", "UTC"),
        number("WEB_CONCURRENCY", 1, 1, 64, "Web processes. Every process has its own pool."),
        number("WEB_THREADS", 16, 4, 256, "Threads of each web process that handle requests."),
        number(
            "WEB_CONNECTIONS",
            2000,
            16,
            100_000,
            "Requests and connections of a web process; an eighth of it is added for probes and "
            "the admin. One tenant has a quarter, one address half. "
            "[Beyond it](internals/web-server.md#the-web-server), connections with an incomplete "
            "request are closed.",
        ),
        number(
            "WEB_HEADER_SECONDS", 10, 1, 3600, "How long a request's headers may take.", unit="s"
        ),
        number("WEB_BODY_SECONDS", 15, 1, 50, "How long a request's body may pause.", unit="s"),
        number(
            "WEB_SEND_SECONDS",
            60,
            1,
            3600,
            "How long a client may take to read 256 KiB of an answer.",
            unit="s",
        ),
        number(
            "WEB_SPOOL_MB",
            512,
            32,
            65_536,
            "The buffer of a web process for large requests, until they are answered. One tenant "
            "has half of it, requests without a key an eighth. The same amount again is for "
            "answers that are not read yet. Two of the largest requests must fit.",
            unit="MiB",
            shown="512 MiB, or four of the largest requests",
        ),
        number(
            "SHUTDOWN_DELAY_SECONDS",
            0,
            0,
            600,
            'After SIGTERM, how long `/readyz` says "draining" while the web server still accepts '
            "everything. Set it for a load balancer that relies on probes alone: more than its "
            "interval times its failures. A load balancer that tries the next instance when a "
            "connection is refused needs none.",
            unit="s",
        ),
        number(
            "SHUTDOWN_GRACE_SECONDS",
            330,
            0,
            90_000,
            "After that delay, how long running executions may continue before they are ended and "
            "recorded; also for the worker and the pool service. A supervisor that stops the "
            "service from outside must wait [longer](internals/web-server.md#shutdown).",
            unit="s",
            shown="`SANDBOX_MAX_TIMEOUT_SEC` + 30 s",
        ),
        number(
            "PROVIDER_MAX_INFLIGHT",
            256,
            1,
            4096,
            "The number of runs that a web process waits for at a time, at providers that are "
            "clients of a service.",
        ),
        choice(
            "LOG_LEVEL",
            "INFO",
            ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"),
            "What is logged, on stderr.",
        ),
        choice(
            "LOG_FORMAT",
            "auto",
            ("auto", "json", "text"),
            "`json`: one JSON line per record; `text`: a short line for people; `auto`: `text` if "
            "stderr is a terminal, else `json`.",
        ),
        flag("ACCESS_LOG", "Log every request to the web server."),
    ),
)

DATABASE: Group = Group(
    "Database and Redis",
    (
        secret(
            "DATABASE_URL",
            "Another database: `postgres://user:password@host:5432/name`.",
            shown="SQLite in `DATA_DIR`",
            is_common=True,
        ),
        number(
            "DATABASE_WAIT_SECONDS",
            10,
            1,
            60,
            "The longest wait for SQLite's write lock, for a connection to the database and, in a "
            "web process, for the answer to a statement. After that the database counts as "
            "[unavailable](database-outages.md).",
            unit="s",
        ),
        choice(
            "Q_BROKER",
            "orm",
            ("orm", "redis"),
            "The broker of the scheduled tasks: `orm`, the database, or `redis`. Executions need "
            "neither: their rows are the queue.",
        ),
        secret(
            "REDIS_URL",
            "The Redis of `Q_BROKER=redis`: `redis://:password@host:6379/0`.",
        ),
        number("Q_WORKERS", 2, 1, 64, "Worker processes. Every process has its own pool."),
        number(
            "Q_THREADS",
            4,
            1,
            64,
            "The number of queued executions that each worker process runs at a time, of one "
            "tenant at most half.",
        ),
    ),
    "[deployment/database.md](deployment/database.md) says what each database needs, and how many "
    "connections.",
)

PRODUCTION: Group = Group(
    "Production",
    (
        flag(
            "DEBUG",
            "Unset: generated keys in `DATA_DIR` are used. `false`: production, keys must be "
            "given. `true`: Django's debug pages.",
            None,
            is_common=True,
        ),
        secret("SECRET_KEY", "Signs sessions and links.", shown="generated", is_common=True),
        secret(
            "FERNET_KEYS",
            "Encrypt [stored secrets](deployment/keys.md#how-secrets-are-stored); comma "
            "separated, the first one encrypts. At least 32 random characters each. "
            "[Rotation](deployment/keys.md#fernet_keys)",
            shown="generated",
            is_common=True,
        ),
        secret(
            "LEDGER_KEYS",
            "Sign the [ledger](ledger.md); comma separated, the first one signs. `python -c "
            "'import secrets; print(secrets.token_urlsafe(32))'` makes one.",
            shown="generated",
            is_common=True,
        ),
        several(
            "LEDGER_TRUSTED_KEYS",
            "Public keys (`public_key` of `/api/v1/ledger/keys`) that signed the ledger in the "
            "past and that no ledger entry vouches for; comma separated.",
        ),
        secret(
            "SECRET_KEY_FALLBACKS",
            "Previous `SECRET_KEY`s, comma separated: their signatures are still accepted.",
        ),
        text(
            "LEDGER_CHECKPOINTS",
            "The folder of the ledger's checkpoints, best on another disk, and the same on every "
            "host. `storage` is `ledger` in the storage of [the files](#files).",
            "storage",
        ),
        several(
            "ALLOWED_HOSTS",
            "Names the service answers to, comma separated.",
            (".localhost", "127.0.0.1", "[::1]"),
            shown="this machine's names",
            is_common=True,
        ),
        several(
            "CSRF_TRUSTED_ORIGINS",
            "Origins that may post to the admin, and whose pages may call [`/mcp`](mcp.md); comma "
            "separated.",
            is_common=True,
        ),
        flag(
            "HTTPS_ONLY",
            "Redirect to HTTPS, HSTS, secure cookies. Behind a proxy it needs `TRUSTED_PROXIES`.",
            is_common=True,
        ),
        several(
            "TRUSTED_PROXIES",
            "Addresses and networks of the [proxies](admin.md#behind-a-proxy) whose "
            "`X-Forwarded-For` and `X-Forwarded-Proto` are trusted, comma separated.",
            is_common=True,
        ),
        flag(
            "TWO_PERSON_RULE",
            "Changes of where code runs, who pays and who may change that wait until a "
            "[second administrator](admin.md#two-person-approval) approves them.",
        ),
        number(
            "LOGIN_FAILURES",
            5,
            1,
            1000,
            "The number of wrong passwords or codes for a name from one address, after which the "
            "name is refused from there.",
        ),
        number(
            "LOGIN_LOCKOUT_MINUTES",
            15,
            1,
            10_080,
            "How long such a name is refused from that address.",
            unit="min",
        ),
    ),
)

FILES: Group = Group(
    "Files",
    (
        text(
            "STORAGE_URL",
            "The absolute path of a directory that every host shares, or "
            "`s3://BUCKET/PREFIX?endpoint=https://host:9000`.",
            shown="`DATA_DIR`",
            is_common=True,
        ),
        secret(
            "STORAGE_ACCESS_KEY",
            "The access key of the bucket. Without it a role or `AWS_ACCESS_KEY_ID` is used.",
            shown="as boto3 finds it",
            is_common=True,
        ),
        secret(
            "STORAGE_SECRET_KEY",
            "The secret key of the bucket.",
            shown="as boto3 finds it",
            is_common=True,
        ),
        text(
            "S3_ENDPOINT_URL",
            "The service of a bucket as Agent Sandbox names it. Set it with `S3_BUCKET` and the "
            "two keys, all four in place of `STORAGE_URL` and its keys.",
        ),
        text("S3_BUCKET", "The name of that bucket."),
        secret("S3_ACCESS_KEY_ID", "The access key of that bucket."),
        secret("S3_SECRET_ACCESS_KEY", "The secret key of that bucket."),
        text("S3_REGION", "The region of that bucket.", "us-east-1"),
        text("S3_PREFIX_ROOT", "The prefix in that bucket.", "sandboxes"),
        number(
            "PRESIGN_EXPIRES_SECONDS",
            300,
            1,
            604_800,  # executions.kernel.storage.MOST_LINK_SECONDS, which would load much of Django
            "How long a link to a file is valid if its caller names no time.",
            unit="s",
        ),
        number(
            "DISK_RESERVE_MIB",
            512,
            0,
            100 * 1024 * 1024,
            "Free space to keep on the disk of `DATA_DIR`, and on that of the SQLite file if it "
            "is elsewhere. Below it, new executions are refused with SB009, and running ones are "
            "still recorded; 0 switches the check off.",
            unit="MiB",
        ),
    ),
    "Artifacts, saved files of sessions, queued requests above 64 KiB (encrypted), signed reports "
    "and the ledger's\ncheckpoints are files of one storage. Every host of an installation needs "
    "the same storage.\n[deployment/storage.md](deployment/storage.md) says what a directory and "
    "a bucket need.",
)

PROVIDERS: Group = Group(
    "Addresses of providers",
    (
        networks(
            "PROVIDER_ALLOWED_NETWORKS",
            "Addresses of providers that are not public: of your own network, of this machine, "
            "link-local, CGNAT, multicast, a cloud's metadata.",
            is_common=True,
        ),
        networks(
            "PROVIDER_PLAIN_HTTP",
            "Addresses of providers for which plain http is allowed. For loopback it always is.",
        ),
    ),
    "An administrator who configures a provider may enter public addresses over https. These "
    "settings allow more.\n[deployment/addresses.md](deployment/addresses.md) says how an entry "
    "is written, and what is always allowed.",
)

FETCHED_FILES: Group = Group(
    "Addresses of fetched files",
    (
        flag(
            "ALLOW_PRIVATE_URLS",
            "Allow the private networks: 10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16 and fc00::/7.",
        ),
        networks(
            "URL_ALLOWED_NETWORKS",
            "Networks, single hosts, or ports of them, this machine included: `127.0.0.1:9000` "
            "for a bucket that is served here.",
        ),
    ),
    "Tenants may have [files fetched by URL](files.md#files-by-url) from the internet. These "
    "settings allow more.\n[What every tenant can then read]"
    "(deployment/addresses.md#addresses-of-fetched-files)",
)

TEMPLATES: Group = Group(
    "Templates",
    (
        text(
            "PACKAGE_INDEX_URL",
            "The index of Python packages, or a mirror of it.",
            "https://pypi.org/simple",
        ),
        text(
            "NPM_REGISTRY_URL",
            "The registry of npm packages, or a mirror of it.",
            "https://registry.npmjs.org",
        ),
        number(
            "TEMPLATES_PER_TENANT",
            20,
            0,
            10_000,
            "Templates that a tenant may have of its own; 0 for none.",
        ),
        number(
            "TEMPLATE_MAX_MB",
            4096,
            1,
            1_000_000,
            "The most that one template may take, unpacked.",
            unit="MiB",
        ),
        number(
            "TEMPLATE_BUILD_SECONDS",
            300,
            1,
            3600,
            "The most that resolving a template's packages may take, and as much again its "
            "commands.",
            unit="s",
        ),
        number(
            "TEMPLATES_MB_PER_TENANT",
            8192,
            1,
            10_000_000,
            "The most that all templates of a tenant may take.",
            unit="MiB",
        ),
        several(
            "TEMPLATE_IMAGES",
            "Images that templates of tenants may be based on, by the names that the pool has.",
        ),
        choice(
            "TEMPLATE_ADVISORIES",
            "refuse",
            ("refuse", "show"),
            "What a package with a known advisory does to a build: it fails, or the advisory is "
            "only shown.",
        ),
        flag(
            "TEMPLATE_BUILDS_FROM_SOURCE",
            "Templates may name Python packages that are built from their source. Building runs "
            "their code in a sandbox that reaches the package index.",
        ),
        number(
            "TEMPLATE_KEEP_DAYS",
            30,
            1,
            3650,
            "After this time, a version that nothing uses is removed with its files.",
            unit="days",
        ),
    ),
    "[Templates](templates.md) give sandboxes packages. A build reaches the index and the registry "
    "through the\n[network lists](network.md). A mirror with a private address also needs "
    "`URL_ALLOWED_NETWORKS`.",
)

WEBHOOKS: Group = Group(
    "Addresses of webhooks",
    (
        networks(
            "WEBHOOK_ALLOWED_NETWORKS",
            "Networks, single hosts, or ports of them, this machine included.",
        ),
        flag(
            "WEBHOOK_PLAIN_HTTP",
            "Allow plain http: anyone on the network path can then read the webhooks and hold "
            "them back.",
        ),
    ),
    "[Webhooks](asynchronous.md#webhooks) are sent to the internet, over https. The settings for "
    "fetched files do not apply\nto webhooks. Entries are written "
    "[as those of providers](deployment/addresses.md).",
)

VAULT: Group = Group(
    "Values of credentials from Vault",
    (
        text(
            "VAULT_URL",
            "The address of HashiCorp Vault or OpenBao, such as `https://vault.example.com:8200`. "
            "Redirects are not followed.",
        ),
        secret(
            "VAULT_TOKEN",
            "The token that reads the values. Its policy should read nothing else. It is read at "
            "start.",
        ),
        text("VAULT_NAMESPACE", "The namespace, where the server has some."),
        text(
            "VAULT_CA_FILE",
            "PEM file of the only certificate authorities that are trusted for that server.",
            shown="the system's",
        ),
        networks(
            "VAULT_ALLOWED_NETWORKS",
            "Addresses that the server may have although they are not public, "
            "[written as those of providers](deployment/addresses.md); for these, plain http is "
            "allowed.",
        ),
    ),
    "Credentials of the network can have [their values from Vault](network.md#values-from-vault).",
)

OBSERVABILITY: Group = Group(
    "Metrics, alerts, export of the ledger",
    (
        secret(
            "METRICS_TOKEN",
            "The token that a scrape of `/metrics` must send, as `Authorization: Bearer`.",
            is_common=True,
        ),
        addresses(
            "METRICS_ALLOWED_ADDRESSES",
            "Networks that a scrape must come from. With neither this nor `METRICS_TOKEN`, only "
            "this machine may read, and with `DEBUG=false` no client.",
        ),
        secret(
            "EMAIL_URL",
            "The mail server: `smtp+tls://user:password@host:587`, `smtp+ssl://...`, "
            "`smtp://host:25`.",
        ),
        several("ALERT_EMAILS", "Recipients of alerts by mail, separated by commas."),
        text("ALERT_SENDER", "The sender of alerts by mail.", "cofferdam@localhost"),
        secret("ALERT_WEBHOOK_URL", "Where alerts are posted."),
        secret(
            "ALERT_WEBHOOK_SECRET",
            "The secret that signs these posts as in Standard Webhooks: `whsec_` and base64.",
        ),
        several(
            "ALERT_THRESHOLDS",
            "The thresholds of the alerts; those that are named change, the others keep their "
            "defaults.",
            (
                "availability_percent=99",
                "error_percent=5",
                "average_seconds=10",
                "p95_seconds=5",
                "rate_percent=80",
                "memory_percent=90",
                "disk_percent=90",
                "out_of_memory_per_hour=20",
                "timed_out_per_hour=20",
                "sigsys_per_hour=5",
                "process_bursts_per_hour=5",
                "refused_attempts_per_hour=500",
                "queue_seconds=300",
                "checkpoint_hours=3",
            ),
        ),
        networks(
            "ALERT_ALLOWED_NETWORKS",
            "Addresses that the webhook may have although they are not public, "
            "[written as those of providers](deployment/addresses.md); for these, plain http is "
            "allowed.",
        ),
        text(
            "AUDIT_EXPORT_URL",
            "The collector of every ledger entry: `syslog+tls://host:6514` or "
            "`https://host:4318/v1/logs`.",
        ),
        text(
            "AUDIT_EXPORT_CA_FILE",
            "PEM file of the only certificate authorities that are trusted for that collector.",
            shown="the system's",
        ),
        secret(
            "AUDIT_EXPORT_HEADERS",
            "Headers for the collector, `Authorization: Bearer ...`, one per line.",
        ),
        text(
            "OTEL_EXPORTER_OTLP_ENDPOINT",
            "The collector of [traces and metrics](observability.md#opentelemetry), "
            "`https://collector:4318`. It needs the packages of `requirements-otel.txt`; without "
            "them nothing starts.",
        ),
        secret(
            "OTEL_EXPORTER_OTLP_HEADERS",
            "Headers for that collector, `name=value`, comma separated, values URL encoded.",
        ),
        number(
            "OTEL_EXPORTER_OTLP_TIMEOUT",
            10,
            1,
            60,
            "Timeout of a request to that collector.",
            unit="s",
        ),
        text("OTEL_EXPORTER_OTLP_PROTOCOL", "The only supported protocol.", "http/protobuf"),
        text("OTEL_SERVICE_NAME", "The name of the service there.", "cofferdam"),
        flag("OTEL_SDK_DISABLED", "Send nothing, whatever the others say."),
    ),
    "[observability.md](observability.md) says what they do.",
)
