"""Placement by tracing: element ids go through the native loader, and storage says where they landed."""

from dcr_stream.trace.cells import EnginePlacement, assign_cells
from dcr_stream.trace.placement import trace
from dcr_stream.trace.plan import (
    Box,
    Finding,
    Layout,
    PlacementPlan,
    StorageRange,
    TensorClass,
    TensorIdentity,
)
from dcr_stream.trace.storage import StorageMap

__all__ = [
    "Box",
    "EnginePlacement",
    "Finding",
    "Layout",
    "PlacementPlan",
    "StorageMap",
    "StorageRange",
    "TensorClass",
    "TensorIdentity",
    "assign_cells",
    "trace",
]
