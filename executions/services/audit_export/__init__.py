"""Every entry of the ledger to a collector elsewhere: in order, and none left out.

events.py says an entry in OCSF, syslog.py and otlp.py carry a batch and know when it has arrived,
exporting.py moves the cursor in the database, and only then. So a collector that was away gets
everything from where it stopped, and may get some of it twice.
"""
