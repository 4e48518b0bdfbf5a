// A packed panel is two columns of weight tiles as they lie: 16 steps of one vector are 16 rows of 16 outputs, a dword each. Rows of the input
// are the other operand, so a tile of sums is up to 16 rows x 16 outputs, and k is cut into tiles at the same places for any number of rows.
#include "amx.h"

#ifdef RN_TILES
#include "pane.h"

#include <cmath>

namespace rn {
namespace {

constexpr int WIDE = 4;               // vectors at once: tiles 0 to 3 are their sums, 4 the input, 5 and 6 the weights

void fetch(const char* w, size_t ahead) {
    for (size_t i = 0; ahead && i < DEEP * STEP; i += 64) _mm_prefetch(w + ahead + i, _MM_HINT_T1);
}

#define DOT(c, b) do { if constexpr (KIND == BF16) TILE_DOT_BF16(c, 4, b); else TILE_DOT_U8S8(c, 4, b); } while (0)

// One tile along k of up to WIDE vectors, two a panel.
template <Kind KIND> inline void deeper(const char* w, size_t panel, int vectors, const char* x, size_t stride, size_t ahead) {
    for (int v = 0; v < vectors; v += 2) fetch(w + v / 2 * panel, ahead);
    TILE_LOAD(4, x, stride);
    TILE_LOAD(5, w, STEP);
    DOT(0, 5);
    if (vectors > 1) { TILE_LOAD(6, w + VECTOR, STEP); DOT(1, 6); }
    if (vectors > 2) { TILE_LOAD(5, w + panel, STEP); DOT(2, 5); }
    if (vectors > 3) { TILE_LOAD(6, w + panel + VECTOR, STEP); DOT(3, 6); }
}

// What is left of k beyond whole tiles, zeros after it.
struct Rest {
    alignas(64) char x[DEEP * 64], w[WIDE / 2 * DEEP * STEP];
};

template <Kind KIND>
void columns(const char* w, size_t panel, int vectors, const char* x, size_t stride, int rows, int steps, float* out, size_t ldo, size_t ahead) {
    TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3);
    int s = 0;
    for (; s + DEEP <= steps; s += DEEP, w += DEEP * STEP, x += 64) deeper<KIND>(w, panel, vectors, x, stride, ahead);
    if (s < steps) {
        Rest rest;
        memset(&rest, 0, sizeof rest);
        for (int i = 0; i < rows; i++) memcpy(rest.x + i * 64, x + i * stride, (steps - s) * 4);
        for (int v = 0; v < vectors; v += 2) memcpy(rest.w + v / 2 * DEEP * STEP, w + v / 2 * panel, (steps - s) * STEP);
        deeper<KIND>(rest.w, DEEP * STEP, vectors, rest.x, 64, 0);
    }
    TILE_STORE(0, out, ldo * 4);
    if (vectors > 1) TILE_STORE(1, out + LANES, ldo * 4);
    if (vectors > 2) TILE_STORE(2, out + 2 * LANES, ldo * 4);
    if (vectors > 3) TILE_STORE(3, out + 3 * LANES, ldo * 4);
}

constexpr unsigned FLUSHED = 0x8040;  // of MXCSR: denormals are zero, in and out
constexpr size_t SOON = 2048;  // bytes of each stream asked for early
constexpr int WAITING = 64;    // tiles of sums that wait

// What one tile of k adds to the sums of one row and S panels, in the order of TDPBF16PS: even and odd products apart, by FMA from zero.
template <int S> inline __attribute__((always_inline)) void deepen_row(const char* const (&w)[S], const char* const (&x)[S], int steps, V (&sum)[S][2]) {
    V even[S][2], odd[S][2];
#pragma GCC unroll 2
    for (int t = 0; t < S; t++) even[t][0] = even[t][1] = odd[t][0] = odd[t][1] = zero();
    for (size_t i = 0; i < (size_t)steps; i++) {
#pragma GCC unroll 2
        for (int t = 0; t < S; t++) {
            uint32_t u;
            memcpy(&u, x[t] + 4 * i, 4);
            const V low = as_float(dset1(u << 16)), high = as_float(dset1(u & 0xffff0000));
            const char* at = w[t] + i * STEP;
            _mm_prefetch(at + SOON, _MM_HINT_T0), _mm_prefetch(at + SOON + 64, _MM_HINT_T0);
#pragma GCC unroll 2
            for (int n = 0; n < 2; n++) {
                const D ww = dload(at + n * VECTOR);
                even[t][n] = fma(low, even_halves(ww), even[t][n]), odd[t][n] = fma(high, odd_halves(ww), odd[t][n]);
            }
        }
    }
#pragma GCC unroll 2
    for (int t = 0; t < S; t++)
        for (int n = 0; n < 2; n++) sum[t][n] = add(even[t][n], odd[t][n]);
}

// Memory is read as two streams, since one alone keeps too few misses in flight: two panels, or the halves of one. Not inline, so that no
// arithmetic moves across the caller's change of MXCSR.
__attribute__((noinline)) void row_of_two(const char* w, const char* other, const char* x, int steps, float* out, float* other_out) {
    V sum[2][2] = {{zero(), zero()}, {zero(), zero()}}, more[2][2];
    for (int s = 0; s < steps; s += DEEP) {
        deepen_row<2>({w + s * STEP, other + s * STEP}, {x + (size_t)s * 4, x + (size_t)s * 4}, std::min(DEEP, steps - s), more);
        for (int t = 0; t < 2; t++)
            for (int n = 0; n < 2; n++) sum[t][n] = add(sum[t][n], more[t][n]);
    }
    store(out, sum[0][0]), store(out + LANES, sum[0][1]), store(other_out, sum[1][0]), store(other_out + LANES, sum[1][1]);
}

__attribute__((noinline)) void row_of_one(const char* w, const char* x, int steps, float* out) {
    V sum[2] = {zero(), zero()}, waiting[WAITING][2];  // the second half's tiles are added after the first's
    auto plus = [&](const V(&more)[2]) { sum[0] = add(sum[0], more[0]), sum[1] = add(sum[1], more[1]); };
    for (int s = 0; s < steps;) {
        const int tiles = std::min(WAITING, (steps - s) / DEEP / 2), half = tiles * DEEP;
        for (int i = 0; i < tiles; i++) {
            const int near = s + i * DEEP, far = near + half;
            V more[2][2];
            deepen_row<2>({w + near * STEP, w + far * STEP}, {x + (size_t)near * 4, x + (size_t)far * 4}, DEEP, more);
            plus(more[0]);
            waiting[i][0] = more[1][0], waiting[i][1] = more[1][1];
        }
        for (int i = 0; i < tiles; i++) plus(waiting[i]);
        s += 2 * half;
        if (tiles) continue;
        V last[1][2];
        deepen_row<1>({w + s * STEP}, {x + (size_t)s * 4}, std::min(DEEP, steps - s), last);
        plus(last[0]);
        s += DEEP;
    }
    store(out, sum[0]), store(out + LANES, sum[1]);
}

// Small numbers that a bf16 holds exactly and whose sums do not.
uint16_t some_bf16(int i) {
    const float x = (float)((i * 37 + 11) % 255 - 127) * (i % 3 ? 0.0078125f : 3);
    uint32_t u;
    memcpy(&u, &x, 4);
    return (uint16_t)(u >> 16);
}

double as_double(uint16_t b) {
    const uint32_t u = (uint32_t)b << 16;
    float x;
    memcpy(&x, &u, 4);
    return x;
}

constexpr int ROWS = 16, VECTORS = 7, STEPS = 88;

// Whether sums [ROWS][VECTORS * 16] are those of x [ROWS][STEPS] and w [panels][STEPS][PANEL], dwords both.
bool right(Kind kind, const uint32_t* x, const uint32_t* w, const float* sums) {
    for (int m = 0; m < ROWS; m++)
        for (int n = 0; n < VECTORS * LANES; n++) {
            double want = 0, size = 0;
            for (int s = 0; s < STEPS; s++) {
                const uint32_t a = x[m * STEPS + s], b = w[(n / PANEL * STEPS + s) * PANEL + n % PANEL];
                for (int i = 0; i < 32; i += kind == BF16 ? 16 : 8) {
                    const double p = kind == BF16 ? as_double(a >> i) * as_double(b >> i) : (int)(uint8_t)(a >> i) * (int8_t)(b >> i);
                    want += p, size += std::fabs(p);
                }
            }
            int32_t whole;
            memcpy(&whole, sums + m * VECTORS * LANES + n, 4);
            if (kind == BF16 ? !(std::fabs(sums[m * VECTORS * LANES + n] - want) <= size / (1 << 20)) : whole != want) return false;
        }
    return true;
}

}  // namespace

void tile_strip(Kind kind, int rows, const char* w, size_t panel, int vectors, const char* x, size_t stride, int steps, float* out, size_t ldo, size_t ahead) {
    TileShapes shapes;  // told anew each time: other libraries of this process use tiles too
    for (int t = 0; t < 7; t++) shapes.rows[t] = t < 5 ? rows : DEEP, shapes.row_bytes[t] = 64;
    TILE_SHAPES(&shapes);
    for (int v = 0; v < vectors; v += WIDE) {
        const int count = std::min(WIDE, vectors - v);
        (kind == BF16 ? columns<BF16> : columns<S8>)(w + v / 2 * panel, panel, count, x, stride, rows, steps, out + v * LANES, ldo, ahead);
    }
    TILE_RELEASE();  // idle tiles are not saved when threads change, and let the core sleep
}

constexpr size_t FAR = 4096;  // bytes of A asked for early

void tile_thin(int rows, const char* w, int vectors, const char* x, size_t stride, const int32_t* from, int steps, float* out, size_t ldo) {
    const int deep = steps % DEEP ? DEEP / 2 : DEEP;  // so that nothing is left of k
    TileShapes shapes;
    for (int t = 0; t < 8; t++) shapes.rows[t] = t < 2 || t == 4 || t == 6 ? rows : deep, shapes.row_bytes[t] = t == 4 || t == 6 ? deep * 4 : 64;
    TILE_SHAPES(&shapes);
    const size_t size = (size_t)steps * VECTOR;
    auto at = [&](int v) { return v < vectors ? from ? from[v] : 0 : -1; };
    for (int v = 0; v < vectors; v += 2, w += 2 * size, out += 2 * LANES) {
        const int one = at(v), two = at(v + 1);
        TILE_ZERO(0); TILE_ZERO(1);
        for (int s = 0; s < steps; s += deep) {
            for (int i = 0; steps > DEEP && i < deep; i++) _mm_prefetch(w + (s + i) * VECTOR + FAR, _MM_HINT_T1);  // of A, which is long
            if (one >= 0) { TILE_LOAD(4, x + one + 4 * s, stride); TILE_LOAD(5, w + s * VECTOR, VECTOR); TILE_DOT_BF16(0, 4, 5); }
            if (two >= 0) { TILE_LOAD(6, x + two + 4 * s, stride); TILE_LOAD(7, w + size + s * VECTOR, VECTOR); TILE_DOT_BF16(1, 6, 7); }
        }
        TILE_STORE(0, out, ldo * 4);
        if (v + 1 < vectors) TILE_STORE(1, out + LANES, ldo * 4);
    }
    TILE_RELEASE();
}

void tile_row(const char* w, size_t panel, int vectors, const char* x, int steps, float* out) {
    const int panels = vectors / 2, half = panels / 2;
    const unsigned was = _mm_getcsr();
    _mm_setcsr(was | FLUSHED);
    for (int p = 0; p < half; p++) row_of_two(w + p * panel, w + (half + p) * panel, x, steps, out + p * PANEL, out + (half + p) * PANEL);
    if (panels % 2) row_of_one(w + (panels - 1) * panel, x, steps, out + (panels - 1) * PANEL);
    _mm_setcsr(was);
}

bool tiles_work() {
    constexpr int W = (VECTORS + 1) / 2 * STEPS * PANEL;
    uint32_t x[ROWS * STEPS], w[W];
    float together[ROWS * VECTORS * LANES], alone[VECTORS * LANES];
    for (Kind kind : {BF16, S8}) {
        auto fill = [&](uint32_t* to, int n, int from) {
            for (int i = 0; i < n; i++) to[i] = kind == BF16 ? some_bf16(i + from) | (uint32_t)some_bf16(3 * i + from) << 16 : (i + from) * 2654435761u;
        };
        fill(x, ROWS * STEPS, 1), fill(w, W, 7);
        auto strip = [&](int row, int rows, float* out) {
            tile_strip(kind, rows, (const char*)w, STEPS * STEP, VECTORS, (const char*)(x + row * STEPS), STEPS * 4, STEPS, out, VECTORS * LANES, 0);
        };
        strip(0, ROWS, together);
        if (!right(kind, x, w, together)) return false;
        for (int m = 0; m < ROWS; m++) {
            strip(m, 1, alone);
            if (memcmp(alone, together + m * VECTORS * LANES, sizeof alone)) return false;
            if (kind == BF16) tile_row((const char*)w, STEPS * STEP, VECTORS - 1, (const char*)(x + m * STEPS), STEPS, alone);
            if (memcmp(alone, together + m * VECTORS * LANES, sizeof alone)) return false;
        }
    }
    return true;
}

}  // namespace rn
#endif
