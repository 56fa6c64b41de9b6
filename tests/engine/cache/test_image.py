import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.image import ImageCodec
from engine.cache.pool import KVPool

SHAPE = {"layers": 3, "block_size": 4, "kv_heads": 2, "head_dim": 8}
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def codec(cold_dtype: str = "auto", dtype: torch.dtype = torch.bfloat16, **sizes: int) -> ImageCodec:
    return ImageCodec(**SHAPE | sizes, dtype=dtype, cold_dtype=cold_dtype)


def pool(dtype: torch.dtype = torch.bfloat16, blocks: int = 6, **sizes: int) -> torch.Tensor:
    data = KVPool(**SHAPE | sizes, blocks=blocks, dtype=dtype, device="cpu").data
    return data.copy_(torch.randn(data.shape, generator=torch.Generator().manual_seed(blocks)))


def image_of(made: ImageCodec, data: torch.Tensor, slot: int, tokens: int | None = None) -> torch.Tensor:
    into = torch.full((made.size,), 7, dtype=torch.uint8)
    made.store(data, slot, into, tokens)
    return into


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


# --- the very bytes --------------------------------------------------------------------------------------------------


def test_sizes_of_the_embedded_model():
    embedded = {"layers": 30, "block_size": 32, "kv_heads": 3, "head_dim": 64}
    assert codec(**embedded).size == 737_280 and not codec(**embedded).lossy
    assert codec("int8", **embedded).size == 391_680 and codec("int8", **embedded).lossy


def test_an_image_is_the_block_with_its_axes_in_order():
    made = codec(dtype=torch.float32, layers=2, block_size=2, kv_heads=1, head_dim=1)
    data = torch.zeros(2, 2, 3, 2, 1, 1)
    data[:, :, 1] = torch.arange(8.0).view(2, 2, 2, 1, 1)
    assert image_of(made, data, 1).view(torch.float32).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("dtype", BITS)
def test_every_bit_comes_back_and_nothing_else_is_touched(dtype):
    made, bits = codec(dtype=dtype), BITS[dtype]
    least, most = torch.iinfo(bits).min, torch.iinfo(bits).max
    data = (
        torch.randint(least, most, pool(dtype).shape, generator=torch.Generator().manual_seed(1)).to(bits).view(dtype)
    )
    data[:, :, 2, 0, 0] = torch.tensor([-0.0, 0.0, torch.nan, -torch.nan, torch.inf, -torch.inf, 1e-40, 1.0])
    target = pool(dtype)
    expected = target.clone()
    expected.view(bits)[:, :, 4] = data.view(bits)[:, :, 2]
    made.load(image_of(made, data, 2), target, 4)
    assert target.view(bits).equal(expected.view(bits))


@pytest.mark.parametrize("cold_dtype", ["auto", "int8"])
def test_all_tokens_by_number_are_the_whole_block(cold_dtype):
    made, data = codec(cold_dtype), pool()
    assert image_of(made, data, 5, tokens=made.shape[2]).equal(image_of(made, data, 5))


def test_only_the_first_tokens_are_loaded_when_asked():
    made, data, target = codec(), pool(), pool(blocks=3)
    expected = target.clone()
    expected[:, :, 1, :3] = data[:, :, 5, :3]
    made.load(image_of(made, data, 5), target, 1, tokens=3)
    assert target.equal(expected)


@pytest.mark.parametrize("cold_dtype", ["auto", "int8"])
def test_what_lies_behind_the_tokens_stays_behind(cold_dtype):
    made, data = codec(cold_dtype), pool()
    other = data.clone()
    other[:, :, 5, 3:] = torch.nan
    image = image_of(made, data, 5, tokens=3)
    assert image.equal(image_of(made, other, 5, tokens=3))
    target = pool(blocks=3)
    made.load(image, target, 1)
    assert target[:, :, 1, 3:].eq(0).all() and target[:, :, 1, :3].ne(0).any()
    assert image_of(made, data, 5, tokens=0).eq(0).all()


@pytest.mark.parametrize("cold_dtype", ["auto", "int8"])
@pytest.mark.parametrize("slots", [[1, 2, 3, 4, 5], [4, 0, 5, 2, 1], [3], []], ids=str)
@pytest.mark.usefixtures("two_threads")
def test_many_at_once_are_each_of_them(cold_dtype, slots):
    made, data = codec(cold_dtype), pool()
    slab = torch.zeros(len(slots), made.size + 64, dtype=torch.uint8)
    images = [row[64:] for row in slab]
    made.store_many(data, slots, images)
    assert all(image.equal(image_of(made, data, slot)) for slot, image in zip(slots, images, strict=True))
    assert slab[:, :64].eq(0).all()

    target, expected = pool(blocks=7), pool(blocks=7)
    made.load_many(images, target, slots)
    for slot, image in zip(slots, images, strict=True):
        made.load(image, expected, slot)
    assert target.equal(expected)


@pytest.mark.parametrize("cold_dtype", ["auto", "int8"])
def test_as_many_images_as_blocks(cold_dtype):
    made, data = codec(cold_dtype), pool()
    with pytest.raises(ValueError, match="longer"):
        made.store_many(data, [1], [torch.zeros(made.size, dtype=torch.uint8)] * 2)


def test_another_shape_or_dtype_is_refused():
    made, image = codec(), torch.zeros(codec().size, dtype=torch.uint8)
    for wrong in (pool(kv_heads=1), pool(block_size=8), pool(layers=1), pool(torch.float16), pool()[:, :1]):
        with pytest.raises(ValueError, match="has no images of"):
            made.store(wrong, 0, image)
        with pytest.raises(ValueError, match="has no images of"):
            made.load_many([image], wrong, [0])
    for wrong in (image[:-1], image.repeat(2), image.view(torch.int8), image.view(2, -1)):
        with pytest.raises(ValueError, match="is no image of 768 bytes"):
            made.store(pool(), 0, wrong)
        with pytest.raises(ValueError, match="is no image of 576 bytes"):
            codec("int8").load(wrong, pool(), 0)


@pytest.mark.parametrize("cold_dtype", ["auto", "int8"])
def test_the_pool_may_go(cold_dtype):
    made, data = codec(cold_dtype), pool()
    image = image_of(made, data, 0)
    made.load_many([image] * 4, data, [0, 1, 2, 3])
    gone = weakref.ref(data.untyped_storage())
    del data
    assert gone() is None
    made.load(image, pool(blocks=1), 0)


# --- int8 ------------------------------------------------------------------------------------------------------------


def test_int8_is_scales_and_then_whole_numbers():
    made = codec("int8", torch.float32, layers=1, block_size=1, kv_heads=1, head_dim=6)
    data = torch.tensor([[127.0, -64.0, 0.4, 0.6, -1.6, 0.0], [0.0, 0.0, -254.0, 1.5, 0.9, 2.0]]).view(1, 2, 1, 1, 1, 6)
    image = image_of(made, data, 0)
    assert made.size == len(image) == 2 * 4 + 2 * 6
    assert image[:8].view(torch.float32).tolist() == [1.0, 2.0]
    assert image[8:].view(torch.int8).tolist() == [127, -64, 0, 1, -2, 0, 0, 0, -127, 1, 0, 1]
    target = torch.zeros_like(data)
    made.load(image, target, 0)
    assert target.flatten().tolist() == [127, -64, 0, 1, -2, 0, 0, 0, -254, 2, 0, 2]


@pytest.mark.parametrize("dtype", BITS)
@given(seed=st.integers(0, 2**32), exponent=st.integers(-30, 4))
def test_int8_is_off_by_half_a_step_and_never_again(dtype, seed, exponent):
    made = codec("int8", dtype)
    data = torch.randn(3, 2, 2, 4, 2, 8, generator=torch.Generator().manual_seed(seed)).mul(10.0**exponent).to(dtype)
    before = data.clone()
    image = image_of(made, data, 0)
    assert data.equal(before), "the pool is not what is quantized"
    made.load(image, data, 1)
    exact, restored = data[:, :, 0].double(), data[:, :, 1].double()
    greatest = exact.abs().amax(-1, keepdim=True)
    half_a_step = greatest / 254 + torch.finfo(dtype).eps * greatest + torch.finfo(dtype).tiny
    assert ((exact - restored).abs() <= half_a_step).all()
    assert image_of(made, data, 1).equal(image)


def test_int8_of_the_greatest_and_the_least():
    made = codec("int8", layers=1, block_size=1, kv_heads=2, head_dim=2)
    huge = torch.finfo(torch.bfloat16).max
    data = torch.tensor([huge, -huge, 0.0, -0.0, 1e-40, 0.0, 1.0, 1.0]).bfloat16().view(1, 2, 1, 1, 2, 2)
    made.load(image_of(made, data, 0), data, 0)
    assert data.flatten().tolist() == [huge, -huge, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_int8_keeps_what_is_no_number_to_its_own_vector(bad):
    made, clean = codec("int8"), pool()
    spoilt = clean.clone()
    spoilt[1, 0, 2, 3, 1, 5] = bad
    spoilt[:, :, 2, 2] = bad
    for data in (clean, spoilt):
        made.load(image_of(made, data, 2), data, 2)
    vectors = spoilt[:, :, 2].isnan()
    assert vectors[1, 0, 3, 1].all() and vectors[:, :, 2].all() and vectors.sum() == 8 + 3 * 2 * 2 * 8
    assert spoilt[:, :, 2][~vectors].equal(clean[:, :, 2][~vectors])


# --- a pool that is not in RAM ---------------------------------------------------------------------------------------


class Elsewhere(torch.Tensor):
    """As far as it says itself."""

    is_cpu = property(lambda _: False)


@pytest.mark.parametrize("cold_dtype", ["auto", "int8"])
def test_images_are_put_together_where_the_pool_is(cold_dtype):
    made, data = codec(cold_dtype), pool()
    there, images = data.clone().as_subclass(Elsewhere), [torch.zeros(made.size, dtype=torch.uint8) for _ in range(4)]
    assert not there.is_cpu
    made.store_many(there, [4, 0, 5], images[:3])
    made.store(there, 1, images[3], tokens=2)
    expected = [*(image_of(made, data, slot) for slot in (4, 0, 5)), image_of(made, data, 1, tokens=2)]
    assert all(image.equal(right) for image, right in zip(images, expected, strict=True))
    for each in (there, data):
        made.load_many(images[:3], each, [1, 2, 3])
        made.load(images[0], each, 0, tokens=2)
    assert torch.equal(there.as_subclass(torch.Tensor), data)


# --- a GPU -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("cold_dtype", ["auto", "int8"])
def test_a_gpu_makes_the_same_images(cold_dtype, pinned):
    made, data = codec(cold_dtype), pool()
    on_gpu, images = data.cuda(), [torch.zeros(made.size, dtype=torch.uint8, pin_memory=pinned) for _ in range(3)]
    made.store_many(on_gpu, [4, 0, 5], images)
    torch.cuda.synchronize()
    assert all(image.equal(image_of(made, data, slot)) for slot, image in zip([4, 0, 5], images, strict=True))
    made.load_many(images, on_gpu, [1, 2, 3])
    made.load_many(images, data, [1, 2, 3])
    made.load(images[0], on_gpu, 0, tokens=2)
    made.load(images[0], data, 0, tokens=2)
    assert on_gpu.cpu().equal(data)
