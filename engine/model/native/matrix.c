/* Rows of numbers times a weight of 4, 8 or 16 bits, whose numbers are unpacked as they are multiplied by. How a weight
 * is packed, engine/model/packed.py says.
 *
 * Each number of the result is summed in the order of the input's numbers, whatever else is computed beside it.
 */
#include <omp.h>

#include "kernels.h"

#define TILE 16   /* rows of a weight that lie together */
#define GROUP 32  /* numbers of one of them that share a scale and a zero */
#define FEW 4     /* rows of input for which nothing is unpacked into memory */
#define PANEL 512 /* numbers of each of a tile's rows that are unpacked there at once; a multiple of GROUP */
#define BAND 192  /* rows of input that are multiplied by a panel; a multiple of ROWS */
#ifdef __AVX512F__
#define ROWS 12 /* rows of input that are multiplied at once: their sums fill the registers */
#else
#define ROWS 6
#endif
#define SMALL 16384 /* numbers of a weight that are not worth waking other threads for */

INLINE Wide fused(Wide x, Wide y, Wide z) { /* which no option of a compiler's puts in another order */
#if defined(__AVX512F__)
    return (Wide)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif defined(__FMA__)
    return (Wide)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#else
    return x * y + z;
#endif
}

#if WIDE == TILE
typedef struct {
    Wide a;
} Tile;

INLINE Tile tile_of(const float *values) { return (Tile){load_floats(values)}; }
INLINE void store_tile(float *out, Tile x) { store_floats(out, x.a); }
INLINE Tile same(float x) { return (Tile){x - (Wide){0}}; }
INLINE Tile multiply_add(Tile x, Tile y, Tile z) { return (Tile){fused(x.a, y.a, z.a)}; }
#else
typedef struct {
    Wide a, b;
} Tile;

INLINE Tile tile_of(const float *values) { return (Tile){load_floats(values), load_floats(values + WIDE)}; }
INLINE void store_tile(float *out, Tile x) { store_floats(out, x.a), store_floats(out + WIDE, x.b); }
INLINE Tile same(float x) { return (Tile){x - (Wide){0}, x - (Wide){0}}; }
INLINE Tile multiply_add(Tile x, Tile y, Tile z) { return (Tile){fused(x.a, y.a, z.a), fused(x.b, y.b, z.b)}; }
#endif

/* Numbers of TILE halves, which are IEEE's. */
INLINE Tile from_halves(const uint8_t *bytes) {
#if defined(__AVX512F__)
    return (Tile){(Wide)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)bytes))};
#elif defined(__F16C__)
    const __m128i *eight = (const __m128i *)bytes;
    return (Tile){(Wide)_mm256_cvtph_ps(_mm_loadu_si128(eight)), (Wide)_mm256_cvtph_ps(_mm_loadu_si128(eight + 1))};
#else
    float each[TILE];
    for (int i = 0; i < TILE; i++) { /* from 2^-14 on the exponent is moved; what is less is so many times 2^-24 */
        uint32_t half = bytes[2 * i] | (uint32_t)bytes[2 * i + 1] << 8, size = half & 0x7fff;
        uint32_t bits = (size << 13) + ((127 - 15) << 23);
        float number = (float)size / 16777216.0f;
        if (size >= 0x400) memcpy(&number, &bits, sizeof number);
        each[i] = half & 0x8000 ? -number : number;
    }
    return tile_of(each);
#endif
}

/* Numbers of TILE bfloat16. */
INLINE Tile from_bfloat16(const uint8_t *bytes) {
#if defined(__AVX512F__)
    __m256i halves = _mm256_loadu_si256((const __m256i *)bytes);
    return (Tile){(Wide)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16)};
#elif defined(__AVX2__)
    const __m128i *eight = (const __m128i *)bytes;
    return (Tile){(Wide)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(eight)), 16),
                  (Wide)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(eight + 1)), 16)};
#else
    uint16_t halves[TILE];
    uint32_t words[TILE];
    Tile tile;
    memcpy(halves, bytes, sizeof halves);
    for (int i = 0; i < TILE; i++) words[i] = (uint32_t)halves[i] << 16;
    memcpy(&tile, words, sizeof tile);
    return tile;
#endif
}

#ifdef __AVX2__
INLINE Tile from_bytes(__m128i bytes) {
#ifdef __AVX512F__
    return (Tile){(Wide)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes))};
#else
    __m128i upper = _mm_unpackhi_epi64(bytes, bytes);
    return (Tile){(Wide)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
                  (Wide)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(upper))};
#endif
}
#endif

/* Numbers of TILE codes, each in the lower (`shift` 0) or upper (4) half of a byte. */
INLINE Tile from_nibbles(const uint8_t *codes, int shift) {
#ifdef __AVX2__
    __m128i bytes = _mm_loadu_si128((const __m128i *)codes);
    return from_bytes(_mm_and_si128(_mm_srli_epi16(bytes, shift), _mm_set1_epi8(15)));
#else
    float each[TILE];
    for (int i = 0; i < TILE; i++) each[i] = (codes[i] >> shift) & 15;
    return tile_of(each);
#endif
}

/* Numbers of TILE codes of a byte each. */
INLINE Tile from_codes(const uint8_t *codes) {
#ifdef __AVX2__
    return from_bytes(_mm_loadu_si128((const __m128i *)codes));
#else
    float each[TILE];
    for (int i = 0; i < TILE; i++) each[i] = codes[i];
    return tile_of(each);
#endif
}

/* Numbers of two tiles of codes, or of bfloat16, one after the other. */
typedef struct {
    Tile first, second;
} Two;

INLINE Two two_of(const uint8_t *codes, int64_t bits, Tile scales, Tile zeros) {
    if (bits == 16) return (Two){from_bfloat16(codes), from_bfloat16(codes + 2 * TILE)};
    Tile first = bits == 8 ? from_codes(codes) : from_nibbles(codes, 0);
    Tile second = bits == 8 ? from_codes(codes + TILE) : from_nibbles(codes, 4);
    return (Two){multiply_add(first, scales, zeros), multiply_add(second, scales, zeros)};
}

/* The scales and zeros of a group, which come before its codes; bfloat16 has none. */
INLINE const uint8_t *begin(const uint8_t *group, int64_t bits, Tile *scales, Tile *zeros) {
    if (bits == 16) return group;
    *scales = from_halves(group), *zeros = from_halves(group + 2 * TILE);
    return group + 4 * TILE;
}

/* sums [rows, TILE] = x [rows, width] times the weight of a tile, for FEW rows at most. */
INLINE void multiply_few(const uint8_t *weight, int64_t bits, const float *x, int64_t width, float *sums, int rows) {
    Tile sum[FEW], scales = same(0), zeros = same(0);
    for (int r = 0; r < rows; r++) sum[r] = same(0);
    for (int64_t from = 0; from < width; from += GROUP) {
        weight = begin(weight, bits, &scales, &zeros);
        for (int64_t k = from; k < from + GROUP; k += 2, weight += TILE * bits / 4) {
            Two two = two_of(weight, bits, scales, zeros);
            for (int r = 0; r < rows; r++) sum[r] = multiply_add(two.first, same(x[r * width + k]), sum[r]);
            for (int r = 0; r < rows; r++) sum[r] = multiply_add(two.second, same(x[r * width + k + 1]), sum[r]);
        }
    }
    for (int r = 0; r < rows; r++) store_tile(sums + r * TILE, sum[r]);
}

/* panel [GROUP, TILE] = the numbers of a group; the next group. */
INLINE const uint8_t *unpack(const uint8_t *group, int64_t bits, float *panel) {
    Tile scales = same(0), zeros = same(0);
    group = begin(group, bits, &scales, &zeros);
    for (int k = 0; k < GROUP; k += 2, group += TILE * bits / 4, panel += 2 * TILE) {
        Two two = two_of(group, bits, scales, zeros);
        store_tile(panel, two.first);
        store_tile(panel + TILE, two.second);
    }
    return group;
}

/* sums [rows, TILE] += x [rows, count], in rows of `width`, times panel [count, TILE]. */
INLINE void accumulate(const float *panel, const float *x, int64_t width, int64_t count, float *sums, int rows) {
    Tile sum[ROWS];
    for (int r = 0; r < rows; r++) sum[r] = tile_of(sums + r * TILE);
    for (int64_t k = 0; k < count; k++) {
        Tile numbers = tile_of(panel + k * TILE);
        for (int r = 0; r < rows; r++) sum[r] = multiply_add(numbers, same(x[r * width + k]), sum[r]);
    }
    for (int r = 0; r < rows; r++) store_tile(sums + r * TILE, sum[r]);
}

static void accumulate_all(const float *panel, const float *x, int64_t width, int64_t count, float *sums,
                           int64_t rows) {
    for (; rows >= ROWS; rows -= ROWS, x += ROWS * width, sums += ROWS * TILE)
        accumulate(panel, x, width, count, sums, ROWS);
    for (; rows >= 6; rows -= 6, x += 6 * width, sums += 6 * TILE) accumulate(panel, x, width, count, sums, 6);
    if (rows == 5) accumulate(panel, x, width, count, sums, 5);
    if (rows == 4) accumulate(panel, x, width, count, sums, 4);
    if (rows == 3) accumulate(panel, x, width, count, sums, 3);
    if (rows == 2) accumulate(panel, x, width, count, sums, 2);
    if (rows == 1) accumulate(panel, x, width, count, sums, 1);
}

/* sums [rows, TILE] = x [rows, width] times the weight of a tile. */
INLINE void multiply_many(const uint8_t *weight, int64_t bits, const float *x, int64_t width, float *sums,
                          int64_t rows) {
    float panel[PANEL * TILE] __attribute__((aligned(64)));
    memset(sums, 0, (size_t)(rows * TILE) * sizeof *sums);
    for (int64_t from = 0; from < width; from += PANEL) {
        int64_t count = least(PANEL, width - from);
        for (int64_t k = 0; k < count; k += GROUP) weight = unpack(weight, bits, panel + k * TILE);
        accumulate_all(panel, x + from, width, count, sums, rows);
    }
}

INLINE void multiply_tile(const uint8_t *weight, int64_t bits, const float *x, int64_t width, float *sums,
                          int64_t rows) {
    if (rows == 1) return multiply_few(weight, bits, x, width, sums, 1);
    if (rows == 2) return multiply_few(weight, bits, x, width, sums, 2);
    if (rows == 3) return multiply_few(weight, bits, x, width, sums, 3);
    if (rows == 4) return multiply_few(weight, bits, x, width, sums, 4);
    multiply_many(weight, bits, x, width, sums, rows);
}

/* out [rows, height] = x [rows, width] times a packed weight [height, width] of so many bits, transposed. `work` has
 * room for x as floats, where it is something else. */
void multiply(const Number *x, const uint8_t *weight, int64_t bits, Number *out, float *work, int64_t rows,
              int64_t width, int64_t height) {
    int64_t tile_bytes = width * TILE * bits / 8 + (bits < 16 ? width / GROUP * TILE * 4 : 0);
    int64_t tiles = height / TILE, bands = (rows + BAND - 1) / BAND, shares = rows > FEW ? 8 : 1;
    int64_t chunk = tiles * bands / (shares * omp_get_max_threads()) + 1;
#ifdef BFLOAT16
    for (int64_t i = 0; i < rows * width; i++) work[i] = load(x[i]);
    const float *floats = work;
#else
    const float *floats = x;
    (void)work;
#endif
#pragma omp parallel for schedule(dynamic, chunk) if (width * height > SMALL)
    for (int64_t i = 0; i < tiles * bands; i++) {
        int64_t tile = i % tiles, from = i / tiles * BAND, count = least(BAND, rows - from);
        const uint8_t *its = weight + tile * tile_bytes;
        const float *input = floats + from * width;
        float sums[BAND * TILE] __attribute__((aligned(64)));
        if (bits == 4)
            multiply_tile(its, 4, input, width, sums, count);
        else if (bits == 8)
            multiply_tile(its, 8, input, width, sums, count);
        else
            multiply_tile(its, 16, input, width, sums, count);
        for (int64_t r = 0; r < count; r++) {
            Number *row = out + (from + r) * height + tile * TILE;
            for (int64_t j = 0; j < TILE; j += WIDE) store_wide(row + j, load_floats(sums + r * TILE + j));
        }
    }
}
