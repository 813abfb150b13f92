// What a rank head sees of each row of scores: the ten largest, their log sum exp, and the entropy.
#include <algorithm>
#include <cmath>

#include "export.h"
#include "growth.h"
#include "team.h"
#include "vector.h"

namespace {

constexpr int TOP = RANKS;
constexpr int GAPS[] = {1, 2, 4};  // ranks, from 0, whose distance to the first is a feature
constexpr int FEATURES = RANK_FEATURES;
constexpr int AT_ONCE = 4;         // vectors that are compared before anything is looked at closely
constexpr int64_t FEW = 1 << 16;   // elements below which helpers cost more than they save
constexpr float LOWEST = -1e30f;
constexpr float LOG2_E = 1.44269504f;

struct Best {  // the largest so far, in order; of equal ones the first seen
    float scores[TOP];
    int64_t ids[TOP];

    void take(float score, int64_t id) {
        if (!(score > scores[TOP - 1])) return;
        int place = TOP - 1;
        for (; place > 0 && score > scores[place - 1]; place--) scores[place] = scores[place - 1], ids[place] = ids[place - 1];
        scores[place] = score, ids[place] = id;
    }
};

bool any(IVec mask) {
    int64_t parts[LANES / 2], all = 0;
    memcpy(parts, &mask, sizeof(mask));
    for (int64_t part : parts) all |= part;
    return all != 0;
}

template <class T>
Best best_of(const T* scores, int64_t vocab) {
    Best best;
    std::fill(best.scores, best.scores + TOP, -INFINITY);
    std::fill(best.ids, best.ids + TOP, 0);
    int64_t i = 0;
    for (; i + AT_ONCE * LANES <= vocab; i += AT_ONCE * LANES) {
        IVec higher{};
        for (int v = 0; v < AT_ONCE; v++) higher |= (IVec)(load(scores + i + v * LANES) > splat(best.scores[TOP - 1]));
        if (any(higher))
            for (int64_t j = i; j < i + AT_ONCE * LANES; j++) best.take(to_float(scores[j]), j);
    }
    for (; i < vocab; i++) best.take(to_float(scores[i]), i);
    return best;
}

// features: log q of ranks 1..10, gaps of the first to some, q of the first, entropy, with log q = z - lse
template <class T>
void one_row(const T* scores, int64_t vocab, float* features, int64_t* ids) {
    Best best = best_of(scores, vocab);
    Vec total{}, weighted{};  // of e = exp(z - max), and of e (z - max)
    for (int64_t i = 0; i < vocab; i += LANES) {
        Vec below = load_end(scores + i, vocab - i, LOWEST) - best.scores[0];
        below = below > LOWEST ? below : splat(LOWEST);
        Vec e = exp2_of(below * LOG2_E);
        total = total + e;
        weighted = weighted + e * below;
    }
    float sum = 0, mean = 0;
    for (int lane = 0; lane < LANES; lane++) sum += total[lane], mean += weighted[lane];
    const float log_sum = std::log(sum);
    for (int rank = 0; rank < TOP; rank++) {
        features[rank] = best.scores[rank] - best.scores[0] - log_sum;
        ids[rank] = best.ids[rank];
    }
    for (int gap = 0; gap < 3; gap++) features[TOP + gap] = features[0] - features[GAPS[gap]];
    features[TOP + 3] = std::exp(features[0]);
    features[TOP + 4] = log_sum - mean / sum;
}

}  // namespace

template <class T>
void rank_features(const T* scores, int64_t rows, int64_t vocab, float* features, int64_t* ids) {
    for_each(rows, rows * vocab <= FEW, [=](int64_t row) {
        one_row(scores + row * vocab, vocab, features + row * FEATURES, ids + row * TOP);
    });
}

template void rank_features(const bf16*, int64_t, int64_t, float*, int64_t*);
template void rank_features(const float*, int64_t, int64_t, float*, int64_t*);

EXPORT_TYPES(rank_features)
