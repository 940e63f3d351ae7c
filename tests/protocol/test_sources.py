"""What owners publish: converted, frozen, tied, replicated and divided tensors, exact over refits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from dcr_stream import TorchLoader, TorchSource
from dcr_stream.canonical import Region, TensorDirectory, TensorSpec, Words
from dcr_stream.codec import dtype_name, words
from dcr_stream.delta import Segment, Task
from dcr_stream.errors import TransitionAbandoned, UsageError
from dcr_stream.interfaces import Source
from dcr_stream.loaders import StateDictLoader
from dcr_stream.sources import ResidualConversion
from dcr_stream.transports import MemoryTransport
from tests.native_loader import NativeConfig, NativeModel, equal_bits, load_dense, make_checkpoint, snapshot
from tests.protocol.faults import RecordingTransport, fail_always
from tests.protocol.harness import Weights, nudge, nudge_one, running

pytestmark = pytest.mark.anyio

Tensors = dict[str, torch.Tensor]


def conversions() -> list[ResidualConversion]:
    """A cast, ``w + 1``, and one output of two inputs."""

    def merged(t: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return {"merged": torch.cat([t["p"], t["q"]]).bfloat16(), "scale": (t["p"].sum() + t["q"].sum()).reshape(())}

    return [
        ResidualConversion(inputs=("w",), run=lambda t: {"w_cast": t["w"].bfloat16(), "w_one": t["w"] + 1}),
        ResidualConversion(inputs=("p", "q"), run=merged),
    ]


def published(live: Tensors) -> Tensors:
    """What the conversions make of the live tensors, by canonical name."""
    out = {"plain": live["plain"]}
    for conversion in conversions():
        out.update(conversion.run({name: live[name] for name in conversion.inputs}))
    return out


@pytest.mark.parametrize("replicas", [1, 2])
async def test_residual_conversions_are_exact_over_refits_and_unchanged_ones_are_not_sent(replicas: int) -> None:
    generator = torch.Generator().manual_seed(1)
    live = {name: torch.randn(40, generator=generator) for name in ("w", "p", "q", "plain")}
    sources = [TorchSource(live, rank=r, replicas=replicas, conversions=conversions()) for r in range(replicas)]
    transport = RecordingTransport(MemoryTransport())
    async with running(
        live=live, sources=sources, model=lambda: Weights(published(live)), transport=transport, nodes=["n0"]
    ) as run:
        model = run.rollouts["n0"].model

        def exact() -> None:
            for name, tensor in published(live).items():
                assert words(model.get_buffer(name)).tobytes() == words(tensor).tobytes(), name

        await run.refit()
        exact()
        directory = [spec.name for spec in sources[0].directory]
        for changed, sent in (("w", {"w_cast", "w_one"}), ("q", {"merged", "scale"}), ("plain", {"plain"})):
            with torch.no_grad():
                live[changed][::3] += 0.5
            transport.sent.clear()
            await run.refit()
            exact()
            assert {directory[item.tensor] for p in transport.sent for item in p.header.items} == sent
        # Below the precision of the cast: the source has changed, the canonical tensor has not.
        before = live["p"].clone(), live["w"].clone()
        live["w"][0] = torch.nextafter(live["w"][0], torch.tensor(9e9))
        await run.refit()
        exact()
        live["p"].add_(1)
        await run.refit()
        live["p"].copy_(before[0])
        live["w"].copy_(before[1])
        report = await run.refit()
        exact()
        assert report.elements > 0
        assert (await run.refit()).elements == 0


async def test_a_residual_change_that_is_abandoned_is_found_again() -> None:
    live = {"w": torch.randn(40), "p": torch.randn(4), "q": torch.randn(4), "plain": torch.randn(4)}
    source = TorchSource(live, conversions=conversions())
    async with running(live=live, sources=[source], model=lambda: Weights(published(live)), nodes=["n0"]) as run:
        await run.refit()
        live["w"][3] += 1
        run.rollouts["n0"].receiver.before = fail_always("begin")
        with pytest.raises(TransitionAbandoned):
            await run.refit()
        run.rollouts["n0"].receiver.before = lambda method: None
        assert (await run.refit()).elements == 2
        for name, tensor in published(live).items():
            assert words(run.rollouts["n0"].model.get_buffer(name)).tobytes() == words(tensor).tobytes(), name


async def test_fp32_masters_are_published_as_bf16_without_a_second_copy() -> None:
    live = {"a": torch.randn(300), "ids": torch.arange(9)}
    cast = {"a": live["a"].bfloat16(), "ids": live["ids"]}
    source = TorchSource(live, published_dtype=torch.bfloat16)
    async with running(live=live, sources=[source], model=lambda: Weights(cast), nodes=["n0"]) as run:
        model = run.rollouts["n0"].model
        for step in range(3):
            live["a"][step::7] *= 1.01
            live["ids"][step] += 1
            await run.refit()
            assert torch.equal(model.get_buffer("a").view(torch.int16), live["a"].bfloat16().view(torch.int16))
            assert torch.equal(model.get_buffer("ids"), live["ids"])
        assert run.owners[0].baseline_bytes == 300 * 2 + 9 * 8


async def test_frozen_tensors_cost_nothing_but_dense_refits_send_them() -> None:
    """B21: zero payload, zero baseline memory; a joiner gets them all the same."""
    live = {"frozen": torch.randn(5000), "moving": torch.randn(50)}
    transport = RecordingTransport(MemoryTransport())
    source = TorchSource(live, frozen=["frozen"])
    async with running(live=live, sources=[source], nodes=["n0"], transport=transport) as run:
        await run.refit()
        run.check_exact()
        assert run.owners[0].baseline_bytes == live["moving"].nbytes
        transport.sent.clear()
        nudge_one(live["moving"])
        report = await run.refit()
        assert report.scanned == 50
        assert [source.directory[i.tensor].name for p in transport.sent for i in p.header.items] == ["moving"]
        run.join("n1")
        await run.joined()
        assert await run.coordinator.restore_joiners() == 1
        run.check_exact(1)


async def test_a_frozen_tensor_that_is_cast_when_read_is_counted_as_memory() -> None:
    """B21: there is no live storage of the published bits to lean on."""
    live = {"frozen": torch.randn(500), "moving": torch.randn(50)}
    source = TorchSource(live, frozen=["frozen"], published_dtype=torch.bfloat16)
    model = Weights({name: t.bfloat16() for name, t in live.items()})
    async with running(live=live, sources=[source], nodes=["n0"], model=lambda: model) as run:
        await run.refit()
        assert run.owners[0].baseline_bytes == 2 * 550


@pytest.mark.parametrize("export_tied", [True, False])
async def test_tied_names_on_one_storage_are_overwritten_and_exact(export_tied: bool) -> None:
    """B1: both names reach one storage; adding a difference for each would add it twice."""
    config = NativeConfig(tied=True, export_tied=export_tied)
    live = make_checkpoint(1, config)
    transport = RecordingTransport(MemoryTransport())
    source = TorchSource(live)
    async with running(
        live=live,
        sources=[source],
        nodes=["n0"],
        transport=transport,
        model=lambda: NativeModel(config),
        loader=lambda model: TorchLoader(model),
    ) as run:
        for seed in range(3):
            if seed:
                nudge(live, seed)
                for name, tensor in live.items():
                    if name == "token_mask":
                        tensor.copy_(torch.arange(tensor.numel()) % (seed + 1) == 0)
                if export_tied:
                    live["lm_head.weight"].copy_(live["embed_tokens.weight"])
            transport.sent.clear()
            report = await run.refit()
            assert report.attempts == 1
            want = load_dense({name: t.clone() for name, t in live.items()}, config, 0, 1)
            assert equal_bits(snapshot(run.rollouts["n0"].model), snapshot(want))
            if seed:
                modes = {source.directory[i.tensor].name: i.mode for p in transport.sent for i in p.header.items}
                assert modes["layers.0.self_attn.q_proj.weight"] == "add"
                assert modes["embed_tokens.weight"] == ("overwrite" if export_tied else "add")


class Parts(Source):
    """An owner of some flat ranges of some tensors."""

    def __init__(self, live: Tensors, ranges: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        self._directory = TensorDirectory(
            TensorSpec(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in live.items()
        )
        self._tasks: list[Task] = []
        for name, pieces in ranges.items():
            for start, count in pieces:
                self._tasks.append(
                    Task(
                        key=f"{name}[{start}]",
                        numel=count,
                        dtype=dtype_name(live[name].dtype),
                        read=self._reader(live[name], start),
                        segments=(Segment(0, self._directory.index(name), Region.run(start, count)),),
                    )
                )

    @staticmethod
    def _reader(tensor: torch.Tensor, start: int) -> Callable[[int, int], Words]:
        return lambda lo, hi: words(tensor)[start + lo : start + hi]

    @property
    def directory(self) -> TensorDirectory:
        return self._directory

    def tasks(self) -> Sequence[Task]:
        return self._tasks


def two_tensors() -> Tensors:
    """A tensor to divide, and one beside it."""
    generator = torch.Generator().manual_seed(3)
    return {"norm": torch.randn(60, generator=generator).bfloat16(), "a": torch.randn(50, generator=generator)}


async def test_parts_of_several_owners_make_one_tensor() -> None:
    live = two_tensors()
    sources = [
        Parts(live, {"norm": [(0, 20), (40, 20)], "a": [(0, 50)]}),
        Parts(live, {"norm": [(20, 20)]}),
    ]
    async with running(live=live, sources=sources) as run:
        for seed in range(3):
            await run.refit()
            run.check_exact()
            nudge(live, seed, share=0.3)


async def test_owners_that_leave_a_hole_are_refused_naming_the_tensor() -> None:
    """B19, B20: every element has exactly one owner, or nothing is sent."""
    live = two_tensors()
    sources = [Parts(live, {"norm": [(0, 20)], "a": [(0, 50)]}), Parts(live, {"norm": [(25, 35)]})]
    async with running(live=live, sources=sources) as run:
        with pytest.raises(UsageError, match="'norm': 5 of 60 elements have no owner"):
            await run.refit()
        assert run.coordinator.version == -1


async def test_owners_that_overlap_in_part_are_refused_naming_both() -> None:
    live = two_tensors()
    sources = [Parts(live, {"norm": [(0, 40)], "a": [(0, 50)]}), Parts(live, {"norm": [(20, 40)]})]
    async with running(live=live, sources=sources) as run:
        with pytest.raises(UsageError, match=r"'norm': 20 elements are published more than once \(by o0, o1\)"):
            await run.refit()


async def test_a_name_published_by_two_owners_with_equal_bits_is_sent_once() -> None:
    """B3: a replicated parameter."""
    live = two_tensors()
    sources = [TorchSource(live), TorchSource(live)]
    transport = RecordingTransport(MemoryTransport())
    async with running(live=live, sources=sources, transport=transport) as run:
        for seed in range(3):
            transport.sent.clear()
            report = await run.refit()
            assert report.attempts == 1
            assert {p.header.owner for p in transport.sent} <= {"o0"}
            run.check_exact()
            nudge(live, seed)
        run.join("n2")
        await run.joined()
        assert await run.coordinator.restore_joiners() == 1
        run.check_exact()


async def test_a_name_published_by_two_owners_with_different_bits_is_refused() -> None:
    """B3: replicas that have drifted apart: an error naming both, and nothing has changed."""
    live = two_tensors()
    twin = {name: t.clone() for name, t in live.items()}
    async with running(live=live, sources=[TorchSource(live), TorchSource(twin)]) as run:
        await run.refit()
        nudge_one(live["a"])
        with pytest.raises(UsageError, match=r"owners o0 and o1 publish 'a' with different bits"):
            await run.refit()
        assert run.coordinator.version == 0
        run.check_exact(0)
        assert run.serving() == [0, 0]
        nudge_one(twin["a"])
        assert (await run.refit()).version == 1
        run.check_exact()


class Composed(torch.nn.Module):
    """Holds ``norm + 1``, which its loader computes, and ``a`` as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("norm_one", torch.zeros(60, dtype=torch.bfloat16))
        self.register_buffer("a", torch.zeros(50))

    def load_weights(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        """The native loader."""
        for name, tensor in weights:
            if name == "norm":
                self.get_buffer("norm_one").copy_(tensor + 1)
            else:
                self.get_buffer(name).copy_(tensor)


def composed_bits(live: Tensors) -> dict[str, bytes]:
    """What a dense load of the live tensors would leave."""
    return {"norm_one": words(live["norm"] + 1).tobytes(), "a": words(live["a"]).tobytes()}


async def test_a_tensor_that_the_loader_computes_with_goes_whole_and_is_exact() -> None:
    """Its parts come from two owners and are put together on the node."""
    live = two_tensors()
    sources = [Parts(live, {"norm": [(0, 20)], "a": [(0, 50)]}), Parts(live, {"norm": [(20, 40)]})]
    transport = RecordingTransport(MemoryTransport())
    async with running(
        live=live, sources=sources, transport=transport, model=Composed, loader=lambda model: TorchLoader(model)
    ) as run:
        await run.refit()
        for seed in range(4):
            nudge_one(live["norm"], 3 * seed)
            if seed % 2:
                nudge_one(live["a"], seed)
            transport.sent.clear()
            report = await run.refit("sync" if seed > 1 else "async")
            assert (report.attempts, report.kind) == (1, "delta")
            for rollout in run.rollouts.values():
                assert rollout.bits() == composed_bits(live)
                assert rollout.receiver.calls.count("load_whole") == seed + 1
        nudge_one(live["a"], 30)
        await run.refit()
        assert all(r.receiver.calls.count("load_whole") == 4 for r in run.rollouts.values())


async def test_a_whole_tensor_that_comes_incomplete_is_refused_before_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    live = two_tensors()
    sources = [Parts(live, {"norm": [(0, 20)], "a": [(0, 50)]}), Parts(live, {"norm": [(20, 40)]})]
    async with running(live=live, sources=sources, model=Composed, loader=lambda model: TorchLoader(model)) as run:
        await run.refit()
        before = composed_bits(live)
        nudge_one(live["norm"], 3)
        whole = run.owners[1]._parts
        with monkeypatch.context() as patch:
            patch.setattr(run.owners[1], "_parts", whole[:0])
            with pytest.raises(TransitionAbandoned, match="whole tensors came incomplete: norm"):
                await run.refit()
        for rollout in run.rollouts.values():
            assert rollout.receiver.calls.count("load_whole") == 0
            assert rollout.bits() == before
        await run.refit()
        assert all(rollout.bits() == composed_bits(live) for rollout in run.rollouts.values())


async def test_giving_up_brings_whole_tensors_back_too() -> None:
    """One engine has loaded the new whole tensor when the other fails for good: it gets the old one again."""
    live = two_tensors()
    sources = [Parts(live, {"norm": [(0, 20)], "a": [(0, 50)]}), Parts(live, {"norm": [(20, 40)]})]
    async with running(live=live, sources=sources, model=Composed, loader=lambda model: TorchLoader(model)) as run:
        await run.refit()
        before = composed_bits(live)
        nudge_one(live["norm"], 3)
        nudge_one(live["norm"], 33)
        nudge_one(live["a"], 3)
        left = 3
        receiver = run.rollouts["n1"].receiver

        def fail(method: str) -> None:
            nonlocal left
            if method == "load_whole" and left:
                left -= 1
                raise RuntimeError("no memory")

        receiver.before = fail
        with pytest.raises(TransitionAbandoned):
            await run.refit()
        assert run.rollouts["n0"].receiver.calls.count("load_whole") > 1
        for rollout in run.rollouts.values():
            assert rollout.bits() == before
            assert rollout.receiver.calls.count("load_begin") == 1
        assert run.serving() == [0, 0]
        await run.refit()
        assert all(rollout.bits() == composed_bits(live) for rollout in run.rollouts.values())


async def test_a_source_whose_tensors_are_swapped_is_read_where_they_are_now() -> None:
    """An optimizer that replaces ``param.data`` would otherwise never be seen to change anything."""
    model = torch.nn.Linear(6, 5, bias=False)
    served = torch.nn.Linear(6, 5, bias=False)
    async with running(
        live={"weight": model.weight.detach()},
        sources=[TorchSource(model)],
        nodes=["n0"],
        model=lambda: served,
        loader=lambda module: StateDictLoader(module),
    ) as run:
        await run.refit()
        model.weight.data = model.weight.data + 1
        await run.refit()
        assert torch.equal(served.weight, model.weight)
