// Functions that Python calls. An export holds a function's address and the types of its arguments, so that
// kernels/cpu/library.py reads the signature from here and nobody writes it twice.
#pragma once
#include <cstdint>
#include <type_traits>

struct Export {
    void* address;
    const char* takes;  // one letter for each argument: p pointer, n int64_t, i int, f float
};

template <class T>
constexpr char letter_of() {
    static_assert(std::is_pointer_v<T> || std::is_same_v<T, int64_t> || std::is_same_v<T, int> || std::is_same_v<T, float>);
    return std::is_pointer_v<T> ? 'p' : std::is_same_v<T, int64_t> ? 'n' : std::is_same_v<T, int> ? 'i' : 'f';
}

template <class Out, class... In>
Export exported(Out (*function)(In...)) {
    static constexpr char takes[] = {letter_of<In>()..., 0};
    return {(void*)function, takes};
}

#define EXPORT(name) extern "C" const Export export_##name = exported(name);
// The instances of a template for both types that there are kernels for.
#define EXPORT_TYPES(name)                                              \
    extern "C" const Export export_##name##_bf16 = exported(name<bf16>); \
    extern "C" const Export export_##name##_float = exported(name<float>);
