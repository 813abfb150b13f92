// As many floats at a time as a register holds, in the compiler's own vectors: one source for AVX2, AVX-512 and NEON.
// Wider ones compilers take apart by way of memory.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#ifdef __AVX2__
#include <immintrin.h>
#endif
#ifdef __ARM_NEON
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int LANES = 8, REGISTERS = 16;
#else
constexpr int LANES = 4, REGISTERS = 32;
#endif
constexpr int MOST_SUMS = REGISTERS * 3 / 4;  // accumulators; the other registers hold operands
constexpr int MOST_DIM = 512;  // of a head
typedef float Vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t IVec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t UVec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t Half __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

struct bf16 {
    uint16_t bits;
};

static inline Vec splat(float x) { return x - Vec{}; }  // x - 0 is x, which compilers know; 0 + x is not for -0

static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline void put(float* to, float x) { *to = x; }
static inline void put(bf16* to, float x) {  // to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, 4);
    to->bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <class T>
static inline float rounded(float x) {
    T value;
    put(&value, x);
    return to_float(value);
}

static inline Vec load(const float* from) { return *(const Vec*)from; }
static inline Vec load(const bf16* from) {
#ifdef __ARM_NEON
    return (Vec)vshll_n_u16(vld1_u16((const uint16_t*)from), 16);
#else
    return (Vec)(__builtin_convertvector(*(const Half*)from, IVec) << 16);
#endif
}

static inline void store(float* to, Vec x) { *(Vec*)to = x; }
static inline void store(bf16* to, Vec x) {
#ifdef __AVX512BF16__
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    UVec bits = (UVec)x;
    UVec halves = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
#ifdef __ARM_NEON
    vst1_u16((uint16_t*)to, vmovn_u32((uint32x4_t)halves));
#else
    *(Half*)to = __builtin_convertvector(halves, Half);
#endif
#endif
}

// Of a row of which `left` values are left: all lanes, or at its end as many as there are.
template <class T>
static inline Vec load_end(const T* from, int64_t left, float fill = 0) {
    if (left >= LANES) return load(from);
    Vec part = splat(fill);
    for (int i = 0; i < left; i++) part[i] = to_float(from[i]);
    return part;
}

template <class T>
static inline void store_end(T* to, Vec x, int64_t left) {
    if (left >= LANES) return store(to, x);
    for (int i = 0; i < left; i++) put(to + i, x[i]);
}

template <class T>
static inline Vec rounded(Vec x) {
    T kept[LANES];
    store(kept, x);
    return load(kept);
}

// a b + c with one rounding, wherever a compiler puts it
static inline Vec fused(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int i = 0; i < LANES; i++) c[i] = std::fma(a[i], b[i], c[i]);
    return c;
#endif
}

// 2^x for x <= 0 by a polynomial of degree 6 on [-1/2, 1/2]; below -126 it is 0.
static inline Vec exp2_of(Vec x) {
    Vec whole = __builtin_convertvector(__builtin_convertvector(x - 0.5f, IVec), Vec);
    Vec part = x - whole;
    Vec y = splat(1.5353362e-4f);
    y = y * part + 1.3398874e-3f;
    y = y * part + 9.6184373e-3f;
    y = y * part + 5.5503324e-2f;
    y = y * part + 2.4022648e-1f;
    y = y * part + 6.9314718e-1f;
    y = y * part + 1.0f;
    IVec power = (__builtin_convertvector(whole, IVec) + 127) << 23;
    return (Vec)((IVec)(y * (Vec)power) & (IVec)(x > -126.0f));
}

// x / (1 + exp(-s))
static inline Vec opened(Vec x, Vec s) {
    Vec e = exp2_of((Vec)((IVec)s | INT32_MIN) * 1.44269504f);  // exp(-|s|)
    return x * (s < 0.0f ? e : splat(1.0f)) / (1.0f + e);
}

// Of x^2, in 16 parts, whatever a register holds.
template <class T>
static inline float square_sum(const T* x, int64_t width) {
    constexpr int VECTORS = 16 / LANES;
    Vec sums[VECTORS] = {};
    for (int64_t first = 0; first < width; first += 16)
        for (int v = 0; v < VECTORS; v++) {
            const int64_t i = first + v * LANES;
            const Vec values = load_end(x + i, width > i ? width - i : 0);
            sums[v] = fused(values, values, sums[v]);
        }
    float total = 0;
    for (int i = 0; i < 16; i++) total += sums[i / LANES][i % LANES];
    return total;
}

// A forward reads each weight once. AMD's non-temporal prefetches keep weights from pushing out of the caches what the rest
// of a step reads. Intel's go past the second level, which alone can wait for many lines at a time: a Xeon read 7 GB/s with
// them, and 18 GB/s with prefetches to that level. Builds for both are Intel's here.
static inline void prefetch_weights(const void* w) {
    constexpr int AHEAD = 1 << 12;  // bytes between a prefetch and its use
#ifdef __AVX512BF16__
    __builtin_prefetch((const char*)w + AHEAD, 0, 0);
#else
    __builtin_prefetch((const char*)w + AHEAD, 0, 1);
#endif
}
