// y = x W^T + b with weights in blocks of 4, 6 or 8 bits and activations in blocks of 8, as GGUF files have them:
//
//     w_oi = scale_oB (code_oi - zero) + min_oB,   x_i ~ a_B p_i,   B: the block of column i
//     y_o = b_o + sum_B scale_oB a_B (sum_{i in B} code_oi p_i - zero sum_{i in B} p_i) + min_oB a_B sum_{i in B} p_i
//
// The sums within a block are whole numbers and exact; blocks of a piece are added up in order, each by one fused
// multiply-add, so that a row has the same bits in any batch, and on every processor with 8 or 16 floats to a register.
//
// A packed matrix is [ceil(out / TILE)] tiles of [in / 32] blocks of 32 columns. A block begins with codes. Of 8 bits:
// [8][TILE][4]; else their lower four as [4][TILE][4], columns 8 j to 8 j + 3 in the lower nibbles of the j-th, the next
// four in the upper ones, and of 6 bits the upper two as [2][TILE][4], columns 16 j + 4 m to 16 j + 4 m + 3 at bit 2 m.
// Codes of 4 bits may stand for the numbers of a table, which are looked up as they are read.
// Then scales [32 / size][TILE] and, where there are any, minima [32 / size][TILE], all of float16. Where these are whole
// numbers times units, 8 blocks lie together: units of float16 [TILE] of scales and [TILE] of minima, then the scales and
// minima of each block, of 8 bits, and then the codes of each.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "decoder.h"
#include "export.h"
#include "pieces.h"
#include "team.h"

namespace {

constexpr int TILE = LANES;  // outputs
constexpr int COLUMNS = 32, GROUPS = COLUMNS / 4;  // of a block; a group of four is what one dot product takes
constexpr int REGISTER = 4 * LANES;  // bytes
constexpr int SPAN = 8;              // blocks that share units
constexpr int MOST_ROWS = LANES == 16 ? 12 : 6;
constexpr int64_t FEW = 1 << 11;  // elements below which helpers cost more than they save

struct Part {  // consecutive outputs of a matrix that have one format
    const uint8_t* tiles;
    int64_t outputs, bits, size, zero, has_minima, has_table, has_units;

    int64_t num_tiles() const { return (outputs + TILE - 1) / TILE; }
    int64_t span() const { return has_units ? SPAN : 1; }  // blocks that lie together
    int64_t unit_bytes() const { return has_units ? 2 * TILE * (1 + has_minima) : 0; }
    int64_t code_bytes() const { return REGISTER * bits; }  // of a block
    int64_t scale_bytes() const { return TILE * (COLUMNS / size) * (1 + has_minima) * (has_units ? 1 : 2); }
    int64_t span_bytes() const { return unit_bytes() + span() * (code_bytes() + scale_bytes()); }
    int64_t tile_bytes(int64_t blocks) const { return (blocks + span() - 1) / span() * span_bytes(); }
};

// Where a block of a tile lies.
template <class Byte>
struct Block {
    Byte *units, *codes, *scales;

    Block(const Part& part, Byte* tile, int64_t number) : units(tile + number / part.span() * part.span_bytes()) {
        const int64_t within = number % part.span(), all_scales = part.span() * part.scale_bytes();
        scales = units + (part.has_units ? part.unit_bytes() + within * part.scale_bytes() : part.code_bytes());
        codes = units + (part.has_units ? part.unit_bytes() + all_scales + within * part.code_bytes() : 0);
    }
};

struct Matrix {
    const Part* parts;
    int64_t count;
};

struct Activations {  // COLUMNS of a row
    int8_t values[COLUMNS];
    int32_t sums[3];  // of all, and of each half
    float scale, scaled_sum;
};

constexpr float MAGIC = 12582912.0f;  // adding and taking it away rounds to the nearest, ties to even, for |x| < 2^22

#if defined(__AVX512F__)
inline int32_t most_of(IVec x) { return _mm512_reduce_max_epi32((__m512i)x); }
inline int32_t sum_of(IVec x) { return _mm512_reduce_add_epi32((__m512i)x); }
#else
inline int32_t most_of(IVec x) {
    int32_t most = x[0];
    for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
}
inline int32_t sum_of(IVec x) {
    int32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}
#endif

// The largest size is found among bits of floats, whose order is that of whole numbers: a NaN is beyond all others, so
// that what is broken stays so.
template <class T>
void quantise(const T* x, Activations* to, int64_t in) {
    typedef int8_t Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
    constexpr int PIECES = COLUMNS / LANES;
    for (int64_t first = 0; first < in; first += COLUMNS, to++) {
        T part[COLUMNS] = {};
        if (in - first < COLUMNS) memcpy(part, x + first, size_t(in - first) * sizeof(T));
        const T* from = in - first < COLUMNS ? part : x + first;
        Vec values[PIECES];
        IVec sizes{};
        for (int v = 0; v < PIECES; v++) {
            values[v] = load(from + v * LANES);
            IVec size = (IVec)values[v] & 0x7fffffff;
            sizes = size > sizes ? size : sizes;
        }
        const int32_t bits = most_of(sizes);
        float most;
        memcpy(&most, &bits, sizeof(most));
        const float inverse = most > 0 ? 127.0f / most : 0.0f;
        IVec sums[2] = {};
        for (int v = 0; v < PIECES; v++) {
            IVec whole = __builtin_convertvector(fused(values[v], splat(inverse), splat(MAGIC)) - MAGIC, IVec);
            *(Bytes*)(to->values + v * LANES) = __builtin_convertvector(__builtin_convertvector(whole, Half), Bytes);
            sums[2 * v / PIECES] += whole;
        }
        to->sums[1] = sum_of(sums[0]), to->sums[2] = sum_of(sums[1]);
        to->sums[0] = to->sums[1] + to->sums[2];
        to->scale = most / 127.0f;
        to->scaled_sum = to->scale * float(to->sums[0]);
    }
}

// Codes of 4 bits that stand for numbers of 5: twice a float of 4 bits (OCP Microscaling's E2M1), plus 12.
constexpr int BY_TABLE = 5;
constexpr uint8_t NUMBERS[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
constexpr int stored(int bits) { return bits == BY_TABLE ? 4 : bits; }

inline IVec numbers_of(IVec codes) {
#if defined(__AVX512F__)
    const __m128i table = _mm_loadu_si128((const __m128i*)NUMBERS);
    return (IVec)_mm512_shuffle_epi8(_mm512_maskz_broadcast_i32x4(0xffff, table), (__m512i)codes);
#elif defined(__AVX2__)
    const __m128i table = _mm_loadu_si128((const __m128i*)NUMBERS);
    return (IVec)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)codes);
#else
    return (IVec)vqtbl1q_u8(vld1q_u8(NUMBERS), (uint8x16_t)codes);
#endif
}

// What the codes of a group add to sums, and how sums become whole numbers of 32 bits.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
inline IVec dot(IVec sums, IVec codes, int32_t four) {
#ifdef __AVX512VNNI__
    return (IVec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(four));
#else
    return (IVec)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)codes, _mm256_set1_epi32(four));
#endif
}
struct Codes {
    IVec bytes;
};
template <int BITS>
struct Sums {
    IVec whole{};

    void add(Codes codes, const int8_t* four, int) {
        int32_t all;
        memcpy(&all, four, 4);
        whole = dot(whole, codes.bytes, all);
    }
    IVec total() const { return whole; }
};
template <int BITS>
inline Codes codes_of(const uint8_t* block, int group) {
    if (BITS == 8) return {*(const IVec*)(block + group * REGISTER)};
    IVec low = *(const IVec*)(block + group / 2 * REGISTER);
    low = (group % 2 ? low >> 4 : low) & 0x0f0f0f0f;
    if (BITS == 4) return {low};
    if (BITS == BY_TABLE) return {numbers_of(low)};
    IVec high = *(const IVec*)(block + (4 + group / 4) * REGISTER);
    int bit = group % 4 * 2;
    return {low | ((bit < 4 ? high << (4 - bit) : high >> (bit - 4)) & 0x30303030)};
}
#elif defined(__AVX2__)
// Products of halves of a code fit into 16 bits, and so do the sums of a block of 32: 8 x 2 x 15 x 127 < 2^15. Numbers of
// a table are whole, and each half of the block has a sum: 4 x 2 x 24 x 127 < 2^15.
struct Codes {
    __m256i low, high;
};
inline __m256i added(__m256i sum, __m256i more) {
    sum = _mm256_add_epi16(sum, more);
    asm("" : "+x"(sum));  // else compilers add up in another order, for which there are too few registers
    return sum;
}
template <int BITS>
struct Sums {
    __m256i low = _mm256_setzero_si256(), high = _mm256_setzero_si256();

    void add(Codes codes, const int8_t* four, int group) {
        int32_t all;
        memcpy(&all, four, 4);
        __m256i values = _mm256_set1_epi32(all);
        __m256i& sum = BITS == BY_TABLE && group >= GROUPS / 2 ? high : low;
        sum = added(sum, _mm256_maddubs_epi16(codes.low, values));
        if (BITS > BY_TABLE) high = added(high, _mm256_maddubs_epi16(codes.high, values));
    }
    IVec total() const {
        __m256i ones = _mm256_set1_epi16(1), sum = _mm256_madd_epi16(low, ones);
        const __m256i unit = BITS == BY_TABLE ? ones : _mm256_set1_epi16(16);
        if (BITS > 4) sum = _mm256_add_epi32(sum, _mm256_madd_epi16(high, unit));
        return (IVec)sum;
    }
};
template <int BITS>
inline Codes codes_of(const uint8_t* block, int group) {
    const __m256i nibbles = _mm256_set1_epi8(15);
    auto at = [&](int number) { return _mm256_loadu_si256((const __m256i*)(block + number * REGISTER)); };
    auto upper = [&](__m256i bytes) { return _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibbles); };
    if (BITS == 8) return {_mm256_and_si256(at(group), nibbles), upper(at(group))};
    Codes codes{group % 2 ? upper(at(group / 2)) : _mm256_and_si256(at(group / 2), nibbles), {}};
    if (BITS == BY_TABLE) codes.low = (__m256i)numbers_of((IVec)codes.low);
    if (BITS == 6)
        codes.high = _mm256_and_si256(_mm256_srli_epi16(at(4 + group / 4), group % 4 * 2), _mm256_set1_epi8(3));
    return codes;
}
#else
struct Codes {
    IVec words;  // four codes each
};
template <int BITS>
struct Sums {
    IVec whole{};

    void add(Codes codes, const int8_t* four, int) {
#if defined(__ARM_FEATURE_DOTPROD)  // of signed numbers: 128 times the sum of the others is missing with 8 bits
        int32_t all;
        memcpy(&all, four, 4);
        const int8x16_t values = vreinterpretq_s8_s32(vdupq_n_s32(all)), bytes = (int8x16_t)codes.words;
        whole = (IVec)vdotq_s32((int32x4_t)whole, BITS == 8 ? veorq_s8(bytes, vdupq_n_s8(-128)) : bytes, values);
        if (BITS == 8) whole = (IVec)vdotq_s32((int32x4_t)whole, vdupq_n_s8(64), values);
        if (BITS == 8) whole = (IVec)vdotq_s32((int32x4_t)whole, vdupq_n_s8(64), values);
#else
        for (int i = 0; i < 4; i++) whole = whole + ((codes.words >> (8 * i)) & 0xff) * int32_t(four[i]);
#endif
    }
    IVec total() const { return whole; }
};
template <int BITS>
inline Codes codes_of(const uint8_t* block, int group) {
    if (BITS == 8) return {*(const IVec*)(block + group * REGISTER)};
    IVec low = (*(const IVec*)(block + group / 2 * REGISTER) >> (group % 2 * 4)) & 0x0f0f0f0f;
    if (BITS == 4) return {low};
    if (BITS == BY_TABLE) return {numbers_of(low)};
    return {low | ((*(const IVec*)(block + (4 + group / 4) * REGISTER) >> (group % 4 * 2) & 0x03030303) << 4)};
}
#endif

inline float to_float16(uint16_t half) {
#if defined(__AVX2__)
    return _cvtsh_ss(half);
#else
    __fp16 value;
    memcpy(&value, &half, 2);
    return float(value);
#endif
}

inline Vec floats(const uint16_t* halves) {
#if defined(__AVX512F__)
    return (Vec)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)halves));
#elif defined(__AVX2__)
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)halves));
#else
    Vec values;
    for (int i = 0; i < LANES; i++) values[i] = to_float16(halves[i]);
    return values;
#endif
}

inline Vec floats(const int8_t* numbers) {
#if defined(__AVX512F__)
    const __m512i whole = _mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128((const __m128i*)numbers));
    return __builtin_convertvector((IVec)whole, Vec);
#elif defined(__AVX2__)
    return __builtin_convertvector((IVec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)numbers)), Vec);
#else
    IVec whole;
    for (int i = 0; i < LANES; i++) whole[i] = numbers[i];
    return __builtin_convertvector(whole, Vec);
#endif
}

// results [ROWS]: of one tile of outputs, for each row of x [ROWS, blocks]. The product of a unit and a number is exact.
template <int BITS, int SIZE, bool MINIMA, bool UNITS, int ROWS>
void tile(const Activations* x, const uint8_t* w, int32_t zero, Vec* results, int64_t blocks, const Cut& cut) {
    using Scale = std::conditional_t<UNITS, int8_t, uint16_t>;
    constexpr int SCALES = COLUMNS / SIZE, TOGETHER = UNITS ? SPAN : 1;  // of a block
    constexpr int64_t CODE_BYTES = REGISTER * stored(BITS), SCALE_BYTES = TILE * SCALES * (1 + MINIMA) * sizeof(Scale);
    constexpr int64_t UNIT_BYTES = UNITS ? 2 * TILE * (1 + MINIMA) : 0;
    constexpr int64_t BYTES = CODE_BYTES + SCALE_BYTES + UNIT_BYTES / TOGETHER;  // of a block with its share
    Vec units[2], kept[Cut::MOST_LEVELS][ROWS];
    for (int piece = 0; piece < cut.count; piece++) {
        Vec sums[ROWS];
        const int64_t end = (cut.ends[piece + 1] + COLUMNS - 1) / COLUMNS;
#pragma GCC unroll 12  // all loops over rows, or sums are kept in memory
        for (int r = 0; r < ROWS; r++) sums[r] = Vec{};
        for (int64_t first = cut.ends[piece] / COLUMNS; first < end; first += TOGETHER, w += TOGETHER * BYTES) {
            if (UNITS) units[0] = floats((const uint16_t*)w), units[1] = floats((const uint16_t*)w + MINIMA * TILE);
            const int64_t count = UNITS ? std::min<int64_t>(TOGETHER, end - first) : 1;
            for (int64_t within = 0; within < count; within++, x++) {
                for (int64_t i = 0; i < BYTES; i += 64) prefetch_weights(w + within * BYTES + i);
                const uint8_t* codes_at = w + UNIT_BYTES + (UNITS ? TOGETHER * SCALE_BYTES + within * CODE_BYTES : 0);
                const Scale* scales = (const Scale*)(w + (UNITS ? UNIT_BYTES + within * SCALE_BYTES : CODE_BYTES));
                Vec minima = MINIMA ? floats(scales + SCALES * TILE) : Vec{};
                if (UNITS && MINIMA) minima *= units[1];
#pragma GCC unroll 2
                for (int step = 0; step < SCALES; step++) {
                    Sums<BITS> whole[ROWS];
#pragma GCC unroll 12
                    for (int group = step * SIZE / 4; group < (step + 1) * SIZE / 4; group++) {
                        Codes codes = codes_of<BITS>(codes_at, group);
#pragma GCC unroll 12
                        for (int r = 0; r < ROWS; r++) whole[r].add(codes, x[r * blocks].values + 4 * group, group);
                    }
                    const Vec scale = UNITS ? units[0] * floats(scales + step * TILE) : floats(scales + step * TILE);
#pragma GCC unroll 12
                    for (int r = 0; r < ROWS; r++) {
                        const Activations& own = x[r * blocks];
                        IVec dots = whole[r].total();
                        if (!MINIMA) dots = dots - zero * own.sums[SIZE == COLUMNS ? 0 : 1 + step];
                        sums[r] = fused(__builtin_convertvector(dots, Vec), scale * own.scale, sums[r]);
                        if (MINIMA) sums[r] = fused(minima, splat(own.scaled_sum), sums[r]);
                    }
                }
            }
        }
        keep(kept, sums, piece);
    }
    for (int r = 0; r < ROWS; r++) results[r] = kept[cut.levels()][r];
}

using Tile = void (*)(const Activations*, const uint8_t*, int32_t, Vec*, int64_t, const Cut&);
template <int BITS, int SIZE, bool MINIMA, bool UNITS = false, int... ROWS>
Tile tile_of(int64_t rows, std::integer_sequence<int, ROWS...>) {
    static constexpr Tile TILES[] = {tile<BITS, SIZE, MINIMA, UNITS, ROWS + 1>...};
    return TILES[rows - 1];
}
Tile tile_of(const Part& part, int64_t rows) {
    constexpr auto COUNTS = std::make_integer_sequence<int, MOST_ROWS>();
    if (part.bits == 8) return tile_of<8, 32, false>(rows, COUNTS);
    if (part.has_table) return tile_of<BY_TABLE, 32, false>(rows, COUNTS);
    if (part.size == 16) return tile_of<6, 16, false, true>(rows, COUNTS);
    if (part.has_units) return part.bits == 4 ? tile_of<4, 32, true, true>(rows, COUNTS) : tile_of<6, 32, true, true>(rows, COUNTS);
    if (part.bits == 4) return part.has_minima ? tile_of<4, 32, true>(rows, COUNTS) : tile_of<4, 32, false>(rows, COUNTS);
    return part.has_minima ? tile_of<6, 32, true>(rows, COUNTS) : tile_of<6, 32, false>(rows, COUNTS);
}

template <class T>
void multiply(const T* x, const Group* groups, int64_t count, void* y, int64_t in, int64_t out, const Cut& cut) {
    if (!count) return;
    static thread_local std::vector<Activations> quantised;
    const int64_t blocks = (in + COLUMNS - 1) / COLUMNS, rows = groups[count - 1].first + groups[count - 1].rows;
    quantised.resize(size_t(rows * blocks));
    Activations* values = quantised.data();
    const Matrix* matrix = (const Matrix*)groups->packed;
    int64_t of_each = 0;
    for (int64_t i = 0; i < matrix->count; i++) of_each += matrix->parts[i].num_tiles();
    for_each(rows, rows * in <= FEW, [=](int64_t row) { quantise(x + row * in, values + row * blocks, in); });
    for_each(count * of_each, false, [=, &cut](int64_t number) {
        const Group& group = groups[number / of_each];
        const Part* part = ((const Matrix*)group.packed)->parts;
        int64_t own = number % of_each, first = 0;
        for (; own >= part->num_tiles(); part++) own -= part->num_tiles(), first += part->outputs;
        const int columns = int(std::min<int64_t>(TILE, part->outputs - own * TILE));
        first += own * TILE;
        const int64_t pieces = (group.rows + MOST_ROWS - 1) / MOST_ROWS;
        for (int64_t piece = 0; piece < pieces; piece++) {
            const int64_t begin = group.rows * piece / pieces, length = group.rows * (piece + 1) / pieces - begin;
            const int64_t at = group.first + begin;
            Vec sums[MOST_ROWS];
            const uint8_t* w = part->tiles + own * part->tile_bytes(blocks);
            tile_of(*part, length)(values + at * blocks, w, int32_t(part->zero), sums, blocks, cut);
            for (int64_t r = 0; r < length; r++)
                finish<T>(y, (at + r) * out + first, sums[r], group.bias ? group.bias + first : nullptr, columns, cut);
        }
    });
}

// Groups of rows, each with a matrix of its own, whose parts have the same outputs in all; no row is left out.
template <class T>
void grouped_quantised(const T* x, const Group* groups, int64_t count, T* y, int64_t in, int64_t out) {
    multiply(x, groups, count, y, in, out, Cut(in));
}

template <class T>
void linear_quantised(const T* x, const void* packed, const float* bias, T* y, int64_t rows, int64_t in, int64_t out) {
    const Group all{packed, bias, 0, rows};
    grouped_quantised(x, &all, 1, y, in, out);
}

template <class T>
void linear_quantised_pieces(const T* x, const void* pieces, const float* bias, T* y, int64_t rows, int64_t in, int64_t out) {
    const Pieces& own = *(const Pieces*)pieces;
    const Group all{own.packed, bias, 0, rows};
    multiply(x, &all, 1, y, in, out, own.cut);
}

// Where bits of a code lie in its block: byte, and bit of it.
struct Place {
    int64_t byte;
    int bit;
};
inline Place low_place(int64_t bits, int column, int64_t lane) {
    const int group = column / 4;
    const int64_t within = lane * 4 + column % 4;
    return bits == 8 ? Place{group * REGISTER + within, 0} : Place{group / 2 * REGISTER + within, group % 2 * 4};
}
inline Place high_place(int column, int64_t lane) {  // of 6 bits the upper two
    return {(4 + column / 16) * REGISTER + lane * 4 + column % 4, column / 4 % 4 * 2};
}

// The codes of a block's columns for one output.
void codes_at(const Part& part, const uint8_t* block, int64_t lane, int* codes) {
    for (int first = 0; first < COLUMNS; first += 4) {  // what stands side by side
        const Place low = low_place(part.bits, first, lane), high = high_place(first, lane);
        for (int i = 0; i < 4; i++) {
            codes[first + i] = block[low.byte + i] >> low.bit & (part.bits == 8 ? 0xff : 0x0f);
            if (part.has_table) codes[first + i] = NUMBERS[codes[first + i]];
            if (part.bits == 6) codes[first + i] |= (block[high.byte + i] >> high.bit & 3) << 4;
        }
    }
}

// The scale of an output in a block, or its minimum.
float factor(const Part& part, const Block<const uint8_t>& block, int64_t number, int64_t lane, bool minimum) {
    const int64_t at = number * TILE + lane;
    if (!part.has_units) return to_float16(((const uint16_t*)block.scales)[at]);
    return to_float16(((const uint16_t*)block.units)[minimum * TILE + lane]) * float(((const int8_t*)block.scales)[at]);
}

// y [count, in]: the weights of some outputs.
template <class T>
void lookup_quantised(const Part* matrix, const int64_t* outputs, int64_t count, int64_t in, T* y) {
    const Part& part = *matrix;
    const int64_t blocks = (in + COLUMNS - 1) / COLUMNS, scales = COLUMNS / part.size;
    for_each(count, count * in <= FEW, [=, &part](int64_t row) {
        const int64_t lane = outputs[row] % TILE;
        const uint8_t* tile = part.tiles + outputs[row] / TILE * part.tile_bytes(blocks);
        int codes[COLUMNS];
        for (int64_t number = 0; number < blocks; number++) {
            const Block<const uint8_t> block(part, tile, number);
            codes_at(part, block.codes, lane, codes);
            for (int64_t step = 0; step < scales; step++) {
                const float scale = factor(part, block, step, lane, false);
                const float minimum = part.has_minima ? factor(part, block, scales + step, lane, true) : 0.0f;
                const int64_t first = number * COLUMNS, begin = step * part.size;
                for (int64_t i = begin; i < std::min(begin + part.size, in - first); i++)
                    put(y + row * in + first + i, std::fma(float(codes[i] - part.zero), scale, minimum));
            }
        }
    });
}

int64_t quantised_bytes(const Part* part, int64_t in) {
    return part->num_tiles() * part->tile_bytes((in + COLUMNS - 1) / COLUMNS);
}

// Copies an output's scales or minima [count] to where they stand in a block, one in TILE.
void spread(const uint8_t* from, uint8_t* to, int64_t count, int64_t size) {
    for (int64_t i = 0; i < count; i++) memcpy(to + i * TILE * size, from + i * size, size_t(size));
}

// `rows` outputs from `first` on, a multiple of TILE, to where they stand in `to`: codes [rows, blocks, 32], scales and
// minima [rows, blocks, 32 / size] of float16, or of int8 if there are units [rows, ceil(blocks / 8), of scales and of
// minima] of float16. Where they stand all is zero before.
void pack_quantised(const Part* part, uint8_t* to, int64_t in, int64_t first, int64_t rows, const uint8_t* codes,
                    const uint8_t* scales, const uint8_t* minima, const uint8_t* units) {
    const int64_t blocks = (in + COLUMNS - 1) / COLUMNS, count = COLUMNS / part->size, size = part->has_units ? 1 : 2;
    const int64_t spans = (blocks + part->span() - 1) / part->span(), of_units = part->unit_bytes() / TILE;
    for_each((rows + TILE - 1) / TILE, false, [=](int64_t tile) {
        uint8_t* whole = to + (first / TILE + tile) * part->tile_bytes(blocks);
        for (int64_t row = tile * TILE; row < std::min(rows, (tile + 1) * TILE); row++)
            for (int64_t number = 0; number < blocks; number++) {
                const int64_t lane = row % TILE, from = row * blocks + number;
                const Block<uint8_t> block(*part, whole, number);
                for (int i = 0; i < COLUMNS; i++) {
                    const int code = codes[from * COLUMNS + i];
                    const Place low = low_place(part->bits, i, lane), high = high_place(i, lane);
                    block.codes[low.byte] |= uint8_t((part->bits == 8 ? code : code & 15) << low.bit);
                    if (part->bits == 6) block.codes[high.byte] |= uint8_t(code >> 4 << high.bit);
                }
                spread(scales + from * count * size, block.scales + lane * size, count, size);
                if (minima) spread(minima + from * count * size, block.scales + (count * TILE + lane) * size, count, size);
                const uint8_t* own_units = units + (row * spans + number / part->span()) * of_units;
                if (units && number % SPAN == 0) spread(own_units, block.units + 2 * lane, of_units / 2, 2);
            }
    });
}

}  // namespace

EXPORT(quantised_bytes)
EXPORT(pack_quantised)
EXPORT_TYPES(lookup_quantised)
EXPORT_TYPES(linear_quantised)
EXPORT_TYPES(linear_quantised_pieces)
EXPORT_TYPES(grouped_quantised)
