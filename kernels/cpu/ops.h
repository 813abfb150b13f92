// Ops that other files call, and the structures that describe one forward.
#pragma once
#include "vector.h"

template <class T>
struct Layer {
    T *keys, *values;  // [slots, kv_heads, dim]
    int64_t query_heads, kv_heads, dim, window;
    const float* sinks;    // [query heads] or null
    float scale, softcap;  // scale and softcap in powers of two; softcap 0: none

    const T* at(const T* base, int64_t slot, int64_t head) const { return base + (slot * kv_heads + head) * dim; }
    // Into the second cache: the first has room for few misses at a time, and waits for one of them to end.
    void prefetch(const T* base, int64_t slot, int64_t head) const {
        for (int64_t d = 0; d < dim; d += 64 / sizeof(T)) __builtin_prefetch(at(base, slot, head) + d, 0, 2);
    }
};

struct Rows {
    const int32_t *order, *seen, *path_start;  // row numbers by sequence; [rows]; [rows + 1]
    const int64_t* path_slots;
};

struct Gate {  // of a feed-forward, as in kernels/layers.py
    int64_t activation;  // number of its name there
    float limit;
};

template <class T>
struct Heads {  // of a fused projection
    const T *query_norm, *key_norm;  // null: none
    int64_t whole;                   // whether these are of all heads of a row together
    int64_t query_heads, kv_heads, dim;
    int64_t projected;   // 3: queries, keys and values; 2: keys are values too; 1: queries alone
    int64_t value_norm;  // whether values are normed, without a weight
    float epsilon, offset;  // see add_rms_norm
};

template <class T>
struct Rotary {
    const T *cos, *sin;     // [rows, columns]
    const T* query_scale;   // [rows], or null
    int64_t columns;        // of a head that are rotated
};

constexpr int64_t SILU = 0, GELU_TANH = 1, CLAMPED_SWIGLU = 2, SIGMOID = 3;

// offset < 0: the norm is rounded before it is weighted.
template <class T>
void add_rms_norm(T* hidden, const T* delta, const T* weight, float epsilon, float offset, T* y, int64_t rows, int64_t width);

template <class T>
void gate_mul(const T* joined, T* y, int64_t rows, int64_t width, int64_t activation, float limit);

template <class T>
void rotary_store(const T* joined, const Rotary<T>* rotary, const int64_t* slots, const Heads<T>* heads, T* query, T* keys,
                  T* values, int64_t rows);

template <class T>
void attend(const Layer<T>* layer, const Rows* rows, const int32_t* groups, int64_t num_groups, const int64_t* tables,
            int64_t table_width, const T* query, T* out);
