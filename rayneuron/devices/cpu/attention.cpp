// Online softmax over tiles of 64 positions. The queries of one KV head (several heads, several tokens) are the rows of one product, so
// KV is read once for them. Where KV lies in panels, products read it as it is; where in rows, a tile is packed first, for all queries at hand.
#include "attention.h"

#include "amx.h"
#include "attend_tiles.h"
#include "rows.h"
#include "soften.h"

#include <algorithm>
#include <vector>

namespace rn {
namespace {

constexpr int FEW_QUERIES = 48, MANY_QUERIES = 192;  // rows of one piece of work, heads of a group times tokens: many share what is read of KV

// Memory of one thread, taken from the beginning anew for some queries.
struct Scratch {
    std::vector<char> bytes;
    char* at = nullptr;
    void begin(size_t wanted) {
        if (bytes.size() < wanted + 64) bytes.resize(wanted + 64);
        at = (char*)(((uintptr_t)bytes.data() + 63) & ~(uintptr_t)63);
    }
    template <class T> T* take(size_t count) {
        char* taken = at;
        at += (count * sizeof(T) + 63) & ~(size_t)63;
        return (T*)taken;
    }
};
thread_local Scratch scratch;

// Tokens [from, to) of one span and all query heads of one KV head.
struct Piece {
    int span, head, from, to;
};

// How the two products of a tile are made: on tiles, 32 queries at once, or by vector instructions.
bool on_tiles(const Attention& a) { return tiled(a.kind) && a.kv.size % PANEL == 0; }
int at_once(const Attention& a) { return on_tiles(a) ? MOST_SEEN : WIDE_ROWS; }

// The first tile that a query at this position sees.
int first_tile(const Attention& a, int position) { return a.window ? std::max(0, position + 1 - a.window) / TILE * TILE : 0; }

// Queries [first, first + count) of one piece as the products read them, row after row, the heads of a group within a token; scores become
// powers of two.
void gather(const Attention& a, const Span& span, const Piece& p, int first, int count, const Sizes& z, const Queries& to) {
    const int group = a.heads / a.kv.kv_heads;
    const V by = set1(a.scale * LOG2_E);
    float* row = scratch.take<float>(z.width);
    for (int r = 0; r < count; r++) {
        const int token = span.first + p.from + (first + r) / group, head = p.head * group + (first + r) % group;
        const float* from = a.q + token * a.q_stride + (size_t)head * a.kv.size;
        for (int i = 0; i < a.kv.size; i += LANES) store(row + i, mul(load_n(from + i, a.kv.size - i), by));
        encode_row(row, a.kv.size, a.kind, z.steps, to.q + (size_t)r * z.steps * 4, nullptr);
        to.at[r] = a.positions[token];
        if (to.slopes) to.slopes[r] = a.slopes[head] * LOG2_E;
    }
    std::fill_n(to.acc, (size_t)count * z.width, 0.0f), std::fill_n(to.total, (size_t)count * LANES, 0.0f), std::fill_n(to.most, count, LOW);
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

// Ask for the first tile of what comes next.
void fetch(const char* from, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) _mm_prefetch(from + i, _MM_HINT_T1);
}

// One tile by vector instructions. `next`: the keys to come, null where there are none.
void mix(const Attention& a, const Sizes& z, const Panels& tile, int start, const Queries& of, int rows, const Sight& sight, Slate& slate, const char* next) {
    const size_t query = (size_t)z.steps * 4;
    multiply(a.kind, tile.keys, query * PANEL, (sight.count + LANES - 1) / LANES, of.q, query, rows, z.steps, slate.scores, TILE, false, next);
    const auto nothing = [](int) {};
    if (a.kind == F32) soften<F32>(sight, start, rows, slate.scores, of, z.width, slate.weights, nothing);
    else soften<BF16>(sight, start, rows, slate.scores, of, z.width, slate.weights, nothing);
    multiply(a.kind, tile.values, z.panel_bytes(), z.vectors, slate.weights, (size_t)TILE * z.bytes, rows, (sight.count * z.bytes + 3) / 4, of.acc, z.width, true,
             next ? next + a.kv.half() : nullptr);
}

// Queries [first, first + count) of a piece. `after`: what this thread reads next.
void attend_queries(const Attention& a, const Span& span, const Piece& p, int first, int count, int written_to, const char* after) {
    const Sizes z(a.kind, a.kv.size);
    const int group = a.heads / a.kv.kv_heads, wide = at_once(a);
    const size_t tile_bytes = z.tile_bytes();
    scratch.begin(3 * tile_bytes + (size_t)wide * TILE * 8 + (size_t)count * (z.steps * 4 + (z.width + LANES + 3) * 4) + z.width * 4 + 1024);
    Slate slate{scratch.take<float>(wide * TILE), scratch.take<char>((size_t)wide * TILE * z.bytes)};
    const Packer packer{scratch.take<char>(tile_bytes), scratch.take<char>(tile_bytes), scratch.take<char>(tile_bytes)};
    const Queries all{scratch.take<char>((size_t)count * z.steps * 4), scratch.take<int32_t>(count), a.slopes ? scratch.take<float>(count) : nullptr,
                      scratch.take<float>((size_t)count * z.width), scratch.take<float>(count * LANES), scratch.take<float>(count)};
    gather(a, span, p, first, count, z, all);

    const auto ends = std::minmax_element(all.at, all.at + count);
    const int end = *ends.second + 1;
    const size_t near = (size_t)std::min(TILE, a.kv.block) * a.kv.size * z.bytes;
    for (int start = first_tile(a, *ends.first); start < end; start += TILE) {
        const int there = std::min(TILE, written_to - start);
        const char* next = start + TILE < end ? a.kv.keys_at(span.row, p.head, start + TILE) : nullptr;
        if (!next && after) fetch(after, near), fetch(after + a.kv.half(), near);
        const Panels tile = a.kv.panels ? written(a.kv.keys_at(span.row, p.head, start), a.kv.half(), a.kind, z, there, packer.values)
                                        : packer.pack(a.kv, a.kind, z, span.row, p.head, start, std::min(there, end - start));
        for (int r = 0; r < count; r += wide) {
            const int rows = std::min(wide, count - r);
            const Queries of = all.from(r, z);
            const Sight sight = look(of, rows, start, a.window);
            if (!sight.count) continue;
            if (on_tiles(a)) mix_on_tiles(z, tile, start, of, rows, sight, slate, r ? nullptr : next);
            else mix(a, z, tile, start, of, rows, sight, slate, r ? nullptr : next);
        }
    }
    for (int r = 0; r < count; r++)
        settle(a, all.acc + (size_t)r * z.width, all.total + (size_t)r * LANES, span.first + p.from + (first + r) / group, p.head * group + (first + r) % group);
}

// `next`: the piece this thread does after this one, whose first tile is fetched while the last one of this is computed.
void attend_piece(const Attention& a, const Span* spans, const Piece& p, const Piece* next) {
    const Span& span = spans[p.span];
    const int queries = (p.to - p.from) * (a.heads / a.kv.kv_heads);
    const int most = on_tiles(a) && a.kv.panels ? at_once(a) : queries;  // what is packed is packed once for all; what is not needs little room
    const char* after = nullptr;
    if (next) after = a.kv.keys_at(spans[next->span].row, next->head, first_tile(a, a.positions[spans[next->span].first + next->from]));
    const int32_t* at = a.positions + span.first;
    const int written_to = *std::max_element(at, at + span.count) + 1;
    for (int r = 0; r < queries; r += most) attend_queries(a, span, p, r, std::min(most, queries - r), written_to, r + most < queries ? nullptr : after);
    if (on_tiles(a)) rest_tiles();
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
