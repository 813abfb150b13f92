// What is recorded of committed tokens, see `record_tokens` of kernels/entries.py.
#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "export.h"
#include "team.h"
#include "vector.h"

namespace {

constexpr int PEAKS = 128, BLOCK = 64;  // parts whose n-th maximum is at most the n-th score; scores compared at once
constexpr float LOWEST = -1e30f, LOG2_E = 1.44269504f;

struct Recordings {
    const bool* wanted;
    char* features;
    int64_t* positions;
    char* states;
    int64_t* tokens;
    float* chances;
    bool* rejected;
    int32_t* top_ids;
    float* top_logprobs;
    int64_t places, feature_bytes, state_bytes, top;
};

struct FirstBlocks {
    const int64_t* roots;
    const char *states, *logits;
    const int64_t *t2d, size, vocab;
};

struct CommittedTokens {
    const int64_t *rows, *roots, *counts, *num_nodes, *tokens;
    const char *features, *logits;
    const int64_t* chosen_by;
};

using Scored = std::pair<float, int32_t>;  // less its score, and the token

// Finds the `top` highest scores, highest first. Returns the log of the sum of all exponentials.
template <class T>
float likeliest(const T* scores, int64_t vocab, int64_t top, std::vector<Scored>& best) {
    std::vector<float> peaks(std::max<int64_t>(PEAKS, top), -INFINITY);
    for (int64_t i = 0; i < vocab; i += PEAKS)
        for (int64_t k = 0; k < std::min<int64_t>(PEAKS, vocab - i); k++) peaks[k] = std::max(peaks[k], to_float(scores[i + k]));
    std::sort(peaks.begin(), peaks.end(), std::greater<float>());
    const float highest = peaks[0], least = peaks[top - 1];
    best.assign(top, {INFINITY, 0});
    for (int64_t i = 0; i < vocab; i += BLOCK) {
        const int64_t end = std::min(vocab, i + BLOCK);
        int high = 0;
        for (int64_t j = i; j < end; j++) high += to_float(scores[j]) >= least;
        for (int64_t j = i; high && j < end; j++)
            if (to_float(scores[j]) >= least) best.push_back({-to_float(scores[j]), int32_t(j)});
    }
    std::partial_sort(best.begin(), best.begin() + top, best.end());
    Vec total{};
    for (int64_t i = 0; i < vocab; i += LANES) {
        const Vec below = load_end(scores + i, vocab - i, LOWEST) - highest;
        total = total + exp2_of((below > LOWEST ? below : splat(LOWEST)) * LOG2_E);
    }
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += total[lane];
    return highest + std::log(sum);
}

template <class T>
void record_tokens(const Recordings* to, const FirstBlocks* blocks, const CommittedTokens* of, int64_t batch, int64_t count,
                   int64_t vocab) {
    for_each(batch * count, batch * count == 1, [=](int64_t at) {
        const int64_t b = at / count, ahead = at % count, row = of->rows[b], root = of->roots[b], position = root + ahead + 1;
        if (ahead >= of->counts[b] || !to->wanted[row]) return;
        const int64_t before = row * to->places + (position - 1) % to->places, place = row * to->places + position % to->places;
        memcpy(to->features + before * to->feature_bytes, of->features + at * to->feature_bytes, size_t(to->feature_bytes));
        std::vector<Scored> best;
        const float all = likeliest((const T*)of->logits + of->chosen_by[at] * vocab, vocab, to->top, best);
        for (int64_t i = 0, first = place * to->top; i < to->top; i++)
            to->top_ids[first + i] = best[i].second, to->top_logprobs[first + i] = -best[i].first - all;
        const int64_t token = to->tokens[place] = of->tokens[at];
        to->rejected[place] = ahead == of->counts[b] - 1 && of->num_nodes[b] > 0;
        to->chances[place] = 0, to->positions[place] = -1;
        if (!blocks || ahead >= blocks->size || blocks->roots[row] != root) return;
        const int64_t entry = row * blocks->size + ahead, drafted = blocks->t2d[token];
        memcpy(to->states + place * to->state_bytes, blocks->states + entry * to->state_bytes, size_t(to->state_bytes));
        to->positions[place] = position;
        const T* logits = (const T*)blocks->logits + entry * blocks->vocab;
        if (drafted >= 0) to->chances[place] = std::exp(to_float(logits[drafted]) - likeliest(logits, blocks->vocab, 1, best));
    });
}

}  // namespace

EXPORT_TYPES(record_tokens)
