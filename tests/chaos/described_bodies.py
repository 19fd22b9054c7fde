"""Bodies that schemathesis cannot make by itself. It loads this."""

from __future__ import annotations

import schemathesis
from hypothesis import strategies

schemathesis.openapi.media_type("application/x-tar", strategies.binary(max_size=2048))
