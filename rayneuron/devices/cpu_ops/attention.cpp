// Online softmax over tiles of 64 positions. The queries of one KV head (several heads, several tokens) are the rows of one product, so
// KV is read once for them; keys and values of a tile are put into the panels of matmul.h, and the same register tiles do both products.
#include "attention.h"

#include <algorithm>
#include <vector>

namespace rn {
namespace {

constexpr int MOST_QUERIES = 48;   // rows of one piece of work, heads of a group times tokens
constexpr float LOW = -1e30f;      // a maximum nothing has reached yet

struct Scratch {
    std::vector<char> bytes;
    char* take(size_t wanted) {
        if (bytes.size() < wanted + 64) bytes.resize(wanted + 64);
        return (char*)(((uintptr_t)bytes.data() + 63) & ~(uintptr_t)63);
    }
};
thread_local Scratch scratch;

// 16 rows of dwords, `stride` dwords apart -> their columns: out[c][16].
void columns(const uint32_t* in, size_t stride, int cols, uint32_t* out) {
    int c = 0;
#ifdef RN_AVX512
    for (; c + 16 <= cols; c += 16) {
        __m512i r[16], t[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(in + i * stride + c);
#pragma GCC unroll 8
        for (int i = 0; i < 16; i += 2) t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
#pragma GCC unroll 4
        for (int i = 0; i < 16; i += 4) {
            r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]), r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
            r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]), r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88), t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
            t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88), t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            _mm512_storeu_si512(out + (c + i) * 16, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
            _mm512_storeu_si512(out + (c + i + 4) * 16, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88));
            _mm512_storeu_si512(out + (c + i + 8) * 16, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
            _mm512_storeu_si512(out + (c + i + 12) * 16, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd));
        }
    }
#endif
    for (; c < cols; c++)
        for (int i = 0; i < 16; i++) out[c * 16 + i] = in[i * stride + c];
}

// Sizes of one head as the products see it: `width` values padded to whole panels, `steps` dwords of a query.
struct Sizes {
    int size, width, panels, steps, bytes;  // bytes of a value
    Sizes(Kind kind, int head) {
        size = head, width = (head + LANES - 1) / LANES * LANES, panels = width / LANES;
        bytes = kind == F32 ? 4 : 2, steps = width * bytes / 4;
    }
};

// `count` positions of one head copied to rows of `width` values, zeros after them up to the next panel.
const char* padded(const char* at, int count, const Sizes& z, char* room) {
    const size_t from = (size_t)z.size * z.bytes, to = (size_t)z.width * z.bytes;
    memset(room, 0, (count + LANES - 1) / LANES * LANES * to);
    for (int i = 0; i < count; i++) memcpy(room + i * to, at + i * from, from);
    return room;
}

// Values of `count` positions -> panels over positions: for every 16 values, step by step, one float or the bf16 of two positions.
void pack_values(Kind kind, const char* v, int count, const Sizes& z, char* out) {
    for (int p = 0; p < z.panels; p++) {
        char* to = out + (size_t)p * TILE * z.bytes * LANES;
        if (kind == F32) {
            for (int i = 0; i < count; i++, to += 64) store((float*)to, load((const float*)v + (size_t)i * z.width + p * LANES));
            continue;
        }
        const bf16* from = (const bf16*)v + p * LANES;
        int i = 0;
        for (; i + 2 <= count; i += 2, to += 64) dstore(to, both(low16(from + (size_t)i * z.width), high16(from + (size_t)(i + 1) * z.width)));
        if (i < count) dstore(to, low16(from + (size_t)i * z.width));
    }
}

// Scores of one query over a tile -> weights, the running maximum, the running sum in lanes; returns what older sums shrink by.
float soften(const Attention& a, float slope, float* scores, int start, int from, int to, float* most, float* total, Kind kind, char* out) {
    const V scale = set1(a.scale), low = set1(LOW);
    alignas(64) static const float lane[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    V top = low;
    for (int i = 0; i < TILE; i += LANES) {
        V at = add(load(lane), set1((float)i));
        V s = mul(load(scores + i), scale);
        if (a.slopes) s = fma(set1(slope), add(at, set1((float)start)), s);
        s = pick(at, set1((float)from), low, pick(at, set1((float)to), s, low));
        store(scores + i, s);
        top = maximum(top, s);
    }
    const float before = *most, now = std::max(before, highest(top));
    *most = now;
    const float shrink = before == now ? 1.0f : expf(before - now);
    V sums = mul(load(total), set1(shrink));
    for (int i = 0; i < TILE; i += LANES) {
        V s = load(scores + i), p = pick(low, s, exponential(sub(s, set1(now))), zero());
        sums = add(sums, p);
        if (kind == F32) store((float*)out + i, p);
        else narrow((bf16*)out + i, p);
    }
    store(total, sums);
    return shrink;
}

// Tokens [from, to) of one span and all query heads of one KV head.
struct Piece {
    int span, head, from, to;
};

// The first position any of these tokens sees, rounded down to a tile.
int first_tile(const Attention& a, const Span& span, const Piece& p) {
    int begin = a.length;
    for (int t = p.from; t < p.to; t++) begin = std::min(begin, a.window ? std::max(0, a.positions[span.first + t] - a.window + 1) : 0);
    return begin / TILE * TILE;
}

// Ask for the first tile of what comes next.
void fetch(const char* from, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) _mm_prefetch(from + i, _MM_HINT_T1);
}

const char* keys_of(const Attention& a, const Span& span, int head) {
    return a.kv + ((size_t)span.row * a.kv_heads + head) * a.length * a.size * (a.kind == F32 ? 4 : 2);
}

// `next`: the piece this thread does after this one, whose first tile is fetched while the last one of this is computed.
void attend_piece(const Attention& a, const Span* spans, const Piece& p, const Piece* next) {
    const Span& span = spans[p.span];
    const int g = p.head, t0 = p.from, t1 = p.to;
    const Sizes z(a.kind, a.size);
    const int group = a.heads / a.kv_heads, queries = (t1 - t0) * group;
    const size_t tile_bytes = (size_t)TILE * z.width * z.bytes, score_bytes = (size_t)queries * TILE * 4;
    char* room = scratch.take(3 * tile_bytes + 2 * score_bytes + (size_t)queries * (z.steps * 4 + z.width * 4 + 64 + 8) + 1024);
    char *keys = room, *values = keys + tile_bytes, *copy = values + tile_bytes, *q = copy + tile_bytes;
    char* weights = q + (size_t)queries * z.steps * 4;
    float* scores = (float*)(weights + (size_t)queries * TILE * z.bytes);
    float *acc = scores + (size_t)queries * TILE, *total = acc + (size_t)queries * z.width, *most = total + (size_t)queries * LANES;
    const int32_t* at = a.positions + span.first;
    memset(q, 0, (size_t)queries * z.steps * 4);
    for (int t = t0, r = 0; t < t1; t++)
        for (int j = 0; j < group; j++, r++) {
            const float* from = a.q + (span.first + t) * a.q_stride + (size_t)(g * group + j) * a.size;
            char* to = q + (size_t)r * z.steps * 4;
            if (a.kind == F32) memcpy(to, from, a.size * 4);
            else
                for (int i = 0; i < a.size; i += LANES) {
                    alignas(64) bf16 x[LANES];
                    narrow(x, load_n(from + i, a.size - i));
                    memcpy((bf16*)to + i, x, 2 * std::min(LANES, a.size - i));
                }
        }
    std::fill_n(acc, (size_t)queries * (z.width + LANES), 0.0f);
    std::fill_n(most, queries, LOW);

    int end = 0;
    for (int t = t0; t < t1; t++) end = std::max(end, at[t] + 1);
    const size_t position_bytes = (size_t)a.size * z.bytes, half = (size_t)a.rows * a.kv_heads * a.length * position_bytes;
    const char *k = keys_of(a, span, g), *after = nullptr;
    if (next) after = keys_of(a, spans[next->span], next->head) + first_tile(a, spans[next->span], *next) * position_bytes;
    for (int start = first_tile(a, span, p); start < end; start += TILE) {
        const int count = std::min(TILE, end - start);
        const char *here = k + start * position_bytes, *coming = start + TILE < end ? here + TILE * position_bytes : nullptr;
        if (!coming && after) fetch(after, TILE * position_bytes);
        const int panels = (count + LANES - 1) / LANES;
        const bool inside = z.size == z.width && start + panels * LANES <= a.length;  // what is read beyond `end` is masked
        const char* rows = inside ? here : padded(here, count, z, copy);
        for (int p = 0; p < panels; p++) columns((const uint32_t*)rows + (size_t)p * LANES * z.steps, z.steps, z.steps, (uint32_t*)keys + (size_t)p * LANES * z.steps);
        multiply(a.kind, keys, (size_t)z.steps * 64, panels, q, (size_t)z.steps * 4, queries, z.steps, scores, TILE, false, coming);
        for (int t = t0, r = 0; t < t1; t++)
            for (int j = 0; j < group; j++, r++) {
                const int from = a.window ? at[t] - a.window + 1 - start : 0, to = std::min(at[t] + 1 - start, TILE);
                const float slope = a.slopes ? a.slopes[g * group + j] : 0;
                const float shrink = soften(a, slope, scores + (size_t)r * TILE, start, from, to, most + r, total + (size_t)r * LANES, a.kind,
                                            weights + (size_t)r * TILE * z.bytes);
                if (shrink != 1.0f)
                    for (int i = 0; i < z.width; i += LANES) store(acc + (size_t)r * z.width + i, mul(load(acc + (size_t)r * z.width + i), set1(shrink)));
            }
        if (!coming && after) fetch(after + half, TILE * position_bytes);
        pack_values(a.kind, z.size == z.width ? here + half : padded(here + half, count, z, copy), count, z, values);
        const int steps = (count * z.bytes + 3) / 4;
        multiply(a.kind, values, (size_t)TILE * z.bytes * LANES, z.panels, weights, (size_t)TILE * z.bytes, queries, steps, acc, z.width, true,
                 coming ? coming + half : nullptr);
    }
    for (int t = t0, r = 0; t < t1; t++)
        for (int j = 0; j < group; j++, r++) {
            char* to = a.out + (span.first + t) * a.out_stride;
            const V by = set1(1.0f / std::max(sum(load(total + (size_t)r * LANES)), 1e-30f));
            for (int i = 0; i < a.size; i += LANES) {
                const int n = std::min(LANES, a.size - i), column = (g * group + j) * a.size + i;
                V x = mul(load(acc + (size_t)r * z.width + i), by);
                if (a.out_kind == F32) {
                    store_n((float*)to + column, x, n);
                } else {
                    alignas(64) bf16 b[LANES];
                    narrow(b, x);
                    memcpy((bf16*)to + column, b, 2 * n);
                }
            }
        }
}

}  // namespace

void attend(Pool& pool, const Attention& a, const Span* spans, int count) {
    static thread_local std::vector<Piece> pieces;
    pieces.clear();
    const int tokens = std::max(1, MOST_QUERIES / (a.heads / a.kv_heads));
    for (int s = 0; s < count; s++)
        for (int t = (spans[s].count - 1) / tokens * tokens; t >= 0; t -= tokens)  // the longest first
            for (int g = 0; g < a.kv_heads; g++) pieces.push_back({s, g, t, std::min(spans[s].count, t + tokens)});
    const Piece* all = pieces.data();
    const int n = (int)pieces.size(), by = std::max(1, n / (pool.threads() * 8));
    pool.run((n + by - 1) / by, [&, all](int i) {
        const int last = std::min(n, (i + 1) * by);
        for (int p = i * by; p < last; p++) attend_piece(a, spans, all[p], p + 1 < last ? all + p + 1 : nullptr);
    });
}

}  // namespace rn
