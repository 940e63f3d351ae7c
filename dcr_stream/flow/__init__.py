"""Asyncio stages joined by channels that are bounded by items and bytes.

``|`` joins stages into a flat ``Pipeline``; ``execute`` feeds it and delivers what leaves it. A stage's output ends
only when the stage returns cleanly, so a failure can never look like the end of the data.
"""

from dcr_stream.flow.channel import Inlet, Limits, Outlet
from dcr_stream.flow.execute import execute
from dcr_stream.flow.lift import Fold, each, expand, fold
from dcr_stream.flow.stage import Pipeline, Stage
from dcr_stream.flow.surroundings import in_worker
from dcr_stream.flow.tasks import task_group

__all__ = [
    "Fold",
    "Inlet",
    "Limits",
    "Outlet",
    "Pipeline",
    "Stage",
    "each",
    "execute",
    "expand",
    "fold",
    "in_worker",
    "task_group",
]
