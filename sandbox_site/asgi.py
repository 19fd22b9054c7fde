"""What the web server serves: Django's synchronous handler behind the bridge."""

import os

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sandbox_site.settings")

handler = get_wsgi_application()

from django.conf import settings  # noqa: E402

from sandbox_site.web.admission import Limits  # noqa: E402
from sandbox_site.web.bridge import Bridge  # noqa: E402
from sandbox_site.web.handlers import ApiHandler  # noqa: E402
from sandbox_site.web.places import most_connections  # noqa: E402

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
