// The feed-forward of a mixture of experts, see kernels/experts.py. Rows are sorted by expert, so that each chosen
// expert's weights are read once whatever the number of its rows, and all experts' products are one loop each.
#include <algorithm>
#include <cmath>
#include <vector>

#include "decoder.h"
#include "export.h"
#include "team.h"

namespace {

constexpr int64_t FEW = 1 << 15;  // elements moved below which helpers cost more than they save

enum { SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN };

// Of numbers that may be NaN, the first of the largest that are not taken.
int64_t best_of(const float* values, const uint8_t* taken, int64_t count) {
    int64_t best = std::find(taken, taken + count, 0) - taken;
    for (int64_t i = best + 1; i < count; i++)
        if (!taken[i] && values[i] > values[best]) best = i;
    return best;
}

// Takes the `count` largest.
void take_best(const float* values, uint8_t* taken, int64_t among, int64_t count) {
    for (int64_t i = 0; i < count; i++) taken[best_of(values, taken, among)] = 1;
}

// values = softmax of them; exponentials in double precision, so that every library's have the same bits.
void softmax(float* values, int64_t count) {
    const float highest = *std::max_element(values, values + count);
    double total = 0;
    for (int64_t i = 0; i < count; i++) total += std::exp(double(values[i] - highest));
    for (int64_t i = 0; i < count; i++) values[i] = float(std::exp(double(values[i] - highest)) / total);
}

// Shuts out the experts of all groups but those whose two best add up to the most.
void keep_groups(const Router& router, float* ranks) {
    std::vector<float> sums;
    std::vector<uint8_t> taken(size_t(router.groups));
    const int64_t size = router.experts / router.groups;
    for (int64_t group = 0; group < router.groups; group++) {
        std::vector<float> sorted(ranks + group * size, ranks + (group + 1) * size);
        std::partial_sort(sorted.begin(), sorted.begin() + 2, sorted.end(), std::greater<float>());
        sums.push_back(sorted[0] + sorted[1]);
    }
    take_best(sums.data(), taken.data(), router.groups, router.chosen_groups);
    for (int64_t i = 0; i < router.experts; i++)
        if (!taken[size_t(i / size)]) ranks[i] = -INFINITY;
}

template <class T>
void choose(const Router& router, const T* logits, int64_t* indices, float* weights) {
    std::vector<float> scores(size_t(router.experts)), ranks;
    std::vector<uint8_t> taken(size_t(router.experts));
    for (size_t i = 0; i < scores.size(); i++) scores[i] = to_float(logits[i]);
    ranks = scores;
    if (router.scores == SOFTMAX) softmax(scores.data(), router.experts);
    if (router.scores == SIGMOID)
        for (float& score : scores) score = float(1.0 / (1.0 + std::exp(-double(score))));
    if (router.correction || router.groups > 1)
        for (size_t i = 0; i < scores.size(); i++) ranks[i] = scores[i] + (router.correction ? router.correction[i] : 0.0f);
    if (router.groups > 1) keep_groups(router, ranks.data());
    take_best(ranks.data(), taken.data(), router.experts, router.chosen);
    for (int64_t i = 0, place = 0; i < router.experts; i++)
        if (taken[size_t(i)]) weights[place] = scores[size_t(i)], indices[place++] = i;
    if (router.scores == SOFTMAX_OF_CHOSEN) softmax(weights, router.chosen);
    float sum = 1e-20f;
    for (int64_t place = 0; place < router.chosen; place++) sum += weights[place];
    for (int64_t place = 0; place < router.chosen; place++) {
        if (router.normalised) weights[place] /= sum;
        weights[place] *= router.scale;
        if (router.expert_scale) weights[place] *= router.expert_scale[indices[place]];
    }
}

}  // namespace

template <class T>
void choose_experts(const Router* router, const T* logits, int64_t* indices, float* weights, int64_t rows) {
    const int64_t chosen = router->chosen;
    for_each(rows, rows * router->experts <= 1 << 9, [=](int64_t row) {
        choose(*router, logits + row * router->experts, indices + row * chosen, weights + row * chosen);
    });
}

// Sums up what a row's experts made of LANES columns, by pieces. `from`: their lines of `parts`, -1 of other devices'.
template <class T>
Vec add_pieces(const Cut& cut, const int64_t* indices, const int64_t* from, const float* weights, int64_t chosen,
               const T* parts, int64_t out, int64_t columns) {
    Vec kept[Cut::MOST_LEVELS][1];
    int64_t one = 0;
    while (one < chosen && indices[one] < 0) one++;
    for (int piece = 0; piece < cut.count; piece++) {
        Vec sum{};
        for (; one < chosen && indices[one] < cut.ends[piece + 1]; one++)
            sum = fused(splat(weights[one]), load_end(parts + from[one] * out, columns), sum);
        keep(kept, &sum, piece);
    }
    return kept[cut.levels()][0];
}

template <class T>
void experts(const Experts<T>* of, const T* x, const int64_t* indices, const float* weights, void* y, int64_t rows,
             int64_t chosen, T* scratch) {
    static thread_local std::vector<int64_t> first, place;  // sorted rows of each expert; where a row's experts have it
    static thread_local std::vector<Group> up, down;
    const int64_t pairs = rows * chosen, in = of->gate_up.in, width = of->down.in, out = of->down.out, count = of->count;
    first.assign(size_t(count + 1), 0), place.assign(size_t(pairs), -1), up.clear(), down.clear();
    const auto is_own = [=](int64_t expert) { return expert >= 0 && expert < count; };
    for (int64_t i = 0; i < pairs; i++)
        if (is_own(indices[i])) first[size_t(indices[i] + 1)]++;
    for (int64_t expert = 0; expert < count; expert++) {
        const int64_t begin = first[size_t(expert)], number = first[size_t(expert + 1)];
        first[size_t(expert + 1)] += begin;
        if (!number) continue;
        up.push_back(of->gate_up.group(expert, begin, number));
        down.push_back(of->down.group(expert, begin, number));
    }
    const int64_t own = first[size_t(count)];
    for (int64_t i = 0; i < pairs; i++)
        if (is_own(indices[i])) place[size_t(i)] = first[size_t(indices[i])]++;
    const int64_t *places = place.data(), groups = int64_t(up.size());
    T *sorted = scratch, *gated = sorted + own * std::max(in, out), *joined = gated + own * width;
    for_each(pairs, own * in <= FEW, [=](int64_t i) {
        if (places[i] >= 0) memcpy(sorted + places[i] * in, x + i / chosen * in, size_t(in) * sizeof(T));
    });
    of->gate_up(sorted, up.data(), groups, joined);
    gate_mul(joined, gated, own, width, of->gate.activation, of->gate.limit);
    of->down(gated, down.data(), groups, sorted);
    for_each(rows, own * out <= FEW, [=](int64_t row) {
        const int64_t at = row * chosen;
        for (int64_t i = 0; i < out; i += LANES) {
            const Vec sum = add_pieces(of->cut, indices + at, places + at, weights + at, chosen, sorted + i, out, out - i);
            finish<T>(y, row * out + i, sum, nullptr, out - i, of->cut);
        }
    });
}

template void choose_experts(const Router*, const bf16*, int64_t*, float*, int64_t);
template void choose_experts(const Router*, const float*, int64_t*, float*, int64_t);
template void experts(const Experts<bf16>*, const bf16*, const int64_t*, const float*, void*, int64_t, int64_t, bf16*);
template void experts(const Experts<float>*, const float*, const int64_t*, const float*, void*, int64_t, int64_t, float*);

EXPORT_TYPES(choose_experts)
EXPORT_TYPES(experts)
