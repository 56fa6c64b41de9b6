/* What a decoder layer computes between its matrices. engine/model/kernels.py says what each function is for, compiles
 * this folder once for each type of number, and holds the result against torch.
 *
 * Results depend neither on the number of threads nor on which tokens are computed together: a row is one thread's, and
 * a token's keys are summed in parts of PART, in order.
 */
#include <math.h>

#include "kernels.h"

#define PART 128        /* keys that are attended to in one go */
#define MOST_DIM 256    /* of a head */
#define MOST_HEADS 128  /* of a layer */
#define MOST_WIDTH 8192 /* of all its heads together */
#define FOUR 4          /* keys, or values, that are computed with at once */
#define FEW 16384       /* numbers that are not worth waking other threads for */

INLINE float sum_of(Wide value) {
    float each[WIDE], sum = 0;
    memcpy(each, &value, sizeof each);
    for (int i = 0; i < WIDE; i++) sum += each[i];
    return sum;
}

/* out[i] = the sum of each of `count` values, which are at most FOUR. */
INLINE void store_sums(const Wide *values, int64_t count, float *out) {
#ifdef __AVX512F__ /* four at once */
    if (count == FOUR) {
        __m512 a = (__m512)values[0], b = (__m512)values[1], c = (__m512)values[2], d = (__m512)values[3];
        __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        __m512 low = _mm512_shuffle_ps(ab, cd, 0x44), high = _mm512_shuffle_ps(ab, cd, 0xee);
        __m512 each = _mm512_add_ps(low, high);
        __m256 half = _mm256_add_ps(_mm512_castps512_ps256(each), _mm512_extractf32x8_ps(each, 1));
        _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
        return;
    }
#elif defined(__AVX2__)
    if (count == FOUR) {
        __m256 ab = _mm256_hadd_ps((__m256)values[0], (__m256)values[1]);
        __m256 each = _mm256_hadd_ps(ab, _mm256_hadd_ps((__m256)values[2], (__m256)values[3]));
        _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(each), _mm256_extractf128_ps(each, 1)));
        return;
    }
#endif
    for (int64_t i = 0; i < count; i++) out[i] = sum_of(values[i]);
}

/* e to the power of x, for x <= 0: Cephes' polynomial, which compilers make vectors of, where libm's is a call. */
INLINE float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = floorf(x * 1.44269504f + 0.5f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

/* x += y, where there is a y; out = x / rms(x) * weight. All [rows, width]. */
void norm(Number *x, const Number *y, const Number *weight, float eps, Number *out, int64_t rows, int64_t width) {
#pragma omp parallel for if (rows * width > FEW)
    for (int64_t row = 0; row < rows; row++) {
        Number *restrict a = x + row * width, *restrict o = out + row * width;
        if (y) {
            const Number *restrict b = y + row * width;
            for (int64_t i = 0; i < width; i++) a[i] = store(load(a[i]) + load(b[i]));
        }
        float sum = 0;
        for (int64_t i = 0; i < width; i++) sum += load(a[i]) * load(a[i]);
        float scale = 1.0f / sqrtf(sum / (float)width + eps);
        for (int64_t i = 0; i < width; i++) o[i] = store(load(weight[i]) * load(store(load(a[i]) * scale)));
    }
}

/* out [rows, width] = silu(gate) * up, of x [rows, gate and up, each width]. */
void gate(const Number *x, Number *out, int64_t rows, int64_t width) {
#pragma omp parallel for if (rows * width > FEW)
    for (int64_t row = 0; row < rows; row++) {
        const Number *restrict g = x + 2 * row * width, *restrict up = g + width;
        Number *restrict o = out + row * width;
        for (int64_t i = 0; i < width; i++) {
            float value = load(g[i]), e = exponential(value > 0 ? -value : value);
            float silu = value * (value > 0 ? 1.0f : e) / (1.0f + e);
            o[i] = store(load(store(silu)) * load(up[i]));
        }
    }
}

/* One head's x, turned by the cos and sin of its position; `out` may be x. */
INLINE void turn(const Number *x, const Number *cos, const Number *sin, Number *out, int64_t half) {
    int64_t i = 0;
    for (; i + WIDE <= half; i += WIDE) {
        Wide a = load_wide(x + i), b = load_wide(x + half + i);
        Wide first = rounded(a * load_wide(cos + i)) - rounded(b * load_wide(sin + i));
        Wide second = rounded(b * load_wide(cos + half + i)) + rounded(a * load_wide(sin + half + i));
        store_wide(out + i, first);
        store_wide(out + half + i, second);
    }
    for (; i < half; i++) {
        float a = load(x[i]), b = load(x[half + i]);
        out[i] = store(load(store(a * load(cos[i]))) - load(store(b * load(sin[i]))));
        out[half + i] = store(load(store(b * load(cos[half + i]))) + load(store(a * load(sin[half + i]))));
    }
}

INLINE void rotate_token(Number *x, const Number *cos, const Number *sin, Number *key, Number *value, int64_t heads,
                         int64_t kv_heads, int64_t dim) {
    for (int64_t h = 0; h < heads; h++, x += dim) turn(x, cos, sin, x, dim / 2);
    for (int64_t h = 0; h < kv_heads; h++, x += dim) turn(x, cos, sin, key + h * dim, dim / 2);
    memcpy(value, x, (size_t)(kv_heads * dim) * sizeof *x);
}

/* Of qkv [tokens, heads + 2 kv_heads, dim]: turn queries, in place, and keys by cos and sin [tokens, dim]; write keys
 * and values to their tokens' slots of a layer's pools. */
void rotate(Number *qkv, const Number *cos, const Number *sin, const int64_t *slots, Number *keys, Number *values,
            int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim) {
    int64_t width = (heads + 2 * kv_heads) * dim, kept = kv_heads * dim;
#pragma omp parallel for if (tokens * width > FEW)
    for (int64_t t = 0; t < tokens; t++) {
        Number *x = qkv + t * width, *key = keys + slots[t] * kept, *value = values + slots[t] * kept;
        if (dim == 64)
            rotate_token(x, cos + t * 64, sin + t * 64, key, value, heads, kv_heads, 64);
        else if (dim == 128)
            rotate_token(x, cos + t * 128, sin + t * 128, key, value, heads, kv_heads, 128);
        else
            rotate_token(x, cos + t * dim, sin + t * dim, key, value, heads, kv_heads, dim);
    }
}

/* How a layer's K and V lie in its pools, and who reads them. */
typedef struct {
    int64_t heads, kv_heads, dim, block_size;
} Shape;

/* scores [heads, PART] = the dot products of q [heads, dim] with `count` keys, the first of which is the `at`th of its
 * part. A row of all heads' keys is `stride` numbers long. */
INLINE void score(const float *q, const Number *key, int64_t count, int64_t at, Shape shape, int64_t dim,
                  float *scores) {
    int64_t group = shape.heads / shape.kv_heads, stride = shape.kv_heads * dim;
    for (int64_t kv_head = 0, head = 0; kv_head < shape.kv_heads; kv_head++, key += dim) {
        Wide k[FOUR][MOST_DIM / WIDE];
        for (int64_t i = 0; i < count; i++)
            for (int64_t d = 0; d < dim / WIDE; d++) k[i][d] = load_wide(key + i * stride + d * WIDE);
        for (int64_t last = head + group; head < last; head++) {
            Wide dots[FOUR] = {0};
            for (int64_t d = 0; d < dim / WIDE; d++) {
                Wide its = load_floats(q + head * dim + d * WIDE);
                for (int64_t i = 0; i < count; i++) dots[i] += its * k[i][d];
            }
            store_sums(dots, count, scores + head * PART + at);
        }
    }
}

/* sums [heads, dim] += `count` values by their weights [heads, PART], of which the first is the `at`th of its part. */
INLINE void sum_up(const float *weights, const Number *value, int64_t count, int64_t at, Shape shape, int64_t dim,
                   float *sums) {
    int64_t group = shape.heads / shape.kv_heads, stride = shape.kv_heads * dim;
    for (int64_t kv_head = 0, head = 0; kv_head < shape.kv_heads; kv_head++, value += dim) {
        Wide v[FOUR][MOST_DIM / WIDE];
        for (int64_t i = 0; i < count; i++)
            for (int64_t d = 0; d < dim / WIDE; d++) v[i][d] = load_wide(value + i * stride + d * WIDE);
        for (int64_t last = head + group; head < last; head++) {
            const float *weight = weights + head * PART + at;
            for (int64_t d = 0; d < dim / WIDE; d++) {
                Wide sum = load_floats(sums + head * dim + d * WIDE);
                for (int64_t i = 0; i < count; i++) sum += weight[i] * v[i][d];
                memcpy(sums + head * dim + d * WIDE, &sum, sizeof sum);
            }
        }
    }
}

/* The largest of `count` scores, a multiple of WIDE. */
INLINE float largest(const float *scores, int64_t count) {
    float each[WIDE], most = -INFINITY;
    memcpy(each, scores, sizeof each);
    for (int64_t j = WIDE; j < count; j += WIDE)
        for (int i = 0; i < WIDE; i++) each[i] = scores[j + i] > each[i] ? scores[j + i] : each[i];
    for (int i = 0; i < WIDE; i++) most = each[i] > most ? each[i] : most;
    return most;
}

/* Make weights of `count` scores, a multiple of WIDE, none above `most`; the weights' sum. */
INLINE float weigh(float *scores, int64_t count, float most) {
    float total = 0;
    for (int64_t j = 0; j < count; j++) scores[j] = exponential(scores[j] - most);
    for (int64_t j = 0; j < count; j++) total += scores[j];
    return total;
}

/* Have `count` numbers brought near, all at once: a third less time than one after the other, as they are read. */
INLINE void fetch(const Number *numbers, int64_t count) {
    for (const char *at = (const char *)numbers, *end = at + count * (int64_t)sizeof *numbers; at < end; at += 64)
        __builtin_prefetch(at);
}

/* Of the pool's rows for the positions from <= j < to, do `four` to FOUR at a time, and `one` to each that is left. */
#define FOR_ROWS(pool, four, one)                                                                                      \
    for (int64_t j = from, stride = shape.kv_heads * dim; j < to;) {                                                   \
        int64_t inside = j % shape.block_size, end = least(to, j - inside + shape.block_size);                         \
        const Number *row = (pool) + (blocks[j / shape.block_size] * shape.block_size + inside) * stride;              \
        for (; j + FOUR <= end; j += FOUR, row += FOUR * stride) {                                                     \
            fetch(row, FOUR * stride);                                                                                 \
            four;                                                                                                      \
        }                                                                                                              \
        for (; j < end; j++, row += stride) one;                                                                       \
    }

/* One token's queries against the keys of from <= j < to. Into `out`: the values' sums by weight [heads, dim], each
 * head's largest score [heads], and the sum of its weights [heads]. */
INLINE void attend_to(const Number *query, const Number *keys, const Number *values, const int64_t *blocks,
                      int64_t from, int64_t to, float scale, Shape shape, int64_t dim, float *out) {
    float q[MOST_WIDTH], scores[MOST_HEADS * PART];
    int64_t padded = (to - from + WIDE - 1) / WIDE * WIDE;
    for (int64_t i = 0; i < shape.heads * dim; i++) q[i] = load(query[i]) * scale, out[i] = 0;
    FOR_ROWS(keys, score(q, row, FOUR, j - from, shape, dim, scores), score(q, row, 1, j - from, shape, dim, scores))
    for (int64_t head = 0; head < shape.heads; head++) {
        float *its = scores + head * PART;
        for (int64_t j = to - from; j < padded; j++) its[j] = -INFINITY;
        out[shape.heads * dim + head] = largest(its, padded);
        out[shape.heads * (dim + 1) + head] = weigh(its, padded, out[shape.heads * dim + head]);
    }
    FOR_ROWS(values, sum_up(scores, row, FOUR, j - from, shape, dim, out),
             sum_up(scores, row, 1, j - from, shape, dim, out))
}

/* out [tokens, heads, dim] = what each token's queries, in rows of `width` numbers, see in a layer's pools. parts[t] is
 * how many parts the tokens before t have together; `work` has room for heads * (dim + 2) floats for each of all. */
void attend(const Number *queries, int64_t width, const Number *keys, const Number *values, const Seen *seen,
            const int64_t *parts, Number *out, float *work, int64_t tokens, int64_t heads, int64_t kv_heads,
            int64_t dim, int64_t block_size, float scale) {
    Shape shape = {heads, kv_heads, dim, block_size};
    int64_t room = heads * (dim + 2);
#pragma omp parallel if (parts[tokens] > 1)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t part = 0; part < parts[tokens]; part++) {
            int64_t t = 0;
            while (parts[t + 1] <= part) t++;
            int64_t from = seen[t].first + (part - parts[t]) * PART, to = least(from + PART, seen[t].length);
            const Number *query = queries + t * width;
            if (dim == 64)
                attend_to(query, keys, values, seen[t].blocks, from, to, scale, shape, 64, work + part * room);
            else if (dim == 128)
                attend_to(query, keys, values, seen[t].blocks, from, to, scale, shape, 128, work + part * room);
            else
                attend_to(query, keys, values, seen[t].blocks, from, to, scale, shape, dim, work + part * room);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < tokens * heads; i++) {
            int64_t t = i / heads, head = i % heads;
            float most = -INFINITY, total = 0, sum[MOST_DIM] = {0};
            for (int64_t part = parts[t]; part < parts[t + 1]; part++) {
                float m = work[part * room + heads * dim + head];
                most = m > most ? m : most;
            }
            for (int64_t part = parts[t]; part < parts[t + 1]; part++) {
                const float *its = work + part * room;
                float weight = exponential(its[heads * dim + head] - most);
                total += weight * its[heads * (dim + 1) + head];
                for (int64_t d = 0; d < dim; d++) sum[d] += weight * its[head * dim + d];
            }
            for (int64_t d = 0; d < dim; d++) out[i * dim + d] = store(sum[d] / total);
        }
    }
}
