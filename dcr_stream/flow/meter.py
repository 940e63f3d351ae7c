"""How long a stage worked and how long it waited."""

from __future__ import annotations

from dcr_stream.interfaces import Clock

__all__ = ["Meter"]


class Meter:
    """Times and counts of one running stage; used from the event loop only.

    A stage *waits* while it is blocked on a channel and none of its worker calls is running; the rest of its life
    it is *busy*. Both add up to its wall time, whatever its number of workers.
    """

    def __init__(self, clock: Clock) -> None:
        self.items = 0
        self.nbytes = 0
        self._clock = clock
        self._began = clock.monotonic()
        self._waited = 0.0
        self._blocked = 0
        self._calls = 0
        self._idle_since: float | None = None

    def passed(self, nbytes: int) -> None:
        """One item of ``nbytes`` was passed on."""
        self.items += 1
        self.nbytes += nbytes

    def blocked(self, step: int) -> None:
        """A wait on a channel began (1) or ended (-1)."""
        self._blocked += step
        self._turn()

    def called(self, step: int) -> None:
        """A worker call began (1) or ended (-1)."""
        self._calls += step
        self._turn()

    def times(self) -> tuple[float, float]:
        """Seconds busy and seconds waited so far."""
        now = self._clock.monotonic()
        waited = self._waited + (now - self._idle_since if self._idle_since is not None else 0.0)
        return now - self._began - waited, waited

    def _turn(self) -> None:
        idle = self._blocked > 0 and self._calls == 0
        if idle and self._idle_since is None:
            self._idle_since = self._clock.monotonic()
        elif not idle and self._idle_since is not None:
            self._waited += self._clock.monotonic() - self._idle_since
            self._idle_since = None
