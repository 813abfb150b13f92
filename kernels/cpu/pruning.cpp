// Survival of candidates corrected, nodes shared out, the likeliest kept, and what became of them counted.
#include <algorithm>
#include <numeric>

#include "trees.h"

namespace {

struct Rates {  // [depths, claims] of them
    const float* rates;
    int64_t depths, claims;
    float ceiling;
};

struct Line {  // one sequence's candidates
    Trees tree;  // with survival as it is corrected
    std::vector<float> survival, claimed;
    Numbers buckets, order;  // the likeliest first
    int64_t worth = 0, limit = 0, wanted = 0;

    int64_t allowed() const { return std::clamp<int64_t>(limit, 0, *tree.num_nodes); }
    float worth_of(int64_t rank, float weight) const { return survival[order[rank]] * weight; }
};

void correct(Line& line, int64_t deepest, const Rates& rates) {
    const Trees& tree = line.tree;
    line.survival.resize(tree.width), line.claimed.resize(tree.width), line.buckets.resize(tree.width);
    for (int64_t i = 0; i < tree.width; i++) {
        const int64_t parent = tree.parents[i], depth = std::max<int64_t>(tree.depths[i] - 1, 0);
        const float above = parent < 0 ? 1.0f : std::max(tree.survival[parent], 1e-9f);
        const float claimed = tree.depths[i] > deepest ? 0.0f : std::min(tree.survival[i] / above, 1.0f);
        const int64_t most = rates.claims - 1;  // of no number a claim of 0
        const int64_t claim = claimed > 0 ? std::min(int64_t(claimed * float(most)), most) : 0;
        const int64_t bucket = std::min(depth, rates.depths - 1) * rates.claims + claim;
        const float made = std::min(claimed * rates.rates[bucket], rates.ceiling);
        line.survival[i] = made * (parent < 0 ? 1.0f : line.survival[parent]);
        line.claimed[i] = claimed, line.buckets[i] = bucket;
        line.worth += line.survival[i] > 0;
    }
    line.tree.survival = line.survival.data();
    line.order.resize(*tree.num_nodes);
    std::iota(line.order.begin(), line.order.end(), 0);
    std::stable_sort(line.order.begin(), line.order.end(),
                     [&](int64_t i, int64_t j) { return line.survival[i] > line.survival[j]; });
}

// The choice of most expected tokens per second; `more(k)` are those that the k-th brings beside `certain` ones.
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

void allocate_nodes(std::vector<Line>& lines, float certain, const float* seconds, int64_t choices, const float* weights) {
    std::vector<std::pair<float, int64_t>> together;  // worth, whose
    int64_t sequences = 0;
    for (size_t b = 0; b < lines.size(); b++) {
        sequences += lines[b].limit >= 0;
        for (int64_t rank = 0; rank < lines[b].allowed(); rank++)
            together.emplace_back(lines[b].worth_of(rank, weights[b]), b);
    }
    std::stable_sort(together.begin(), together.end(), [](const auto& one, const auto& other) { return one.first > other.first; });
    double sum = 0;
    const int64_t count = int64_t(together.size()), best = best_rate(certain, seconds, choices, [&](int64_t k) {
        if (k > 0 && k <= count) sum += together[k - 1].first;
        return float(sum);
    });
    int64_t left = std::min(best, count);
    const bool is_for_all = best > sequences;  // then each one's best node comes before anybody's second
    if (is_for_all)
        for (Line& line : lines)
            if (line.allowed()) line.wanted = 1, left--;
    std::vector<bool> seen(lines.size());
    for (int64_t k = 0; left > 0; k++) {
        const int64_t b = together[k].second;
        if (is_for_all && !seen[b])
            seen[b] = true;
        else
            lines[b].wanted++, left--;
    }
}

void allocate_width(std::vector<Line>& lines, float certain, const float* seconds, int64_t choices, const float* weights,
                    const int64_t* widths) {
    const int64_t best = best_rate(certain, seconds, choices, [&](int64_t k) {
        float all = 0;
        for (size_t b = 0; b < lines.size(); b++) {
            double sum = 0;
            for (int64_t rank = 0; rank < std::min(widths[k], lines[b].allowed()); rank++)
                sum += lines[b].worth_of(rank, weights[b]);
            all += float(sum);
        }
        return all;
    });
    for (Line& line : lines) line.wanted = std::clamp<int64_t>(line.limit, 0, widths[best]);
}

}  // namespace

extern "C" {

void prune_trees(const Trees* candidates, int64_t batch, const int64_t* deepest, const int64_t* wished, const float* rates,
                 int64_t depths, int64_t claims, float ceiling, const float* seconds, int64_t choices, const float* weights,
                 const int64_t* widths, const Trees* kept, float* claimed, int64_t* buckets, int64_t* sizes) {
    std::vector<Line> lines(batch);
    float certain = 0;
    for (int64_t b = 0; b < batch; b++) {
        lines[b].tree = candidates->line(b);
        correct(lines[b], deepest[b], {rates, depths, claims, ceiling});
        lines[b].limit = std::min(wished[b], lines[b].worth);
        if (lines[b].limit >= 0) certain += weights[b];
    }
    if (!choices)
        for (Line& line : lines) line.wanted = std::max<int64_t>(line.limit, 0);
    else if (widths)
        allocate_width(lines, certain, seconds, choices, weights, widths);
    else
        allocate_nodes(lines, certain, seconds, choices, weights);
    Numbers chosen(kept->width);
    for (int64_t b = 0; b < batch; b++, claimed += kept->width, buckets += kept->width, sizes += 3) {
        const Line& line = lines[b];
        const int64_t keep = widths ? line.limit : line.wanted;
        Numbers nodes(line.order.begin(), line.order.begin() + std::clamp<int64_t>(keep, 0, std::min(kept->width, *line.tree.num_nodes)));
        std::stable_sort(nodes.begin(), nodes.end(),
                         [&](int64_t i, int64_t j) { return line.tree.depths[i] < line.tree.depths[j]; });
        const Trees tree = kept->line(b);
        cut(line.tree, nodes, nullptr, tree, chosen.data());
        for (int64_t k = 0; k < kept->width; k++) {
            const bool exists = k < *tree.num_nodes;
            claimed[k] = exists ? line.claimed[chosen[k]] : 0.0f, buckets[k] = exists ? line.buckets[chosen[k]] : 0;
        }
        sizes[0] = line.wanted, sizes[1] = *tree.num_nodes, sizes[2] = line.worth;
    }
}
}
