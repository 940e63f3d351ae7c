"""Words that live on a device: compared, changed and read back there with torch operations.

Only what changed crosses to the host, where it is coded as any other change: the bytes on the wire do not depend on
where words live. Torch has little arithmetic for unsigned integers, so words are signed there; sums and differences of
bits are the same modulo 2^w.

On a device of type ``cpu`` the same operations run on the host: that is how they are tested where there is no other
(:func:`is_host` then says no).
"""

from __future__ import annotations

import numpy as np
import torch

from dcr_stream.canonical import Indices, Region, Words, word_dtype
from dcr_stream.codec.boxes import copies, find
from dcr_stream.codec.digest import lane
from dcr_stream.codec.positions import encode_positions
from dcr_stream.delta import EntryMode, Positions, RemoteWords

__all__ = ["DeviceWords", "is_host", "on_host"]

_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 22  # elements compared at a time


class DeviceWords(RemoteWords):
    """A flat array of words on a device. Slices are views; :func:`on_host` copies one to the host.

    Args:
        tensor: contiguous elements of 1, 2, 4 or 8 bytes, of any dtype; viewed, not copied.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._words = tensor.detach().reshape(-1).view(_SIGNED[tensor.element_size()])

    @classmethod
    def of_bytes(cls, raw: torch.Tensor, width: int) -> DeviceWords:
        """Bytes on a device as words of ``width`` bytes."""
        return cls(raw.view(_SIGNED[width]))

    @property
    def itemsize(self) -> int:
        """Bytes of a word."""
        return self._words.element_size()

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """What the words are on the host."""
        return word_dtype(self.itemsize)

    @property
    def size(self) -> int:
        """Number of words."""
        return self._words.numel()

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.size * self.itemsize

    def __getitem__(self, some: slice) -> DeviceWords:
        return DeviceWords(self._words[some])

    def copy(self) -> DeviceWords:
        """A copy on the same device."""
        return DeviceWords(self._words.clone())

    def host(self) -> Words:
        """A copy on the host. Waits for what the current stream has still to write."""
        return self._words.to("cpu", copy=True).numpy().view(self.dtype)

    def changes_to(self, live: RemoteWords) -> tuple[Positions, Words, Words]:
        """Where ``live``, on the same device, differs: positions, differences modulo 2^w, and old bits, on the host.

        On the device this needs 8 bytes for each changed element, and a byte for each of the elements compared at a
        time (4 Mi).
        """
        assert isinstance(live, DeviceWords)
        where, differences, old = [], [], []
        for lo in range(0, self.size, _BLOCK):
            now, was = live._words[lo : lo + _BLOCK], self._words[lo : lo + _BLOCK]
            at = (now != was).nonzero().reshape(-1)
            was = was[at]
            where.append(at.cpu().numpy() + lo)
            differences.append(DeviceWords(now[at] - was).host())
            old.append(DeviceWords(was).host())
        indices = np.concatenate([np.empty(0, np.int64), *where])
        none = np.empty(0, self.dtype)
        return (
            encode_positions(indices, self.size),
            np.concatenate([none, *differences]),
            np.concatenate([none, *old]),
        )

    def add_at(self, at: Indices, differences: Words) -> None:
        """As :func:`dcr_stream.codec.boxes.add_at`."""
        self._put("add", self._moved(at), self._moved(differences))

    def write_box(
        self, region: Region, place: Region, mode: EntryMode, key: int, flat: Indices, values: Words
    ) -> tuple[int, ...]:
        """As :func:`dcr_stream.codec.boxes.write_box`, into these words."""
        for chosen, at in find(region, place, flat):
            self._put(mode, self._moved(at), self._moved(values[chosen]))
        return self.sum_box(region, place, key, flat)

    def sum_box(self, region: Region, place: Region, key: int, flat: Indices) -> tuple[int, ...]:
        """As :func:`dcr_stream.codec.boxes.sum_box`, of these words as they are on the device now."""
        found = [lane(key, flat[chosen], self.at(at)) for chosen, at in find(region, place, flat)]
        return tuple(found) or (0,) * copies(region)

    def at(self, indices: Indices) -> Words:
        """The words at some indices, on the host."""
        return DeviceWords(self._words[self._moved(indices)]).host()

    def _put(self, mode: EntryMode, at: torch.Tensor, values: torch.Tensor) -> None:
        if mode == "add":
            values = self._words[at] + values
        elif mode == "xor":
            values = self._words[at] ^ values
        self._words[at] = values

    def _moved(self, array: Words) -> torch.Tensor:
        """Indices or words on the device, words signed."""
        signed = np.array(array).view(f"i{array.itemsize}" if array.itemsize > 1 else "u1")
        return torch.from_numpy(signed).to(self._words.device)


def is_host(device: torch.device) -> bool:
    """Whether words on a device are the host's, for its own kernels to work on."""
    return device.type == "cpu"


def on_host(words: Words | RemoteWords) -> Words:
    """Words on the host: themselves, or a copy of those that live on a device."""
    return words.host() if isinstance(words, RemoteWords) else words
