// The token of each row: of the highest score, or of the highest sum of score and Gumbel noise; of equals the lowest id.
// Noise has the same bits wherever it is drawn, so products and sums are never fused here.
#pragma GCC optimize("fp-contract=off")
#include <cmath>

#include "export.h"
#include "growth.h"
#include "gumbel.h"
#include "team.h"
#include "vector.h"

namespace {

constexpr int CHAINS = 4;         // comparisons on their way at once
constexpr int64_t FEW = 1 << 16;  // scores below which helpers cost more than they save
constexpr int64_t FEW_DRAWN = 1 << 13;  // the same where each score draws noise, which takes two logarithms

// The natural logarithm of normal numbers above 0: x = 2^e m with m about 1, log m = 2 atanh((m - 1) / (m + 1)).
Vec log_of(Vec x) {
    IVec exponent = ((IVec)x - 0x3f3504f3) >> 23;  // m from sqrt(1/2) to sqrt(2)
    Vec m = (Vec)((IVec)x - (exponent << 23));
    Vec s = (m - 1.0f) / (m + 1.0f), z = s * s;
    Vec series = (((z * (1 / 9.0f) + 1 / 7.0f) * z + 1 / 5.0f) * z + 1 / 3.0f) * z + 1.0f;
    Vec whole = __builtin_convertvector(exponent, Vec);
    return whole * 0.693359375f + (2.0f * s * series + whole * -2.12194440e-4f);  // log 2 in two parts
}

// As kernels/sample.py: -log(E), E = -log1p(-u), u = (hash(key, token) + 1/2) 2^-32, at most 1 - 2^-24.
Vec noise_of(const int32_t* key, UVec tokens) {
    UVec bits = mixed(mixed(tokens ^ uint32_t(key[0])) ^ uint32_t(key[1]));
    Vec u = (__builtin_convertvector(bits, Vec) + 0.5f) * 0x1p-32f;
    u = u < 1 - 0x1p-24f ? u : splat(1 - 0x1p-24f);
    Vec rest = 1.0f - u, lost = rest - 1.0f;                                // log1p(x) = log(1 + x) x / ((1 + x) - 1)
    Vec e = lost == 0.0f ? u : log_of(rest) * (u / (lost == 0.0f ? splat(1.0f) : lost));
    return -log_of(e);
}

struct Best {
    float score;
    int64_t token;
    bool nan;
};

template <class Score>
Best best_of(int64_t vocab, Score score) {  // score(i): of LANES tokens from i on
    Vec best[CHAINS];
    IVec place[CHAINS] = {}, strange{};
    for (Vec& lanes : best) lanes = splat(-INFINITY);
    for (int64_t i = 0; i < vocab; i += CHAINS * LANES)
        for (int c = 0; c < CHAINS && i + c * LANES < vocab; c++) {
            Vec x = score(i + c * LANES);
            IVec better = x > best[c];
            strange |= x != x;
            best[c] = better ? x : best[c];
            place[c] = better ? IVec{} + int32_t(i) : place[c];
        }
    Best found = {-INFINITY, 0, false};
    for (int c = 0; c < CHAINS; c++)
        for (int lane = 0; lane < LANES; lane++) {
            int64_t id = place[c][lane] + c * LANES + lane;
            if (best[c][lane] > found.score || (best[c][lane] == found.score && id < found.token))
                found.score = best[c][lane], found.token = id;
            found.nan |= strange[lane] != 0;
        }
    return found;
}

template <class T>
void choose_row(const T* scores, uint64_t noise, float temperature, int64_t vocab, int64_t* token, int64_t* bad) {
    // what is behind the end never wins
    Best found = best_of(vocab, [&](int64_t i) { return load_end(scores + i, vocab - i, -INFINITY); });
    *bad = found.nan || std::isinf(found.score);
    if (!*bad && temperature > 0) {
        const float highest = found.score;
        const int32_t key[] = {int32_t(noise), int32_t(noise >> 32)};
        UVec lanes;
        for (int lane = 0; lane < LANES; lane++) lanes[lane] = uint32_t(lane);
        found = best_of(vocab, [&](int64_t i) {
            return (load_end(scores + i, vocab - i, -INFINITY) - highest) / temperature + noise_of(key, lanes + uint32_t(i));
        });
    }
    *token = *bad ? 0 : found.token;
}

template <class T>
void choose(const T* scores, const int64_t* seeds, const int64_t* positions, const float* temperatures, int64_t rows,
            int64_t vocab, int64_t* tokens, int64_t* bad) {
    for_each(rows, rows * vocab <= FEW, [=](int64_t row) {
        choose_row(scores + row * vocab, seeds ? noise_key(seeds[row], positions[row]) : 0, temperatures ? temperatures[row] : 0.0f,
                   vocab, tokens + row, bad + row);
    });
}

}  // namespace

void gumbel_noise(const int32_t* keys, const int32_t* tokens, float* noise, int64_t rows, int64_t count) {
    for_each(rows, rows * count <= FEW_DRAWN, [=](int64_t row) {
        for (int64_t i = 0; i < count; i += LANES) {
            UVec part{};
            for (int64_t lane = 0; lane < LANES && i + lane < count; lane++) part[lane] = uint32_t(tokens[i + lane]);
            Vec drawn = noise_of(keys + 2 * row, part);
            store_end(noise + row * count + i, drawn, count - i);
        }
    });
}


EXPORT_TYPES(choose)
EXPORT(gumbel_noise)
