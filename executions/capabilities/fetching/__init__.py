"""Fetching files by URL for a tenant: `service.fetch_files` is what others call.

The tenant may be hostile, and so may the server that answers. The tenant wants to reach what only
this machine reaches, the server wants to hold or fill it. executions/kernel/http.py says what
may be connected to and bounds what an answer may take, filenames.py says what a file may be called,
and service.py bounds what one tenant may hold.
"""

from __future__ import annotations
