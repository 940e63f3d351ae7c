"""The pipeline of an owner that was given none."""

from __future__ import annotations

from dcr_stream.delta import CodedBucket, Shard
from dcr_stream.flow import Pipeline
from dcr_stream.stages.bucket import bucket
from dcr_stream.stages.chunk import chunk
from dcr_stream.stages.compare import compare
from dcr_stream.stages.compress import compress
from dcr_stream.stages.convert import convert
from dcr_stream.stages.encode import encode
from dcr_stream.stages.project import project

__all__ = ["default_pipeline"]


def default_pipeline() -> Pipeline[Shard, CodedBucket]:
    """All stages in their order, with their default arguments and two workers where work is per element."""
    return chunk() | compare(workers=2) | project() | convert() | encode(workers=2) | bucket() | compress(workers=2)
