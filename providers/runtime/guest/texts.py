"""The runners that are no Python modules, as texts: a container has no file of ours.

Whoever packs the guest fills them in (launchers/guest_files.py).
"""

TEXTS: "dict[str, str]" = {}
