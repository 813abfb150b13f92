// y = x W^T + b. Every output is summed in the order of x's columns, whatever rows are beside it.
//
// A packed weight is [ceil(out / 32)][in / 2][32][2] of bf16, or [ceil(out / 32)][in][32] of float: a block of 32
// outputs is read front to back, once for up to MOST_ROWS rows.
#include <algorithm>

#include "vector.h"

namespace {

constexpr int COLUMNS = 2 * LANES;
constexpr int MOST_ROWS = 12;  // with two accumulators each they fill 24 of 32 registers
constexpr int AHEAD = 256;     // steps between a prefetch into the second cache and its use: 32 KB

template <class T>
constexpr int PAIR = sizeof(float) / sizeof(T);  // columns of x that one step takes

inline Vec dot(Vec sum, const float* x, const float* w) { return sum + *x * load(w); }
inline Vec dot(Vec sum, const bf16* x, const bf16* w) {
    uint32_t pair;
    memcpy(&pair, x, 4);
#ifdef __AVX512BF16__
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)_mm512_loadu_si512(w));
#else
    IVec both = *(const IVec*)w;
    sum = sum + to_float(x[0]) * (Vec)(both << 16);
    return sum + to_float(x[1]) * (Vec)(both & int32_t(0xffff0000));
#endif
}

template <class T, int ROWS>
void block(const T* x, const T* w, const float* bias, T* y, int64_t in, int64_t out, int columns) {
    Vec sums[ROWS][2];
    for (int r = 0; r < ROWS; r++)
        for (int h = 0; h < 2; h++) sums[r][h] = bias ? load(bias + h * LANES) : Vec{};
    for (int64_t i = 0; i < in; i += PAIR<T>, w += PAIR<T> * COLUMNS) {
        __builtin_prefetch(w + AHEAD * PAIR<T> * COLUMNS, 0, 2);
        __builtin_prefetch(w + AHEAD * PAIR<T> * COLUMNS + PAIR<T> * LANES, 0, 2);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            sums[r][0] = dot(sums[r][0], x + r * in + i, w);
            sums[r][1] = dot(sums[r][1], x + r * in + i, w + PAIR<T> * LANES);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int h = 0; h < 2; h++) store_end(y + r * out + h * LANES, sums[r][h], columns - h * LANES);
}

template <class T>
using Block = void (*)(const T*, const T*, const float*, T*, int64_t, int64_t, int);
template <class T>
constexpr Block<T> BLOCKS[MOST_ROWS] = {block<T, 1>, block<T, 2>, block<T, 3>, block<T, 4>,  block<T, 5>,  block<T, 6>,
                                        block<T, 7>, block<T, 8>, block<T, 9>, block<T, 10>, block<T, 11>, block<T, 12>};

template <class T>
void product(const T* x, const T* packed, const float* bias, T* y, int64_t rows, int64_t in, int64_t out, int threads) {
    int64_t parts = (rows + MOST_ROWS - 1) / MOST_ROWS;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t first = 0; first < out; first += COLUMNS)
        for (int64_t part = 0; part < parts; part++) {
            int64_t begin = rows * part / parts, end = rows * (part + 1) / parts;
            BLOCKS<T>[end - begin - 1](x + begin * in, packed + first * in, bias ? bias + first : nullptr,
                                       y + begin * out + first, in, out, int(std::min<int64_t>(COLUMNS, out - first)));
        }
}

template <class T>
void pack(const T* weight, T* packed, int64_t in, int64_t out) {
    for (int64_t first = 0; first < out; first += COLUMNS)
        for (int64_t i = 0; i < in; i += PAIR<T>)
            for (int c = 0; c < COLUMNS; c++)
                for (int j = 0; j < PAIR<T>; j++)
                    *packed++ = first + c < out ? weight[(first + c) * in + i + j] : T{};
}

}  // namespace

extern "C" {
void pack_bf16(const bf16* weight, bf16* packed, int64_t in, int64_t out) { pack(weight, packed, in, out); }
void pack_float(const float* weight, float* packed, int64_t in, int64_t out) { pack(weight, packed, in, out); }
void linear_bf16(const bf16* x, const void* packed, const float* bias, bf16* y, int64_t rows, int64_t in, int64_t out,
                 int threads) {
    product(x, (const bf16*)packed, bias, y, rows, in, out, threads);
}
void linear_float(const float* x, const void* packed, const float* bias, float* y, int64_t rows, int64_t in, int64_t out,
                  int threads) {
    product(x, (const float*)packed, bias, y, rows, in, out, threads);
}
}
