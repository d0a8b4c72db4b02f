// Copies many pieces of memory in one call. The pieces are parts of KV pages: a page is contiguous in a tier, but has a piece per layer
// in the pools.

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

// Copies with writes that bypass the caches, so that the data of a concurrent step stays cached. The target is not read before.
void stream(char* to, const char* from, int64_t bytes) {
    int64_t at = 0;
#if defined(__SSE2__)
    if (reinterpret_cast<uintptr_t>(to) % 16 == 0) {
        for (; at + 64 <= bytes; at += 64) {
            const __m128i* source = reinterpret_cast<const __m128i*>(from + at);
            __m128i* target = reinterpret_cast<__m128i*>(to + at);
            const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
            const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
            _mm_stream_si128(target, a);
            _mm_stream_si128(target + 1, b);
            _mm_stream_si128(target + 2, c);
            _mm_stream_si128(target + 3, d);
        }
    }
#endif
    std::memcpy(to + at, from + at, bytes - at);
}

}  // namespace

// `to` and `from` are int64[count] addresses, `sizes` int64[count] bytes. No piece of `to` overlaps another piece of `to` or a
// piece of `from`.
extern "C" void rootstock_copy_pieces(const int64_t* to, const int64_t* from, const int64_t* sizes, int64_t count, int streamed) {
    for (int64_t piece = 0; piece < count; ++piece) {
        char* target = reinterpret_cast<char*>(to[piece]);
        const char* source = reinterpret_cast<const char*>(from[piece]);
        if (streamed) {
            stream(target, source, sizes[piece]);
        } else {
            std::memcpy(target, source, sizes[piece]);
        }
    }
#if defined(__SSE2__)
    _mm_sfence();
#endif
}
