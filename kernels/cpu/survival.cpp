// How often proposed nodes were accepted, and trees whose outcome is not known yet: the ops of kernels/survival.py.
#include <algorithm>
#include <memory>

#include "export.h"
#include "growth.h"
#include "trees.h"

namespace {

// What became of one tree's nodes.
struct Judged {
    std::unique_ptr<bool[]> tried, came_true;

    explicit Judged(int64_t width) : tried(new bool[width]), came_true(new bool[width]) {}

    void judge(const Trees& tree, const int64_t* committed, int64_t longest, int64_t count) {
        fates(tree.tokens, tree.parents, tree.depths, 1, tree.width, committed, longest, &count, tried.get(), came_true.get());
    }
};

// Counted labels, and the rates that follow, for `buckets` buckets.
struct Hits {
    float *came_true, *expected, *rates;
    int64_t buckets;
    float prior, decay, low, high;

    void fade() const {
        for (int64_t i = 0; i < buckets; i++) came_true[i] *= decay, expected[i] *= decay;
    }
    void add(int64_t bucket, float true_ones, float expected_ones) const {
        came_true[bucket] += true_ones, expected[bucket] += expected_ones;
    }
    void estimate() const {
        for (int64_t i = 0; i < buckets; i++) {
            float rate = (prior + came_true[i]) / (prior + expected[i]);
            rates[i] = std::min(std::max(rate, low), high);
        }
    }
};

void count_claims(const Hits* hits, float* bins, int64_t num_bins, float bin_decay, const Trees* trees, int64_t batch,
                  const float* claimed, const int64_t* buckets, const int64_t* committed, int64_t longest,
                  const int64_t* num_known) {
    hits->fade();
    for (int64_t i = 0; i < 3 * num_bins; i++) bins[i] *= bin_decay;
    Judged judged(trees->width);
    for (int64_t b = 0; b < batch; b++, claimed += trees->width, buckets += trees->width, committed += longest) {
        const Trees tree = trees->tree(b);
        judged.judge(tree, committed, longest, num_known[b]);
        for (int64_t i = 0; i < tree.width; i++) {
            if (judged.tried[i]) hits->add(buckets[i], judged.came_true[i], claimed[i]);
            float* bin = bins + std::clamp<int64_t>(int64_t(tree.survival[i] * float(num_bins)), 0, num_bins - 1);
            bin[0] += tree.depths[i] > 0, bin[num_bins] += tree.survival[i], bin[2 * num_bins] += judged.came_true[i];
        }
    }
    hits->estimate();
}

}  // namespace

void keep_proposed(const Proposed* log, const int64_t* rows, int64_t batch, const Trees* trees, const int64_t* chosen,
                   const float* predicted, const int64_t* buckets, int64_t count) {
    for (int64_t b = 0; b < batch; b++, chosen += trees->width, predicted += count) {
        const Trees tree = trees->tree(b);
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

namespace {

void judge_proposed(const Proposed* log, const Hits* hits, const int64_t* rows, int64_t batch, const int64_t* tokens,
                    int64_t longest, const int64_t* lengths, int64_t next_block, int64_t* came) {
    Judged judged(log->width);
    came[0] = came[1] = 0;
    hits->fade();
    for (int64_t b = 0; b < batch; b++, tokens += longest) {
        const int64_t first = rows[b] * log->width;
        const Trees tree{log->tokens + first, log->parents + first, log->depths + first, nullptr, nullptr, log->width};
        judged.judge(tree, tokens, longest, lengths[b]);
        for (int64_t i = 0; i < log->width; i++) {
            if (!judged.tried[i]) continue;  // and then it has not come true
            hits->add(log->buckets[first + i], judged.came_true[i], log->predicted[first + i]);
            came[0] += judged.came_true[i] && log->buckets[first + i] >= next_block && log->depths[first + i] < lengths[b];
        }
        came[1] += lengths[b];
    }
    for (int64_t b = 0; b < batch; b++) std::fill_n(log->depths + rows[b] * log->width, log->width, 0);
    hits->estimate();
}

}  // namespace

EXPORT(count_claims)
EXPORT(keep_proposed)
EXPORT(judge_proposed)
