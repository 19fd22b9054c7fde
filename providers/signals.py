"""What the rest of the project may want to know of providers."""

from django.dispatch import Signal

# Sent inside the transaction of the change, with: config_id, provider_id, version, author, reason,
# diff (masked), content_hash. A receiver that raises keeps the change from being made.
configuration_changed = Signal()

# The same of a row that `providers.guarded` knows, with: config_id, subject, version, author,
# approved_by, reason, diff, content_hash.
setting_changed = Signal()
