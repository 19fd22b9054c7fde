"""`GET /metrics`: figures for Prometheus, the same from whichever process is asked.

exposition.py writes the text, collecting.py reads the database, and access.py says who may read.
"""
