// The structures of kernels/cpu/layers.py that describe whole decoder layers, and the function that runs them.
#pragma once
#include "ops.h"

template <class T>
struct Product {
    void (*call)(const T* x, const void* packed, const float* bias, T* y, int64_t rows, int64_t in, int64_t out);
    const void* packed;
    const float* bias;
    int64_t in, out;

    void operator()(const T* x, T* y, int64_t rows) const { call(x, packed, bias, y, rows, in, out); }
};

template <class T>
struct DecoderLayer {
    Product<T> query_key_value, output, gate_up, down;
    const T *attention_input, *attention_output, *mlp_input, *mlp_output;  // norms; null where the family has none
    const T *query_norm, *key_norm;
    int64_t norms_whole;  // whether these two are of all heads of a row together
    int64_t tap;          // number of this layer among the tapped ones, or -1
    Layer<T> attention;
    float epsilon;
};

struct KVRows {  // of one KV group: places to write, and what attention reads
    const int64_t* slots;
    Rows rows;
    const int32_t* groups;
    int64_t num_groups;
    const int64_t* tables;
    int64_t table_width;
};

template <class T>
struct Places {
    const T *cos, *sin;  // [rows, dim]
    KVRows groups[2];    // of layers without a window and of those with one
    T* tapped;  // [rows, taps, width], hidden states after the tapped layers, or null
    int64_t taps;
};

// Runs the layers on hidden [rows, width], in place. The first layer adds `delta` (or null) to it first; the output of the
// last feed-forward, which is still to be added, goes to `result`. `scratch` holds intermediate results of all rows.
template <class T>
void decode(const DecoderLayer<T>* layers, int64_t count, const Places<T>* at, T* hidden, const T* delta, T* result,
            int64_t rows, T* scratch);
