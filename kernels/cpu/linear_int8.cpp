// y = x W^T + b with weights and activations of 8 bits: integers with one scale for every 32 columns, as GGUF's Q8_0.
// Sums within a block of columns are exact; blocks are added up in order, so that a row's bits are its own.
//
// A packed weight is [ceil(out / TILE)] tiles of [in / 32] blocks of {[8][TILE][4] of uint8, 128 more than they count,
// [TILE] scales in bf16}: a tile is read front to back, once for up to MOST_ROWS rows.
#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "vector.h"

namespace {

constexpr int TILE = 2 * LANES;  // outputs
constexpr int COLUMNS = 32, VECTORS = COLUMNS / LANES;  // of a block
constexpr int MOST_ROWS = MOST_SUMS / 2;
constexpr int AHEAD = (1 << 15) / (TILE * (COLUMNS + 2));  // blocks between a prefetch into the second cache and its use
constexpr int64_t FEW = 1 << 14;  // elements below which waking threads costs more than they save

struct Block {
    uint8_t weights[COLUMNS / 4][TILE][4];
    bf16 scales[TILE];
};

struct Activations {  // COLUMNS of a row
    int8_t values[COLUMNS];
    int32_t sum;
    float scale;
};

constexpr float MAGIC = 12582912.0f;  // adding and taking it away rounds to the nearest, ties to even, for |x| < 2^22

template <class T>
void quantise(const T* x, Activations* to, int64_t in) {
    typedef int8_t Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
    for (int64_t first = 0; first < in; first += COLUMNS, to++) {
        T part[COLUMNS] = {};
        if (in - first < COLUMNS) memcpy(part, x + first, size_t(in - first) * sizeof(T));
        const T* from = in - first < COLUMNS ? part : x + first;
        Vec values[VECTORS], sizes{};
        for (int v = 0; v < VECTORS; v++) {
            values[v] = load(from + v * LANES);
            Vec size = (Vec)((IVec)values[v] & 0x7fffffff);
            sizes = size > sizes ? size : sizes;
        }
        float most = 0;
        for (int i = 0; i < LANES; i++) most = sizes[i] > most ? sizes[i] : most;
        to->scale = most / 127.0f;
        float inverse = most > 0 ? 127.0f / most : 0.0f;
        IVec sum{}, broken{};
        for (int v = 0; v < VECTORS; v++) {
            IVec whole = __builtin_convertvector((values[v] * inverse + MAGIC) - MAGIC, IVec);
            *(Bytes*)(to->values + v * LANES) = __builtin_convertvector(__builtin_convertvector(whole, Half), Bytes);
            sum = sum + whole;
            broken |= values[v] - values[v] != 0.0f;
        }
        to->sum = 0;
        for (int i = 0; i < LANES; i++) {
            to->sum += sum[i];
            if (broken[i]) to->scale = NAN;  // what is broken stays so
        }
    }
}

inline IVec dot(IVec sum, const uint8_t* weights, const int8_t* values) {
    uint32_t four;
    memcpy(&four, values, 4);
#ifdef __AVX512VNNI__
    return (IVec)_mm512_dpbusd_epi32((__m512i)sum, _mm512_loadu_si512(weights), _mm512_set1_epi32(four));
#elif defined(__AVX2__)
    // as numbers of 16 bits, the even columns and then the odd ones
    __m256i all = _mm256_loadu_si256((const __m256i*)weights), fours = _mm256_set1_epi32(four);
    __m256i evens = _mm256_madd_epi16(_mm256_and_si256(all, _mm256_set1_epi16(0xff)),
                                      _mm256_srai_epi16(_mm256_slli_epi16(fours, 8), 8));
    __m256i odds = _mm256_madd_epi16(_mm256_srli_epi16(all, 8), _mm256_srai_epi16(fours, 8));
    return sum + (IVec)_mm256_add_epi32(evens, odds);
#else
    IVec all = *(const IVec*)weights;
    for (int i = 0; i < 4; i++) sum = sum + ((all >> (8 * i)) & 0xff) * int32_t(values[i]);
    return sum;
#endif
}

template <class T, int ROWS>
void tile(const Activations* x, const Block* w, const float* bias, T* y, int64_t blocks, int64_t out, int columns) {
    Vec sums[ROWS][2];
    for (int r = 0; r < ROWS; r++)
        for (int h = 0; h < 2; h++) sums[r][h] = bias ? load(bias + h * LANES) : Vec{};
    for (int64_t block = 0; block < blocks; block++, w++) {
        for (size_t i = 0; i < sizeof(Block); i += 64) __builtin_prefetch((const char*)(w + AHEAD) + i, 0, 2);
        Vec low = load(w->scales), high = load(w->scales + LANES);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            const Activations& own = x[r * blocks + block];
            IVec whole[2] = {IVec{} - 128 * own.sum, IVec{} - 128 * own.sum};
#pragma GCC unroll 8
            for (int i = 0; i < COLUMNS / 4; i++) {
                whole[0] = dot(whole[0], w->weights[i][0], own.values + 4 * i);
                whole[1] = dot(whole[1], w->weights[i][LANES], own.values + 4 * i);
            }
            sums[r][0] = sums[r][0] + __builtin_convertvector(whole[0], Vec) * (low * own.scale);
            sums[r][1] = sums[r][1] + __builtin_convertvector(whole[1], Vec) * (high * own.scale);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int h = 0; h < 2; h++) store_end(y + r * out + h * LANES, sums[r][h], columns - h * LANES);
}

template <class T>
using Tile = void (*)(const Activations*, const Block*, const float*, T*, int64_t, int64_t, int);
template <class T, int... ROWS>
constexpr std::array<Tile<T>, MOST_ROWS> tiles(std::integer_sequence<int, ROWS...>) {
    return {tile<T, ROWS + 1>...};
}

template <class T>
void product(const T* x, const Block* packed, const float* bias, T* y, int64_t rows, int64_t in, int64_t out, int threads) {
    static constexpr auto TILES = tiles<T>(std::make_integer_sequence<int, MOST_ROWS>());
    static thread_local std::vector<Activations> quantised;
    const int64_t blocks = (in + COLUMNS - 1) / COLUMNS, parts = (rows + MOST_ROWS - 1) / MOST_ROWS;
    quantised.resize(size_t(rows * blocks));
    Activations* values = quantised.data();
#pragma omp parallel for schedule(static) num_threads(rows * in > FEW ? threads : 1)
    for (int64_t row = 0; row < rows; row++) quantise(x + row * in, values + row * blocks, in);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t first = 0; first < out; first += TILE)
        for (int64_t part = 0; part < parts; part++) {
            int64_t begin = rows * part / parts, end = rows * (part + 1) / parts;
            TILES[end - begin - 1](values + begin * blocks, packed + first / TILE * blocks, bias ? bias + first : nullptr,
                                      y + begin * out + first, blocks, out, int(std::min<int64_t>(TILE, out - first)));
        }
}

// A scale is rounded up to bf16, so that no weight is beyond 127 of it.
inline bf16 scale_of(float most) {
    float exact = most / 127.0f;
    uint32_t bits;
    memcpy(&bits, &exact, 4);
    return {uint16_t((bits + 0xffff) >> 16)};
}

template <class T>
void pack(const T* weight, Block* packed, int64_t in, int64_t out) {
    for (int64_t first = 0; first < out; first += TILE)
        for (int64_t column = 0; column < in; column += COLUMNS, packed++)
            for (int o = 0; o < TILE; o++) {
                int count = first + o < out ? int(std::min<int64_t>(COLUMNS, in - column)) : 0;
                const T* from = weight + (first + o) * in + column;
                float most = 0;
                for (int i = 0; i < count; i++) most = std::max(most, std::fabs(to_float(from[i])));
                packed->scales[o] = scale_of(most);
                float scale = to_float(packed->scales[o]);
                for (int i = 0; i < COLUMNS; i++)
                    packed->weights[i / 4][o][i % 4] =
                        uint8_t(128 + int(i < count && most > 0 ? std::nearbyint(to_float(from[i]) / scale) : 0));
            }
}

}  // namespace

extern "C" {
int64_t packed_int8_bytes(int64_t in, int64_t out) {
    return int64_t(sizeof(Block)) * ((in + COLUMNS - 1) / COLUMNS) * ((out + TILE - 1) / TILE);
}
void pack_int8_bf16(const bf16* weight, void* packed, int64_t in, int64_t out) { pack(weight, (Block*)packed, in, out); }
void pack_int8_float(const float* weight, void* packed, int64_t in, int64_t out) { pack(weight, (Block*)packed, in, out); }
void linear_int8_bf16(const bf16* x, const void* packed, const float* bias, bf16* y, int64_t rows, int64_t in, int64_t out,
                      int threads) {
    product(x, (const Block*)packed, bias, y, rows, in, out, threads);
}
void linear_int8_float(const float* x, const void* packed, const float* bias, float* y, int64_t rows, int64_t in, int64_t out,
                       int threads) {
    product(x, (const Block*)packed, bias, y, rows, in, out, threads);
}
}
