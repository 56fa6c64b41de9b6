"""A block as one contiguous run of bytes: what host and disk keep. Knows neither pools nor tiers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import numpy as np
import torch

from engine.config import ColdDtype

LEAST_PER_THREAD = 2  # blocks; one alone is copied sooner than a second thread wakes up
TINY = torch.finfo(torch.float32).tiny

Bytes: TypeAlias = "np.ndarray | torch.Tensor"  # an array where both ends are in RAM

Tensor = torch.Tensor  # for those who hand images and pools on, and need nothing else of torch


class ImageCodec:
    """Copies blocks of one shape and dtype out of a pool into *block images*, and back.

    The pool's data is `[layers, 2, blocks, block_size, kv_heads, head_dim]`; index 0 of the second axis is K, 1 is V.
    It is handed in at every call and never kept. An image is a one-dimensional uint8 tensor of `size` bytes in RAM, in
    the machine's byte order, and laid out as `cold_dtype` says:

    - auto: `[layers, 2, block_size, kv_heads, head_dim]` in the pool's dtype, the very bytes.
    - int8: float32 scales `[layers, 2, block_size, kv_heads]`, then int8 `[layers, 2, block_size, kv_heads, head_dim]`.
      A head's vector at a token is its scale, a 127th of its greatest magnitude, times whole numbers from -127 to 127.
      One that holds NaN or infinity comes back as NaN throughout, and no other is touched by it. What has come back
      once is stored and loaded again without further loss.

    In RAM a copy is done when the call returns. To or from CUDA it may only be queued, on the current stream: whoever
    reads or reuses either side waits for the stream first (`copies`). There an image is put together on the device, and
    crosses in one piece. Every method raises `ValueError` for a pool or an image that is not of this codec's shape.
    """

    def __init__(  # noqa: PLR0917 - the order of the tensor's axes
        self, layers: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, cold_dtype: ColdDtype
    ) -> None:
        self.shape, self.dtype = (layers, 2, block_size, kv_heads, head_dim), dtype
        self.lossy = cold_dtype == "int8"
        vectors = layers * 2 * block_size * kv_heads
        self._scales = 4 * vectors if self.lossy else 0  # their bytes
        self.size = self._scales + vectors * head_dim * (1 if self.lossy else dtype.itemsize)
        self._threads = ThreadPoolExecutor(thread_name_prefix="block-copy")

    def store(self, pool_data: torch.Tensor, slot: int, into: torch.Tensor, tokens: int | None = None) -> None:
        """Make `into` the image of block `slot`.

        With `tokens`, only its first so many go in and the rest is zeros: what else the slot has held stays behind.
        """
        self._check(pool_data, [into])
        image = into if pool_data.is_cpu else torch.empty_like(into, device=pool_data.device)
        if tokens is not None and tokens < self.shape[2]:
            _clear(image)
        if self.lossy:
            self._quantize(pool_data, slot, image, tokens)
        else:
            _copy_each((exact, block) for block, exact in self._pairs(pool_data, [slot], [image], tokens))
        if image is not into:
            into.copy_(image, non_blocking=image.is_cuda)  # MPS would not say when it has ended

    def load(self, image: torch.Tensor, pool_data: torch.Tensor, slot: int, tokens: int | None = None) -> None:
        """Fill block `slot` from an image; with `tokens`, only its first so many, and the others stay as they are."""
        self._check(pool_data, [image])
        image = image.to(pool_data.device, non_blocking=pool_data.is_cuda)
        if self.lossy:
            self._restore(image, pool_data, slot, tokens)
        else:
            _copy_each(self._pairs(pool_data, [slot], [image], tokens))

    def store_many(self, pool_data: torch.Tensor, slots: Sequence[int], into: Sequence[torch.Tensor]) -> None:
        """`store` for whole blocks, one into each image, with as many threads as torch may use."""
        if self.lossy or not pool_data.is_cpu:
            for slot, image in zip(slots, into, strict=True):
                self.store(pool_data, slot, image)
            return
        self._check(pool_data, into)
        self._copy_all([(image, block) for block, image in self._pairs(pool_data, slots, into)])

    def load_many(self, images: Sequence[torch.Tensor], pool_data: torch.Tensor, slots: Sequence[int]) -> None:
        """`load` for whole blocks, one from each image, with as many threads as torch may use."""
        if self.lossy or not pool_data.is_cpu:
            for slot, image in zip(slots, images, strict=True):
                self.load(image, pool_data, slot)
            return
        self._check(pool_data, images)
        self._copy_all(list(self._pairs(pool_data, slots, images)))

    # --- the very bytes ---------------------------------------------------------------------------------------------

    def _pairs(
        self, pool_data: torch.Tensor, slots: Sequence[int], images: Sequence[torch.Tensor], tokens: int | None = None
    ) -> Iterator[tuple[Bytes, Bytes]]:
        """Each block with its image, as bytes `[layers, 2, tokens, kv_heads, head_dim * bytes a value]`.

        In RAM they are numpy's: it copies at the speed of memcpy and in this thread alone, where torch wakes all of
        its threads for every block and waits for the last: many times as long, wherever the cores have other work.
        """
        shape, in_ram = (*self.shape[:4], -1), pool_data.is_cpu
        blocks: Bytes = pool_data.view(torch.uint8).numpy() if in_ram else pool_data.view(torch.uint8)
        for slot, image in zip(slots, images, strict=True):
            exact: Bytes = image.numpy() if in_ram else image
            yield blocks[:, :, slot, :tokens], exact.reshape(shape)[:, :, :tokens]

    def _copy_all(self, copies: Sequence[tuple[Bytes, Bytes]]) -> None:
        """Copy each second to its first, in parts of about the same size."""
        parts = min(torch.get_num_threads(), len(copies) // LEAST_PER_THREAD)
        if parts > 1:
            list(self._threads.map(_copy_each, [copies[part::parts] for part in range(parts)]))
        else:
            _copy_each(copies)

    # --- int8 -------------------------------------------------------------------------------------------------------

    def _quantize(self, pool_data: torch.Tensor, slot: int, into: torch.Tensor, tokens: int | None) -> None:
        values = pool_data[:, :, slot, :tokens].to(torch.float32, copy=True)
        scale = values.abs().amax(-1) / 127
        # What is no number becomes 0, and 0 times a scale that is none is NaN.
        whole = values.div_(scale.clamp_min(TINY).unsqueeze(-1)).round_().nan_to_num_(0).to(torch.int8)
        for target, source in zip(self._parts(into, tokens), (scale, whole), strict=True):
            _copy(target, source)

    def _restore(self, image: torch.Tensor, pool_data: torch.Tensor, slot: int, tokens: int | None) -> None:
        scale, whole = self._parts(image, tokens)
        pool_data[:, :, slot, :tokens].copy_(whole.float() * scale.unsqueeze(-1))

    def _parts(self, image: torch.Tensor, tokens: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales `[layers, 2, tokens, kv_heads]` and whole numbers `[layers, 2, tokens, kv_heads, head_dim]`."""
        scales = image[: self._scales].view(torch.float32).view(self.shape[:4])
        return scales[:, :, :tokens], image[self._scales :].view(torch.int8).view(self.shape)[:, :, :tokens]

    # --- both -------------------------------------------------------------------------------------------------------

    def _check(self, pool_data: torch.Tensor, images: Sequence[torch.Tensor]) -> None:
        shape = (*pool_data.shape[:2], *pool_data.shape[3:])
        if shape != self.shape or pool_data.dtype != self.dtype:
            raise ValueError(f"a pool of {shape}, {pool_data.dtype} has no images of {self.shape}, {self.dtype}")
        for image in images:
            if image.dtype != torch.uint8 or image.shape != (self.size,):
                raise ValueError(f"{list(image.shape)} of {image.dtype} is no image of {self.size} bytes")


def _copy_each(copies: Iterable[tuple[Bytes, Bytes]]) -> None:
    for target, source in copies:
        _copy(target, source)


def _clear(image: torch.Tensor) -> None:
    """Zeros throughout; in RAM by numpy, for the same reason as copies."""
    if image.is_cpu:
        image.numpy().fill(0)
    else:
        image.zero_()


def _copy(target: Bytes, source: Bytes) -> None:
    if isinstance(target, torch.Tensor) and isinstance(source, torch.Tensor):
        target.copy_(source)
    elif isinstance(target, np.ndarray):
        target[...] = source
