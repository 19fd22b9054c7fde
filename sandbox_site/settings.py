"""Settings. Every value that an operator may change is read from the environment, by a name that
`sandbox_site.settings_table` declares with its type, default, limits and meaning.

Three ways to run, told apart by DEBUG:
- unset: needs no other setting. Keys are generated into the data directory; error pages say
  nothing, as in production.
- `false`: production. The keys must come from the environment; generated ones do not count.
- `true`: development, with Django's debug pages.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path

from django.core.exceptions import ImproperlyConfigured

from providers.key_file import KeyFile
from sandbox_site import (
    __version__,
    admin_pages,
    agent_sandbox,
    client_address,
    keys,
    observability,
    storage_settings,
    task_queue,
    vault,
)
from sandbox_site.database import JOURNAL_BYTES, databases, files_of
from sandbox_site.pool_settings import *
from sandbox_site.private_files import write_privately

HOST = env.str("HOST")
PORT = env.number("PORT")
# How this host or container is called in records and on pages.
INSTANCE = env.str("INSTANCE", default=socket.gethostname())[:100]

_debug = env.tristate("DEBUG")
DEBUG = _debug is True
PRODUCTION = _debug is False

_keys = {name: env.secret(name) for name in keys.NAMES}
if PRODUCTION and not all(_keys.values()):
    raise ImproperlyConfigured(
        "DEBUG=false needs keys of its own. Set SECRET_KEY or SECRET_KEY_FILE, "
        "FERNET_KEYS or FERNET_KEYS_FILE (comma separated, the first one encrypts), "
        "and LEDGER_KEYS or LEDGER_KEYS_FILE (the first one signs). "
        "Keys generated into the data directory serve only while DEBUG is unset or true."
    )
if not PRODUCTION:
    _keys = keys.read(DATA_DIR) | {name: key for name, key in _keys.items() if key}
SECRET_KEY = _keys.get("SECRET_KEY", "")
# Former ones: what they signed is still accepted.
SECRET_KEY_FALLBACKS = keys.split(env.secret("SECRET_KEY_FALLBACKS"))
FERNET_KEYS = keys.split(_keys.get("FERNET_KEYS", ""))
FERNET_KEYS_FILE: KeyFile | None = None
if _file := env.str("FERNET_KEYS_FILE"):
    FERNET_KEYS_FILE = KeyFile(BASE_DIR / _file)
elif not env.secret("FERNET_KEYS") and not PRODUCTION:
    FERNET_KEYS_FILE = KeyFile(DATA_DIR / keys.FILE_NAME, "FERNET_KEYS")
LEDGER_KEYS = keys.split(_keys.get("LEDGER_KEYS", ""))

ALLOWED_HOSTS = env.list("ALLOWED_HOSTS", default=[".localhost", "127.0.0.1", "[::1]", HOST])
CSRF_TRUSTED_ORIGINS = env.list("CSRF_TRUSTED_ORIGINS")

# The proxies whose X-Forwarded-For and X-Forwarded-Proto are believed; nobody else's are.
TRUSTED_PROXIES = client_address.read_networks(env.list("TRUSTED_PROXIES"))
# The middleware leaves the header of a trusted proxy alone.
SECURE_PROXY_SSL_HEADER = (client_address.FORWARDED_PROTO, "https")

# Set where HTTPS ends at this service or at a proxy in front of it.
HTTPS_ONLY = env.bool("HTTPS_ONLY")
SECURE_SSL_REDIRECT = HTTPS_ONLY
SECURE_REDIRECT_EXEMPT = [r"^healthz$", r"^readyz$", r"^metrics$"]
SECURE_HSTS_SECONDS = 31_536_000 if HTTPS_ONLY else 0
# Whether every other name below this one is served over HTTPS is not known here.
SILENCED_SYSTEM_CHECKS = ["security.W005", "security.W021"]
SESSION_COOKIE_SECURE = HTTPS_ONLY
CSRF_COOKIE_SECURE = HTTPS_ONLY
SESSION_COOKIE_HTTPONLY = True
CSRF_COOKIE_HTTPONLY = True
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"

INSTALLED_APPS = [
    "sandbox_site",
    "unfold",
    "sandbox_site.admin_app.AdminConfig",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django.contrib.humanize",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "django_q",
    "axes",
    "csp",
    "django_otp",
    "django_otp.plugins.otp_totp",
    "providers",
    "executions",
]

# What runs can do beyond running. One that is left out does nothing: no endpoints, no pages, no
# tasks. The order is the order of their hooks (executions/runs/extensions.py).
INSTALLED_CAPABILITIES = [
    "executions.capabilities.tools",
    "executions.capabilities.policies",
    "executions.capabilities.network",
    "executions.capabilities.templates",
    "executions.capabilities.webhooks",
    "executions.capabilities.search",
    "executions.capabilities.threads",
    "executions.capabilities.observability",
    "executions.capabilities.spending",
    "executions.capabilities.schedules",
    "executions.capabilities.alerts",
    "executions.capabilities.reports",
    "executions.capabilities.retention",
]

MIDDLEWARE = [
    "sandbox_site.client_address.ClientAddressMiddleware",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "sandbox_site.strangers.StrangersMiddleware",
    "django_otp.middleware.OTPMiddleware",
    "executions.middleware.ActorMiddleware",
    "executions.middleware.RightsMiddleware",
    "executions.middleware.DatabaseAwayMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "csp.middleware.CSPMiddleware",
    "axes.middleware.AxesMiddleware",
]
# What a request of the API without a cookie passes: the rest is for people, who have a session.
API_MIDDLEWARE = [
    "sandbox_site.client_address.ClientAddressMiddleware",
    "django.middleware.security.SecurityMiddleware",
    "django.middleware.common.CommonMiddleware",
    "executions.middleware.RightsMiddleware",
    "executions.middleware.DatabaseAwayMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "csp.middleware.CSPMiddleware",
]

ROOT_URLCONF = "sandbox_site.urls"
WSGI_APPLICATION = "sandbox_site.wsgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "sandbox_site.admin_pages.version",
            ],
        },
    },
]

DATABASE_WAIT_SECONDS = env.number("DATABASE_WAIT_SECONDS")
DATABASES = databases(env, DATA_DIR, DATABASE_WAIT_SECONDS)
SQLITE_JOURNAL_BYTES = JOURNAL_BYTES
# Every process reads this before it writes anything.
write_privately(DATA_DIR, *files_of(DATABASES))
# Artifacts, large queued requests and the ledger's checkpoints: what every host needs.
STORAGES = storage_settings.storages(env)
STORAGE_FOLDER = storage_settings.shared_folder(env.str("STORAGE_URL"))
if STORAGE_FOLDER:
    write_privately(STORAGE_FOLDER)
# Of a link to a file, where its caller says no time.
PRESIGN_EXPIRES_SECONDS = env.number("PRESIGN_EXPIRES_SECONDS")
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in (
        "UserAttributeSimilarityValidator",
        "MinimumLengthValidator",
        "CommonPasswordValidator",
        "NumericPasswordValidator",
    )
]

AUTHENTICATION_BACKENDS = [
    "sandbox_site.throttling.ThrottledLogins",
    "django.contrib.auth.backends.ModelBackend",
]

# Where a login without a page to go to ends.
LOGIN_URL = "admin:login"
LOGIN_REDIRECT_URL = "admin:index"
LOGOUT_REDIRECT_URL = "admin:login"

LANGUAGE_CODE = "en-us"
FORMAT_MODULE_PATH = "sandbox_site.formats"
USE_TZ = True

STATIC_URL = "static/"
STATICFILES_DIRS = [BASE_DIR / "static"]
# Served from where the packages keep them: there is no collecting step to forget.
WHITENOISE_USE_FINDERS = True
WHITENOISE_MAX_AGE = 3600 if PRODUCTION else 60

UNFOLD, CONTENT_SECURITY_POLICY = admin_pages.UNFOLD, admin_pages.POLICY
OTP_TOTP_ISSUER = "Cofferdam"
OTP_ADMIN_HIDE_SENSITIVE_DATA = True
AXES_FAILURE_LIMIT = env.number("LOGIN_FAILURES")
AXES_COOLOFF_TIME = timedelta(minutes=env.number("LOGIN_LOCKOUT_MINUTES"))
# A name from one address; a name alone would let anybody lock an administrator out.
AXES_LOCKOUT_PARAMETERS = [["username", "ip_address"]]
AXES_CLIENT_IP_CALLABLE = "sandbox_site.client_address.address_of"
AXES_RESET_ON_SUCCESS = True
AXES_LOCKOUT_TEMPLATE = "admin/locked_out.html"
AXES_HTTP_RESPONSE_CODE = 429
AXES_SENSITIVE_PARAMETERS = ["username", "ip_address", "otp_token"]
AXES_VERBOSE = False

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "executions.doors.native.authentication.ApiKeyAuthentication"
    ],
    "DEFAULT_PERMISSION_CLASSES": ["executions.doors.native.authentication.HasApiKey"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_SCHEMA_CLASS": "executions.doors.native.schema.EndpointSchema",
    "EXCEPTION_HANDLER": "executions.doors.native.frame.render_error",
    "STRICT_JSON": True,
    "TEST_REQUEST_DEFAULT_FORMAT": "json",
    "UNAUTHENTICATED_USER": None,
}

SPECTACULAR_SETTINGS = {
    "TITLE": "Cofferdam",
    "DESCRIPTION": "Runs AI-generated code in isolated sandboxes and keeps an auditable record of "
    "every run.",
    "VERSION": __version__,
    # What a declaration says of itself is JSON Schema as 3.1 has it.
    "OAS_VERSION": "3.1.0",
    "SERVE_INCLUDE_SCHEMA": False,
    "SERVE_PERMISSIONS": ["rest_framework.permissions.AllowAny"],
    "SERVE_AUTHENTICATION": [],
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "ENUM_NAME_OVERRIDES": {
        "ModeEnum": ["sync", "async"],
        "NetworkModeEnum": ["none", "allowlist", "open"],
        "PackageKindEnum": ["python", "npm"],
        "TemplateStateEnum": [
            *("pending", "queued", "resolving", "building", "ready", "failed", "cancelled"),
        ],
    },
    "POSTPROCESSING_HOOKS": [
        "drf_spectacular.hooks.postprocess_schema_enums",
        "executions.doors.native.schema.describe_transport",
        "executions.doors.native.schema.describe_rate_headers",
    ],
}

SANDBOX_STORE_CODE = env.choice("SANDBOX_STORE_CODE")
# Public keys that signed the ledger once and are vouched for by nothing in it.
LEDGER_TRUSTED_KEYS = env.list("LEDGER_TRUSTED_KEYS")
# A folder of their own for the checkpoints; "storage" is where the artifacts are as well.
LEDGER_CHECKPOINTS = env.str("LEDGER_CHECKPOINTS")
if LEDGER_CHECKPOINTS not in ("", "storage"):
    LEDGER_CHECKPOINTS = str(BASE_DIR / LEDGER_CHECKPOINTS)
    write_privately(Path(LEDGER_CHECKPOINTS))
# Days; 0 keeps for ever. A tenant may have its own.
SANDBOX_KEEP_DAYS = {
    data: env.number(f"SANDBOX_KEEP_{data.upper()}_DAYS")
    for data in ("code", "output", "artifacts", "records")
}
# Records stay at least so long, whatever else is said: six months, as auditors ask. From the first
# of March they have 184 days.
SANDBOX_RECORDS_FLOOR_DAYS = env.number("SANDBOX_MIN_RECORD_RETENTION_DAYS")
SANDBOX_TIMEOUT_SEC = env.number(
    "SANDBOX_TIMEOUT_SEC",
    default=min(30, SANDBOX_MAX_TIMEOUT_SEC),
    high=SANDBOX_MAX_TIMEOUT_SEC,
)
# The bridge, `manage.py code_exec`: RAGFlow's name and number for a run's time. Whoever has set the
# most for everybody has not meant less than this.
_most = SANDBOX_MAX_TIMEOUT_SEC if env.is_set("SANDBOX_MAX_TIMEOUT_SEC") else 600
COMPONENT_EXEC_TIMEOUT = env.number("COMPONENT_EXEC_TIMEOUT", default=min(600, _most))
CODE_EXEC_API_KEY = env.secret("CODE_EXEC_API_KEY")
CODE_EXEC_PROVIDER_TYPE = env.str("CODE_EXEC_PROVIDER_TYPE")
# RAGFlow's executor, where no provider is configured.
SANDBOX_HOST = env.host("SANDBOX_HOST")
SANDBOX_MAX_OUTPUT_KB = env.number("SANDBOX_MAX_OUTPUT_KB")
SANDBOX_MAX_BODY_BYTES = env.number("SANDBOX_MAX_BODY_BYTES")
# The bounds of a tenant that has none of its own.
SANDBOX_MAX_RUNNING = env.number("SANDBOX_MAX_RUNNING")
SANDBOX_MAX_QUEUED = env.number("SANDBOX_MAX_QUEUED")
SANDBOX_MAX_SCHEDULES = 20
SANDBOX_MAX_STORED_MIB = env.number("SANDBOX_MAX_STORED_MIB")
SANDBOX_MAX_REQUESTS_PER_MINUTE = env.number("SANDBOX_MAX_REQUESTS_PER_MINUTE")
SANDBOX_MAX_EXECUTIONS_PER_DAY = env.number("SANDBOX_MAX_EXECUTIONS_PER_DAY")
# A hundred runs around the clock.
SANDBOX_MAX_SECONDS_PER_DAY = env.number("SANDBOX_MAX_SECONDS_PER_DAY")
# Sessions: how many a tenant may have open, and all together; how long one may be asked to stay;
# and how long an execution waits for those before it in its session.
SESSIONS_PER_TENANT = env.number("SESSIONS_PER_TENANT")
SESSIONS_MAX_TOTAL = env.number("SANDBOX_MAX_TOTAL")
SESSION_MAX_SECONDS = env.number("SESSION_MAX_SECONDS")
# How often they are tended: closed, put to sleep and renewed as their times say.
SANDBOX_REAPER_INTERVAL = env.number("SANDBOX_REAPER_INTERVAL")
SESSION_QUEUE_TIMEOUT = env.number("SESSION_QUEUE_TIMEOUT")
# What may be in storage of a session and of a tenant: bytes, and files with folders; whether it
# goes with the session; whether a removed file's bytes go at once, whoever has a link to them.
SESSION_STORAGE_BYTES = env.number("SESSION_STORAGE_BYTES")
SESSION_STORAGE_FILES = env.number("SESSION_STORAGE_FILES")
TENANT_STORAGE_BYTES = env.number("TENANT_STORAGE_BYTES")
TENANT_STORAGE_FILES = env.number("TENANT_STORAGE_FILES")
DELETE_S3_ON_CLEANUP = env.bool("DELETE_S3_ON_CLEANUP")
DELETE_S3_ON_DELETE = env.bool("DELETE_S3_ON_DELETE")
# What is left free of the disk for what runs already.
DISK_RESERVE_MIB = env.number("DISK_RESERVE_MIB")
SANDBOX_TYPE = env.choice("SANDBOX_TYPE", any_case=True)
TWO_PERSON_RULE = env.bool("TWO_PERSON_RULE")
# Of a form, without its files.
DATA_UPLOAD_MAX_MEMORY_SIZE = min(SANDBOX_MAX_BODY_BYTES, 2_621_440)

# Of callers of Agent Sandbox's API, below /v1.
AGENT_SANDBOX = agent_sandbox.read(env)

# The web server, `sandbox_site.web`.
WEB_CONCURRENCY = env.number("WEB_CONCURRENCY")
ACCESS_LOG = env.bool("ACCESS_LOG")
WEB_THREADS = env.number("WEB_THREADS")
WEB_CONNECTIONS = env.number("WEB_CONNECTIONS")
WEB_HEADER_SECONDS = env.number("WEB_HEADER_SECONDS")
WEB_BODY_SECONDS = env.number("WEB_BODY_SECONDS")
WEB_SEND_SECONDS = env.number("WEB_SEND_SECONDS")
# One tenant may hold half of it, and must be able to send the largest request.
_largest_mb = -(-SANDBOX_MAX_BODY_BYTES // 2**20)
WEB_SPOOL_MB = env.number(
    "WEB_SPOOL_MB",
    default=max(512, 4 * _largest_mb),
    low=max(32, 2 * _largest_mb),
    high=max(65_536, 4 * _largest_mb),
)
# After SIGTERM: how long /readyz says so before the listener closes. Then begin the
# SHUTDOWN_GRACE_SECONDS of pool_settings.
SHUTDOWN_DELAY_SECONDS = env.number("SHUTDOWN_DELAY_SECONDS")
# Templates: where their packages come from, and what they may take.
PACKAGE_INDEX_URL = env.str("PACKAGE_INDEX_URL")
NPM_REGISTRY_URL = env.str("NPM_REGISTRY_URL")
TEMPLATES_PER_TENANT = env.number("TEMPLATES_PER_TENANT")
TEMPLATE_MAX_MB = env.number("TEMPLATE_MAX_MB")
TEMPLATE_BUILD_SECONDS = env.number("TEMPLATE_BUILD_SECONDS")
TEMPLATES_MB_PER_TENANT = env.number("TEMPLATES_MB_PER_TENANT")
TEMPLATE_IMAGES = env.list("TEMPLATE_IMAGES")
TEMPLATE_ADVISORIES = env.choice("TEMPLATE_ADVISORIES")
TEMPLATE_BUILDS_FROM_SOURCE = env.bool("TEMPLATE_BUILDS_FROM_SOURCE")
TEMPLATE_KEEP_DAYS = env.number("TEMPLATE_KEEP_DAYS")

# Where tenants' files may be fetched from by URL, beside the internet.
ALLOW_PRIVATE_URLS = env.bool("ALLOW_PRIVATE_URLS")
URL_ALLOWED_NETWORKS = env.networks("URL_ALLOWED_NETWORKS")
# Where tenants' webhooks may be sent to, beside the internet over https.
WEBHOOK_ALLOWED_NETWORKS = env.networks("WEBHOOK_ALLOWED_NETWORKS")
WEBHOOK_PLAIN_HTTP = env.bool("WEBHOOK_PLAIN_HTTP")

# Where values of network credentials may come from.
VAULT_ALLOWED_NETWORKS = env.networks("VAULT_ALLOWED_NETWORKS")
VAULT_URL, VAULT_TOKEN, VAULT_NAMESPACE, VAULT_CA = vault.server(env, VAULT_ALLOWED_NETWORKS)

# Metrics, alerts and the export of the ledger; see docs/observability.md.
METRICS_TOKEN = observability.metrics_token(env)
METRICS_ALLOWED_ADDRESSES = env.networks("METRICS_ALLOWED_ADDRESSES")
ALERTING = observability.alerting(env)
ALERT_THRESHOLDS = observability.thresholds(env)
ALERT_ALLOWED_NETWORKS = env.networks("ALERT_ALLOWED_NETWORKS")
# Django's own names, from EMAIL_BACKEND to EMAIL_TIMEOUT.
globals().update(observability.mail(env))
AUDIT_EXPORT = observability.audit_destination(env)
TELEMETRY = observability.telemetry(env, INSTANCE)

# Queued executions that each of the Q_WORKERS runs at once.
Q_THREADS = env.number("Q_THREADS")
Q_CLUSTER = task_queue.cluster(env, SECRET_KEY, SANDBOX_MAX_TIMEOUT_SEC + 60)
