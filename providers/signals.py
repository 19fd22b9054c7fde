"""What the rest of the project may want to know of providers."""

from django.dispatch import Signal

# Sent inside the transaction of the change, with: config_id, provider_id, version, author, reason,
# diff (masked), content_hash. A receiver that raises keeps the change from being made.
configuration_changed = Signal()

# Sent before a configuration is tried out, with: provider_id, author, addresses (by field, none of
# them a secret), stored (whether it is the stored one). A receiver that raises prevents the try.
configuration_tried = Signal()
# Sent by `AnnouncedQuerySet` in the transaction of an UPDATE, before and after it, with: pks, and
# `before`, a dictionary in which a receiver keeps what it found of each row from the first to the
# second. The sender is the model.
rows_update = Signal()
rows_updated = Signal()
# The same of a row that `providers.guarded` knows, with: config_id, subject, version, author,
# approved_by, reason, diff, content_hash.
setting_changed = Signal()
