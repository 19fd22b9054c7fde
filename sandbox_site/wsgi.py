"""Django's handlers: one for everything, and one for programs."""

import os

from django.conf import settings
from django.core.handlers.wsgi import WSGIHandler
from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sandbox_site.settings")

application = get_wsgi_application()


class ApiHandler(WSGIHandler):
    """Django with the middleware of API_MIDDLEWARE.

    It is for requests of the API without a cookie. They have no session, so nothing that they pass
    otherwise would do anything: sessions, accounts, forms, static files.
    """

    def load_middleware(self, is_async: bool = False) -> None:
        """Load it once, as the process starts and before a thread handles a request."""
        of_pages = settings.MIDDLEWARE
        # Django has one list for all handlers of a process.
        settings.MIDDLEWARE = settings.API_MIDDLEWARE
        try:
            super().load_middleware(is_async)
        finally:
            settings.MIDDLEWARE = of_pages
