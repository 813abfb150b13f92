// The ops of a decoder layer other than products and attention. A row's sums have one order whatever the batch; values that
// the references round are rounded here too.
#include <algorithm>
#include <cmath>

#include "export.h"
#include "ops.h"
#include "team.h"

namespace {

constexpr int64_t FEW = 1 << 11;  // elements below which helpers cost more than they save

constexpr int VECTORS = 16 / LANES;  // squares are added up in 16 parts, whatever a register holds

// 1 / sqrt(mean(x^2) + epsilon)
template <class T>
float norm_scale(const T* x, float epsilon, int64_t width) {
    Vec sums[VECTORS] = {};
    for (int64_t first = 0; first < width; first += 16)
        for (int v = 0; v < VECTORS; v++) {
            const int64_t i = first + v * LANES;
            const Vec values = load_end(x + i, std::max<int64_t>(0, width - i));
            sums[v] = sums[v] + values * values;
        }
    float total = 0;
    for (int i = 0; i < 16; i++) total += sums[i / LANES][i % LANES];
    return 1.0f / std::sqrt(total / float(width) + epsilon);
}

// y = weight * round(x * scale)
template <class T>
void apply_norm(const T* x, const T* weight, float scale, int64_t width, T* y) {
    for (int64_t i = 0; i < width; i += LANES)
        store_end(y + i, load_end(weight + i, width - i) * rounded<T>(load_end(x + i, width - i) * scale), width - i);
}

enum { SILU, GELU_TANH, CLAMPED_SWIGLU };

// x / (1 + exp(-at))
Vec of_sigmoid(Vec x, Vec at) {
    Vec e = exp2_of((Vec)((IVec)at | INT32_MIN) * 1.44269504f);  // exp(-|at|)
    return x * (at < 0.0f ? e : splat(1.0f)) / (1.0f + e);
}

}  // namespace

// hidden += delta; y = the norm of hidden if there is a weight. y may be hidden.
template <class T>
void add_rms_norm(T* hidden, const T* delta, const T* weight, float epsilon, T* y, int64_t rows, int64_t width) {
    for_each(rows, rows * width <= FEW, [=](int64_t row) {
        T* mine = hidden + row * width;
        if (delta)
            for (int64_t i = 0; i < width; i += LANES)
                store_end(mine + i, load_end(mine + i, width - i) + load_end(delta + row * width + i, width - i), width - i);
        if (weight) apply_norm(mine, weight, norm_scale(mine, epsilon, width), width, y + row * width);
    });
}

// y = round(activation(gate)) * up, see kernels/layers.py. joined [rows, gate then up]
template <class T>
void gate_mul(const T* joined, T* y, int64_t rows, int64_t width, int64_t activation, float limit) {
    for_each(rows, rows * width <= FEW, [=](int64_t row) {
        const T *gates = joined + 2 * row * width, *ups = gates + width;
        T* mine = y + row * width;
        for (int64_t i = 0; i < width; i += LANES) {
            Vec gate = load_end(gates + i, width - i), up = load_end(ups + i, width - i);
            if (activation == SILU) gate = of_sigmoid(gate, gate);
            if (activation == GELU_TANH) gate = of_sigmoid(gate, 1.59576912f * (gate + 0.044715f * gate * gate * gate));
            if (activation == CLAMPED_SWIGLU) {  // a NaN is no larger than a limit, and stays
                gate = gate > limit ? splat(limit) : gate;
                up = rounded<T>((up > limit ? splat(limit) : up < -limit ? splat(-limit) : up) + 1.0f);
                gate *= rounded<T>(of_sigmoid(splat(1.0f), rounded<T>(gate * 1.702f)));
            }
            store_end(mine + i, rounded<T>(gate) * up, width - i);
        }
    });
}

// Norms queries and keys where there are weights for it (each head, or with `whole` all heads of a row together), and
// rotates them, halves against halves:
// round(x cos) + round([-x_2; x_1] sin); keys and values go to their slots, queries to a table of their own.
// joined [rows, query heads + 2 kv_heads, dim], cos and sin [rows, dim]
template <class T>
void rotary_store(const T* joined, const T* cos, const T* sin, const int64_t* slots, const T* query_norm, const T* key_norm,
                  int64_t whole, float epsilon, T* query, T* keys, T* values, int64_t rows, int64_t query_heads,
                  int64_t kv_heads, int64_t dim) {
    const int64_t heads = query_heads + 2 * kv_heads, half = dim / 2;
    for_each(rows, rows * heads * dim <= FEW, [=](int64_t row) {
        const T *c = cos + row * dim, *s = sin + row * dim;
        T normed[MOST_DIM];
        float scale = 0;
        for (int64_t head = 0; head < heads; head++) {
            const T* x = joined + (row * heads + head) * dim;
            int64_t key = head - query_heads, value = key - kv_heads;
            if (value >= 0) {
                memcpy(values + (slots[row] * kv_heads + value) * dim, x, size_t(dim) * sizeof(T));
                continue;
            }
            if (const T* weight = key >= 0 ? key_norm : query_norm) {
                const int64_t number = key >= 0 ? key : head, count = key >= 0 ? kv_heads : query_heads;
                if (!whole || number == 0) scale = norm_scale(x, epsilon, whole ? count * dim : dim);
                apply_norm(x, weight + (whole ? number * dim : 0), scale, dim, normed);
                x = normed;
            }
            T turned[MOST_DIM];
            for (int64_t i = 0; i < half; i++) {
                float a = to_float(x[i]), b = to_float(x[i + half]);
                float low = rounded<T>(a * to_float(c[i])) + rounded<T>(-b * to_float(s[i]));
                float high = rounded<T>(b * to_float(c[i + half])) + rounded<T>(a * to_float(s[i + half]));
                put(turned + i, low), put(turned + i + half, high);
            }
            T* to = key < 0 ? query + row * query_heads * dim : keys + slots[row] * kv_heads * dim;
            memcpy(to + (key < 0 ? head : key) * dim, turned, size_t(dim) * sizeof(T));
        }
    });
}

template void add_rms_norm(bf16*, const bf16*, const bf16*, float, bf16*, int64_t, int64_t);
template void add_rms_norm(float*, const float*, const float*, float, float*, int64_t, int64_t);
template void gate_mul(const bf16*, bf16*, int64_t, int64_t, int64_t, float);
template void gate_mul(const float*, float*, int64_t, int64_t, int64_t, float);
template void rotary_store(const bf16*, const bf16*, const bf16*, const int64_t*, const bf16*, const bf16*, int64_t, float, bf16*,
                           bf16*, bf16*, int64_t, int64_t, int64_t, int64_t);
template void rotary_store(const float*, const float*, const float*, const int64_t*, const float*, const float*, int64_t, float,
                           float*, float*, float*, int64_t, int64_t, int64_t, int64_t);

EXPORT_TYPES(add_rms_norm)
EXPORT_TYPES(gate_mul)
EXPORT_TYPES(rotary_store)
