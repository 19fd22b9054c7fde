"""Alerts: rules that a schedule looks at, what of them does not hold, and who is told.

rules.py says what is looked at, watching.py opens and resolves, sending.py tells by mail and
webhook, acknowledging.py notes who has taken it on. What a tenant's code brings about opens
warnings of that tenant alone, and not before it did so again and again (of_runs.py). One rule has
one open alert of one subject, so that nobody can flood whoever reads them.
"""
