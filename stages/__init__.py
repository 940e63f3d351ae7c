"""The stages of a refit, one module each, and the pipeline that an owner uses by default.

``chunk`` → ``compare`` → ``project`` → ``convert`` run once per transition; what leaves ``convert`` is the pending
set. ``encode`` → ``bucket`` → ``compress`` run once per attempt.
"""

# The folder is reached through the link `dcr_stream/stages`. This parent-relative import makes importing it directly
# fail at once, instead of giving every class a second identity.
from .. import __version__ as _version  # noqa: F401, TID252  # pyright: ignore[reportMissingImports]

# isort: split
from dcr_stream.stages.bucket import bucket
from dcr_stream.stages.chunk import chunk
from dcr_stream.stages.compare import compare
from dcr_stream.stages.compress import compress
from dcr_stream.stages.convert import convert
from dcr_stream.stages.default import default_pipeline
from dcr_stream.stages.encode import encode
from dcr_stream.stages.project import project

__all__ = ["bucket", "chunk", "compare", "compress", "convert", "default_pipeline", "encode", "project"]
