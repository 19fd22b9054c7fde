from __future__ import annotations

from executions.runs.models import Execution


class Thread(Execution):
    """An execution that names a conversation, in the place of all of that conversation.

    Nothing of its own is stored: a thread is the executions of a tenant that name the same one.
    """

    class Meta:
        proxy = True
        default_permissions = ()
        ordering = ("-id",)
