"""Settings. Every value that an operator may change is read from the environment.

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

import django_stubs_ext
from django.core.exceptions import ImproperlyConfigured

from executions.kernel.storage import MOST_LINK_SECONDS
from providers.guest.protocol import MOST_KNOWN
from providers.key_file import KeyFile
from providers.launcher_names import KINDS
from sandbox_site import (
    __version__,
    admin_pages,
    agent_sandbox,
    client_address,
    keys,
    logs,
    observability,
    storage_settings,
    task_queue,
)
from sandbox_site.database import databases, files_of
from sandbox_site.env_file import read_env_file
from sandbox_site.environment import PROJECT, StrictEnv
from sandbox_site.private_files import write_privately

# Lets annotations such as ModelAdmin[Tenant] stand where Python evaluates them.
django_stubs_ext.monkeypatch()

BASE_DIR: Path = PROJECT
env = StrictEnv()
read_env_file(BASE_DIR / env.str("ENV_FILE", default=".env"))
DATA_DIR = (BASE_DIR / env.str("DATA_DIR", default="var")).resolve()
HOST = env.str("HOST", default="127.0.0.1")
PORT = env.bounded("PORT", default=8000, low=1, high=65535)
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
if _file := env.str("FERNET_KEYS_FILE", default=""):
    FERNET_KEYS_FILE = KeyFile(BASE_DIR / _file)
elif not env.secret("FERNET_KEYS") and not PRODUCTION:
    FERNET_KEYS_FILE = KeyFile(DATA_DIR / keys.FILE_NAME, "FERNET_KEYS")
LEDGER_KEYS = keys.split(_keys.get("LEDGER_KEYS", ""))

ALLOWED_HOSTS = env.list("ALLOWED_HOSTS", default=[".localhost", "127.0.0.1", "[::1]", HOST])
CSRF_TRUSTED_ORIGINS = env.list("CSRF_TRUSTED_ORIGINS", default=[])

# The proxies whose X-Forwarded-For and X-Forwarded-Proto are believed; nobody else's are.
TRUSTED_PROXIES = client_address.read_networks(env.list("TRUSTED_PROXIES", default=[]))
# The middleware leaves the header of a trusted proxy alone.
SECURE_PROXY_SSL_HEADER = (client_address.FORWARDED_PROTO, "https")

# Set where HTTPS ends at this service or at a proxy in front of it.
HTTPS_ONLY = env.bool("HTTPS_ONLY", default=False)
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
    "executions.capabilities.webhooks",
    "executions.capabilities.search",
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

DATABASE_WAIT_SECONDS = env.bounded("DATABASE_WAIT_SECONDS", default=10, low=1, high=60)
DATABASES = databases(env, DATA_DIR, DATABASE_WAIT_SECONDS)
# Every process reads this before it writes anything.
write_privately(DATA_DIR, *files_of(DATABASES))
# Artifacts, large queued requests and the ledger's checkpoints: what every host needs.
STORAGES = storage_settings.storages(env)
STORAGE_FOLDER = storage_settings.shared_folder(env.str("STORAGE_URL", default=""))
if STORAGE_FOLDER:
    write_privately(STORAGE_FOLDER)
# Of a link to a file, where its caller says no time.
PRESIGN_EXPIRES_SECONDS = env.bounded("PRESIGN_EXPIRES_SECONDS", 300, 1, MOST_LINK_SECONDS)
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
TIME_ZONE = env.str("TIME_ZONE", default="UTC")
USE_TZ = True

STATIC_URL = "static/"
STATICFILES_DIRS = [BASE_DIR / "static"]
# Served from where the packages keep them: there is no collecting step to forget.
WHITENOISE_USE_FINDERS = True
WHITENOISE_MAX_AGE = 3600 if PRODUCTION else 60

UNFOLD, CONTENT_SECURITY_POLICY = admin_pages.UNFOLD, admin_pages.POLICY
OTP_TOTP_ISSUER = "Cofferdam"
OTP_ADMIN_HIDE_SENSITIVE_DATA = True
AXES_FAILURE_LIMIT = env.bounded("LOGIN_FAILURES", default=5, low=1, high=1000)
AXES_COOLOFF_TIME = timedelta(minutes=env.bounded("LOGIN_LOCKOUT_MINUTES", 15, 1, 10_080))
# A name from one address; a name alone would let anybody lock an administrator out.
AXES_LOCKOUT_PARAMETERS = [["username", "ip_address"]]
AXES_CLIENT_IP_CALLABLE = "sandbox_site.client_address.address_of"
AXES_RESET_ON_SUCCESS = True
AXES_LOCKOUT_TEMPLATE = "admin/locked_out.html"
AXES_HTTP_RESPONSE_CODE = 429
AXES_SENSITIVE_PARAMETERS = ["username", "ip_address", "otp_token"]
AXES_VERBOSE = False

LOGGING = logs.configuration(
    env.choice("LOG_LEVEL", "INFO", ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")),
    logs.format_for(env.choice("LOG_FORMAT", "auto", ("auto", "json", "text"))),
)

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
    "POSTPROCESSING_HOOKS": [
        "drf_spectacular.hooks.postprocess_schema_enums",
        "executions.doors.native.schema.describe_transport",
        "executions.doors.native.schema.describe_rate_headers",
    ],
}

SANDBOX_STORE_CODE = env.choice("SANDBOX_STORE_CODE", "always", ("always", "on_error", "never"))
# Public keys that signed the ledger once and are vouched for by nothing in it.
LEDGER_TRUSTED_KEYS = env.list("LEDGER_TRUSTED_KEYS", default=[])
# A folder of their own for the checkpoints; "storage" is where the artifacts are as well.
LEDGER_CHECKPOINTS = env.str("LEDGER_CHECKPOINTS", default="storage")
if LEDGER_CHECKPOINTS not in ("", "storage"):
    LEDGER_CHECKPOINTS = str(BASE_DIR / LEDGER_CHECKPOINTS)
    write_privately(Path(LEDGER_CHECKPOINTS))
# Days; 0 keeps for ever. A tenant may have its own.
SANDBOX_KEEP_DAYS = {
    data: env.bounded(f"SANDBOX_KEEP_{data.upper()}_DAYS", default=0, low=0, high=32_767)
    for data in ("code", "output", "artifacts", "records")
}
# Records stay at least so long, whatever else is said: six months, as auditors ask. From the first
# of March they have 184 days.
SANDBOX_RECORDS_FLOOR_DAYS = env.bounded("SANDBOX_MIN_RECORD_RETENTION_DAYS", 184, 1, 32_767)
SANDBOX_MAX_TIMEOUT_SEC = env.bounded("SANDBOX_MAX_TIMEOUT_SEC", default=300, low=1, high=86_400)
SANDBOX_TIMEOUT_SEC = env.bounded(
    "SANDBOX_TIMEOUT_SEC",
    default=min(30, SANDBOX_MAX_TIMEOUT_SEC),
    low=1,
    high=SANDBOX_MAX_TIMEOUT_SEC,
)
# The bridge, `manage.py code_exec`: RAGFlow's name and number for a run's time. Whoever has set the
# most for everybody has not meant less than this.
_most = SANDBOX_MAX_TIMEOUT_SEC if env.str("SANDBOX_MAX_TIMEOUT_SEC", default="") else 600
COMPONENT_EXEC_TIMEOUT = env.bounded(
    "COMPONENT_EXEC_TIMEOUT", default=min(600, _most), low=1, high=86_400
)
CODE_EXEC_API_KEY = env.secret("CODE_EXEC_API_KEY")
CODE_EXEC_PROVIDER_TYPE = env.str("CODE_EXEC_PROVIDER_TYPE", default="")
# RAGFlow's executor, where no provider is configured.
SANDBOX_HOST = env.host("SANDBOX_HOST")
SANDBOX_MAX_OUTPUT_KB = env.bounded("SANDBOX_MAX_OUTPUT_KB", default=1000, low=1, high=65_536)
SANDBOX_MAX_CODE_BYTES = env.bounded("SANDBOX_MAX_CODE_BYTES", 1024 * 1024, 1, 64 * 1024 * 1024)
SANDBOX_MAX_BODY_BYTES = env.bounded(
    "SANDBOX_MAX_BODY_BYTES", default=64 * 1024 * 1024, low=1024, high=1024 * 1024 * 1024
)
# How far ahead a run may be asked for.
SANDBOX_MAX_RUN_AHEAD_DAYS = env.bounded("SANDBOX_MAX_RUN_AHEAD_DAYS", 30, 0, 3650)
# The bounds of a tenant that has none of its own.
SANDBOX_MAX_RUNNING = env.bounded("SANDBOX_MAX_RUNNING", default=10, low=0, high=10_000)
SANDBOX_MAX_QUEUED = env.bounded("SANDBOX_MAX_QUEUED", default=100, low=0, high=100_000)
SANDBOX_MAX_SCHEDULES = env.bounded("SANDBOX_MAX_SCHEDULES", default=20, low=0, high=10_000)
SANDBOX_MAX_STORED_MIB = env.bounded("SANDBOX_MAX_STORED_MIB", 5 * 1024, 0, 100 * 1024 * 1024)
SANDBOX_MAX_REQUESTS_PER_MINUTE = env.bounded(
    "SANDBOX_MAX_REQUESTS_PER_MINUTE", default=6000, low=0, high=10_000_000
)
SANDBOX_MAX_EXECUTIONS_PER_DAY = env.bounded(
    "SANDBOX_MAX_EXECUTIONS_PER_DAY", default=1_000_000, low=0, high=1_000_000_000
)
# A hundred runs around the clock.
SANDBOX_MAX_SECONDS_PER_DAY = env.bounded(
    "SANDBOX_MAX_SECONDS_PER_DAY", default=8_640_000, low=0, high=1_000_000_000
)
# Sessions: how many a tenant may have open, and all together; how long one may be asked to stay;
# and how long an execution waits for those before it in its session.
SESSIONS_PER_TENANT = env.bounded("SESSIONS_PER_TENANT", default=20, low=0, high=10_000)
SESSIONS_MAX_TOTAL = env.bounded(
    "SESSIONS_MAX_TOTAL",
    # Agent Sandbox's name for it.
    default=env.bounded("SANDBOX_MAX_TOTAL", default=200, low=0, high=100_000),
    low=0,
    high=100_000,
)
SESSION_MAX_SECONDS = env.bounded("SESSION_MAX_SECONDS", default=86_400, low=1, high=31_536_000)
# How often they are tended: closed, put to sleep and renewed as their times say.
SANDBOX_REAPER_INTERVAL = env.bounded("SANDBOX_REAPER_INTERVAL", default=15, low=1, high=60)
SESSION_QUEUE_TIMEOUT = env.bounded("SESSION_QUEUE_TIMEOUT", default=30, low=1, high=3600)
# What may be in storage of a session and of a tenant: bytes, and files with folders; whether it
# goes with the session; whether a removed file's bytes go at once, whoever has a link to them.
_EIB = 2**60
SESSION_STORAGE_BYTES = env.bounded("SESSION_STORAGE_BYTES", default=2 * 2**30, low=0, high=_EIB)
SESSION_STORAGE_FILES = env.bounded("SESSION_STORAGE_FILES", default=20_000, low=0, high=MOST_KNOWN)
TENANT_STORAGE_BYTES = env.bounded("TENANT_STORAGE_BYTES", default=20 * 2**30, low=0, high=_EIB)
TENANT_STORAGE_FILES = env.bounded("TENANT_STORAGE_FILES", default=1_000_000, low=0, high=2**40)
DELETE_S3_ON_CLEANUP = env.bool("DELETE_S3_ON_CLEANUP", default=True)
DELETE_S3_ON_DELETE = env.bool("DELETE_S3_ON_DELETE", default=False)
# What is left free of the disk for what runs already.
DISK_RESERVE_MIB = env.bounded("DISK_RESERVE_MIB", default=512, low=0, high=100 * 1024 * 1024)
SANDBOX_TYPE = env.choice("SANDBOX_TYPE", "", ("", "local", "docker", "e2b"), any_case=True)
TWO_PERSON_RULE = env.bool("TWO_PERSON_RULE", default=False)
MINIMUM_ISOLATION = env.choice(
    "MINIMUM_ISOLATION", "namespaces", ("microvm", "gvisor", "namespaces", "none")
)
# `manage.py packages` makes it.
PACKAGES_DIR = BASE_DIR / ".venv-packages"
_packages_python = PACKAGES_DIR / "bin" / "python"
SANDBOX_LOCAL_PYTHON = env.str(
    "SANDBOX_LOCAL_PYTHON", default=str(_packages_python) if _packages_python.exists() else ""
)
SANDBOX_LOCAL_UNISOLATED = env.bool("SANDBOX_LOCAL_UNISOLATED", default=False)
# Of a form, without its files.
DATA_UPLOAD_MAX_MEMORY_SIZE = min(SANDBOX_MAX_BODY_BYTES, 2_621_440)

# Of callers of Agent Sandbox's API, below /v1.
AGENT_SANDBOX = agent_sandbox.read(env)

# The web server, `sandbox_site.web`.
WEB_THREADS = env.bounded("WEB_THREADS", default=16, low=4, high=256)
WEB_CONNECTIONS = env.bounded("WEB_CONNECTIONS", default=2000, low=16, high=100_000)
WEB_HEADER_SECONDS = env.bounded("WEB_HEADER_SECONDS", default=10, low=1, high=3600)
WEB_BODY_SECONDS = env.bounded("WEB_BODY_SECONDS", default=15, low=1, high=50)
WEB_SEND_SECONDS = env.bounded("WEB_SEND_SECONDS", default=60, low=1, high=3600)
# One tenant may hold half of it, and must be able to send the largest request.
_largest_mb = -(-SANDBOX_MAX_BODY_BYTES // 2**20)
WEB_SPOOL_MB = env.bounded(
    "WEB_SPOOL_MB",
    default=max(512, 4 * _largest_mb),
    low=max(32, 2 * _largest_mb),
    high=max(65_536, 4 * _largest_mb),
)
# After SIGTERM: how long /readyz says so before the listener closes, then how long what runs may go
# on: the longest allowed run, and what starting, ending and recording it takes.
SHUTDOWN_DELAY_SECONDS = env.bounded("SHUTDOWN_DELAY_SECONDS", default=0, low=0, high=600)
SHUTDOWN_GRACE_SECONDS = env.bounded(
    "SHUTDOWN_GRACE_SECONDS", default=SANDBOX_MAX_TIMEOUT_SEC + 30, low=0, high=90_000
)
# Calls of providers that are clients of a service, waited for at once in a web process.
PROVIDER_WAITS = env.bounded("PROVIDER_MAX_INFLIGHT", 256, 1, 4096)
# Beside public addresses over https, which every provider may have; see providers/addresses.py.
PROVIDER_ALLOWED_NETWORKS = env.networks("PROVIDER_ALLOWED_NETWORKS")
PROVIDER_PLAIN_HTTP = env.networks("PROVIDER_PLAIN_HTTP")
# Where tenants' files may be fetched from by URL, beside the internet.
ALLOW_PRIVATE_URLS = env.bool("ALLOW_PRIVATE_URLS", default=False)
URL_ALLOWED_NETWORKS = env.networks("URL_ALLOWED_NETWORKS")
# Where tenants' webhooks may be sent to, beside the internet over https.
WEBHOOK_ALLOWED_NETWORKS = env.networks("WEBHOOK_ALLOWED_NETWORKS")
WEBHOOK_PLAIN_HTTP = env.bool("WEBHOOK_PLAIN_HTTP", default=False)

# Metrics, alerts and the export of the ledger; see docs/observability.md.
METRICS_TOKEN = observability.metrics_token(env)
METRICS_ALLOWED_ADDRESSES = env.networks("METRICS_ALLOWED_ADDRESSES", names=False)
ALERTING = observability.alerting(env)
ALERT_THRESHOLDS = observability.thresholds(env)
ALERT_ALLOWED_NETWORKS = env.networks("ALERT_ALLOWED_NETWORKS")
# Django's own names, from EMAIL_BACKEND to EMAIL_TIMEOUT.
globals().update(observability.mail(env))
AUDIT_EXPORT = observability.audit_destination(env)
TELEMETRY = observability.telemetry(env, INSTANCE)

# Where `manage.py pool` listens, and where `manage.py up` expects it.
POOL_HOST = env.str("POOL_HOST", default="127.0.0.1")
POOL_PORT = env.bounded("POOL_PORT", default=9385, low=1, high=65535)
POOL_TOKEN = env.secret("POOL_TOKEN")
POOL_ALLOWED_ADDRESSES = env.networks("POOL_ALLOWED_ADDRESSES", names=False)
POOL_LAUNCHER = env.choice("POOL_LAUNCHER", "auto", KINDS)
POOL_GVISOR_PLATFORM = env.choice("POOL_GVISOR_PLATFORM", "systrap", ("systrap", "ptrace", "kvm"))
# What the pool begins with, until a provider pushes its configuration. RAGFlow's names.
POOL_SIZE = env.bounded("SANDBOX_EXECUTOR_MANAGER_POOL_SIZE", default=10, low=1, high=100)
POOL_MEMORY = env.str("SANDBOX_MAX_MEMORY", default="256m")
POOL_TIMEOUT = env.str("SANDBOX_TIMEOUT", default="10s")
POOL_IMAGES = {
    "python": env.str("SANDBOX_BASE_PYTHON_IMAGE", default=""),
    "nodejs": env.str("SANDBOX_BASE_NODEJS_IMAGE", default=""),
}
# Queued executions that each of the Q_WORKERS runs at once.
Q_THREADS = env.bounded("Q_THREADS", default=4, low=1, high=64)
Q_CLUSTER = task_queue.cluster(env, SECRET_KEY, SANDBOX_MAX_TIMEOUT_SEC + 60)
