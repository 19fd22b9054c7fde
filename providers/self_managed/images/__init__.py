"""The sandboxes' images, and how `manage.py build_images` makes them."""
