"""The ``dcr-stream`` command. Commands import what they need when they run, so that ``--help`` is quick."""

from dcr_stream.cli.main import main

__all__ = ["main"]
