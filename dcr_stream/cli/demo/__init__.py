"""The demonstration: a real model, trained and served by real processes, refitted while it answers requests.

Modules are imported one by one, because each process of the demonstration needs only a few of them.
"""
