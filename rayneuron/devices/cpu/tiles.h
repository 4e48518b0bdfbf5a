// The tile instructions of AMX, each a macro over register numbers: the processor's own (RN_TILES 1) or the same in software (RN_TILES 2).
// Run on hardware: in 25 million sums (normal, huge, tiny, denormal and not finite ones) the processor's bits were the emulation's.
//
// The emulation follows the operations of LDTILECFG, TILELOADD, TILESTORED, TILEZERO, TDPBF16PS and TDPBUSD in Intel's Software
// Developer's Manual, volume 2. TDPBF16PS there: for each row and column the products of the even bf16 and those of the odd are summed
// apart, in order of k, from zero, by fp32 FMA; then sum = even + odd, and C = C + sum. Denormals in are zero, denormals out are flushed,
// all rounding is to nearest even, MXCSR does not matter. Nothing is said there of tininess before or after rounding: here it is as in SSE.
// A shape the processor would refuse (#UD) aborts.
#pragma once
#include <stdlib.h>

#include "simd.h"

namespace rn {

// What LDTILECFG reads, palette 1: eight registers of at most 16 rows of 64 bytes.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {0};
    uint16_t row_bytes[16] = {0};
    uint8_t rows[16] = {0};
};
static_assert(sizeof(TileShapes) == 64, "as the manual has it");

}  // namespace rn

#if RN_TILES == 1

// The compiler's statements do not say which memory they read: nothing may be stored later than them.
#define TILE_FENCE(at) __asm__ volatile("" ::"r"((const void*)(at)) : "memory")
#define TILE_SHAPES(shapes) do { TILE_FENCE(shapes); _tile_loadconfig(shapes); } while (0)
#define TILE_LOAD(t, at, stride) do { TILE_FENCE(at); _tile_loadd(t, at, stride); } while (0)
#define TILE_STREAM(t, at, stride) do { TILE_FENCE(at); _tile_stream_loadd(t, at, stride); } while (0)  // past the first cache
#define TILE_STORE(t, at, stride) do { _tile_stored(t, at, stride); TILE_FENCE(at); } while (0)
#define TILE_ZERO(t) _tile_zero(t)
#define TILE_DOT_BF16(c, a, b) _tile_dpbf16ps(c, a, b)
#define TILE_DOT_U8S8(c, a, b) _tile_dpbusd(c, a, b)  // a unsigned, b signed
#define TILE_RELEASE() _tile_release()

#else

namespace rn::emulated {

struct Register {
    int rows = 0, bytes = 0;
    alignas(64) uint32_t at[16][16] = {};
};

struct File {
    Register of[8];
    Register& operator[](int t) {
        if (!of[t].rows || !of[t].bytes) abort();
        return of[t];
    }
};
inline thread_local File file;

inline void shape(const TileShapes* shapes) {
    if (shapes->palette != 1 || shapes->start_row) abort();
    for (int t = 0; t < 8; t++) {
        const int rows = shapes->rows[t], bytes = shapes->row_bytes[t];
        if (rows > 16 || bytes > 64 || !rows != !bytes) abort();
        file.of[t] = Register{rows, bytes};
    }
}

inline void load(int t, const char* at, size_t stride) {
    Register& r = file[t];
    memset(r.at, 0, sizeof r.at);
    for (int i = 0; i < r.rows; i++) memcpy(r.at[i], at + i * stride, r.bytes);
}

inline void keep(int t, char* at, size_t stride) {
    const Register& r = file[t];
    for (int i = 0; i < r.rows; i++) memcpy(at + i * stride, r.at[i], r.bytes);
}

inline void check(const Register& c, const Register& a, const Register& b) {
    if (c.rows != a.rows || c.bytes != b.bytes || a.bytes != 4 * b.rows || c.bytes % 4) abort();
}

// Apart from `dot_bf16`, so that no arithmetic moves across the change of MXCSR.
__attribute__((noinline)) inline void multiply_bf16(Register& c, const Register& a, const Register& b) {
    for (int m = 0; m < c.rows; m++) {
        V even = zero(), odd = zero();
        for (int k = 0; k < b.rows; k++) {
            const D x = dset1(a.at[m][k]), w = dload(b.at[k]);
            even = fma(even_halves(x), even_halves(w), even), odd = fma(odd_halves(x), odd_halves(w), odd);
        }
        float* to = (float*)c.at[m];
        store_n(to, add(load_n(to, c.bytes / 4), add(even, odd)), c.bytes / 4);
    }
}

inline void dot_bf16(int c, int a, int b) {
    constexpr unsigned MASKED = 0x1f80, DENORMALS_IN = 0x0040, FLUSHED_OUT = 0x8000;
    check(file[c], file[a], file[b]);
    const unsigned was = _mm_getcsr();
    _mm_setcsr(MASKED | DENORMALS_IN | FLUSHED_OUT);
    multiply_bf16(file[c], file[a], file[b]);
    _mm_setcsr(was);
}

inline void dot_u8s8(int to, int x, int w) {
    Register& c = file[to];
    const Register &a = file[x], &b = file[w];
    check(c, a, b);
    for (int m = 0; m < c.rows; m++)
        for (int k = 0; k < b.rows; k++)
            for (int n = 0; n < c.bytes / 4; n++)
                for (int i = 0; i < 32; i += 8) c.at[m][n] += (uint32_t)((int)(uint8_t)(a.at[m][k] >> i) * (int8_t)(b.at[k][n] >> i));
}

}  // namespace rn::emulated

#define TILE_SHAPES(shapes) rn::emulated::shape(shapes)
#define TILE_LOAD(t, at, stride) rn::emulated::load(t, (const char*)(at), stride)
#define TILE_STREAM(t, at, stride) TILE_LOAD(t, at, stride)
#define TILE_STORE(t, at, stride) rn::emulated::keep(t, (char*)(at), stride)
#define TILE_ZERO(t) memset(rn::emulated::file[t].at, 0, 1024)
#define TILE_DOT_BF16(c, a, b) rn::emulated::dot_bf16(c, a, b)
#define TILE_DOT_U8S8(c, a, b) rn::emulated::dot_u8s8(c, a, b)
#define TILE_RELEASE() (void)(rn::emulated::file = rn::emulated::File{})

#endif
