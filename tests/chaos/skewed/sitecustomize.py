"""A clock that is minutes ahead, for every Python process that has this folder on PYTHONPATH.

Not libfaketime: with it `time.sleep` fails. The monotonic clock goes as it does.
"""

from __future__ import annotations

import datetime
import os
import time

from django.utils import timezone

_AHEAD = float(os.environ["CLOCK_AHEAD_SECONDS"])
_time, _now = time.time, timezone.now


def _time_ahead() -> float:
    return _time() + _AHEAD


def _now_ahead() -> datetime.datetime:
    return _now() + datetime.timedelta(seconds=_AHEAD)


time.time = _time_ahead
timezone.now = _now_ahead
