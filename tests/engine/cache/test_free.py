import pytest

from engine.cache.free import FreeBlocks


def test_a_sequence_grows_into_its_neighbours():
    free = FreeBlocks(8)
    assert free.take(2, after=2) == [3, 4]
    assert free.take(2, after=2) != [3, 4]


def test_new_runs_start_far_from_the_others_and_are_consecutive():
    free = FreeBlocks(16)
    assert free.take(2) == [7, 8]
    assert free.take(2) == [2, 3]
    assert free.take(2) == [11, 12]
    assert free.take(2, after=3) == [4, 5]


def test_several_runs_are_joined_when_none_is_large_enough():
    free = FreeBlocks(6)
    free.take(6)
    for block in (0, 2, 3, 5):
        free.add(block)
    assert free.take(3) == [2, 3, 0]
    assert free.ids() == [5] and len(free) == 1


def test_neighbours_go_first_and_the_rest_comes_from_elsewhere():
    free = FreeBlocks(4)
    assert free.take(4, after=2) == [3, 0, 1, 2]


def test_what_is_not_there_cannot_be_taken():
    free = FreeBlocks(2)
    with pytest.raises(RuntimeError, match="3 blocks wanted, 2 free"):
        free.take(3)
    assert free.ids() == [0, 1]


def test_a_block_cannot_be_freed_twice():
    free = FreeBlocks(2)
    with pytest.raises(RuntimeError, match="block 1 was freed twice"):
        free.add(1)


def test_nothing_of_nothing():
    free = FreeBlocks(0)
    assert free.take(0) == [] and free.ids() == [] and len(free) == 0
