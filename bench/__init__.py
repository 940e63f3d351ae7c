"""Benchmarks: one file per question, run as ``python -m bench.NAME [--quick] [--json]``."""
