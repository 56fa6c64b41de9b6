/* Decoder layers, one after the other, for tokens that each attend by themselves. What a layer computes is written in
 * engine/model/fused.py, which is what this is held against. */
#include "kernels.h"

/* A weight [height, width] in tiles; `bias` may be NULL. */
typedef struct {
    const uint8_t *weight;
    const Number *bias;
    int64_t bits, width, height;
} Matrix;

/* An RMS norm; without a weight it is none. */
typedef struct {
    const Number *weight;
    float eps;
} Norm;

typedef struct {
    Matrix qkv, output, gate_up, down;
    Norm input, post, query, key;
    Number *keys, *values; /* its pools */
} Layer;

/* How all layers attend, and what each token sees of the text so far. */
typedef struct {
    int64_t tokens, heads, kv_heads, dim, block_size;
    const Number *cos, *sin; /* [tokens, dim] */
    const int64_t *slots;    /* [tokens], where K and V go */
    const Seen *seen;        /* [tokens] */
    const int64_t *parts;    /* [tokens + 1] */
    float scale;
} Step;

static void apply(const Matrix *matrix, const Number *x, Number *out, float *work, int64_t rows) {
    multiply(x, matrix->weight, matrix->bits, out, work, rows, matrix->width, matrix->height);
    if (!matrix->bias) return;
    for (int64_t r = 0; r < rows; r++, out += matrix->height)
        for (int64_t i = 0; i < matrix->height; i++) out[i] = store(load(out[i]) + load(matrix->bias[i]));
}

/* Norm some heads of each token, in place; `normed` has room for those of one. */
static void norm_heads(const Norm *its, Number *heads, int64_t count, int64_t stride, const Step *step,
                       Number *normed) {
    if (!its->weight) return;
    for (int64_t t = 0; t < step->tokens; t++, heads += stride) {
        norm(heads, NULL, its->weight, its->eps, normed, count, step->dim);
        memcpy(heads, normed, (size_t)(count * step->dim) * sizeof *heads);
    }
}

/* Run x [tokens, width] through `count` layers, in place. `numbers` has room for the results of a layer's matrices, and
 * for what goes into the next of them; `work` for what attention and multiplying take. */
void decode(Number *x, const Layer *layers, int64_t count, const Step *step, Number *numbers, float *work) {
    int64_t tokens = step->tokens, width = layers->qkv.width, inner = layers->down.width;
    int64_t all = layers->qkv.height, seen_width = step->heads * step->dim;
    Number *qkv = numbers, *seen = qkv + tokens * all, *added = seen + tokens * seen_width;
    Number *normed = added + tokens * width, *gate_up = normed + tokens * (width + seen_width);
    Number *gated = gate_up + tokens * 2 * inner;
    for (const Layer *its = layers; its < layers + count; its++) {
        norm(x, its == layers ? NULL : added, its->input.weight, its->input.eps, normed, tokens, width);
        apply(&its->qkv, normed, qkv, work, tokens);
        norm_heads(&its->query, qkv, step->heads, all, step, normed);
        norm_heads(&its->key, qkv + seen_width, step->kv_heads, all, step, normed);
        rotate(qkv, step->cos, step->sin, step->slots, its->keys, its->values, tokens, step->heads, step->kv_heads,
               step->dim);
        attend(qkv, all, its->keys, its->values, step->seen, step->parts, seen, work, tokens, step->heads,
               step->kv_heads, step->dim, step->block_size, step->scale);
        apply(&its->output, seen, added, work, tokens);
        norm(x, added, its->post.weight, its->post.eps, normed, tokens, width);
        apply(&its->gate_up, normed, gate_up, work, tokens);
        gate(gate_up, gated, tokens, inner);
        apply(&its->down, gated, added, work, tokens);
    }
    for (int64_t i = 0; i < tokens * width; i++) x[i] = store(load(x[i]) + load(added[i]));
}
