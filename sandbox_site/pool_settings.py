"""The settings that the pool service reads, which has no Django. The other settings begin here."""

from __future__ import annotations

import os

from sandbox_site import logs
from sandbox_site.env_file import read_env_file
from sandbox_site.environment import PROJECT, StrictEnv, refuse_unknown

BASE_DIR = PROJECT
env = StrictEnv()
env.in_file = read_env_file(BASE_DIR / env.str("ENV_FILE"))
refuse_unknown(name for name, value in os.environ.items() if value)
DATA_DIR = (BASE_DIR / env.str("DATA_DIR")).resolve()

TIME_ZONE = env.str("TIME_ZONE")
LOGGING = logs.configuration(
    env.choice("LOG_LEVEL"),
    logs.format_for(env.choice("LOG_FORMAT")),
)

SANDBOX_MAX_TIMEOUT_SEC = env.number("SANDBOX_MAX_TIMEOUT_SEC")
# How long what runs may go on after SIGTERM: the longest allowed run, and what starting, ending and
# recording it takes.
SHUTDOWN_GRACE_SECONDS = env.number("SHUTDOWN_GRACE_SECONDS", default=SANDBOX_MAX_TIMEOUT_SEC + 30)

MINIMUM_ISOLATION = env.choice("MINIMUM_ISOLATION")
# `manage.py packages` makes it.
PACKAGES_DIR = BASE_DIR / ".venv-packages"
_packages_python = PACKAGES_DIR / "bin" / "python"
SANDBOX_LOCAL_PYTHON = env.str(
    "SANDBOX_LOCAL_PYTHON", default=str(_packages_python) if _packages_python.exists() else ""
)
SANDBOX_LOCAL_UNISOLATED = env.bool("SANDBOX_LOCAL_UNISOLATED")

# Calls of providers that are clients of a service, waited for at once in a web process.
PROVIDER_WAITS = env.number("PROVIDER_MAX_INFLIGHT")
# Beside public addresses over https, which every provider may have; see providers/addresses.py.
PROVIDER_ALLOWED_NETWORKS = env.networks("PROVIDER_ALLOWED_NETWORKS")
PROVIDER_PLAIN_HTTP = env.networks("PROVIDER_PLAIN_HTTP")

# Where the pool service listens, and where `manage.py up` expects it.
POOL_HOST = env.str("POOL_HOST")
POOL_PORT = env.number("POOL_PORT")
POOL_TOKEN = env.secret("POOL_TOKEN")
POOL_AUTOSTART = env.bool("POOL_AUTOSTART")
NETWORK_ALLOWED_ADDRESSES = env.networks("NETWORK_ALLOWED_ADDRESSES")
NETWORK_CA_FILE = env.str("NETWORK_CA_FILE")
POOL_ALLOWED_ADDRESSES = env.networks("POOL_ALLOWED_ADDRESSES")
POOL_LAUNCHER = env.choice("POOL_LAUNCHER")
POOL_NAME = env.str("POOL_NAME")
KUBERNETES_NAMESPACE = env.str("KUBERNETES_NAMESPACE")
POOL_GVISOR_PLATFORM = env.choice("POOL_GVISOR_PLATFORM")
# What the pool begins with, until a provider pushes its configuration. RAGFlow's names.
POOL_SIZE = env.number("SANDBOX_EXECUTOR_MANAGER_POOL_SIZE")
POOL_MEMORY = env.str("SANDBOX_MAX_MEMORY")
POOL_TIMEOUT = env.str("SANDBOX_TIMEOUT")
POOL_IMAGES = {
    "python": env.str("SANDBOX_BASE_PYTHON_IMAGE"),
    "nodejs": env.str("SANDBOX_BASE_NODEJS_IMAGE"),
}
