// A drafter's block at the newest position of each sequence, from the waiting entries to the tree of its likeliest nodes: the
// ops that drafters/network/blocks.py composes, in their order, without a return to Python between them.
#include "growth.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>

#include "decoder.h"
#include "export.h"
#include "gumbel.h"

namespace {

template <class T>
using Room = std::unique_ptr<T[]>;

template <class T>
Room<T> room(int64_t count) {  // uninitialised
    return Room<T>(new T[size_t(count)]);
}

template <class T>
struct Network {  // of kernels/lattice.py
    Product<T> condition, known, head, rank_hidden, rank_classes;
    const DecoderLayer<T>* layers;
    const Product<T>* shifts;  // [layers - 1], or null
    const T *feature_norms, *condition_norm, *token_norm, *queries, *output_norm, *rank_norm;  // feature_norms: or null
    void (*embed)(const void* table, const int64_t* tokens, int64_t count, int64_t width, T* y);
    const void* embedding;
    const T* rotary;  // [2, positions, dim], cosines and sines
    const int64_t *d2t, *buckets;  // [draft_vocab], [block, RANKS]
    const int32_t* ids;            // [draft_vocab], d2t for the noise
    const float* rates;            // [buckets]
    int64_t num_layers, parts, broadcast, block, positions, scratch, work;  // scratch: stride; work: of a row in layers
    float epsilon, rank_epsilon, feature_scale, ceiling, least;
};

struct Keys {  // of the sampling noise, [batch] each; null where no sequence draws, or none filters
    const int64_t *seeds, *roots;
    const float *temperatures, *log_min_p;
    const int64_t* top_k;
    const double* top_p;
};

float add(float a, float b) { return a + b; }
bf16 add(bf16 a, bf16 b) {
    bf16 sum;
    put(&sum, to_float(a) + to_float(b));
    return sum;
}

template <class T>
void norm(const T* x, const T* weight, float epsilon, T* y, int64_t width) {
    add_rms_norm<T>(const_cast<T*>(x), nullptr, weight, epsilon, -1, y, 1, width);
}

// A forward of `count` waiting entries of each sequence and of the block at the newest of them.
template <class T>
struct Block {
    const Network<T>& net;
    const Entries& entries;
    const int64_t batch, count, hidden, size, before, each, rows;  // before, each: committed rows, all rows of a sequence
    Room<int64_t> positions, slots, end, live, at, standing, to;

    Block(const Network<T>& network, const Entries& of, int64_t sequences, int64_t waiting)
        : net(network), entries(of), batch(sequences), count(waiting), hidden(net.condition.out), size(net.block),
          before((count - 1) * of.entries), each(before + size), rows(batch * each) {}

    // The first layer's input of all rows, [rows, hidden].
    Room<T> inputs(const int64_t* of_rows) {
        const int64_t waiting = batch * count, width = net.condition.in;
        auto features = room<T>(waiting * width), context = room<T>(waiting * hidden), embedded = room<T>(waiting * hidden);
        auto joined = room<T>(waiting * 2 * hidden), seen = room<T>(waiting * hidden), input = room<T>(rows * hidden);
        auto tokens = room<int64_t>(waiting);
        positions = room<int64_t>(waiting), slots = room<int64_t>(waiting);
        take_entries(&entries, of_rows, batch, count, (char*)features.get(), tokens.get(), positions.get(), slots.get());
        for (int64_t i = 0, part = width / std::max<int64_t>(1, net.parts); i < waiting && net.feature_norms; i++)
            for (int64_t p = 0; p < width; p += part)
                norm(features.get() + i * width + p, net.feature_norms + p, net.epsilon, features.get() + i * width + p, part);
        net.condition(features.get(), context.get(), waiting);
        net.embed(net.embedding, tokens.get(), waiting, hidden, embedded.get());
        for (int64_t i = 0; i < waiting; i++) {
            norm(context.get() + i * hidden, net.condition_norm, net.epsilon, joined.get() + 2 * i * hidden, hidden);
            norm(embedded.get() + i * hidden, net.token_norm, net.epsilon, joined.get() + (2 * i + 1) * hidden, hidden);
        }
        net.known(joined.get(), seen.get(), waiting);
        T* to_row = input.get();
        for (int64_t i = 0; i < waiting; i++)
            for (int64_t k = 0; k < (i % count == count - 1 ? size : entries.entries); k++, to_row += hidden)
                for (int64_t d = 0; d < hidden; d++) {
                    const T query = net.queries[k * hidden + d];
                    to_row[d] = k == 0 || net.broadcast ? add(seen[i * hidden + d], query) : query;
                }
        return input;
    }

    // The block's states after the output norm, [batch, block, hidden].
    void run(const int64_t* of_rows, const int64_t* scratch, T* states) {
        auto input = inputs(of_rows);
        T* x = input.get();
        end = room<int64_t>(batch), live = room<int64_t>(batch * size), at = room<int64_t>(rows);
        standing = room<int64_t>(rows), to = room<int64_t>(rows);
        place_entries(&entries, of_rows, batch, positions.get(), slots.get(), count, scratch, net.scratch, size, end.get(),
                      live.get(), at.get(), standing.get(), to.get());
        const Layer<T>& heads = net.layers->attention;
        auto cos = room<T>(rows * heads.dim), sin = room<T>(rows * heads.dim);
        for (int64_t row = 0; row < rows; row++) {
            const T* turn = net.rotary + standing[row] * heads.dim;
            std::copy_n(turn, heads.dim, cos.get() + row * heads.dim);
            std::copy_n(turn + net.positions * heads.dim, heads.dim, sin.get() + row * heads.dim);
        }
        auto order = room<int32_t>(rows), seen = room<int32_t>(rows), path_start = room<int32_t>(rows + 1);
        auto path_slots = room<int64_t>(rows * size);
        auto groups = room<int32_t>(3 * rows);
        const int64_t num_groups = plan(of_rows, order.get(), seen.get(), path_start.get(), path_slots.get(), groups.get());
        const KVRows own{to.get(), {order.get(), seen.get(), path_start.get(), path_slots.get()},
                         groups.get(), num_groups, entries.places, entries.positions * entries.entries};
        const Places<T> places{{own, own}, nullptr, 0, {{cos.get(), sin.get(), nullptr, heads.dim}}};
        auto delta = room<T>(rows * hidden), normed = room<T>(rows * hidden), pairs = room<T>(rows * 2 * hidden);
        auto work = room<T>(rows * net.work);
        for (int64_t layer = 0; layer < net.num_layers; layer++) {
            const bool continues = layer && !net.shifts;
            decode(net.layers + layer, 1, &places, x, continues ? delta.get() : nullptr, delta.get(), rows, work.get());
            if (net.shifts && layer + 1 < net.num_layers) shift(net.shifts[layer], x, delta.get(), pairs.get());
        }
        add_rms_norm(x, delta.get(), net.output_norm, net.epsilon, -1, normed.get(), rows, hidden);
        for (int64_t b = 0; b < batch; b++)
            std::copy_n(normed.get() + (b * each + before) * hidden, size * hidden, states + b * size * hidden);
    }

    int64_t plan(const int64_t* of_rows, int32_t* order, int32_t* seen, int32_t* path_start, int64_t* path_slots, int32_t* groups) {
        auto sequence = room<int64_t>(rows), node = room<int64_t>(rows);
        auto above = room<bool>(batch * size * size);
        for (int64_t row = 0; row < rows; row++) {
            sequence[row] = row / each;
            node[row] = std::max<int64_t>(row % each - before, ROOT);
        }
        for (int64_t i = 0; i < batch * size * size; i++) above[i] = i % size <= i / size % size;
        const Layer<T>& heads = net.layers->attention;
        const int64_t rows_at_once = std::max<int64_t>(1, attend_lanes() / (heads.query_heads / heads.kv_heads));
        return plan_rows(sequence.get(), at.get(), node.get(), rows, of_rows, end.get(), live.get(), above.get(), batch, size,
                         rows_at_once, order, seen, path_start, path_slots, groups);
    }

    // h_k <- W [h_k; h_{k-1}] within each block, h_0 := h_1
    void shift(const Product<T>& mix, T* x, const T* delta, T* pairs) {
        for (int64_t i = 0; i < rows * hidden; i++) x[i] = add(x[i], delta[i]);
        for (int64_t row = 0; row < rows; row++) {
            const int64_t place = row % each, entry = place < before ? place % entries.entries : place - before;
            std::copy_n(x + row * hidden, hidden, pairs + 2 * row * hidden);
            std::copy_n(x + (row - (entry > 0)) * hidden, hidden, pairs + (2 * row + 1) * hidden);
        }
        mix(pairs, x, rows);
    }
};

constexpr int64_t LIKELIEST = 64;  // tokens among which filters are applied, as in drafters/coupling.py
constexpr float DROPPED = 3;

// The lowest score that the filters keep.
float least_kept(const float* scores, int64_t vocab, float log_min_p, int64_t top_k, double top_p) {
    std::vector<float> best(scores, scores + vocab);
    const int64_t count = std::min(LIKELIEST, vocab);
    std::partial_sort(best.begin(), best.begin() + count, best.end(), std::greater<float>());
    const float floor = best[0] + log_min_p;
    int64_t kept = std::partition_point(best.begin(), best.begin() + count, [&](float x) { return x >= floor; }) - best.begin();
    if (top_k > 0) kept = std::min(kept, top_k);
    double whole = 0, mass = 0;
    for (int64_t i = 0; i < (top_k > 0 ? kept : vocab); i++) whole += best[i] >= floor ? std::exp(best[i] - best[0]) : 0;
    int64_t in_nucleus = 0;
    for (; in_nucleus < kept && (in_nucleus == 0 || top_p >= 1 || mass / whole < top_p); in_nucleus++)
        mass += std::exp(best[in_nucleus] - best[0]);
    return in_nucleus == count ? floor : best[in_nucleus - 1];
}

// log q / T + g in place of logits for the rows of sequences that draw, and the features of the rank head.
template <class T>
void rank(const Network<T>& net, const Keys& keys, int64_t batch, const T* logits, float* features, int64_t* ids) {
    const int64_t vocab = net.head.out, rows = batch * net.block;
    if (!keys.temperatures) return rank_features(logits, rows, vocab, features, ids);
    auto scores = room<float>(rows * vocab);
    auto noise_keys = room<int32_t>(2 * rows);
    for (int64_t row = 0; row < rows; row++) {
        const uint64_t key = noise_key(keys.seeds[row / net.block], keys.roots[row / net.block] + 1 + row % net.block);
        memcpy(noise_keys.get() + 2 * row, &key, sizeof(key));
    }
    gumbel_noise(noise_keys.get(), net.ids, scores.get(), rows, vocab);
    auto scaled = room<float>(vocab);
    for (int64_t row = 0; row < rows; row++) {
        const int64_t b = row / net.block;
        const float temperature = keys.temperatures[b];
        float *noise = scores.get() + row * vocab, least = -INFINITY;
        for (int64_t i = 0; i < vocab; i++)
            scaled[i] = to_float(logits[row * vocab + i]) / (temperature > 0 ? temperature : 1);
        if (temperature > 0 && keys.top_k)
            least = least_kept(scaled.get(), vocab, keys.log_min_p[b], keys.top_k[b], keys.top_p[b]);
        for (int64_t i = 0; i < vocab; i++)
            noise[i] = scaled[i] - (scaled[i] < least ? DROPPED : 0) + (temperature > 0 ? noise[i] : 0);
    }
    rank_features(scores.get(), rows, vocab, features, ids);
}

// Conditional probabilities of ranks 1 to 10, [rows, RANKS].
template <class T>
void predict(const Network<T>& net, const T* states, const float* features, int64_t rows, float* predicted) {
    const int64_t hidden = net.head.in, width = net.rank_hidden.in, inner = net.rank_hidden.out;
    auto joined = room<T>(rows * width), between = room<T>(rows * inner), logits = room<T>(rows * RANK_CLASSES);
    auto classes = room<float>(rows * RANK_CLASSES);
    std::fill_n(joined.get(), rows * width, T{});
    for (int64_t row = 0; row < rows; row++) {
        T* own = joined.get() + row * width;
        norm(states + row * hidden, net.rank_norm, net.rank_epsilon, own, hidden);
        for (int64_t i = 0; i < RANK_FEATURES; i++)
            put(own + hidden + i, rounded<T>(features[row * RANK_FEATURES + i]) * net.feature_scale);
    }
    net.rank_hidden(joined.get(), between.get(), rows);
    for (int64_t i = 0; i < rows * inner; i++) {
        const float x = to_float(between[i]);
        put(between.get() + i, x / (1 + std::exp(-x)));
    }
    net.rank_classes(between.get(), logits.get(), rows);
    for (int64_t i = 0; i < rows * RANK_CLASSES; i++) classes[i] = to_float(logits[i]);
    spread_classes(classes.get(), features, rows, RANK_FEATURES, net.ceiling, predicted);
}

// states [batch, block, hidden] and logits [batch, block, draft_vocab] are for who learns from them; trees [batch, nodes]
template <class T>
void grow_block(const Network<T>* network, const Entries* entries, const Proposed* log, const int64_t* rows,
                const int64_t* seeds, const int64_t* roots, const float* temperatures, const float* log_min_p,
                const int64_t* top_k, const double* top_p, int64_t batch, int64_t count, const int64_t* scratch, T* states, T* logits, const Trees* trees) {
    const Network<T>& net = *network;
    const int64_t lines = batch * net.block, width = net.block * RANKS;
    Block<T> block(net, *entries, batch, count);
    block.run(rows, scratch, states);
    net.head(states, logits, lines);
    auto features = room<float>(lines * RANK_FEATURES), predicted = room<float>(batch * width), trust = room<float>(width);
    auto ids = room<int64_t>(batch * width), parents = room<int64_t>(batch * width), depths = room<int64_t>(batch * width);
    auto survival = room<float>(batch * width), alive = room<float>(batch);
    rank(net, {seeds, roots, temperatures, log_min_p, top_k, top_p}, batch, logits, features.get(), ids.get());
    predict(net, states, features.get(), lines, predicted.get());
    for (int64_t i = 0; i < batch * width; i++) ids[i] = net.d2t[ids[i]];
    for (int64_t i = 0; i < width; i++) trust[i] = net.rates[net.buckets[i]];
    Numbers root(batch, ROOT), depth(batch, 0), chosen(batch * trees->width);
    for (int64_t b = 0; b < batch; b++) alive[b] = block.positions[(b + 1) * count - 1] >= 0;  // else there is no anchor
    const Origin origin{root.data(), depth.data(), alive.get()};
    const Nodes nodes{ids.get(), parents.get(), depths.get(), survival.get()};
    grow_lattice(&origin, batch, 1, predicted.get(), trust.get(), net.block, RANKS, 0, net.ceiling, net.least, &nodes, nullptr, 0);
    const Trees raw{ids.get(), parents.get(), depths.get(), survival.get(), nullptr, width};
    merge_trees(&raw, batch, 0, trees, chosen.data());  // paths within one block all differ
    keep_proposed(log, rows, batch, trees, chosen.data(), predicted.get(), net.buckets, width);
}

template <class T>
void look_up_rows(const void* table, const int64_t* tokens, int64_t count, int64_t width, T* y) {
    for (int64_t i = 0; i < count; i++) std::copy_n((const T*)table + tokens[i] * width, width, y + i * width);
}

}  // namespace

EXPORT_TYPES(grow_block)
EXPORT_TYPES(look_up_rows)
