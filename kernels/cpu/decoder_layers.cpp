// Whole decoder layers, one after the other: the ops of kernels/decoder_layer.py in their order, without a return to
// Python between them.
#include "decoder.h"
#include "export.h"

namespace {

// hidden += delta; returns the norm of hidden, in `normed`, or hidden itself where there is no norm.
template <class T>
const T* add_norm(T* hidden, const T* delta, const T* norm, const Heads<T>& like, T* normed, int64_t rows, int64_t width) {
    if (delta || norm) add_rms_norm(hidden, delta, norm, like.epsilon, like.offset, normed, rows, width);
    return norm ? normed : hidden;
}

// What is added to hidden states: the norm of delta where there is one, times a factor.
template <class T>
void finish(T* delta, const T* norm, const DecoderLayer<T>& layer, int64_t rows, int64_t width) {
    add_norm<T>(delta, nullptr, norm, layer.heads, delta, rows, width);
    if (layer.residual == 1.0f) return;
    for (int64_t i = 0; i < rows * width; i += LANES)
        store_end(delta + i, load_end(delta + i, rows * width - i) * layer.residual, rows * width - i);
}

// to = hidden + delta, whose rows lie `stride` apart.
template <class T>
void tap(const T* hidden, const T* delta, T* to, int64_t rows, int64_t width, int64_t stride) {
    for (int64_t row = 0; row < rows; row++, hidden += width, delta += width, to += stride)
        for (int64_t i = 0; i < width; i += LANES)
            store_end(to + i, load_end(hidden + i, width - i) + load_end(delta + i, width - i), width - i);
}

}  // namespace

template <class T>
void decode(const DecoderLayer<T>* layers, int64_t count, const Places<T>* at, T* hidden, const T* delta, T* result,
            int64_t rows, T* scratch) {
    for (const DecoderLayer<T>* layer = layers; layer < layers + count; layer++, delta = result) {
        const Layer<T>& own = layer->attention;
        const KVRows& at_keys = at->groups[own.window != 0];
        const int64_t width = layer->output.out, attended_width = layer->output.in;
        T *normed = scratch, *query = normed + rows * width, *attended = query + rows * attended_width;
        T *joined = attended + rows * attended_width, *gated = query;
        const T* x = add_norm(hidden, delta, layer->attention_input, layer->heads, normed, rows, width);
        layer->query_key_value(x, joined, rows);
        rotary_store(joined, at->rotary + layer->rotary, at_keys.slots, &layer->heads, query, own.keys, own.values, rows);
        attend(&own, &at_keys.rows, at_keys.groups, at_keys.num_groups, at_keys.tables, at_keys.table_width, query, attended);
        layer->output(attended, result, rows);
        finish(result, layer->attention_output, *layer, rows, width);
        x = add_norm(hidden, result, layer->mlp_input, layer->heads, normed, rows, width);
        joined = gated + rows * layer->down.in;
        layer->gate_up(x, joined, rows);
        gate_mul(joined, gated, rows, layer->down.in, layer->activation, layer->limit);
        layer->down(gated, result, rows);
        finish(result, layer->mlp_output, *layer, rows, width);
        if (at->tapped && layer->tap >= 0) tap(hidden, result, at->tapped + layer->tap * width, rows, width, at->taps * width);
    }
}

template void decode(const DecoderLayer<bf16>*, int64_t, const Places<bf16>*, bf16*, const bf16*, bf16*, int64_t, bf16*);
template void decode(const DecoderLayer<float>*, int64_t, const Places<float>*, float*, const float*, float*, int64_t, float*);

EXPORT_TYPES(decode)
