"""Alerts: rules that are checked at intervals, their findings, and who is notified.

rules.py says what is checked. service.py opens and resolves alerts, sends them by mail and
webhook, and notes who has acknowledged them. What a tenant's code causes opens warnings of that
tenant alone, and only after it has happened several times. One rule has one open alert of one
subject, so that nobody can flood those who read them.
"""

from __future__ import annotations
