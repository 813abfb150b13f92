// Draft trees of a few hundred nodes: node by node what the references compute by sorts and jumps.
#include <algorithm>
#include <cstring>

#include "trees.h"

Numbers likeliest_first(const Trees& tree, int64_t count) {
    Numbers order;
    for (int64_t i = 0; i < count; i++)
        if (tree.survival[i] > 0) order.push_back(i);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return tree.survival[a] > tree.survival[b]; });
    return order;
}

namespace {

// For each node the first one in `order` with the same path.
Numbers leaders_of(const Trees& raw, const Numbers& order) {
    size_t size = 1;
    while (size < 2 * size_t(raw.width)) size *= 2;
    Numbers first(size, ROOT), same(raw.width), leaders(raw.width, ROOT);  // by hash of parent's path and token
    for (int64_t i = 0; i < raw.width; i++) {
        int64_t above = raw.parents[i] < 0 ? ROOT : same[raw.parents[i]], token = raw.tokens[i];
        size_t place = size_t(uint64_t(above * 1000003 + token) * 0x9e3779b97f4a7c15u >> 32);
        for (;; place++) {
            int64_t& other = first[place &= size - 1];
            if (other < 0) other = i;
            int64_t other_above = raw.parents[other] < 0 ? ROOT : same[raw.parents[other]];
            if (raw.tokens[other] == token && other_above == above) {
                same[i] = other;
                break;
            }
        }
    }
    Numbers best(raw.width, ROOT);
    for (int64_t i : order)
        if (best[same[i]] < 0) best[same[i]] = i;
    for (int64_t i = 0; i < raw.width; i++) leaders[i] = best[same[i]];
    return leaders;
}

}  // namespace

void cut(const Trees& from, const Numbers& nodes, const Numbers* leaders, const Trees& to, int64_t* chosen) {
    Numbers number(from.width, ROOT);
    const int64_t count = std::min(int64_t(nodes.size()), to.width);
    for (int64_t k = 0; k < count; k++) number[nodes[k]] = k;
    for (int64_t k = 0; k < to.width; k++) {
        const bool exists = k < count;
        const int64_t i = exists ? nodes[k] : 0;
        int64_t parent = exists ? from.parents[i] : ROOT;
        if (parent >= 0) parent = number[leaders ? (*leaders)[parent] : parent];
        to.tokens[k] = exists ? from.tokens[i] : 0;
        to.parents[k] = parent;
        to.depths[k] = exists ? from.depths[i] : 0;
        to.survival[k] = exists ? from.survival[i] : 0.0f;
        chosen[k] = i;
    }
    *to.num_nodes = count;
}

extern "C" {

void merge_trees(const Trees* raw, int64_t batch, bool merges, const Trees* merged, int64_t* chosen) {
    for (int64_t b = 0; b < batch; b++, chosen += merged->width) {
        const Trees from = raw->line(b), to = merged->line(b);
        Numbers order = likeliest_first(from, from.width), leaders, kept;
        if (merges) leaders = leaders_of(from, order);
        for (int64_t i : order)
            if (!merges || leaders[i] == i) kept.push_back(i);
        cut(from, kept, merges ? &leaders : nullptr, to, chosen);
    }
}

void select_nodes(const Trees* candidates, int64_t batch, const int64_t* num_keep, const Trees* tree, int64_t* chosen) {
    for (int64_t b = 0; b < batch; b++, chosen += tree->width) {
        const Trees from = candidates->line(b);
        Numbers nodes(*from.num_nodes);
        for (int64_t i = 0; i < *from.num_nodes; i++) nodes[i] = i;
        std::stable_sort(nodes.begin(), nodes.end(),
                         [&](int64_t i, int64_t j) { return from.survival[i] > from.survival[j]; });
        nodes.resize(std::min(num_keep[b], *from.num_nodes));
        std::stable_sort(nodes.begin(), nodes.end(), [&](int64_t i, int64_t j) { return from.depths[i] < from.depths[j]; });
        cut(from, nodes, nullptr, tree->line(b), chosen);
    }
}

void fates(const int64_t* tokens, const int64_t* parents, const int64_t* depths, int64_t batch, int64_t width,
           const int64_t* committed, int64_t longest, const int64_t* counts, bool* tried, bool* came_true) {
    for (int64_t b = 0; b < batch; b++, committed += longest) {
        for (int64_t i = 0; i < width; i++) {
            const bool known = depths[i] > 0 && depths[i] <= counts[b];
            tried[i] = known && (parents[i] < 0 || came_true[parents[i]]);
            came_true[i] = tried[i] && tokens[i] == committed[depths[i] - 1];
        }
        tokens += width, parents += width, depths += width, tried += width, came_true += width;
    }
}

void ancestor_matrix(const int64_t* parents, int64_t batch, int64_t nodes, bool* above) {
    for (int64_t b = 0; b < batch; b++, parents += nodes)
        for (int64_t i = 0; i < nodes; i++, above += nodes) {
            if (parents[i] < 0)
                memset(above, 0, size_t(nodes));
            else
                memcpy(above, above - (i - parents[i]) * nodes, size_t(nodes));
            above[i] = true;
        }
}

// Counted labels, and the rates that follow, for `buckets` buckets.
struct Hits {
    const float *prior_true, *prior_expected;
    float *came_true, *expected, *rates;
    int64_t buckets;
    float decay, low, high;

    void fade() const {
        for (int64_t i = 0; i < buckets; i++) came_true[i] *= decay, expected[i] *= decay;
    }
    void add(int64_t bucket, float true_ones, float expected_ones) const {
        came_true[bucket] += true_ones, expected[bucket] += expected_ones;
    }
    void estimate() const {
        for (int64_t i = 0; i < buckets; i++) {
            float rate = (prior_true[i] + came_true[i]) / (prior_expected[i] + expected[i]);
            rates[i] = std::min(std::max(rate, low), high);
        }
    }
};

void count_hits(const Hits* hits, const int64_t* bucket, const float* came_true, const float* expected, int64_t count) {
    hits->fade();
    for (int64_t i = 0; i < count; i++) hits->add(bucket[i], came_true[i], expected[i]);
    hits->estimate();
}

// The newest tree of each row, [rows, width] each.
struct Proposed {
    int64_t *tokens, *parents, *depths;
    float* predicted;
    int64_t *buckets, width;
};

void keep_proposed(const Proposed* log, const int64_t* rows, int64_t batch, const Trees* trees, const int64_t* chosen,
                   const float* predicted, const int64_t* buckets, int64_t count) {
    for (int64_t b = 0; b < batch; b++, chosen += trees->width, predicted += count) {
        const Trees tree = trees->line(b);
        const int64_t first = rows[b] * log->width;
        std::copy_n(tree.tokens, tree.width, log->tokens + first);
        std::copy_n(tree.parents, tree.width, log->parents + first);
        std::copy_n(tree.depths, tree.width, log->depths + first);
        std::fill(log->depths + first + tree.width, log->depths + first + log->width, 0);
        for (int64_t i = 0; i < tree.width; i++) {
            log->predicted[first + i] = predicted[chosen[i]];
            log->buckets[first + i] = buckets[chosen[i]];
        }
    }
}

void judge_proposed(const Proposed* log, const Hits* hits, const int64_t* rows, int64_t batch, const int64_t* tokens,
                    int64_t longest, const int64_t* lengths, int64_t further, int64_t* came) {
    std::vector<char> tried(log->width), came_true(log->width);
    came[0] = came[1] = 0;
    hits->fade();
    for (int64_t b = 0; b < batch; b++, tokens += longest) {
        const int64_t first = rows[b] * log->width;
        fates(log->tokens + first, log->parents + first, log->depths + first, 1, log->width, tokens, longest, lengths + b,
              (bool*)tried.data(), (bool*)came_true.data());
        for (int64_t i = 0; i < log->width; i++) {
            if (!tried[i]) continue;  // and then it has not come true
            hits->add(log->buckets[first + i], came_true[i], log->predicted[first + i]);
            came[0] += came_true[i] && log->buckets[first + i] >= further && log->depths[first + i] < lengths[b];
        }
        came[1] += lengths[b];
    }
    for (int64_t b = 0; b < batch; b++) std::fill_n(log->depths + rows[b] * log->width, log->width, 0);
    hits->estimate();
}

void correct_survival(const int64_t* parents, const int64_t* depths, const float* survival, int64_t batch, int64_t nodes,
                      const int64_t* deepest, const float* rates, int64_t depth_bins, int64_t claims, float ceiling,
                      float* corrected, float* conditional, int64_t* bucket) {
    for (int64_t b = 0; b < batch; b++) {
        for (int64_t i = 0; i < nodes; i++) {
            const int64_t parent = parents[i], depth = std::max<int64_t>(depths[i] - 1, 0);
            const float above = parent < 0 ? 1.0f : std::max(survival[parent], 1e-9f);
            conditional[i] = depths[i] > deepest[b] ? 0.0f : std::min(survival[i] / above, 1.0f);
            const bool claimed = conditional[i] > 0;  // not if it is no number
            const int64_t claim = claimed ? std::min(int64_t(conditional[i] * float(claims - 1)), claims - 1) : 0;
            bucket[i] = std::min(depth, depth_bins - 1) * claims + claim;
            corrected[i] = std::min(conditional[i] * rates[bucket[i]], ceiling) * (parent < 0 ? 1.0f : corrected[parent]);
        }
        parents += nodes, depths += nodes, survival += nodes, corrected += nodes, conditional += nodes, bucket += nodes;
    }
}
}
