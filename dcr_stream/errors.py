"""Every error that dcr_stream raises on purpose.

::

    DcrError
    ├ UsageError                        wrong argument, URL or order of calls
    ├ TransportError (.retryable)
    │ ├ TransportUnavailable ├ TransportTimeout ├ PayloadRejected
    │ ├ AttemptFenced        └ AttemptAborted
    ├ PayloadError
    │ ├ SealMismatch ├ MalformedPayload ├ VersionMismatch └ DirectoryMismatch
    ├ CaptureError
    │ ├ RecordsAltered └ PendingSetFull
    ├ PlacementError
    │ ├ UntracedPath ├ UnplacedTensor └ LayoutChanged
    ├ ApplyError
    │ ├ LoaderConditionViolated └ DigestMismatch
    ├ StagingFull
    ├ CommitError
    │ ├ CommitConflict ├ CommitDeadlineExceeded ├ CommitRecordUnreadable └ CasUnsupported
    ├ GateError
    │ ├ GateClosed ├ DrainTimeout └ EngineHookFailed
    ├ ControlError
    │ ├ PeerLost ├ AuthenticationFailed ├ StaleEpoch └ ListenFailed
    └ TransitionFailed
      └ TransitionAbandoned

A message names what it is about (attempt, owner, tensor, payload) and ends with what to do.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "ApplyError",
    "AttemptAborted",
    "AttemptFenced",
    "AuthenticationFailed",
    "CaptureError",
    "CasUnsupported",
    "CommitConflict",
    "CommitDeadlineExceeded",
    "CommitError",
    "CommitRecordUnreadable",
    "ControlError",
    "DcrError",
    "DigestMismatch",
    "DirectoryMismatch",
    "DrainTimeout",
    "EngineHookFailed",
    "GateClosed",
    "GateError",
    "LayoutChanged",
    "ListenFailed",
    "LoaderConditionViolated",
    "MalformedPayload",
    "PayloadError",
    "PayloadRejected",
    "PeerLost",
    "PendingSetFull",
    "PlacementError",
    "RecordsAltered",
    "SealMismatch",
    "StagingFull",
    "StaleEpoch",
    "TransitionAbandoned",
    "TransitionFailed",
    "TransportError",
    "TransportTimeout",
    "TransportUnavailable",
    "UnplacedTensor",
    "UntracedPath",
    "UsageError",
    "VersionMismatch",
    "error_named",
]


class DcrError(Exception):
    """Base of every error raised on purpose by this library."""


class UsageError(DcrError, ValueError):
    """An argument, URL, file or order of calls that cannot work."""


class TransportError(DcrError):
    """Payloads could not be moved. ``retryable`` says whether the same call may succeed later."""

    retryable: ClassVar[bool] = False


class TransportUnavailable(TransportError):
    """The store or peer did not answer, or could not be reached."""

    retryable: ClassVar[bool] = True


class TransportTimeout(TransportError):
    """A bounded wait on the transport ran out."""

    retryable: ClassVar[bool] = True


class PayloadRejected(TransportError):
    """The transport refuses this payload (too large, or the same id with other bytes)."""


class AttemptFenced(TransportError):
    """The attempt was discarded; nothing sent on it can take effect any more."""


class AttemptAborted(TransportError):
    """An owner left, or the transport ended, before the attempt was complete."""


class PayloadError(DcrError):
    """A payload that must not be applied."""


class SealMismatch(PayloadError):
    """The seal does not belong to these bytes, or was made with another secret."""


class MalformedPayload(PayloadError):
    """The payload does not decode to exactly what its header declares, or exceeds a limit."""


class VersionMismatch(PayloadError):
    """The payload starts from, or leads to, another version than the receiver is at."""


class DirectoryMismatch(PayloadError):
    """The two sides disagree about names, dtypes or shapes of the canonical tensors."""


class CaptureError(DcrError):
    """The changed set could not be captured; trackers and baselines are unchanged."""


class RecordsAltered(CaptureError):
    """A stage lost, added or altered records between comparison and the pending set."""


class PendingSetFull(CaptureError):
    """Memory and spill budget of the pending set are used up."""


class PlacementError(DcrError):
    """The native loader's placement cannot be used as it is."""


class UntracedPath(PlacementError):
    """An operation needs a placement that was never traced or proved."""


class UnplacedTensor(PlacementError):
    """A canonical element is held by no rank of an engine and is not declared unplaced."""


class LayoutChanged(PlacementError):
    """Storage moved, or changed shape or strides, since it was traced."""


class ApplyError(DcrError):
    """Writing into the receiver failed; the receiver is dirty."""


class LoaderConditionViolated(ApplyError):
    """The native loader did something that its trace excludes."""


class DigestMismatch(ApplyError):
    """Storage read back after applying does not hold what the owner declared."""


class StagingFull(DcrError):
    """Staging budget and spill folder of a node are used up."""


class CommitError(DcrError):
    """The commit record could not be read or advanced."""


class CommitConflict(CommitError):
    """Somebody else changed the record: the compare-and-set was refused."""


class CommitDeadlineExceeded(CommitError):
    """The store did not answer in time; read the record back before concluding anything."""


class CommitRecordUnreadable(CommitError):
    """A record exists but cannot be read or verified. Never treated as a fresh start."""


class CasUnsupported(CommitError):
    """The backend accepts a stale conditional put; it cannot hold commit records."""


class GateError(DcrError):
    """The request gate could not do what was asked."""


class GateClosed(GateError):
    """A request waited for an open gate longer than it may."""


class DrainTimeout(GateError):
    """Requests were still running when the drain deadline passed."""


class EngineHookFailed(GateError):
    """``pause``, ``resume`` or ``invalidate_caches`` of an engine failed or ran out of time."""


class ControlError(DcrError):
    """The control plane between roles failed."""


class PeerLost(ControlError):
    """The other end of a control connection is gone."""


class AuthenticationFailed(ControlError):
    """A peer does not hold the run's secret, or a frame was altered or replayed."""


class StaleEpoch(ControlError):
    """A frame from a coordinator that has been replaced."""


class ListenFailed(ControlError):
    """An address cannot be listened on."""


class TransitionFailed(DcrError):
    """A transition did not commit; the committed version is unchanged."""


class TransitionAbandoned(TransitionFailed):
    """Every attempt of a transition failed; receivers are back on the committed version."""


def error_named(name: str, message: str) -> DcrError:
    """Build the error that a peer reported by class name; unknown names become ``DcrError``."""
    kind = globals().get(name)
    if isinstance(kind, type) and issubclass(kind, DcrError):
        return kind(message)
    return DcrError(f"{name}: {message}")
