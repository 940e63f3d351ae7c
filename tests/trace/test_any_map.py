"""Whatever a loader that only copies does with elements, tracing finds exactly that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dcr_stream.canonical import Indices
from dcr_stream.codec import words
from dcr_stream.loaders import TorchLoader
from dcr_stream.trace import trace
from tests.native_loader import directory_of

DTYPES = [torch.bfloat16, torch.float32, torch.uint8]


@dataclass
class Copy:
    """Elements ``source`` of a canonical tensor go to elements ``target`` of a parameter."""

    parameter: int
    source: Indices
    target: Indices


class Scatter(nn.Module):
    def __init__(self, sizes: list[tuple[torch.dtype, int]], copies: dict[str, list[Copy]], fill: Indices) -> None:
        super().__init__()
        self.p = nn.ParameterList(nn.Parameter(torch.ones(n).to(d), requires_grad=False) for d, n in sizes)
        self.copies, self.fill = copies, fill

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            bits = words(tensor)
            for copy in self.copies[name]:
                words(self.p[copy.parameter])[copy.target] = bits[copy.source]
        words(self.p[0])[self.fill] = 0


@st.composite
def scatters(draw: st.DrawFn) -> tuple[Scatter, dict[str, torch.Tensor]]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sizes = [(draw(st.sampled_from(DTYPES)), draw(st.integers(1, 60))) for _ in range(draw(st.integers(1, 3)))]
    weights: dict[str, torch.Tensor] = {}
    copies: dict[str, list[Copy]] = {}
    for i in range(draw(st.integers(1, 5))):
        parameter = draw(st.integers(0, len(sizes) - 1))
        dtype, size = sizes[parameter]
        numel = draw(st.integers(1, 40))
        name = f"t{i}"
        weights[name] = torch.zeros(numel).to(dtype)
        copies[name] = []
        for _ in range(draw(st.integers(0, 2))):
            count = draw(st.integers(1, min(numel, size)))
            if draw(st.booleans()):
                at, start = draw(st.integers(0, size - count)), draw(st.integers(0, numel - count))
                copies[name].append(Copy(parameter, np.arange(start, start + count), np.arange(at, at + count)))
            else:
                source = rng.integers(0, numel, count) if draw(st.booleans()) else rng.permutation(numel)[:count]
                copies[name].append(Copy(parameter, source, rng.permutation(size)[:count]))
    fill = rng.permutation(sizes[0][1])[: draw(st.integers(0, 3))]
    return Scatter(sizes, copies, fill), weights


@given(scatters())
@settings(max_examples=150)
def test_any_scatter_of_elements_is_found_exactly(case: tuple[Scatter, dict[str, torch.Tensor]]) -> None:
    model, weights = case
    directory = directory_of(weights)
    plan = trace(TorchLoader(model), directory)
    assert not plan.findings
    expected: set[tuple[str, int, int, int]] = set()
    writers: dict[tuple[int, int], set[tuple[str, int]]] = {}
    for name, listed in model.copies.items():
        held: dict[tuple[int, int], int] = {}
        for copy in listed:
            held.update(
                {(copy.parameter, t): s for s, t in zip(copy.source.tolist(), copy.target.tolist(), strict=True)}
            )
        for (parameter, target), source in held.items():
            if parameter or target not in model.fill:
                expected.add((name, source, parameter, target))
                writers.setdefault((parameter, target), set()).add((name, source))
    found: list[tuple[str, int, int, int]] = []
    for box in plan.boxes:
        pairs = zip(box.region.all_flat().tolist(), box.place.all_flat().tolist(), strict=True)
        found += [(directory[box.tensor].name, flat, box.storage, at) for flat, at in pairs]
    assert len(found) == len(set(found))
    assert set(found) == expected
    aliased = {name for who in writers.values() if len(who) > 1 for name, _ in who}
    assert {directory[t].name for t in plan.aliased} == aliased
