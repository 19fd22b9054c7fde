"""Settings. Every value that an operator may change is read from the environment.

Three ways to run, told apart by DEBUG:
- unset: needs no other setting. Keys are generated into the data directory; error pages say
  nothing, as in production.
- `false`: production. The keys must come from the environment; generated ones do not count.
- `true`: development, with Django's debug pages.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import django_stubs_ext
from django.core.exceptions import ImproperlyConfigured

from sandbox_site import admin_pages, client_address, keys, logs
from sandbox_site.database import databases, files_of
from sandbox_site.environment import StrictEnv
from sandbox_site.private_files import write_privately

# Lets annotations such as ModelAdmin[Tenant] stand where Python evaluates them.
django_stubs_ext.monkeypatch()

env = StrictEnv()

BASE_DIR = Path(__file__).resolve().parent.parent
DATA_DIR = (BASE_DIR / env.str("DATA_DIR", default="var")).resolve()
HOST = env.str("HOST", default="127.0.0.1")
PORT = env.bounded("PORT", default=8000, low=1, high=65535)

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
FERNET_KEYS = keys.split(_keys.get("FERNET_KEYS", ""))
LEDGER_KEYS = keys.split(_keys.get("LEDGER_KEYS", ""))

ALLOWED_HOSTS = env.list("ALLOWED_HOSTS", default=[".localhost", "127.0.0.1", "[::1]", HOST])
CSRF_TRUSTED_ORIGINS = env.list("CSRF_TRUSTED_ORIGINS", default=[])

# The proxies whose X-Forwarded-For and X-Forwarded-Proto are believed; nobody else's are.
# FORWARDED_ALLOW_IPS is the name the second had before.
TRUSTED_PROXIES = client_address.read_networks(
    env.list("TRUSTED_PROXIES", default=[]) or env.list("FORWARDED_ALLOW_IPS", default=[])
)
# The middleware leaves the header of a trusted proxy alone.
SECURE_PROXY_SSL_HEADER = (client_address.FORWARDED_PROTO, "https")

# Set where HTTPS ends at this service or at a proxy in front of it.
HTTPS_ONLY = env.bool("HTTPS_ONLY", default=False)
SECURE_SSL_REDIRECT = HTTPS_ONLY
SECURE_REDIRECT_EXEMPT = [r"^healthz$"]
SECURE_HSTS_SECONDS = 31_536_000 if HTTPS_ONLY else 0
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
    "django.contrib.admin",
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

MIDDLEWARE = [
    "sandbox_site.client_address.ClientAddressMiddleware",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django_otp.middleware.OTPMiddleware",
    "executions.middleware.ActorMiddleware",
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
            ],
        },
    },
]

DATABASES = databases(env, DATA_DIR)
# Every process reads this before it writes anything.
write_privately(DATA_DIR, *files_of(DATABASES))
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
AXES_COOLOFF_TIME = timedelta(minutes=env.bounded("LOGIN_PAUSE_MINUTES", 15, 1, 10_080))
# A name from one address; a name alone would let anybody lock an administrator out.
AXES_LOCKOUT_PARAMETERS = [["username", "ip_address"]]
AXES_CLIENT_IP_CALLABLE = "sandbox_site.client_address.address_of"
AXES_RESET_ON_SUCCESS = True
AXES_LOCKOUT_TEMPLATE = "admin/locked_out.html"
AXES_HTTP_RESPONSE_CODE = 429
AXES_SENSITIVE_PARAMETERS = ["username", "ip_address", "otp_token"]
AXES_VERBOSE = False

LOGGING = logs.configuration(
    env.choice("LOG_LEVEL", "INFO", ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"))
)

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": ["executions.api.authentication.ApiKeyAuthentication"],
    "DEFAULT_PERMISSION_CLASSES": ["executions.api.authentication.HasApiKey"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "EXCEPTION_HANDLER": "executions.api.errors.render_error",
    "STRICT_JSON": True,
    "TEST_REQUEST_DEFAULT_FORMAT": "json",
    "UNAUTHENTICATED_USER": None,
}

SPECTACULAR_SETTINGS = {
    "TITLE": "Cofferdam",
    "DESCRIPTION": "Runs code in isolation and keeps the record.",
    "VERSION": "1",
    "SERVE_INCLUDE_SCHEMA": False,
    "SERVE_PERMISSIONS": ["rest_framework.permissions.AllowAny"],
    "SERVE_AUTHENTICATION": [],
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
}

SANDBOX_STORE_CODE = env.choice("SANDBOX_STORE_CODE", "always", ("always", "on_error", "never"))
# Public keys that signed the ledger once and are vouched for by nothing in it.
LEDGER_TRUSTED_KEYS = env.list("LEDGER_TRUSTED_KEYS", default=[])
LEDGER_CHECKPOINTS = env.str("LEDGER_CHECKPOINTS", default=str(DATA_DIR / "ledger"))
if LEDGER_CHECKPOINTS:
    write_privately(Path(LEDGER_CHECKPOINTS))
# Days; 0 keeps for ever. A tenant may have its own.
SANDBOX_KEEP_DAYS = {
    data: env.bounded(f"SANDBOX_KEEP_{data.upper()}_DAYS", default=0, low=0, high=32_767)
    for data in ("code", "output", "artifacts")
}
SANDBOX_MAX_TIMEOUT_SEC = env.bounded("SANDBOX_MAX_TIMEOUT_SEC", default=300, low=1, high=86_400)
SANDBOX_TIMEOUT_SEC = env.bounded(
    "SANDBOX_TIMEOUT_SEC",
    default=min(30, SANDBOX_MAX_TIMEOUT_SEC),
    low=1,
    high=SANDBOX_MAX_TIMEOUT_SEC,
)
SANDBOX_MAX_OUTPUT_KB = env.bounded("SANDBOX_MAX_OUTPUT_KB", default=200, low=1, high=65_536)
SANDBOX_MAX_CODE_BYTES = env.bounded(
    "SANDBOX_MAX_CODE_BYTES", default=1024 * 1024, low=1, high=64 * 1024 * 1024
)
SANDBOX_MAX_BODY_BYTES = env.bounded(
    "SANDBOX_MAX_BODY_BYTES", default=64 * 1024 * 1024, low=1024, high=1024 * 1024 * 1024
)
# The bounds of a tenant that has none of its own.
SANDBOX_MAX_RUNNING = env.bounded("SANDBOX_MAX_RUNNING", default=10, low=0, high=10_000)
SANDBOX_MAX_QUEUED = env.bounded("SANDBOX_MAX_QUEUED", default=100, low=0, high=100_000)
SANDBOX_MAX_STORED_MIB = env.bounded(
    "SANDBOX_MAX_STORED_MIB", default=5 * 1024, low=0, high=100 * 1024 * 1024
)
# What is left free of the disk for what runs already.
DISK_RESERVE_MIB = env.bounded("DISK_RESERVE_MIB", default=512, low=0, high=100 * 1024 * 1024)
SANDBOX_TYPE = env.choice("SANDBOX_TYPE", "", ("", "local", "docker", "e2b"))
TWO_PERSON_RULE = env.bool("TWO_PERSON_RULE", default=False)
MINIMUM_ISOLATION = env.choice(
    "MINIMUM_ISOLATION", "namespaces", ("microvm", "gvisor", "namespaces", "none")
)
SANDBOX_LOCAL_UNISOLATED = env.bool("SANDBOX_LOCAL_UNISOLATED", default=False)
DATA_UPLOAD_MAX_MEMORY_SIZE = SANDBOX_MAX_BODY_BYTES

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
# Calls of providers that are clients of a service, waited for at once in a web process.
PROVIDER_WAITS = env.bounded("PROVIDER_WAITS", default=256, low=1, high=4096)
# Beside public addresses over https, which every provider may have; see providers/addresses.py.
PROVIDER_ALLOWED_NETWORKS = env.networks("PROVIDER_ALLOWED_NETWORKS")
PROVIDER_PLAIN_HTTP = env.networks("PROVIDER_PLAIN_HTTP")

# Where `manage.py pool` listens, and where `manage.py up` expects it.
POOL_HOST = env.str("POOL_HOST", default="127.0.0.1")
POOL_PORT = env.bounded("POOL_PORT", default=9385, low=1, high=65535)
POOL_TOKEN = env.secret("POOL_TOKEN")
POOL_ALLOWED_ADDRESSES = env.networks("POOL_ALLOWED_ADDRESSES", names=False)
POOL_LAUNCHER = env.choice("POOL_LAUNCHER", "auto", ("auto", "docker", "gvisor", "bubblewrap"))
POOL_GVISOR_PLATFORM = env.choice("POOL_GVISOR_PLATFORM", "systrap", ("systrap", "ptrace", "kvm"))
# What the pool begins with, until a provider pushes its configuration. RAGFlow's names.
POOL_SIZE = env.bounded("SANDBOX_EXECUTOR_MANAGER_POOL_SIZE", default=10, low=1, high=100)
POOL_MEMORY = env.str("SANDBOX_MAX_MEMORY", default="256m")
POOL_TIMEOUT = env.str("SANDBOX_TIMEOUT", default="10s")
POOL_IMAGES = {
    "python": env.str("SANDBOX_BASE_PYTHON_IMAGE", default=""),
    "nodejs": env.str("SANDBOX_BASE_NODEJS_IMAGE", default=""),
}

Q_BROKER = env.choice("Q_BROKER", "orm", ("orm", "redis"))
Q_WORKERS = env.bounded("Q_WORKERS", default=2, low=1, high=64)
# Queued executions that each of the workers runs at once.
Q_THREADS = env.bounded("Q_THREADS", default=4, low=1, high=64)
_task_seconds = SANDBOX_MAX_TIMEOUT_SEC + 60

Q_CLUSTER: dict[str, Any] = {
    "name": "cofferdam",
    "workers": Q_WORKERS,
    # A task is taken from the broker only when a worker is about to be free for it.
    "queue_limit": Q_WORKERS,
    "bulk": 1,
    "timeout": _task_seconds,
    # A task that was delivered waits behind at most two others; only after that is it lost.
    "retry": 3 * _task_seconds + 60,
    # A task is tried once. Whether an execution may run again is no decision of the queue.
    "ack_failures": True,
    "max_attempts": 1,
    "catch_up": False,
    "save_limit": 250,
}
if Q_BROKER == "redis":
    if not (redis_url := env.secret("REDIS_URL")):
        raise ImproperlyConfigured("Q_BROKER=redis needs REDIS_URL or REDIS_URL_FILE")
    Q_CLUSTER["redis"] = redis_url
else:
    # Seconds between looks into the table; an idle worker's load is these looks.
    Q_CLUSTER |= {"orm": "default", "poll": 0.05}
