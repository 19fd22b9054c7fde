"""What the rest of the project may want to know of providers."""

from django.dispatch import Signal

# Sent inside the transaction of the change, with: config_id, provider_id, version, author, reason,
# diff (masked), content_hash. A receiver that raises keeps the change from being made.
configuration_changed = Signal()

# Sent by `AnnouncedQuerySet` in the transaction of an UPDATE, with: pks. The sender is the model.
rows_updated = Signal()
