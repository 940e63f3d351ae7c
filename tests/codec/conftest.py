"""Every test of the codec runs twice: on the compiled kernels and on their numpy references."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dcr_stream.codec.kernels import Implementation, using


@pytest.fixture(autouse=True, scope="module", params=["numba", "numpy"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Implementation]:
    """The implementation in use."""
    name: Implementation = request.param
    if name == "numba":
        pytest.importorskip("numba", exc_type=ImportError)
    with using(name):
        yield name
