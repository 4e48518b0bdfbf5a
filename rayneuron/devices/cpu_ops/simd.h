// Sixteen lanes of float or of dwords, in AVX-512 or as two halves in AVX2: the only file that knows the width of a register.
// Every operation rounds the same way on every lane and at every call, so a result never depends on where a row sits in a batch.
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

namespace rn {

using bf16 = uint16_t;
constexpr int LANES = 16;

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define RN_AVX512 1
using V = __m512;   // 16 floats
using D = __m512i;  // 16 dwords
static inline V zero() { return _mm512_setzero_ps(); }
static inline V set1(float x) { return _mm512_set1_ps(x); }
static inline V load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, V a) { _mm512_storeu_ps(p, a); }
static inline __mmask16 first(int n) { return (__mmask16)(n >= LANES ? 0xffff : (1u << n) - 1); }
static inline V load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
static inline void store_n(float* p, V a, int n) { _mm512_mask_storeu_ps(p, first(n), a); }
static inline V add(V a, V b) { return _mm512_add_ps(a, b); }
static inline V sub(V a, V b) { return _mm512_sub_ps(a, b); }
static inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
static inline V div(V a, V b) { return _mm512_div_ps(a, b); }
static inline V maximum(V a, V b) { return _mm512_max_ps(a, b); }
static inline V minimum(V a, V b) { return _mm512_min_ps(a, b); }
static inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c
static inline V round_even(V a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline V pick(V a, V b, V yes, V no) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes); }  // a < b ?
static inline V absolute(V a) { return _mm512_abs_ps(a); }
static inline V times_pow2(V a, V n) { return _mm512_scalef_ps(a, n); }
static inline float sum(V a) { return _mm512_reduce_add_ps(a); }
static inline float highest(V a) { return _mm512_reduce_max_ps(a); }
static inline D dload(const void* p) { return _mm512_loadu_si512(p); }
static inline void dstore(void* p, D a) { _mm512_storeu_si512(p, a); }
static inline D dset1(uint32_t x) { return _mm512_set1_epi32((int)x); }
static inline D dzero() { return _mm512_setzero_si512(); }
static inline V as_float(D a) { return _mm512_castsi512_ps(a); }
static inline V widen(const bf16* p) { return as_float(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16)); }
static inline D low16(const bf16* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }
static inline D high16(const bf16* p) { return _mm512_slli_epi32(low16(p), 16); }
static inline D both(D a, D b) { return _mm512_or_si512(a, b); }
static inline V odd_halves(D a) { return as_float(_mm512_and_si512(a, _mm512_set1_epi32((int)0xffff0000))); }
static inline V even_halves(D a) { return as_float(_mm512_slli_epi32(a, 16)); }
static inline V to_float(D a) { return _mm512_cvtepi32_ps(a); }
static inline D dsub(D a, D b) { return _mm512_sub_epi32(a, b); }
static inline void narrow(bf16* p, V a) {
#ifdef __AVX512BF16__
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a));
#else
    __m512i u = _mm512_castps_si512(a);
    u = _mm512_add_epi32(u, _mm512_add_epi32(_mm512_set1_epi32(0x7fff), _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1))));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(u, 16)));
#endif
}
// Bytes of 16 floats that are already whole numbers in 0..255.
static inline void to_bytes(uint8_t* p, V a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a))); }

#else  // AVX2 with FMA: two halves
struct V { __m256 a, b; };
struct D { __m256i a, b; };
#define RN_BOTH(f) V{f(x.a, y.a), f(x.b, y.b)}
static inline V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline V set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, V x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
static inline V load_n(const float* p, int n) {
    alignas(64) float t[LANES] = {0};
    memcpy(t, p, sizeof(float) * (n < LANES ? n : LANES));
    return load(t);
}
static inline void store_n(float* p, V x, int n) {
    alignas(64) float t[LANES];
    store(t, x);
    memcpy(p, t, sizeof(float) * (n < LANES ? n : LANES));
}
static inline V add(V x, V y) { return RN_BOTH(_mm256_add_ps); }
static inline V sub(V x, V y) { return RN_BOTH(_mm256_sub_ps); }
static inline V mul(V x, V y) { return RN_BOTH(_mm256_mul_ps); }
static inline V div(V x, V y) { return RN_BOTH(_mm256_div_ps); }
static inline V maximum(V x, V y) { return RN_BOTH(_mm256_max_ps); }
static inline V minimum(V x, V y) { return RN_BOTH(_mm256_min_ps); }
static inline V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline V round_even(V x) {
    constexpr int how = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, how), _mm256_round_ps(x.b, how)};
}
static inline V pick(V x, V y, V yes, V no) {
    return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)), _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
static inline V absolute(V x) {
    const __m256 m = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(m, x.a), _mm256_andnot_ps(m, x.b)};
}
static inline V times_pow2(V x, V n) {  // n whole, above -127
    auto power = [](__m256 e) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(e), _mm256_set1_epi32(127)), 23)); };
    return {_mm256_mul_ps(x.a, power(n.a)), _mm256_mul_ps(x.b, power(n.b))};
}
template <class F> static inline float fold(V x, F f) {
    alignas(64) float t[LANES];
    store(t, x);
    for (int w = LANES / 2; w; w /= 2)
        for (int i = 0; i < w; i++) t[i] = f(t[i], t[i + w]);
    return t[0];
}
static inline float sum(V x) { return fold(x, [](float p, float q) { return p + q; }); }
static inline float highest(V x) { return fold(x, [](float p, float q) { return p > q ? p : q; }); }
static inline D dload(const void* p) { return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)}; }
static inline void dstore(void* p, D x) { _mm256_storeu_si256((__m256i*)p, x.a); _mm256_storeu_si256((__m256i*)p + 1, x.b); }
static inline D dset1(uint32_t x) { return {_mm256_set1_epi32((int)x), _mm256_set1_epi32((int)x)}; }
static inline D dzero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
static inline V as_float(D x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
static inline D low16(const bf16* p) { return {_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p + 1))}; }
static inline D up16(D x) { return {_mm256_slli_epi32(x.a, 16), _mm256_slli_epi32(x.b, 16)}; }
static inline D high16(const bf16* p) { return up16(low16(p)); }
static inline V widen(const bf16* p) { return as_float(high16(p)); }
static inline D both(D x, D y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
static inline V even_halves(D x) { return as_float(up16(x)); }
static inline V odd_halves(D x) {
    const __m256i m = _mm256_set1_epi32((int)0xffff0000);
    return as_float(D{_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)});
}
static inline V to_float(D x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
static inline D dsub(D x, D y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
static inline void narrow(bf16* p, V x) {
    alignas(64) uint32_t t[LANES];
    memcpy(t, &x, sizeof t);
    for (int i = 0; i < LANES; i++) p[i] = (bf16)((t[i] + 0x7fff + ((t[i] >> 16) & 1)) >> 16);
}
static inline void to_bytes(uint8_t* p, V x) {
    alignas(64) float t[LANES];
    store(t, x);
    for (int i = 0; i < LANES; i++) p[i] = (uint8_t)(int)t[i];
}
#endif

// acc + the products of the two bf16 halves of every dword.
static inline V dot2(V acc, D w, D x) {
#ifdef __AVX512BF16__
    return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)x);
#else
    return fma(odd_halves(w), odd_halves(x), fma(even_halves(w), even_halves(x), acc));
#endif
}

// e^x for x <= 88; about 1e-7 relative. Range reduction by ln 2 in two parts, then the Taylor series to the sixth power.
static inline V exponential(V x) {
    x = minimum(maximum(x, set1(-87.0f)), set1(88.0f));
    V n = round_even(mul(x, set1(1.44269504088896341f)));
    V r = fma(n, set1(-1.428606765330187045e-06f), fma(n, set1(-0.693145751953125f), x));
    V p = set1(1.0f / 720);
    p = fma(p, r, set1(1.0f / 120));
    p = fma(p, r, set1(1.0f / 24));
    p = fma(p, r, set1(1.0f / 6));
    p = fma(p, r, set1(0.5f));
    p = fma(p, r, set1(1.0f));
    p = fma(p, r, set1(1.0f));
    return times_pow2(p, n);
}

}  // namespace rn
