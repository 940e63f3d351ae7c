"""The devices that tests of the device path run on."""

from __future__ import annotations

import pytest
import torch

__all__ = ["DEVICES", "take_for_a_device"]

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")),
]
"""``cpu`` runs the same torch operations on the host."""


def take_for_a_device(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Let the library treat a device as one that is not the host, even if it is."""
    for user in ("sources.torch_source", "trace.storage"):
        monkeypatch.setattr(f"dcr_stream.{user}.is_host", lambda found: found.type not in (device, "cuda"))
