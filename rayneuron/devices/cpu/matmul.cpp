// Register tiles of M rows x N vectors of outputs, chosen so that accumulators, weights and one spread input fit the registers.
#include "adapt.h"
#include "amx.h"
#include "finish.h"

#include <algorithm>

namespace rn {
namespace {

#ifdef RN_AVX512
constexpr int MOST_ROWS = 16, GOOD_ROWS = 12;  // the most that are computed at once; what many rows are cut to
constexpr int widest(int rows) { return rows > 1 && rows <= WIDE_ROWS ? 4 : 2; }
#else
constexpr int MOST_ROWS = 5, GOOD_ROWS = 5;
constexpr int widest(int rows) { return rows <= 2 ? 2 : 1; }
#endif
constexpr int MOST_WIDE = 64;    // vectors of finished values kept before they are used
constexpr int TILE_ROWS = 14;    // the most one tile takes
constexpr int CHUNK = 32;        // steps that both tiles of a block do before the next: from memory, then from the first cache
constexpr size_t AHEAD = 4096;   // bytes of a panel asked for early
constexpr int SHORT = 32;        // steps of attention's products in bf16: 64 positions, a head of 64; where a loop's end costs a twentieth
constexpr size_t PART_BYTES = 512 << 10;  // of rows that meet all panels before the next ones
constexpr int PART_ROWS = 96;    // and at least so many, as all panels pass once more
constexpr int FEW_ROWS = 4;      // of int8, for which vector instructions read memory faster than tiles
#ifdef __AVX512VNNI__
constexpr bool VNNI = true;
#else
constexpr bool VNNI = false;
#endif

template <int KIND> struct Acc { using T = V; };
#ifdef __AVX512VNNI__
template <> struct Acc<S8> { using T = D; };
#endif

template <int KIND> static inline typename Acc<KIND>::T step(typename Acc<KIND>::T acc, D w, D x) {
    if constexpr (KIND == F32) return fma(as_float(w), as_float(x), acc);
    else if constexpr (KIND == BF16) return dot2(acc, w, x);
#ifdef __AVX512VNNI__
    else return _mm512_dpbusd_epi32(acc, x, w);
#else
    else return acc;  // nothing is packed as S8 where the processor has no VNNI
#endif
}

template <int KIND, int M, int N, size_t BY = STEP, int STEPS = 0>  // BY: bytes from one step to the next; STEPS: how many, where that is known
__attribute__((noinline)) void tile(const char* w, size_t panel, const char* x, size_t stride, int steps, float* out, size_t ldo, bool more, size_t ahead) {
    if constexpr (STEPS) steps = STEPS;
    using A = typename Acc<KIND>::T;
    A acc[M][N];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            D start = more ? dload(out + m * ldo + n * LANES) : dzero();
            memcpy(&acc[m][n], &start, sizeof(D));
        }
    const char* base[(M + 2) / 3];  // rows in threes: base, base + stride, base + 2 stride are addresses of one instruction each
#pragma GCC unroll 6
    for (int i = 0; i < (M + 2) / 3; i++) base[i] = x + 3 * i * stride;
    for (int s = 0; s < steps; s++) {
        D ww[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            const char* at = w + (n / 2) * panel + (n % 2) * VECTOR + (size_t)s * BY;
            if constexpr (M > 2) _mm_prefetch(at + ahead, _MM_HINT_T1);  // for one or two rows the processor's own is faster
            ww[n] = dload(at);
        }
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            uint32_t u;
            memcpy(&u, base[m / 3] + (m % 3) * stride + 4 * (size_t)s, 4);
            D xx = dset1(u);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) acc[m][n] = step<KIND>(acc[m][n], ww[n], xx);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) memcpy(out + m * ldo + n * LANES, &acc[m][n], sizeof(A));
}

// M rows x N vectors: one tile, or two over half of the rows each, a chunk of the panel after the other.
template <int KIND, int M, int N>
void block(const char* w, size_t panel, const char* x, size_t stride, int steps, float* out, size_t ldo, bool more, size_t ahead) {
    if constexpr (N > 2)
        if (steps == SHORT) return tile<KIND, M, N, STEP, SHORT>(w, panel, x, stride, steps, out, ldo, more, ahead);
    if constexpr (M <= TILE_ROWS) return tile<KIND, M, N>(w, panel, x, stride, steps, out, ldo, more, ahead);
    constexpr int HALF = M / 2;
    for (int s = 0; s < steps; s += CHUNK, w += CHUNK * STEP, x += CHUNK * 4, more = true) {
        const int count = std::min(CHUNK, steps - s);
        tile<KIND, HALF, N>(w, panel, x, stride, count, out, ldo, more, ahead);
        tile<KIND, M - HALF, N>(w, panel, x + HALF * stride, stride, count, out + HALF * ldo, ldo, more, ahead);
    }
}

template <int KIND, int M>
void strip(const char* w, size_t panel, int vectors, const char* x, size_t stride, int steps, float* out, size_t ldo, bool more, size_t ahead) {
    constexpr int N = widest(M);
    auto at = [&](int v) { return w + v / 2 * panel + v % 2 * VECTOR; };
    int v = 0;
    for (; v + N <= vectors; v += N) block<KIND, M, N>(at(v), panel, x, stride, steps, out + v * LANES, ldo, more, ahead);
    if constexpr (N > 2)
        for (; v + 2 <= vectors; v += 2) block<KIND, M, 2>(at(v), panel, x, stride, steps, out + v * LANES, ldo, more, ahead);
    if constexpr (N > 1)
        for (; v < vectors; v++) block<KIND, M, 1>(at(v), panel, x, stride, steps, out + v * LANES, ldo, more, ahead);
}

using Strip = void (*)(const char*, size_t, int, const char*, size_t, int, float*, size_t, bool, size_t);

template <int KIND> Strip strip_of(int rows) {
    static constexpr Strip all[] = {
        strip<KIND, 1>, strip<KIND, 2>, strip<KIND, 3>, strip<KIND, 4>, strip<KIND, 5>,
#ifdef RN_AVX512
        strip<KIND, 6>, strip<KIND, 7>, strip<KIND, 8>, strip<KIND, 9>, strip<KIND, 10>, strip<KIND, 11>, strip<KIND, 12>,
        strip<KIND, 13>, strip<KIND, 14>, strip<KIND, 15>, strip<KIND, 16>,
#endif
    };
    return all[rows - 1];
}

Strip strip_of(Kind kind, int rows) {
    return kind == F32 ? strip_of<F32>(rows) : kind == BF16 ? strip_of<BF16>(rows) : strip_of<S8>(rows);
}

using Thin = void (*)(const char*, size_t, const char*, size_t, int, float*, size_t, bool, size_t);

template <int KIND> Thin thin_of(int rows) {
    static constexpr Thin all[] = {
        tile<KIND, 1, 1, VECTOR>, tile<KIND, 2, 1, VECTOR>, tile<KIND, 3, 1, VECTOR>, tile<KIND, 4, 1, VECTOR>, tile<KIND, 5, 1, VECTOR>,
#ifdef RN_AVX512
        tile<KIND, 6, 1, VECTOR>, tile<KIND, 7, 1, VECTOR>, tile<KIND, 8, 1, VECTOR>, tile<KIND, 9, 1, VECTOR>, tile<KIND, 10, 1, VECTOR>,
        tile<KIND, 11, 1, VECTOR>, tile<KIND, 12, 1, VECTOR>, tile<KIND, 13, 1, VECTOR>, tile<KIND, 14, 1, VECTOR>, tile<KIND, 15, 1, VECTOR>,
        tile<KIND, 16, 1, VECTOR>,
#endif
    };
    return all[rows - 1];
}

// Few rows take one tile, so that memory streams past once; many take tiles of the best shape.
int blocks_of(int rows) { return rows <= MOST_ROWS ? 1 : (rows + GOOD_ROWS - 1) / GOOD_ROWS; }

// Accumulators of one row and panel -> values: integers scaled, the bias added.
V value(const Matrix& w, const Input& x, int row, int at, const float* acc) {
    V v = load(acc);
    if (w.kind == S8) v = mul(to_float(dsub(dload(acc), dload(w.sums + at))), set1(x.scale[row]));
    if (w.scale) v = mul(v, load(w.scale + at));
    return w.bias ? add(v, load(w.bias + at)) : v;
}

void put(const Output& out, int row, int at, int count, V v) {
    char* y = out.y + row * out.stride;
    if (out.kind == F32) {
        float* to = (float*)y + at;
        if (out.finish == ADD) v = add(load_n(to, count), v);
        count >= LANES ? store(to, v) : store_n(to, v, count);
    } else if (count >= LANES) {
        narrow((bf16*)y + at, v);
    } else {
        alignas(64) bf16 t[LANES];
        narrow(t, v);
        memcpy((bf16*)y + at, t, sizeof(bf16) * count);
    }
}

// Panels of one piece of work: so many pieces that no thread waits long for the last, so few that claiming them costs nothing.
int piece_panels(const Matrix& w, int rows, int threads) {
    if (rows > MOST_ROWS) return tiled(w.kind) ? 2 : 1;
    const int by_bytes = (int)((160 << 10) / w.panel_bytes()), by_share = w.panels / (threads * 6);
    return std::max(1, std::min({by_bytes, by_share, MOST_WIDE / 2}));
}

// Sums of few rows [rows][vectors * LANES]. Those of int8 are exact, so whoever reads memory faster may add them up.
void few(const Matrix& w, int rows, const char* at, int vectors, const char* x, size_t stride, float* acc, size_t ahead) {
    const Kind kind = (Kind)w.kind;
    const bool vector = !tiled(kind) || (VNNI && kind == S8 && rows <= FEW_ROWS);
    if (vector) strip_of(kind, rows)(at, w.panel_bytes(), vectors, x, stride, w.steps, acc, vectors * LANES, false, ahead);
    else if (rows == 1 && kind == BF16 && vectors % 2 == 0) tile_row(at, w.panel_bytes(), vectors, x, w.steps, acc);
    else tile_strip(kind, rows, at, w.panel_bytes(), vectors, x, stride, w.steps, acc, vectors * LANES, ahead);
}

// Finishes rows [row, row + count) of sums [count][vectors * LANES] that begin at panel p; null: what only `finish` can.
using Finisher = void (*)(const Matrix&, const Input&, const Output&, int, int, int, int, const float*);

template <Kind KIND, How HOW> void finish_rows(const Matrix& w, const Input& x, const Output& out, int row, int count, int p, int vectors, const float* acc) {
    for (int i = 0; i < count; i++)
        for (int v = 0; v < vectors; v += 2, acc += PANEL) finish_panel<KIND, HOW>(w, x, out, row + i, p + v / 2, 2, acc);
}

template <Kind KIND> Finisher finisher_of(const Matrix& w, const Output& out) {
    Finisher found = nullptr;
    by_how(w, out, [&](auto how) { if (how != ANY) found = finish_rows<KIND, how>; });
    return found;
}

Finisher finisher_of(const Matrix& w, const Output& out) {
    return w.kind == F32 ? finisher_of<F32>(w, out) : w.kind == BF16 ? finisher_of<BF16>(w, out) : finisher_of<S8>(w, out);
}

// Ask for what the values of one panel are added to, or replace: a few lines of every row, which no processor foresees.
void expect(const Matrix& w, const Output& out, int row, int count, int p) {
    const int bytes = PANEL * (out.kind == F32 ? 4 : 2) / (out.finish == ACT && w.gated ? 2 : 1);
    const char* y = out.y + row * out.stride + (size_t)p * bytes;
    for (int i = 0; i < count; i++, y += out.stride) __builtin_prefetch(y, 1), __builtin_prefetch(y + bytes - 1, 1);
}

// Sums of `count` rows from `m` on and of `vectors` from panel p on -> what is written, with what adapters add, which comes into `added`.
// `slot`: of the first row among the best of all pieces.
void finish_block(const Matrix& w, const Input& x, const Output& out, Finisher usual, Adapting* more, int m, int count, int p, int vectors, const float* acc,
                  float* added, int slot) {
    if (more) more->wait(), more->sums(m, count, 2 * p, vectors, added);
    if (usual && !more) return usual(w, x, out, m, count, p, vectors, acc);
    for (int i = 0; i < count; i++) {
        const int at = i * vectors * LANES;
        finish(w, x, out, m + i, p, vectors, acc + at, slot + i, more && more->has(m + i) ? added + at : nullptr);
    }
}

// Many rows are cut into parts that stay in the second cache while all panels pass, and every thread begins with parts of its own, whose rows
// it has met in the product before. A panel stays in the first two caches for the blocks of a part; each block asks for its share of the next.
void by_parts(Pool& pool, const Matrix& w, const Input& x, int rows, const Output& out, Adapting* more, Finisher usual) {
    const int threads = pool.threads(), least = (int)((x.stride * rows + PART_BYTES - 1) / PART_BYTES);
    const int parts = std::max(1, std::min((least + threads - 1) / threads * threads, rows / PART_ROWS));
    pool.run(parts * w.panels, [&](int piece) {
        alignas(64) float acc[MOST_ROWS * PANEL], added[MOST_ROWS * PANEL];
        if (more) more->help();
        const int part = piece / w.panels, p = piece % w.panels, vectors = std::min(2, w.vectors() - 2 * p);
        const int first = (int)((int64_t)rows * part / parts), end = (int)((int64_t)rows * (part + 1) / parts);
        const char* panel = w.data + p * w.panel_bytes();
        const int blocks = blocks_of(end - first);
        for (int b = 0, m = first; b < blocks; b++) {
            const int count = (end - m + blocks - b - 1) / (blocks - b);
            expect(w, out, m, count, p);
            const size_t ahead = b ? 0 : w.panel_bytes();
            strip_of((Kind)w.kind, count)(panel, w.panel_bytes(), vectors, x.rows + m * x.stride, x.stride, w.steps, acc, vectors * LANES, false, ahead);
            finish_block(w, x, out, usual, more, m, count, p, vectors, acc, added, m);
            m += count;
        }
    }, true);
}

}  // namespace

void finish(const Matrix& w, const Input& x, const Output& out, int row, int p, int vectors, const float* acc, int slot, const float* more) {
    auto whole = [&](int at, int i) {
        const V v = value(w, x, row, at, acc + i * LANES);
        return more ? add(v, load(more + i * LANES)) : v;
    };
    if (out.finish == ACT && w.gated) {
        for (int i = 0; i < vectors; i += 2) {
            const int at = p * PANEL + i * LANES;
            V gate = activate(out.act, whole(at, i)), up = whole(at + LANES, i + 1);
            put(out, row, at / 2, w.n / 2 - at / 2, mul(gate, up));
        }
        return;
    }
    for (int i = 0; i < vectors; i++) {
        const int at = p * PANEL + i * LANES;
        if (at >= w.n) return;
        V v = whole(at, i);
        if (out.finish == BEST) {
            if (out.index[slot] >= 0 && !any_above(v, set1(out.second ? out.second[slot] : out.best[slot]))) continue;
            alignas(64) float t[LANES];
            store(t, v);
            for (int j = 0; j < LANES && at + j < w.n; j++)
                if (out.index[slot] < 0 || t[j] > out.best[slot]) {
                    if (out.second) out.second[slot] = out.index[slot] < 0 ? -INFINITY : out.best[slot];
                    out.best[slot] = t[j], out.index[slot] = at + j;
                } else if (out.second && t[j] > out.second[slot]) {
                    out.second[slot] = t[j];
                }
        } else {
            put(out, row, at, w.n - at, out.finish == ACT ? activate(out.act, v) : v);
        }
    }
}

V activate(Act act, V x) {
    switch (act) {
        case SILU: return silu(x);
        case QUICK_GELU: return div(x, add(set1(1), exponential(mul(x, set1(-1.702f)))));
        case RELU: return maximum(x, zero());
        case RELU_SQUARED: return mul(maximum(x, zero()), maximum(x, zero()));
        case GELU_TANH: {  // 0.5 x (1 + tanh u) = x / (1 + e^-2u)
            V u = mul(mul(x, set1(0.7978845608028654f)), fma(mul(x, x), set1(0.044715f), set1(1)));
            return div(x, add(set1(1), exponential(mul(u, set1(-2)))));
        }
        case GELU: {  // erf by Abramowitz and Stegun 7.1.26, 1.5e-7 absolute
            V z = mul(absolute(x), set1(0.70710678118654752f)), t = div(set1(1), fma(z, set1(0.3275911f), set1(1)));
            V p = fma(t, set1(1.061405429f), set1(-1.453152027f));
            p = fma(p, t, set1(1.421413741f));
            p = fma(p, t, set1(-0.284496736f));
            p = mul(fma(p, t, set1(0.254829592f)), t);
            V tail = mul(mul(p, exponential(sub(zero(), mul(z, z)))), set1(0.5f));  // (1 - erf z) / 2
            return mul(x, pick(x, zero(), tail, sub(set1(1), tail)));
        }
        default: return x;
    }
}

void multiply(Kind kind, const char* w, size_t panel, int vectors, const char* x, size_t stride, int rows, int steps, float* out, size_t ldo, bool more,
              const char* next) {
    const int blocks = blocks_of(rows);
    const size_t ahead = next ? (size_t)next - (size_t)w : 0;
    for (int b = 0, m = 0; b < blocks; b++) {
        const int count = (rows - m + blocks - b - 1) / (blocks - b);
        strip_of(kind, count)(w, panel, vectors, x + m * stride, stride, steps, out + m * ldo, ldo, more, b ? 0 : ahead);
        m += count;
    }
}

void thin(Kind kind, int rows, const char* w, int vectors, const char* x, size_t stride, const int32_t* from, int steps, float* out, size_t ldo) {
    for (int count; rows > 0; rows -= count, x += count * stride, out += count * ldo) {
        count = std::min(rows, MOST_ROWS);
        if (tiled(kind)) {
            tile_thin(count, w, vectors, x, stride, from, steps, out, ldo);
            continue;
        }
        const Thin one = kind == F32 ? thin_of<F32>(count) : thin_of<BF16>(count);
        for (int v = 0; v < vectors; v++) {
            float* to = out + v * LANES;
            if (!from || from[v] >= 0) one(w + (size_t)v * steps * VECTOR, 0, x + (from ? from[v] : 0), stride, steps, to, ldo, false, AHEAD);
            else
                for (int m = 0; m < count; m++) store(to + m * ldo, zero());
        }
    }
}

int best_pieces(const Matrix& w, int rows, int threads) { return (w.panels + piece_panels(w, rows, threads) - 1) / piece_panels(w, rows, threads); }

void foresee(Pool& pool, const Matrix& w, int rows) {
    const int wide = piece_panels(w, rows, pool.threads());
    pool.foresee(rows > MOST_ROWS ? nullptr : w.data, wide * w.panel_bytes(), best_pieces(w, rows, pool.threads()));
}

void matmul(Pool& pool, const Matrix& w, const Input& x, int rows, const Output& out, Adapting* more) {
    if (tiled(w.kind) && rows > MOST_ROWS && out.finish != BEST) return matmul_many(pool, w, x, rows, out, more);
    const int wide = piece_panels(w, rows, pool.threads()), pieces = (w.panels + wide - 1) / wide;
    const int blocks = tiled(w.kind) ? (rows + MOST_ROWS - 1) / MOST_ROWS : blocks_of(rows);
    const Finisher usual = finisher_of(w, out);
    if (blocks > 1 && !tiled(w.kind) && out.finish != BEST) return by_parts(pool, w, x, rows, out, more, usual);
    const int group = blocks == 1 ? MOST_WIDE / 2 : tiled(w.kind) ? 2 : 1;  // panels all rows meet before the next ones
    pool.run(pieces, [&](int piece) {
        alignas(64) float acc[MOST_ROWS * MOST_WIDE * LANES], added[MOST_ROWS * MOST_WIDE * LANES];
        if (more) more->help();
        const int from = piece * wide, to = std::min(w.panels, from + wide);
        if (out.finish == BEST) std::fill_n(out.index + (size_t)piece * rows, rows, -1);
        for (int p = from; p < to; p += group) {
            const int panels = std::min(group, to - p), vectors = std::min(2 * panels, w.vectors() - 2 * p);
            for (int b = 0, m = 0; b < blocks; b++) {
                const int count = (rows - m + blocks - b - 1) / (blocks - b);
                const size_t ahead = blocks == 1 ? AHEAD : b ? 0 : group * w.panel_bytes();  // memory never rests
                if (more && blocks == 1) more->fetch(0, rows, 2 * p, vectors);
                few(w, count, w.data + p * w.panel_bytes(), vectors, x.rows + m * x.stride, x.stride, acc, ahead);
                finish_block(w, x, out, usual, more, m, count, p, vectors, acc, added, piece * rows + m);
                m += count;
            }
        }
    }, true);
}

}  // namespace rn
