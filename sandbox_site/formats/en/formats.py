"""Times as every list and page has them: to the second, with the zone, sorted as they are read."""

DATETIME_FORMAT = "Y-m-d H:i:s T"
DATE_FORMAT = "Y-m-d"
TIME_FORMAT = "H:i:s"
