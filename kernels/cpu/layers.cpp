// The ops of a decoder layer other than products and attention. A row's sums have one order whatever the batch; values that
// the references round are rounded here too.
#include <algorithm>
#include <cmath>

#include "export.h"
#include "ops.h"
#include "team.h"

namespace {

constexpr int64_t FEW = 1 << 11;  // elements below which helpers cost more than they save

// 1 / sqrt(mean(x^2) + epsilon)
template <class T>
float norm_scale(const T* x, float epsilon, int64_t width) {
    return 1.0f / std::sqrt(square_sum(x, width) / float(width) + epsilon);
}

// y = weight * round(x * scale), or with an offset (offset + weight) * x * scale, rounded once
template <class T>
void apply_norm(const T* x, const T* weight, float scale, float offset, int64_t width, T* y) {
    for (int64_t i = 0; i < width; i += LANES) {
        const Vec normed = load_end(x + i, width - i) * scale, weights = load_end(weight + i, width - i);
        store_end(y + i, offset < 0 ? weights * rounded<T>(normed) : (offset + weights) * normed, width - i);
    }
}

// f(gate) up, of which all f are gate / (1 + exp(-s(gate))), or 1 / (1 + exp(-gate))
template <int ACTIVATION, class T>
Vec gated(Vec gate, Vec up, float limit) {
    Vec s = gate;
    if (ACTIVATION == GELU_TANH) s = 1.5957691216f * (gate + 0.044715f * gate * gate * gate);  // 2 sqrt(2 / pi)
    if (ACTIVATION == CLAMPED_SWIGLU) {
        gate = gate > limit ? splat(limit) : gate;
        up = up > limit ? splat(limit) : up < -limit ? splat(-limit) : up;
        s = 1.702f * gate;
    }
    const Vec product = opened(ACTIVATION == SIGMOID ? splat(1.0f) : gate, s);
    return ACTIVATION == CLAMPED_SWIGLU ? product * (up + 1.0f) : rounded<T>(product) * up;
}

template <int ACTIVATION, class T>
void gate_rows(const T* joined, T* y, int64_t rows, int64_t width, float limit) {
    for_each(rows, rows * width <= FEW, [=](int64_t row) {
        const T *gates = joined + 2 * row * width, *ups = gates + width;
        T* mine = y + row * width;
        for (int64_t i = 0; i < width; i += LANES)
            store_end(mine + i, gated<ACTIVATION, T>(load_end(gates + i, width - i), load_end(ups + i, width - i), limit),
                      width - i);
    });
}

template <class T>
void store_value(const T* x, const Heads<T>& heads, T* to) {
    if (!heads.value_norm) return void(memcpy(to, x, size_t(heads.dim) * sizeof(T)));
    const float scale = norm_scale(x, heads.epsilon, heads.dim);
    for (int64_t i = 0; i < heads.dim; i += LANES)
        store_end(to + i, load_end(x + i, heads.dim - i) * scale, heads.dim - i);
}

// What rotation makes of the first `rotated` columns of a head; the others stay.
template <class T>
void rotate(const T* x, const T* cos, const T* sin, int64_t rotated_columns, int64_t dim, T* to) {
    const int64_t half = rotated_columns / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = to_float(x[i]), b = to_float(x[i + half]);
        float low = rounded<T>(a * to_float(cos[i])) + rounded<T>(-b * to_float(sin[i]));
        float high = rounded<T>(b * to_float(cos[i + half])) + rounded<T>(a * to_float(sin[i + half]));
        put(to + i, low), put(to + i + half, high);
    }
    memcpy(to + rotated_columns, x + rotated_columns, size_t(dim - rotated_columns) * sizeof(T));
}

}  // namespace

// hidden += delta; y = the norm of hidden if there is a weight. y may be hidden.
template <class T>
void add_rms_norm(T* hidden, const T* delta, const T* weight, float epsilon, float offset, T* y, int64_t rows, int64_t width) {
    for_each(rows, rows * width <= FEW, [=](int64_t row) {
        T* mine = hidden + row * width;
        if (delta)
            for (int64_t i = 0; i < width; i += LANES)
                store_end(mine + i, load_end(mine + i, width - i) + load_end(delta + row * width + i, width - i), width - i);
        if (weight) apply_norm(mine, weight, norm_scale(mine, epsilon, width), offset, width, y + row * width);
    });
}

// joined [rows, gate then up]
template <class T>
void gate_mul(const T* joined, T* y, int64_t rows, int64_t width, int64_t activation, float limit) {
    if (activation == SILU) return gate_rows<SILU>(joined, y, rows, width, limit);
    if (activation == GELU_TANH) return gate_rows<GELU_TANH>(joined, y, rows, width, limit);
    if (activation == SIGMOID) return gate_rows<SIGMOID>(joined, y, rows, width, limit);
    gate_rows<CLAMPED_SWIGLU>(joined, y, rows, width, limit);
}

// Norms queries and keys where there are weights for it (each head, or with `whole` all heads of a row together), and
// rotates them, halves against halves:
// round(x cos) + round([-x_2; x_1] sin); keys and values go to their slots, queries to a table of their own.
// joined [rows, query heads + 2 kv_heads, dim], cos and sin [rows, rotated]
template <class T>
void rotary_store(const T* joined, const Rotary<T>* rotary, const int64_t* slots, const Heads<T>* heads, T* query, T* keys,
                  T* values, int64_t rows) {
    const Heads<T> h = *heads;
    const Rotary<T> turn = *rotary;
    const int64_t count = h.query_heads + (h.projected - 1) * h.kv_heads, dim = h.dim;
    for_each(rows, rows * count * dim <= FEW, [=](int64_t row) {
        const T *c = turn.cos + row * turn.columns, *s = turn.sin + row * turn.columns;
        T normed[MOST_DIM];
        float scale = 0;
        for (int64_t head = 0; head < count; head++) {
            const T* x = joined + (row * count + head) * dim;
            const int64_t key = head - h.query_heads, value = h.projected == 2 ? key : key - h.kv_heads;
            if (value >= 0) store_value(x, h, values + (slots[row] * h.kv_heads + value) * dim);
            if (key >= h.kv_heads) continue;
            if (const T* weight = key >= 0 ? h.key_norm : h.query_norm) {
                const int64_t number = key >= 0 ? key : head, of_kind = key >= 0 ? h.kv_heads : h.query_heads;
                if (!h.whole || number == 0) scale = norm_scale(x, h.epsilon, h.whole ? of_kind * dim : dim);
                apply_norm(x, weight + (h.whole ? number * dim : 0), scale, h.offset, dim, normed);
                x = normed;
            }
            T* to = key < 0 ? query + (row * h.query_heads + head) * dim : keys + (slots[row] * h.kv_heads + key) * dim;
            rotate(x, c, s, turn.columns, dim, to);
            if (key < 0 && turn.query_scale)
                for (int64_t i = 0; i < dim; i++) put(to + i, to_float(to[i]) * to_float(turn.query_scale[row]));
        }
    });
}

#define INSTANCES(T)                                                                                        \
    template void add_rms_norm(T*, const T*, const T*, float, float, T*, int64_t, int64_t);                 \
    template void gate_mul(const T*, T*, int64_t, int64_t, int64_t, float);                                 \
    template void rotary_store(const T*, const Rotary<T>*, const int64_t*, const Heads<T>*, T*, T*, T*, int64_t);
INSTANCES(bf16)
INSTANCES(float)

EXPORT_TYPES(add_rms_norm)
EXPORT_TYPES(gate_mul)
EXPORT_TYPES(rotary_store)
