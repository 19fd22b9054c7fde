from tests.support.templates import index as index
from tests.support.templates import resolver as resolver
