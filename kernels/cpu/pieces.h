// A sum over the columns of a product, as kernels/pieces.py defines it: pieces are summed one by one and added pairwise,
// then the bias, and the result is rounded once.
#pragma once
#include "vector.h"

// Where a sum is cut, and whether it stays a float without bias, as one part of a product over several devices.
struct Cut {
    static constexpr int MOST_PIECES = 8, MOST_LEVELS = 4;  // of a tree over as many pieces
    int64_t count, as_float, ends[MOST_PIECES + 1];

    explicit Cut(int64_t columns) : count(1), as_float(0), ends{0, columns} {}
    int levels() const { return __builtin_ctz(unsigned(count)); }  // of the tree; count is a power of two
};

struct Pieces {
    const void* packed;
    Cut cut;
};

// Takes over the sums of a piece: `kept` are sums over 1, 2, 4 pieces that wait for their neighbour.
template <int COUNT>
inline void keep(Vec (*kept)[COUNT], Vec* sums, int piece) {
    int level = 0;
    for (; piece >> level & 1; level++)
#pragma GCC unroll 24
        for (int i = 0; i < COUNT; i++) sums[i] = kept[level][i] + sums[i];
#pragma GCC unroll 24
    for (int i = 0; i < COUNT; i++) kept[level][i] = sums[i];
}

// Stores up to LANES sums at element `at` of y.
template <class T>
inline void finish(void* y, int64_t at, Vec sums, const float* bias, int64_t columns, const Cut& cut) {
    if (cut.as_float) return store_end((float*)y + at, sums, columns);
    store_end((T*)y + at, bias ? sums + load_end(bias, columns) : sums, columns);
}
