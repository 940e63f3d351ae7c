"""Where commit records live."""

from dcr_stream.commit.sqlite import SqliteCommitStore

__all__ = ["SqliteCommitStore"]
