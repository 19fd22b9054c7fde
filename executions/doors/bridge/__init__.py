"""The bridge: `manage.py code_exec`, by which a program in another language runs code here.

A thin translation, as the API is: requests of one shape in, answers of one shape out.
"""

from __future__ import annotations
