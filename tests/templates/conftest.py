from tests.support.template_images import long_wait_for_images as long_wait_for_images
from tests.support.templates import index as index
from tests.support.templates import resolver as resolver
