"""The Django project: settings, URLs, the web server's configuration, starting and stopping."""
