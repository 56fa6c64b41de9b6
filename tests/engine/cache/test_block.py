import hashlib
import struct

from engine.cache.block import Scope, block_hash, common_prefix, root_hash


def test_a_hash_is_a_function_of_parent_salt_and_tokens():
    root = root_hash(b"model")
    names = {
        block_hash(root, [1, 2, 3], b""),
        block_hash(root, [1, 2, 4], b""),
        block_hash(root, [1, 2, 3], b"salt"),
        block_hash(root_hash(b"another model"), [1, 2, 3], b""),
        block_hash(block_hash(root, [1, 2, 3], b""), [1, 2, 3], b""),
    }
    assert len(names) == 5
    assert block_hash(root, [1, 2, 3], b"") == block_hash(root, (1, 2, 3), b"")


def test_a_salt_cannot_pass_for_tokens():
    root = root_hash(b"model")
    assert block_hash(root, [7], b"") != block_hash(root, [], struct.pack("<q", 7))


def test_the_hash_is_blake2b_of_128_bits_and_the_same_on_every_machine():
    root = root_hash(b"model")
    data = root + b"\x01\x00\x00\x00" + b"s" + b"\x05" + b"\x00" * 7
    assert block_hash(root, [5], b"s") == hashlib.blake2b(data, digest_size=16).digest()


def test_common_prefix():
    assert common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix([], [1]) == 0


def test_only_blocks_wholly_inside_the_preset_have_no_salt():
    scope = Scope("s", b"mine", shared_len=10)
    assert [scope.salt_at(index, 4) for index in range(4)] == [b"", b"", b"mine", b"mine"]
    assert Scope("s", b"mine").salt_at(0, 4) == b"mine"


def test_reach_is_the_whole_blocks_of_the_preset_between_users():
    anna, ben = Scope("a", b"anna", 10), Scope("b", b"ben", 10)
    assert anna.reach(ben, 4) == ben.reach(anna, 4) == 8
    assert anna.reach(Scope("a2", b"anna", 10), 4) is None
    assert anna.reach(Scope("a2", b"anna", 11), 4) is None
    assert anna.reach(Scope("a2", b"anna", 5), 4) == 4
    assert anna.reach(Scope("open"), 4) == 8
    assert Scope("open").reach(Scope("open2", b"", 3), 4) is None
