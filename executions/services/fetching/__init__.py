"""Fetching files by URL for a tenant: `batch.fetch_files` is what others call.

Who asks is hostile, and so is who answers. The one wants to reach what only this machine reaches,
the other to hold or fill it. Each module stands against one of these: destinations.py says what may
be connected to, connection.py and budget.py bound what an answer may take, names.py what a file may
be called, slots.py what one tenant may hold.
"""
