"""Buckets → framed buckets, ready to be sealed."""

from __future__ import annotations

from functools import partial

from dcr_stream.codec.wire import frame_bucket
from dcr_stream.delta import Bucket, CodedBucket
from dcr_stream.errors import UsageError
from dcr_stream.flow import Stage, each
from dcr_stream.flow.arguments import check_at_least

__all__ = ["MAX_LEVEL", "compress"]

MAX_LEVEL = 19
"""Highest zstd level: beyond it the window exceeds what receivers accept (``dcr_stream.codec.wire.MAX_WINDOW``)."""


def compress(*, level: int = 1, workers: int = 1) -> Stage[Bucket, CodedBucket]:
    """Frame every column of each bucket with zstd at ``level``, or raw where that is not larger.

    Args:
        level: 1 (fastest) to 19. On weight changes higher levels cost much and gain little.
        workers: buckets compressed at the same time.

    Raises:
        UsageError: an argument is out of range.
    """
    check_at_least("compress", "level", level, 1)
    check_at_least("compress", "workers", workers, 1)
    if level > MAX_LEVEL:
        raise UsageError(f"compress: level={level} is too large; give 1 to {MAX_LEVEL}")
    return each(partial(frame_bucket, level=level), workers=workers, name="compress")
