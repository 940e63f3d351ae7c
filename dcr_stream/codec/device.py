"""Words that live on a device: compared, changed and read back there with torch operations.

Only what changed crosses to the host, where it is coded as any other change: the bytes on the wire do not depend on
where words live. Torch has little arithmetic for unsigned integers, so words are signed there; sums and differences of
bits are the same modulo 2^w.

On a device of type ``cpu`` the same operations run on the host: that is how they are tested where there is no other
(:func:`is_host` then says no).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from dcr_stream.canonical import Indices, Region, Words, word_dtype
from dcr_stream.codec.boxes import copies, find
from dcr_stream.codec.digest import lane
from dcr_stream.codec.positions import encode_positions
from dcr_stream.delta import EntryMode, Positions, RemoteWords
from dcr_stream.errors import CaptureError

__all__ = ["DeviceWords", "gather", "is_host", "on_host", "wait_for"]

_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 22  # elements compared or gathered at a time


class DeviceWords(RemoteWords):
    """A flat array of words on a device. Slices are views; :func:`on_host` copies one to the host.

    Args:
        tensor: elements of 1, 2, 4 or 8 bytes, of any dtype; viewed if they are contiguous, else copied.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        stored = tensor.detach().resolve_conj().resolve_neg().view(_SIGNED[tensor.element_size()])
        self._words = stored.reshape(-1)

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

        On the device this needs a byte for each of the elements compared at a time (4 Mi), and for each that changed
        8 bytes and three words.

        Raises:
            CaptureError: ``live`` are other words than these: of another width or number, or elsewhere.
        """
        if not isinstance(live, DeviceWords) or live._what != self._what:
            found = live._what if isinstance(live, DeviceWords) else f"{live.size} words elsewhere"
            raise CaptureError(
                f"live weights were read as {found}, and their tracker holds {self._what}; where they live and what "
                "they are must not change within a run"
            )
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
        self._put("add", self._places(at), self._moved(differences))

    def write_box(
        self, region: Region, place: Region, mode: EntryMode, key: int, flat: Indices, values: Words
    ) -> tuple[int, ...]:
        """As :func:`dcr_stream.codec.boxes.write_box`, into these words."""
        for chosen, at in find(region, place, flat):
            self._put(mode, self._places(at), self._moved(values[chosen]))
        return self.sum_box(region, place, key, flat)

    def sum_box(self, region: Region, place: Region, key: int, flat: Indices) -> tuple[int, ...]:
        """As :func:`dcr_stream.codec.boxes.sum_box`, of these words as they are on the device now."""
        found = [lane(key, flat[chosen], self.at(at)) for chosen, at in find(region, place, flat)]
        return tuple(found) or (0,) * copies(region)

    def at(self, indices: Indices) -> Words:
        """The words at some indices, on the host."""
        found = np.empty(indices.size, self.dtype)
        for lo in range(0, indices.size, _BLOCK):
            some = indices[lo : lo + _BLOCK]
            found[lo : lo + some.size] = DeviceWords(self._words[self._places(some)]).host()
        return found

    def strided(self, region: Region) -> Words:
        """The words at a region, with its sizes: a copy on the host."""
        self._require_inside(region.offset, region.last)
        start = self._words.storage_offset() + region.offset
        found = self._words.as_strided(region.sizes, region.strides, start).contiguous()
        return found.to("cpu", copy=True).numpy().view(self.dtype)

    @property
    def _what(self) -> str:
        return f"{self.size} words of {self.itemsize} bytes on {self._words.device}"

    def _put(self, mode: EntryMode, at: torch.Tensor, values: torch.Tensor) -> None:
        if mode == "add":
            values = self._words[at] + values
        elif mode == "xor":
            values = self._words[at] ^ values
        self._words[at] = values

    def _places(self, at: Indices) -> torch.Tensor:
        """Indices on the device. Checked here: one beyond the end makes the device useless to this process."""
        if at.size:
            self._require_inside(int(at.min()), int(at.max()))
        return self._moved(at)

    def _require_inside(self, first: int, last: int) -> None:
        if not 0 <= first <= last < self.size:
            raise IndexError(f"elements {first} to {last} do not lie in {self._what}")

    def _moved(self, array: Words) -> torch.Tensor:
        """Indices or words on the device, words signed."""
        signed = np.array(array).view(f"i{array.itemsize}" if array.itemsize > 1 else "u1")
        return torch.from_numpy(signed).to(self._words.device)


def is_host(device: torch.device) -> bool:
    """Whether words on a device are the host's, for its own kernels to work on."""
    return device.type == "cpu"


def gather(words: Words | DeviceWords, at: Indices) -> Words:
    """The words at some indices, on the host."""
    return words.at(at) if isinstance(words, DeviceWords) else words[at]


def on_host(words: Words | RemoteWords) -> Words:
    """Words on the host: themselves, or a copy of those that live on a device."""
    return words.host() if isinstance(words, RemoteWords) else words


def wait_for(devices: Iterable[torch.device]) -> None:
    """Wait until devices have done all that they were told to, on every stream."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
