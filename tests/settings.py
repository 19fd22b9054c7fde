"""The project's settings with keys and a data directory that live as long as the test run."""

import atexit
import os
import shutil
import tempfile

_data_dir = tempfile.mkdtemp(prefix="cofferdam-tests-")
atexit.register(shutil.rmtree, _data_dir, ignore_errors=True)

os.environ["ENV_FILE"] = os.devnull
os.environ["DATA_DIR"] = _data_dir
os.environ["SECRET_KEY"] = "a key for tests that is as long as Django wants its keys to be"
os.environ["FERNET_KEYS"] = "another key for tests that is as long as a key should be"
os.environ["LEDGER_KEYS"] = "YSBrZXkgdGhhdCBzaWducyB0aGUgdGVzdHMnIGxlZGc"
os.environ.pop("DEBUG", None)

from sandbox_site.settings import *  # noqa: E402, F403
from sandbox_site.settings import DATA_DIR, DATABASES  # noqa: E402

SANDBOX_LOCAL_PYTHON = ""
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
# A file, so that threads and child processes of a test see the same rows.
if DATABASES["default"]["ENGINE"].endswith("sqlite3"):
    DATABASES["default"]["TEST"] = {"NAME": str(DATA_DIR / "test.sqlite3")}
# The rows of a test are rolled back, what it notes in a file is not.
LEDGER_CHECKPOINTS = ""
# The services that tests start are on this machine.
PROVIDER_ALLOWED_NETWORKS = ["127.0.0.0/8", "::1"]
# The provider `probe` connects to nothing.
PROVIDER_PLAIN_HTTP = ["a", "b", "evil"]
