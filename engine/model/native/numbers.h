/* Numbers as the kernels load, round and store them: bfloat16 with -DBFLOAT16, else float; and as many at once as the
 * processor has room for. */
#ifndef NUMBERS_H
#define NUMBERS_H

#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
#define WIDE 16 /* numbers that are computed with at once; a head's dimensions are a multiple of it */
#else
#define WIDE 8
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float Wide __attribute__((vector_size(4 * WIDE)));

INLINE Wide load_floats(const float *values) {
    Wide result;
    memcpy(&result, values, sizeof result);
    return result;
}

INLINE void store_floats(float *out, Wide values) { memcpy(out, &values, sizeof values); }

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

#ifdef BFLOAT16
typedef uint16_t Number;
typedef uint16_t Halves __attribute__((vector_size(2 * WIDE)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDE)));

INLINE float load(Number value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

INLINE Number store(float value) { /* to nearest, ties to even; NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (Number)(value != value ? 0x7fc0 : rounded);
}

INLINE Wide load_wide(const Number *values) {
#ifdef __AVX512F__ /* which compilers make more of than they need */
    return (Wide)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)values)), 16);
#else
    Halves halves;
    memcpy(&halves, values, sizeof halves);
    return (Wide)(__builtin_convertvector(halves, Words) << 16);
#endif
}

INLINE Words round_wide(Wide values) { /* as `store` does, but into as many bits as there were */
    Words bits = (Words)values, nan = (Words)(values != values);
    Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (rounded & ~nan) | (nan & 0x7fc0);
}

INLINE void store_wide(Number *out, Wide values) {
#ifdef __AVX512F__
    __m256i halves = _mm512_cvtepi32_epi16((__m512i)round_wide(values));
#else
    Halves halves = __builtin_convertvector(round_wide(values), Halves);
#endif
    memcpy(out, &halves, sizeof halves);
}

INLINE Wide rounded(Wide values) { return (Wide)(round_wide(values) << 16); }
#else
typedef float Number;

INLINE float load(Number value) { return value; }
INLINE Number store(float value) { return value; }
INLINE void store_wide(Number *out, Wide values) { store_floats(out, values); }
INLINE Wide rounded(Wide values) { return values; }

INLINE Wide load_wide(const Number *values) { return load_floats(values); }
#endif

#endif
