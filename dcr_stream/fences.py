"""What one role knows of fences: the highest epoch that it has seen, and the attempt floor of that epoch."""

from __future__ import annotations

from dcr_stream.errors import AttemptFenced, StaleEpoch
from dcr_stream.messages import Attempt

__all__ = ["Fences"]


class Fences:
    """Refuses coordinators that were replaced, and attempts that were given up. Only ever rises.

    A new epoch starts with its own floor: everything of the epochs before it is void anyway.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._epoch, self._floor = -1, 0

    def follow(self, epoch: int) -> None:
        """Obey a coordinator of ``epoch``.

        Raises:
            StaleEpoch: a later one was seen.
        """
        if epoch < self._epoch:
            raise StaleEpoch(
                f"{self._who} follows epoch {self._epoch}; the coordinator of epoch {epoch} was replaced and must stop"
            )
        if epoch > self._epoch:
            self._epoch, self._floor = epoch, 0

    def raise_floor(self, floor: int) -> None:
        """Attempts of this epoch below ``floor`` are void from now on."""
        self._floor = max(self._floor, floor)

    def check(self, attempt: Attempt) -> None:
        """Let an attempt pass that is not void.

        Raises:
            StaleEpoch: its coordinator was replaced.
            AttemptFenced: it was given up.
        """
        self.follow(attempt.epoch)
        if attempt.number < self._floor:
            raise AttemptFenced(f"attempt {attempt.name} is below the fence at {self._floor} of {self._who}")

    def void(self, attempt: Attempt) -> bool:
        """Whether nothing of ``attempt`` may take effect any more."""
        return (attempt.epoch, attempt.number) < (self._epoch, self._floor)
