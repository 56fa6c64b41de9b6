/* The kernels, which the decoder calls one after the other. */
#ifndef KERNELS_H
#define KERNELS_H

#include "numbers.h"

/* What one token sees: the positions first <= j < length, of which position j is in blocks[j / block_size]. */
typedef struct {
    const int64_t *blocks;
    int64_t first, length;
} Seen;

void norm(Number *x, const Number *y, const Number *weight, float eps, Number *out, int64_t rows, int64_t width);
void gate(const Number *x, Number *out, int64_t rows, int64_t width);
void rotate(Number *qkv, const Number *cos, const Number *sin, const int64_t *slots, Number *keys, Number *values,
            int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim);
void attend(const Number *queries, int64_t width, const Number *keys, const Number *values, const Seen *seen,
            const int64_t *parts, Number *out, float *work, int64_t tokens, int64_t heads, int64_t kv_heads,
            int64_t dim, int64_t block_size, float scale);
void multiply(const Number *x, const uint8_t *weight, int64_t bits, Number *out, float *work, int64_t rows,
              int64_t width, int64_t height);

#endif
