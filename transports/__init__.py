"""The ways for payloads to travel that come with the package, and how to find others by URL."""

# The folder is reached through the link `dcr_stream/transports`. This parent-relative import makes importing it
# directly fail at once, instead of giving every class a second identity.
from .. import __version__ as _version  # noqa: F401, TID252  # pyright: ignore[reportMissingImports]

# isort: split
from dcr_stream.transports.memory import MemoryTransport
from dcr_stream.transports.object_store import ObjectStoreTransport
from dcr_stream.transports.registry import open_transport

__all__ = ["MemoryTransport", "ObjectStoreTransport", "open_transport"]
