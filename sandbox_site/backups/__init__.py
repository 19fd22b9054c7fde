"""`manage.py backup` and `restore`: the embedded database and the data directory as one file."""
