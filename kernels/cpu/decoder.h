// The structures of kernels/cpu/layers.py that describe whole decoder layers, and the function that runs them.
#pragma once
#include "ops.h"
#include "pieces.h"

constexpr int MOST_ROTARY = 3;  // rotary embeddings of a model, of which one may rotate nothing

// Rows of x, side by side, that one weight multiplies.
struct Group {
    const void* packed;
    const float* bias;
    int64_t first, rows;
};

template <class T>
struct Product {
    void (*call)(const T* x, const void* packed, const float* bias, T* y, int64_t rows, int64_t in, int64_t out);
    const void* packed;
    const float* bias;
    int64_t in, out;

    void operator()(const T* x, T* y, int64_t rows) const { call(x, packed, bias, y, rows, in, out); }
};

// One product for each expert.
template <class T>
struct Stack {
    void (*call)(const T* x, const Group* groups, int64_t count, T* y, int64_t in, int64_t out);
    const char* packed;
    int64_t stride;  // bytes from one expert's weight to the next
    const float* bias;
    int64_t bias_stride;  // elements
    int64_t in, out;

    Group group(int64_t expert, int64_t first, int64_t rows) const {
        return {packed + expert * stride, bias ? bias + expert * bias_stride : nullptr, first, rows};
    }
    void operator()(const T* x, const Group* groups, int64_t count, T* y) const { call(x, groups, count, y, in, out); }
};

template <class T>
struct Experts {
    Stack<T> gate_up, down;
    int64_t count;
    Cut cut;  // of the sum over experts
    Gate gate;
};

struct Router {  // as in kernels/experts.py
    int64_t experts, chosen, scores, normalised, groups, chosen_groups;
    const float *correction, *expert_scale;
    float scale;
};

template <class T>
struct DecoderLayer {
    Product<T> query_key_value, output, gate_up, down;
    const T *attention_input, *attention_output, *mlp_input, *mlp_output;  // norms; null where the family has none
    int64_t activation;  // of gate_mul
    int64_t rotary;      // index of this layer's rotary embedding
    int64_t tap;         // number of this layer among the tapped ones, or -1
    float limit;         // of gate_mul
    float residual;      // factor on what is added to hidden states
    Heads<T> heads;
    Layer<T> attention;
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
    KVRows groups[2];  // of layers without a window and of those with one
    T* tapped;         // [rows, taps, width], hidden states after the tapped layers, or null
    int64_t taps;
    Rotary<T> rotary[MOST_ROTARY];
};

// Runs the layers on hidden [rows, width], in place. The first layer adds `delta` (or null) to it first; the output of the
// last feed-forward, which is still to be added, goes to `result`. `scratch` holds intermediate results of all rows.
template <class T>
void decode(const DecoderLayer<T>* layers, int64_t count, const Places<T>* at, T* hidden, const T* delta, T* result,
            int64_t rows, T* scratch);

// Experts of each row, ascending, and their weights: [rows, chosen] both. logits [rows, experts]
template <class T>
void choose_experts(const Router* router, const T* logits, int64_t* indices, float* weights, int64_t rows);

// y [rows, out] = the weighted sum of what a row's chosen experts make of it, of type T or float; experts with other
// numbers than these are another device's. `scratch` holds, for each row and chosen expert, max(in, out) and three times
// the experts' width.
template <class T>
void experts(const Experts<T>* of, const T* x, const int64_t* indices, const float* weights, void* y, int64_t rows,
             int64_t chosen, T* scratch);
