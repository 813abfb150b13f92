// y = x W^T + b. Every output is summed in the order of x's columns, piece by piece, whatever the batch.
//
// A packed weight is [ceil(out / COLUMNS)][in / 2][COLUMNS][2] of bf16, or [ceil(out / COLUMNS)][in][COLUMNS] of float: a
// tile of COLUMNS outputs is read front to back, once for up to MOST_ROWS rows.
#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "decoder.h"
#include "export.h"
#include "pieces.h"
#include "team.h"

namespace {

constexpr int VECTORS = 2;
constexpr int COLUMNS = VECTORS * LANES;
constexpr int MOST_ROWS = MOST_SUMS / VECTORS;

template <class W>
constexpr int PAIR = sizeof(float) / sizeof(W);  // columns of x that one step takes

template <int ROWS>
using Sums = Vec[ROWS][VECTORS];

// `add`: what one step adds to the sums of each row. x [ROWS, in], w [COLUMNS][PAIR]
// `factors`: numbers of bf16 as they are multiplied: where there is no instruction for pairs of them, as floats.
template <int ROWS>
inline void add(Sums<ROWS>& sums, const float* x, int64_t in, const float* w) {
    Vec weights[VECTORS] = {load(w), load(w + LANES)};
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = sums[r][v] + x[r * in] * weights[v];
}

const float* factors(const float* x, int64_t) { return x; }

#ifdef __AVX512BF16__
const bf16* factors(const bf16* x, int64_t) { return x; }

template <int ROWS>
inline void add(Sums<ROWS>& sums, const bf16* x, int64_t in, const bf16* w) {
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
        uint32_t pair;
        memcpy(&pair, x + r * in, sizeof(pair));
        for (int v = 0; v < VECTORS; v++)
            sums[r][v] = (Vec)_mm512_dpbf16_ps((__m512)sums[r][v], (__m512bh)_mm512_set1_epi32(pair),
                                               (__m512bh)_mm512_loadu_si512(w + 2 * v * LANES));
    }
}
#else
const float* factors(const bf16* x, int64_t count) {
    static thread_local std::vector<float> values;
    values.resize(size_t(count));
    for (int64_t i = 0; i < count; i++) values[size_t(i)] = to_float(x[i]);
    return values.data();
}

template <int ROWS>
inline void add(Sums<ROWS>& sums, const float* x, int64_t in, const bf16* w) {
#pragma GCC unroll 2
    for (int column = 0; column < 2; column++) {
        Vec weights[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            IVec pairs = *(const IVec*)(w + 2 * v * LANES);
            weights[v] = (Vec)(column ? pairs & int32_t(0xffff0000) : pairs << 16);
        }
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) sums[r][v] = sums[r][v] + x[r * in + column] * weights[v];
    }
}
#endif

template <class X, class W, int ROWS>
void tile(const X* x, const W* w, const float* bias, void* y, int64_t at, int64_t in, int64_t out, int columns, const Cut& cut) {
    Vec kept[Cut::MOST_LEVELS][ROWS * VECTORS];
    for (int piece = 0; piece < cut.count; piece++) {
        Sums<ROWS> sums{};
        for (int64_t i = cut.ends[piece]; i < cut.ends[piece + 1]; i += PAIR<W>, w += PAIR<W> * COLUMNS) {
            for (int byte = 0; byte < COLUMNS * 4; byte += 64) prefetch_weights((const char*)w + byte);
            add<ROWS>(sums, x + i, in, w);
        }
        keep(kept, &sums[0][0], piece);
    }
    const Vec* sums = kept[cut.levels()];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++)
            finish<W>(y, at + r * out + v * LANES, sums[r * VECTORS + v], bias ? bias + v * LANES : nullptr, columns - v * LANES, cut);
}

template <class X, class W>
using Tile = void (*)(const X*, const W*, const float*, void*, int64_t, int64_t, int64_t, int, const Cut&);
template <class X, class W, int... ROWS>
constexpr std::array<Tile<X, W>, MOST_ROWS> tiles(std::integer_sequence<int, ROWS...>) {
    return {tile<X, W, ROWS + 1>...};
}

template <class X, class W>
void product(const X* x, const Group* groups, int64_t count, void* y, int64_t in, int64_t out, const Cut& cut) {
    static constexpr auto TILES = tiles<X, W>(std::make_integer_sequence<int, MOST_ROWS>());
    const int64_t of_each = (out + COLUMNS - 1) / COLUMNS;
    for_each(count * of_each, false, [=, &cut](int64_t tile) {
        const Group& group = groups[tile / of_each];
        const int64_t first = tile % of_each * COLUMNS, parts = (group.rows + MOST_ROWS - 1) / MOST_ROWS;
        for (int64_t part = 0; part < parts; part++) {
            const int64_t begin = group.rows * part / parts, end = group.rows * (part + 1) / parts, at = group.first + begin;
            TILES[end - begin - 1](x + at * in, (const W*)group.packed + first * in, group.bias ? group.bias + first : nullptr,
                                   y, at * out + first, in, out, int(std::min<int64_t>(COLUMNS, out - first)), cut);
        }
    });
}

template <class W>
void pack(const W* weight, W* packed, int64_t in, int64_t out) {
    for (int64_t first = 0; first < out; first += COLUMNS)
        for (int64_t i = 0; i < in; i += PAIR<W>)
            for (int c = 0; c < COLUMNS; c++)
                for (int j = 0; j < PAIR<W>; j++)
                    *packed++ = first + c < out ? weight[(first + c) * in + i + j] : W{};
}

template <class T>
void multiply(const T* x, const Group* groups, int64_t count, void* y, int64_t in, int64_t out, const Cut& cut) {
    const int64_t rows = count ? groups[count - 1].first + groups[count - 1].rows : 0;
    const auto* values = factors(x, rows * in);
    product<std::decay_t<decltype(*values)>, T>(values, groups, count, y, in, out, cut);
}

// Groups of rows, each with a weight of its own; no row is left out.
template <class T>
void grouped_linear(const T* x, const Group* groups, int64_t count, T* y, int64_t in, int64_t out) {
    multiply(x, groups, count, y, in, out, Cut(in));
}

template <class T>
void linear(const T* x, const void* packed, const float* bias, T* y, int64_t rows, int64_t in, int64_t out) {
    const Group all{packed, bias, 0, rows};
    grouped_linear(x, &all, 1, y, in, out);
}

template <class T>
void linear_pieces(const T* x, const void* pieces, const float* bias, T* y, int64_t rows, int64_t in, int64_t out) {
    const Pieces& own = *(const Pieces*)pieces;
    const Group all{own.packed, bias, 0, rows};
    multiply(x, &all, 1, y, in, out, own.cut);
}

}  // namespace

EXPORT_TYPES(pack)
EXPORT_TYPES(linear)
EXPORT_TYPES(linear_pieces)
EXPORT_TYPES(grouped_linear)
