// The op of kernels/survival.py: corrects survival, divides nodes among sequences, keeps the likeliest.
#include <algorithm>
#include <numeric>

#include "export.h"
#include "trees.h"

namespace {

struct Rates {  // [depths, claims] of them
    const float* rates;
    int64_t depths, claims;
    float ceiling;
};

struct Candidates {  // one sequence's candidates
    Trees tree;  // with survival as it is corrected
    std::vector<float> survival, claimed;
    Numbers buckets, order;  // the likeliest first
    int64_t num_alive = 0, limit = 0, wanted = 0;

    int64_t allowed() const { return std::clamp<int64_t>(limit, 0, *tree.num_nodes); }
    float value_of(int64_t rank, float weight) const { return survival[order[rank]] * weight; }
};

void correct(Candidates& sequence, int64_t deepest, const Rates& rates) {
    const Trees& tree = sequence.tree;
    sequence.survival.resize(tree.width), sequence.claimed.resize(tree.width), sequence.buckets.resize(tree.width);
    for (int64_t i = 0; i < tree.width; i++) {
        const int64_t parent = tree.parents[i], depth = std::max<int64_t>(tree.depths[i] - 1, 0);
        const float above = parent < 0 ? 1.0f : std::max(tree.survival[parent], 1e-9f);
        const float claimed = tree.depths[i] > deepest ? 0.0f : std::min(tree.survival[i] / above, 1.0f);
        const int64_t most = rates.claims - 1;  // NaN counts as a claim of 0
        const int64_t claim = claimed > 0 ? std::min(int64_t(claimed * float(most)), most) : 0;
        const int64_t bucket = std::min(depth, rates.depths - 1) * rates.claims + claim;
        const float corrected = std::min(claimed * rates.rates[bucket], rates.ceiling);
        sequence.survival[i] = corrected * (parent < 0 ? 1.0f : sequence.survival[parent]);
        sequence.claimed[i] = claimed, sequence.buckets[i] = bucket;
        sequence.num_alive += sequence.survival[i] > 0;
    }
    sequence.tree.survival = sequence.survival.data();
    sequence.order.resize(*tree.num_nodes);
    std::iota(sequence.order.begin(), sequence.order.end(), 0);
    std::stable_sort(sequence.order.begin(), sequence.order.end(),
                     [&](int64_t i, int64_t j) { return sequence.survival[i] > sequence.survival[j]; });
}

// The choice of most expected tokens per second; `more(k)` are those that the k-th adds to the `certain` ones.
template <class More>
int64_t best_rate(float certain, const float* seconds, int64_t choices, More more) {
    int64_t best = 0;
    float most = 0;
    for (int64_t k = 0; k < choices; k++) {
        const float rate = (certain + more(k)) / seconds[k];
        if (k == 0 || rate > most) best = k, most = rate;
    }
    return best;
}

void allocate_nodes(std::vector<Candidates>& sequences, float certain, const float* seconds, int64_t choices, const float* weights) {
    std::vector<std::pair<float, int64_t>> together;  // value, sequence
    int64_t num_sequences = 0;
    for (size_t b = 0; b < sequences.size(); b++) {
        num_sequences += sequences[b].limit >= 0;
        for (int64_t rank = 0; rank < sequences[b].allowed(); rank++)
            together.emplace_back(sequences[b].value_of(rank, weights[b]), b);
    }
    std::stable_sort(together.begin(), together.end(), [](const auto& one, const auto& other) { return one.first > other.first; });
    double sum = 0;
    const int64_t count = int64_t(together.size()), best = best_rate(certain, seconds, choices, [&](int64_t k) {
        if (k > 0 && k <= count) sum += together[k - 1].first;
        return float(sum);
    });
    int64_t left = std::min(best, count);
    const bool is_for_all = best > num_sequences;  // then each sequence's best node comes before second ones
    if (is_for_all)
        for (Candidates& sequence : sequences)
            if (sequence.allowed()) sequence.wanted = 1, left--;
    std::vector<bool> seen(sequences.size());
    for (int64_t k = 0; left > 0; k++) {
        const int64_t b = together[k].second;
        if (is_for_all && !seen[b])
            seen[b] = true;
        else
            sequences[b].wanted++, left--;
    }
}

void allocate_width(std::vector<Candidates>& sequences, float certain, const float* seconds, int64_t choices, const float* weights,
                    const int64_t* widths) {
    const int64_t best = best_rate(certain, seconds, choices, [&](int64_t k) {
        float all = 0;
        for (size_t b = 0; b < sequences.size(); b++) {
            double sum = 0;
            for (int64_t rank = 0; rank < std::min(widths[k], sequences[b].allowed()); rank++)
                sum += sequences[b].value_of(rank, weights[b]);
            all += float(sum);
        }
        return all;
    });
    for (Candidates& sequence : sequences) sequence.wanted = std::clamp<int64_t>(sequence.limit, 0, widths[best]);
}

void prune_trees(const Trees* candidates, int64_t batch, const int64_t* deepest, const int64_t* requested, const float* rates,
                 int64_t depths, int64_t claims, float ceiling, const float* seconds, int64_t choices, const float* weights,
                 const int64_t* widths, const Trees* kept, float* claimed, int64_t* buckets, int64_t* sizes) {
    std::vector<Candidates> sequences(batch);
    float certain = 0;
    for (int64_t b = 0; b < batch; b++) {
        sequences[b].tree = candidates->tree(b);
        correct(sequences[b], deepest[b], {rates, depths, claims, ceiling});
        sequences[b].limit = std::min(requested[b], sequences[b].num_alive);
        if (sequences[b].limit >= 0) certain += weights[b];
    }
    if (!choices)
        for (Candidates& sequence : sequences) sequence.wanted = std::max<int64_t>(sequence.limit, 0);
    else if (widths)
        allocate_width(sequences, certain, seconds, choices, weights, widths);
    else
        allocate_nodes(sequences, certain, seconds, choices, weights);
    Numbers chosen(kept->width);
    for (int64_t b = 0; b < batch; b++, claimed += kept->width, buckets += kept->width, sizes += 3) {
        const Candidates& sequence = sequences[b];
        const int64_t keep = widths ? sequence.limit : sequence.wanted;
        Numbers nodes(sequence.order.begin(), sequence.order.begin() + std::clamp<int64_t>(keep, 0, std::min(kept->width, *sequence.tree.num_nodes)));
        std::stable_sort(nodes.begin(), nodes.end(),
                         [&](int64_t i, int64_t j) { return sequence.tree.depths[i] < sequence.tree.depths[j]; });
        const Trees tree = kept->tree(b);
        cut(sequence.tree, nodes, nullptr, tree, chosen.data());
        for (int64_t k = 0; k < kept->width; k++) {
            const bool exists = k < *tree.num_nodes;
            claimed[k] = exists ? sequence.claimed[chosen[k]] : 0.0f, buckets[k] = exists ? sequence.buckets[chosen[k]] : 0;
        }
        sizes[0] = sequence.wanted, sizes[1] = *tree.num_nodes, sizes[2] = sequence.num_alive;
    }
}

}  // namespace

EXPORT(prune_trees)
