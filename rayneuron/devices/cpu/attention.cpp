// Online softmax over tiles of 64 positions. The queries of one KV head (several heads, several tokens) are the rows of one product, so
// KV is read once for them; keys and values of a tile are put into the panels of matmul.h, and the same register tiles do both products.
#include "attention.h"

#include "rows.h"

#include <algorithm>
#include <vector>

namespace rn {
namespace {

constexpr int FEW_QUERIES = 48, MANY_QUERIES = 192;  // rows of one piece of work, heads of a group times tokens: many share the packing of a tile
constexpr float LOW = -1e30f;                       // a maximum nothing has reached yet
constexpr float LOG2_E = 1.44269504088896341f;

struct Scratch {
    std::vector<char> bytes;
    char* take(size_t wanted) {
        if (bytes.size() < wanted + 64) bytes.resize(wanted + 64);
        return (char*)(((uintptr_t)bytes.data() + 63) & ~(uintptr_t)63);
    }
};
thread_local Scratch scratch;

// 16 rows of dwords, `stride` dwords apart -> their columns, the vectors of a panel: out[c * PANEL + row].
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
            _mm512_storeu_si512(out + (c + i) * PANEL, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
            _mm512_storeu_si512(out + (c + i + 4) * PANEL, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88));
            _mm512_storeu_si512(out + (c + i + 8) * PANEL, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
            _mm512_storeu_si512(out + (c + i + 12) * PANEL, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd));
        }
    }
#endif
    for (; c < cols; c++)
        for (int i = 0; i < 16; i++) out[c * PANEL + i] = in[i * stride + c];
}

// Sizes of one head as the products see it: `width` values padded to whole vectors, `steps` dwords of a query.
struct Sizes {
    int size, width, vectors, steps, bytes;  // bytes of a value
    Sizes(Kind kind, int head) {
        size = head, width = (head + LANES - 1) / LANES * LANES, vectors = width / LANES;
        bytes = kind == F32 ? 4 : 2, steps = width * bytes / 4;
    }
};

// `count` positions of one head copied to rows of `width` values, zeros after them up to the next vector.
const char* padded(const char* at, int count, const Sizes& z, char* room) {
    const size_t from = (size_t)z.size * z.bytes, to = (size_t)z.width * z.bytes;
    memset(room, 0, (count + LANES - 1) / LANES * LANES * to);
    for (int i = 0; i < count; i++) memcpy(room + i * to, at + i * from, from);
    return room;
}

// Values of `count` positions, the `first` of a tile (even) and those behind it -> panels over positions: for every 16 values, step by step,
// one float or the bf16 of two positions.
void pack_values(Kind kind, const char* v, int first, int count, const Sizes& z, char* out) {
    for (int p = 0; p < z.vectors; p++) {
        char* to = out + (size_t)(p / 2) * TILE * z.bytes * PANEL + p % 2 * VECTOR + (size_t)first * z.bytes / 4 * STEP;
        if (kind == F32) {
            for (int i = 0; i < count; i++, to += STEP) store((float*)to, load((const float*)v + (size_t)i * z.width + p * LANES));
            continue;
        }
        const bf16* from = (const bf16*)v + p * LANES;
        int i = 0;
        for (; i + 2 <= count; i += 2, to += STEP) dstore(to, both(low16(from + (size_t)i * z.width), high16(from + (size_t)(i + 1) * z.width)));
        if (i < count) dstore(to, low16(from + (size_t)i * z.width));
    }
}

// What is kept of some queries between tiles: sums [rows][width] weighted by 2^(score - most), the weights' sums in lanes, the largest score.
struct Running {
    float *acc, *total, *most;
};

// The positions of this tile that each row sees, [from, to), and its slope.
struct Sight {
    int from[WIDE_ROWS], to[WIDE_ROWS];
    const float* slope;
    bool all;  // every row sees every position, and there is no slope
};

// Add alibi to one row of scores, put what is out of sight to LOW.
void limit(const Sight& sight, int r, int start, float* scores) {
    alignas(64) static const float lane[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const V low = set1(LOW), slope = set1(sight.slope ? sight.slope[r] : 0), from = set1((float)sight.from[r]), to = set1((float)sight.to[r]);
    for (int i = 0; i < TILE; i += LANES) {
        const V at = add(load(lane), set1((float)i)), s = fma(slope, add(at, set1((float)start)), load(scores + i));
        store(scores + i, pick(at, from, low, pick(at, to, s, low)));
    }
}

// Scores [rows][TILE] (powers of two) -> weights of `kind`; the running sums shrink where a maximum grows.
template <bool ALL> void soften(Kind kind, const Sight& sight, int start, int rows, float* scores, const Running& run, int width, char* out) {
    for (int r = 0; r < rows; r++, scores += TILE, out += TILE * (kind == F32 ? 4 : 2)) {
        if (!ALL) limit(sight, r, start, scores);
        V s[TILE / LANES];
#pragma GCC unroll 4
        for (int i = 0; i < TILE / LANES; i++) s[i] = load(scores + i * LANES);
        const V highest_lanes = maximum(maximum(s[0], s[1]), maximum(s[2], s[3]));
        V sums = load(run.total + r * LANES), most = set1(run.most[r]);
        if (any_above(highest_lanes, most)) {
            const V now = set1(highest(highest_lanes)), shrink = power_of_two(sub(most, now));
            sums = mul(sums, shrink), most = now;
            store_n(run.most + r, now, 1);
            for (int i = 0; i < width; i += LANES) store(run.acc + (size_t)r * width + i, mul(load(run.acc + (size_t)r * width + i), shrink));
        }
#pragma GCC unroll 4
        for (int i = 0; i < TILE / LANES; i++) {
            const V p = power_of_two(sub(s[i], most));
            s[i] = ALL ? p : pick(set1(LOW), s[i], p, zero());
            sums = add(sums, s[i]);
        }
        store(run.total + r * LANES, sums);
#pragma GCC unroll 4
        for (int i = 0; i < TILE / LANES; i += 2) {
            if (kind == F32) store((float*)out + i * LANES, s[i]), store((float*)out + (i + 1) * LANES, s[i + 1]);
            else narrow2((bf16*)out + i * LANES, s[i], s[i + 1]);
        }
    }
}

// Tokens [from, to) of one span and all query heads of one KV head.
struct Piece {
    int span, head, from, to;
};

// The first position any of these tokens sees, rounded down to a tile.
int first_tile(const Attention& a, const Span& span, const Piece& p) {
    int begin = a.positions[span.first + p.from];
    for (int t = p.from; t < p.to; t++) begin = std::min(begin, a.window ? std::max(0, a.positions[span.first + t] - a.window + 1) : 0);
    return begin / TILE * TILE;
}

int last_position(const Attention& a, const Span& span, const Piece& p) {
    int last = 0;
    for (int t = p.from; t < p.to; t++) last = std::max(last, a.positions[span.first + t]);
    return last;
}

// Ask for the first tile of what comes next.
void fetch(const char* from, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) _mm_prefetch(from + i, _MM_HINT_T1);
}

// Queries of one piece as the products read them, row after row, the heads of a group within a token; scores become powers of two.
void gather(const Attention& a, const Span& span, const Piece& p, const Sizes& z, char* to, int32_t* at, float* slopes) {
    const int group = a.heads / a.kv.kv_heads;
    const V by = set1(a.scale * LOG2_E);
    std::vector<float> row(z.width);
    for (int t = p.from; t < p.to; t++)
        for (int j = 0; j < group; j++, to += (size_t)z.steps * 4) {
            const float* from = a.q + (span.first + t) * a.q_stride + (size_t)(p.head * group + j) * a.kv.size;
            for (int i = 0; i < a.kv.size; i += LANES) store(row.data() + i, mul(load_n(from + i, a.kv.size - i), by));
            encode_row(row.data(), a.kv.size, a.kind, z.steps, to, nullptr);
            *at++ = a.positions[span.first + t];
            if (a.slopes) *slopes++ = a.slopes[p.head * group + j] * LOG2_E;
        }
}

// One finished row of sums -> the output.
void settle(const Attention& a, const float* acc, const float* total, int token, int head) {
    char* to = a.out + token * a.out_stride;
    const V by = set1(1.0f / std::max(sum(load(total)), 1e-30f));
    for (int i = 0; i < a.kv.size; i += LANES) {
        const int n = std::min(LANES, a.kv.size - i), column = head * a.kv.size + i;
        const V x = mul(load(acc + i), by);
        if (a.out_kind == F32) {
            store_n((float*)to + column, x, n);
        } else {
            alignas(64) bf16 b[LANES];
            narrow(b, x);
            memcpy((bf16*)to + column, b, 2 * n);
        }
    }
}

// What `rows` queries at positions `at` see of the tile that begins at `start`; returns how many of its positions anybody sees.
int look(const Attention& a, const int32_t* at, const float* slopes, int start, int rows, Sight& sight) {
    int most = 0;
    bool all = !a.slopes;
    for (int r = 0; r < rows; r++) {
        const int to = std::min(at[r] + 1 - start, TILE), from = a.window ? at[r] - a.window + 1 - start : 0;
        sight.from[r] = from, sight.to[r] = to;
        all &= from <= 0 && to == TILE;
        if (from < to) most = std::max(most, to);
    }
    sight.slope = a.slopes ? slopes : nullptr, sight.all = all;
    return most;
}

// The keys and values of `count` positions in panels, with room for what only the padding of odd sizes needs.
struct Tile {
    char *keys, *values, *copy;

    // Positions of the tile `first`, a multiple of 16, and those behind it: `count` of one block, `room_behind` positions of it from `at` on.
    void take(const Attention& a, const Sizes& z, const char* at, int first, int count, int room_behind) const {
        const int vectors = (count + LANES - 1) / LANES;
        const bool whole = z.size == z.width, inside = whole && vectors * LANES <= room_behind;  // what is read beyond `count` is masked
        const char* rows = inside ? at : padded(at, count, z, copy);
        for (int p = 0; p < vectors; p++) {
            const int vector = first / LANES + p;
            columns((const uint32_t*)rows + (size_t)p * LANES * z.steps, z.steps, z.steps, (uint32_t*)keys + (size_t)(vector / 2) * PANEL * z.steps + vector % 2 * LANES);
        }
        at += a.kv.half();
        pack_values(a.kind, whole ? at : padded(at, count, z, copy), first, count, z, values);
    }
};

// The first address of a row's KV from `position` on, null at its end.
const char* unit(const Attention& a, int row, int head, int position, int end) {
    return position < end ? a.kv.keys_at(row, head, position) : nullptr;
}

// `next`: the piece this thread does after this one, whose first tile is fetched while the last one of this is computed.
void attend_piece(const Attention& a, const Span* spans, const Piece& p, const Piece* next) {
    const Span& span = spans[p.span];
    const Sizes z(a.kind, a.kv.size);
    const int group = a.heads / a.kv.kv_heads, queries = (p.to - p.from) * group;
    const size_t tile_bytes = (size_t)TILE * ((z.vectors + 1) / 2 * PANEL) * z.bytes, query_bytes = (size_t)z.steps * 4;
    char* room = scratch.take(3 * tile_bytes + WIDE_ROWS * TILE * 8 + queries * (query_bytes + (z.width + LANES + 3) * 4) + 1024);
    const Tile tile{room, room + tile_bytes, room + 2 * tile_bytes};
    float *scores = (float*)(room + 3 * tile_bytes), *acc = scores + 2 * WIDE_ROWS * TILE, *total = acc + (size_t)queries * z.width;
    char *weights = (char*)(scores + WIDE_ROWS * TILE), *q = (char*)(total + (size_t)queries * LANES);
    float *most = (float*)(q + queries * query_bytes), *slopes = most + queries;
    int32_t* at = (int32_t*)(slopes + queries);
    gather(a, span, p, z, q, at, slopes);
    std::fill_n(acc, (size_t)queries * (z.width + LANES), 0.0f);
    std::fill_n(most, queries, LOW);

    const int begin = first_tile(a, span, p), end = last_position(a, span, p) + 1, block = a.kv.block;
    const size_t near = (size_t)std::min(TILE, block) * a.kv.size * z.bytes, half = a.kv.half();
    const char* after = next ? unit(a, spans[next->span].row, next->head, first_tile(a, spans[next->span], *next), INT32_MAX) : nullptr;
    for (int start = begin; start < end; start += TILE) {
        const int count = std::min(TILE, end - start);
        const char* coming = unit(a, span.row, p.head, start + TILE, end);
        if (!coming && after) fetch(after, near), fetch(after + half, near);
        for (int i = 0; i < count;) {
            const int offset = (start + i) % block, n = std::min(count - i, block - offset);
            tile.take(a, z, a.kv.keys_at(span.row, p.head, start + i), i, n, block - offset);
            i += n;
        }
        for (int r = 0; r < queries; r += WIDE_ROWS) {
            const int rows = std::min(WIDE_ROWS, queries - r);
            Sight sight;
            const int seen = look(a, at + r, slopes + r, start, rows, sight);
            if (!seen) continue;
            const Running run{acc + (size_t)r * z.width, total + (size_t)r * LANES, most + r};
            multiply(a.kind, tile.keys, query_bytes * PANEL, (seen + LANES - 1) / LANES, q + r * query_bytes, query_bytes, rows, z.steps, scores, TILE, false,
                     r ? nullptr : coming);
            (sight.all ? soften<true> : soften<false>)(a.kind, sight, start, rows, scores, run, z.width, weights);
            multiply(a.kind, tile.values, (size_t)TILE * z.bytes * PANEL, z.vectors, weights, (size_t)TILE * z.bytes, rows, (seen * z.bytes + 3) / 4, run.acc,
                     z.width, true, r || !coming ? nullptr : coming + half);
        }
    }
    for (int r = 0; r < queries; r++)
        settle(a, acc + (size_t)r * z.width, total + (size_t)r * LANES, span.first + p.from + r / group, p.head * group + r % group);
}

}  // namespace

void attend(Pool& pool, const Attention& a, const Span* spans, int count) {
    static thread_local std::vector<Piece> pieces;
    pieces.clear();
    int all_tokens = 0;
    for (int s = 0; s < count; s++) all_tokens += spans[s].count;
    const int group = a.heads / a.kv.kv_heads, share = all_tokens * a.heads / (pool.threads() * 8);  // every thread gets several pieces
    const int tokens = std::max(1, std::min(std::max(share, FEW_QUERIES), MANY_QUERIES) / group);
    for (int s = 0; s < count; s++)
        for (int t = (spans[s].count - 1) / tokens * tokens; t >= 0; t -= tokens)  // the longest first
            for (int g = 0; g < a.kv.kv_heads; g++) pieces.push_back({s, g, t, std::min(spans[s].count, t + tokens)});
    const Piece* all = pieces.data();
    const int n = (int)pieces.size(), by = std::max(1, n / (pool.threads() * 8));
    pool.run((n + by - 1) / by, [&, all](int i) {
        const int last = std::min(n, (i + 1) * by);
        for (int p = i * by; p < last; p++) attend_piece(a, spans, all[p], p + 1 < last ? all + p + 1 : nullptr);
    });
}

}  // namespace rn
