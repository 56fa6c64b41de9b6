"""The device pool: one tensor that holds every block's K and V. It does no bookkeeping and knows no token."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class KVPool:
    """One allocation `[layers, 2, blocks, block_size, kv_heads, head_dim]`; index 0 of the second axis is K, 1 is V.

    Layer-major, so that a layer's K is `[blocks, block_size, kv_heads, head_dim]`: what paged kernels expect, and a
    zero-copy view of a sequence wherever its blocks are consecutive. Every layer has the same shape; a model whose
    layers differ does not belong in one pool. Raises `ValueError` for a size below zero (blocks) or one (the rest).
    """

    def __init__(  # noqa: PLR0917 - the order of the tensor's axes
        self,
        layers: int,
        blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        sizes = {"layers": layers, "block_size": block_size, "kv_heads": kv_heads, "head_dim": head_dim}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} is {size}; a KV pool needs at least 1")
        if blocks < 0:
            raise ValueError(f"blocks is {blocks}; a KV pool cannot have fewer than 0")
        self.blocks, self.block_size = blocks, block_size
        self._hold(torch.zeros(layers, 2, blocks, block_size, kv_heads, head_dim, dtype=dtype, device=device))

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Layer `index`'s K and V, each a view `[blocks, block_size, kv_heads, head_dim]`."""
        return self._layers[index]

    def _hold(self, data: torch.Tensor) -> None:
        self.data = data
        self._layers = [(layer[0], layer[1]) for layer in data]  # each step asks for all of them

    def copy_tokens(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` tokens of block `source`, all layers, to the start of block `target`."""
        self.data[:, :, target, :count].copy_(self.data[:, :, source, :count])

    def resize(self, blocks: int, moved: Mapping[int, int]) -> None:
        """Have `blocks` blocks from now on; the block at each old id in `moved` is then at its new one.

        The old allocation goes when the new one holds what stays. Raises what torch raises when there is no memory for
        that; then nothing has changed.
        """
        old, new, shape = list(moved), list(moved.values()), self.data.shape
        data = self.data.new_zeros(*shape[:2], blocks, *shape[3:])
        for layer in range(shape[0]):  # one at a time, so that what is copied takes little room in between
            data[layer][:, new] = self.data[layer][:, old]
        self._hold(data)
        self.blocks = blocks

    def poison(self, block: int) -> None:
        """Fill a block with NaN, so that a test notices whoever reads what was never written."""
        self.data[:, :, block].fill_(float("nan"))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: K and V of all layers."""
        layers, _, _, block_size, kv_heads, head_dim = self.data.shape
        return self.bytes_per_block(layers, block_size, kv_heads, head_dim, self.data.dtype)

    @property
    def bytes(self) -> int:
        """Bytes of the whole allocation."""
        return self.data.numel() * self.data.element_size()

    @staticmethod
    def bytes_per_block(layers: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that one block will take, before anything is allocated."""
        return layers * 2 * block_size * kv_heads * head_dim * dtype.itemsize
