// The likeliest token of each row: the highest score, of equals the lowest id.
#include <cmath>

#include "vector.h"

namespace {

constexpr int CHAINS = 4;        // comparisons on their way at once
constexpr int64_t FEW = 1 << 20;  // scores below which waking threads costs more than they save

template <class T>
void choose_row(const T* scores, int64_t vocab, int64_t* token, bool* bad) {
    Vec best[CHAINS];
    IVec place[CHAINS] = {}, strange{};
    for (Vec& lanes : best) lanes = splat(-INFINITY);
    int64_t i = 0;
    for (; i + CHAINS * LANES <= vocab; i += CHAINS * LANES)
        for (int c = 0; c < CHAINS; c++) {
            Vec x = load(scores + i + c * LANES);
            IVec better = x > best[c];
            strange |= x != x;
            best[c] = better ? x : best[c];
            place[c] = better ? IVec{} + int32_t(i) : place[c];
        }
    float highest = -INFINITY;
    int64_t at = 0;
    bool nan = false;
    for (int c = 0; c < CHAINS; c++)
        for (int lane = 0; lane < LANES; lane++) {
            int64_t id = place[c][lane] + c * LANES + lane;
            if (best[c][lane] > highest || (best[c][lane] == highest && id < at)) highest = best[c][lane], at = id;
        }
    for (int lane = 0; lane < LANES; lane++) nan |= strange[lane] != 0;
    for (; i < vocab; i++) {
        float x = to_float(scores[i]);
        nan |= x != x;
        if (x > highest) highest = x, at = i;
    }
    *bad = nan || std::isinf(highest);
    *token = *bad ? 0 : at;
}

template <class T>
void choose_likeliest(const T* scores, int64_t rows, int64_t vocab, int64_t* tokens, bool* bad, int threads) {
#pragma omp parallel for schedule(static) num_threads(rows > 1 && rows * vocab > FEW ? threads : 1)
    for (int64_t row = 0; row < rows; row++) choose_row(scores + row * vocab, vocab, tokens + row, bad + row);
}

}  // namespace

extern "C" {
void choose_likeliest_bf16(const bf16* scores, int64_t rows, int64_t vocab, int64_t* tokens, bool* bad, int threads) {
    choose_likeliest(scores, rows, vocab, tokens, bad, threads);
}
void choose_likeliest_float(const float* scores, int64_t rows, int64_t vocab, int64_t* tokens, bool* bad, int threads) {
    choose_likeliest(scores, rows, vocab, tokens, bad, threads);
}
}
