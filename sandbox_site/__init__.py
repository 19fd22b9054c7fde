"""The Django project: settings, URLs, the web server's configuration, starting and stopping."""

# The version of the service, and the only place that states it.
__version__ = "0.1.0"
