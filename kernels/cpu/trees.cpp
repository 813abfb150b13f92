// Draft trees of a few hundred nodes: node by node what the references compute by sorts and jumps.
#include <algorithm>
#include <cstring>

#include "export.h"
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

void merge_trees(const Trees* raw, int64_t batch, int merges, const Trees* merged, int64_t* chosen) {
    for (int64_t b = 0; b < batch; b++, chosen += merged->width) {
        const Trees from = raw->tree(b), to = merged->tree(b);
        Numbers order = likeliest_first(from, from.width), leaders, kept;
        if (merges) leaders = leaders_of(from, order);
        for (int64_t i : order)
            if (!merges || leaders[i] == i) kept.push_back(i);
        cut(from, kept, merges ? &leaders : nullptr, to, chosen);
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

EXPORT(merge_trees)
EXPORT(fates)
EXPORT(ancestor_matrix)
