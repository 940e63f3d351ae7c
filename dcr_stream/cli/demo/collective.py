"""Sums over the ranks of a small group: gloo on the loopback interface, rendezvous through a file."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Protocol, cast

import torch
from torch.distributed import FileStore, ProcessGroupGloo  # type: ignore[attr-defined]

from dcr_stream.errors import PeerLost

__all__ = ["Collective"]


class _Work(Protocol):
    def wait(self) -> object: ...


class _Group(Protocol):
    # Exists at run time; torch's stubs leave it out.
    def allreduce(self, tensors: list[torch.Tensor]) -> _Work: ...


class Collective:
    """All-reduce among ``world`` ranks, in one process or in several. Nothing listens beyond the loopback interface.

    With two ranks a sum has one order of additions, so all ranks get the same bits, and the same bits every time.

    Args:
        store: path of the rendezvous file; it must not exist before the first rank of the group arrives.
        rank, world: this rank among all.
        timeout_s: bound on the rendezvous and on each sum. A peer that dies is noticed at once.

    Raises:
        PeerLost: not every rank arrived in time.
    """

    def __init__(self, store: Path, rank: int, world: int, *, timeout_s: float = 10.0) -> None:
        self.rank = rank
        self.world = world
        self._group: _Group | None = None
        if world == 1:
            return
        # gloo would otherwise listen on the address of the host's name.
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        try:
            group = ProcessGroupGloo(FileStore(str(store), world), rank, world, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise PeerLost(
                f"rank {rank} of {world} could not meet its peers at {store}; start every rank of the group"
            ) from error
        self._group = cast("_Group", group)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace ``tensor`` (contiguous) by the sum over all ranks, and return it.

        Raises:
            PeerLost: another rank died or did not take part in time.
        """
        if self._group is not None:
            try:
                self._group.allreduce([tensor]).wait()
            except RuntimeError as error:
                raise PeerLost(
                    f"a peer of rank {self.rank} of {self.world} left during an all-reduce; restart the group"
                ) from error
        return tensor

    def agree(self, ok: bool) -> bool:
        """Whether every rank says ``ok``; a collective call."""
        return int(self.all_reduce(torch.tensor([int(ok)])).item()) == self.world
