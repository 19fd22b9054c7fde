"""What the web server serves: Django's synchronous handler behind the bridge."""

# isort: off
# Loads the apps, which the rest needs.
from sandbox_site.wsgi import ApiHandler, application as handler

# isort: on
from django.conf import settings

from sandbox_site.web.admission import Limits
from sandbox_site.web.bridge import Bridge
from sandbox_site.web.places import most_connections

application = Bridge(
    handler,
    settings.WEB_THREADS,
    Limits(
        body_bytes=settings.SANDBOX_MAX_BODY_BYTES,
        spool_bytes=settings.WEB_SPOOL_MB * 1024 * 1024,
        body_seconds=settings.WEB_BODY_SECONDS,
        connections=most_connections(),
    ),
    ApiHandler(),
)
