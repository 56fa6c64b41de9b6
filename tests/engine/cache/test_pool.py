import pytest
import torch

from engine.cache.pool import KVPool


def pool(**sizes) -> KVPool:
    shape = {"layers": 2, "blocks": 3, "block_size": 4, "kv_heads": 2, "head_dim": 8} | sizes
    return KVPool(**shape, dtype=torch.float32, device="cpu")


def test_layers_are_views_of_one_allocation():
    kv = pool()
    key, value = kv.layer(1)
    assert key.shape == value.shape == (3, 4, 2, 8)
    key[2, 3] = 5.0
    value[2, 3] = 6.0
    assert kv.data[1, 0, 2, 3].eq(5).all() and kv.data[1, 1, 2, 3].eq(6).all()
    assert kv.data[0].eq(0).all()


def test_consecutive_blocks_are_a_view_without_a_copy():
    kv = pool()
    key, _ = kv.layer(0)
    run = key[1:3].view(8, 2, 8)
    run[7] = 3.0
    assert kv.data[0, 0, 2, 3].eq(3).all()


def test_tokens_are_copied_in_all_layers_and_no_further():
    kv = pool()
    kv.data[:, :, 0] = torch.arange(4.0).view(1, 1, 4, 1, 1)
    kv.data[:, :, 1] = 9.0
    kv.copy_tokens(0, 1, 3)
    assert kv.data[:, :, 1, :, 0, 0].tolist() == [[[0, 1, 2, 9]] * 2] * 2
    kv.copy_tokens(0, 2, 0)
    assert kv.data[:, :, 2].eq(0).all()


def test_a_poisoned_block_is_all_nan_and_its_neighbours_are_not():
    kv = pool()
    kv.poison(1)
    assert kv.data[:, :, 1].isnan().all()
    assert not kv.data[:, :, [0, 2]].isnan().any()


def test_bytes_are_those_of_the_allocation():
    kv = pool()
    assert kv.bytes == 2 * 2 * 3 * 4 * 2 * 8 * 4 == kv.data.untyped_storage().nbytes()
    assert kv.block_bytes == kv.bytes // 3 == KVPool.bytes_per_block(2, 4, 2, 8, torch.float32)


def test_a_pool_of_no_blocks_is_a_pool():
    kv = pool(blocks=0)
    assert kv.bytes == 0 and kv.layer(0)[0].shape == (0, 4, 2, 8)
    assert kv.block_bytes == 1024


@pytest.mark.parametrize("name", ["layers", "block_size", "kv_heads", "head_dim"])
def test_a_shape_without_extent_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name} is 0"):
        pool(**{name: 0})


def test_fewer_than_no_blocks_are_refused():
    with pytest.raises(ValueError, match="blocks is -1"):
        pool(blocks=-1)


def numbered(blocks: int) -> KVPool:
    kv = pool(blocks=blocks)
    kv.data[:] = torch.arange(float(blocks)).view(1, 1, -1, 1, 1, 1)
    return kv


def test_a_smaller_pool_has_what_was_carried_over():
    kv = numbered(6)
    kv.resize(3, {1: 0, 5: 2})
    assert kv.blocks == 3
    assert kv.data[1, 1, :, 0, 0, 0].tolist() == [1, 0, 5]
    assert kv.bytes == 3 * kv.block_bytes


def test_a_larger_pool_has_what_was_carried_over():
    kv = numbered(3)
    kv.resize(5, {2: 2, 0: 0})
    assert kv.data[0, 0, :, 3, 1, 7].tolist() == [0, 0, 2, 0, 0]


def test_a_pool_that_cannot_grow_stays_as_it_is():
    kv = numbered(3)
    with pytest.raises((MemoryError, RuntimeError)):
        kv.resize(2**50, {0: 0, 2: 1})
    assert kv.blocks == 3
    assert kv.data[0, 0, [0, 2], 0, 0, 0].tolist() == [0, 2]
