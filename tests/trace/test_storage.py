"""Storage ranges and the identity that is checked before every apply."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from dcr_stream.errors import LayoutChanged, PlacementError
from dcr_stream.loaders import TorchLoader
from dcr_stream.trace import StorageMap
from tests.native_loader import NativeConfig, NativeModel, torch_loader


def module_of(**tensors: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def map_of(module: nn.Module) -> StorageMap:
    return StorageMap(TorchLoader(module, load_weights=list))


def test_aliases_and_views_are_one_storage() -> None:
    base = torch.zeros(4, 6)
    storage = map_of(module_of(a=base, b=base, c=base[1:, ::2], d=base.view(torch.int32), e=torch.zeros(3)))
    assert len(storage) == 2
    assert storage.names(0) == ("a", "b", "c", "d")
    assert [s.nbytes for s in storage.identity().storages] == [96, 12]


def test_tied_parameters_are_listed_under_both_names() -> None:
    storage = StorageMap(torch_loader(NativeModel(NativeConfig(layers=1, tied=True))))
    names = {t.name for t in storage.identity().tensors}
    assert {"embed_tokens", "lm_head"} <= names


def test_words_are_the_storage_itself_at_any_width() -> None:
    held = torch.arange(6, dtype=torch.int32)
    storage = map_of(module_of(a=held[2:4]))
    for width in (1, 2, 4, 8):
        assert storage.words(0, width).size == 24 // width
    storage.words(0, 2)[4] = 0xFFFF
    assert held[2] == 0x0000_FFFF


def test_a_storage_that_ends_within_a_word_has_only_whole_words() -> None:
    assert map_of(module_of(a=torch.zeros(7, dtype=torch.uint8))).words(0, 4).size == 1


def test_zero_dim_and_empty_tensors_have_an_identity() -> None:
    storage = map_of(module_of(a=torch.tensor(1.0), b=torch.zeros(0, 3)))
    storage.check(storage.identity())
    assert len(storage) == 1


def test_an_unchanged_layout_passes_however_often_values_change() -> None:
    """D12: refits write in place, so every ``data_ptr`` stays what it was."""
    module = module_of(a=torch.zeros(4))
    storage = map_of(module)
    module.get_buffer("a").fill_(3)
    storage.check(storage.identity())


@pytest.mark.parametrize("change", ["moved", "reshaped", "restrided", "cast", "gone", "new"])
def test_a_changed_layout_names_the_tensor(change: str) -> None:
    module = module_of(other=torch.zeros(2), a=torch.zeros(2, 3))
    storage = map_of(module)
    before = module.get_buffer("a")
    if change == "moved":
        module.a = before.clone()
    elif change == "reshaped":
        module.a = before.view(3, 2)
    elif change == "restrided":
        module.a = before.as_strided((2, 3), (1, 2))
    elif change == "cast":
        module.a = before.view(torch.int32)
    elif change == "gone":
        del module.a
    else:
        module.register_buffer("added", torch.zeros(1))
    with pytest.raises(LayoutChanged, match="'added'" if change == "new" else "'a'"):
        storage.check(storage.identity())


def test_a_freed_address_cannot_come_back_as_the_same_layout() -> None:
    module = module_of(a=torch.zeros(1000))
    storage = map_of(module)
    for _ in range(8):
        module.a = torch.zeros(1000)
        with pytest.raises(LayoutChanged):
            storage.check(storage.identity())


def test_overlapping_storages_are_refused() -> None:
    memory = np.zeros(64, np.uint8)
    module = module_of(a=torch.from_numpy(memory[:40]), b=torch.from_numpy(memory[32:]))
    with pytest.raises(PlacementError, match="'a' and 'b' overlap"):
        map_of(module)


def test_storage_that_is_no_host_memory_is_refused_by_name() -> None:
    with pytest.raises(PlacementError, match=r"'a'.*meta"):
        map_of(module_of(a=torch.zeros(2, device="meta")))
