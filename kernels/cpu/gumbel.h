// The bits of the sampling noise, as kernels/sample.py: a function of seed, position and token id.
#pragma once
#include <cstdint>

template <class Bits>  // uint32_t, or lanes of it
inline Bits mixed(Bits bits) {
    bits = (bits ^ (bits >> 16)) * 0x7feb352du;
    bits = (bits ^ (bits >> 15)) * 0x846ca68bu;
    return bits ^ (bits >> 16);
}

inline uint64_t mixed64(uint64_t state) {
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9;
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB;
    return state ^ (state >> 31);
}

inline uint64_t noise_key(int64_t seed, int64_t position) {
    constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;
    return mixed64(mixed64(uint64_t(seed) + GOLDEN) + uint64_t(position + 1) * GOLDEN);
}

inline uint32_t noise_bits(uint64_t key, uint32_t token) { return mixed(mixed(token ^ uint32_t(key)) ^ uint32_t(key >> 32)); }
