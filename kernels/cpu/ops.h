// Ops that other files call, and the structures that describe one forward.
#pragma once
#include "vector.h"

template <class T>
struct Layer {
    T *keys, *values;  // [slots, kv_heads, dim]
    int64_t query_heads, kv_heads, dim, window;
    float scale, softcap;  // scale in powers of two; softcap 0: none

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

template <class T>
void add_rms_norm(T* hidden, const T* delta, const T* weight, float epsilon, T* y, int64_t rows, int64_t width);

struct Gate {  // of a feed-forward, as in kernels/layers.py
    int64_t activation;  // number of its name there
    float limit;
};

template <class T>
void gate_mul(const T* joined, T* y, int64_t rows, int64_t width, int64_t activation, float limit);

template <class T>
void rotary_store(const T* joined, const T* cos, const T* sin, const int64_t* slots, const T* query_norm, const T* key_norm,
                  int64_t whole, float epsilon, T* query, T* keys, T* values, int64_t rows, int64_t query_heads,
                  int64_t kv_heads, int64_t dim);

template <class T>
void attend(const Layer<T>* layer, const Rows* rows, const int32_t* groups, int64_t num_groups, const int64_t* tables,
            int64_t table_width, const T* query, T* out);
