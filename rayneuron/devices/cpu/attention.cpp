// Online softmax over tiles of 64 positions. The queries of one KV head (several heads, several tokens) are the rows of one product, so
// KV is read once for them. Where KV lies in panels, products read it as it is; where in rows, a tile is packed first, for all queries at hand.
//
// Sums begin anew at every SEGMENT and are folded in order, whoever made them: so where queries are few and contexts long, segments are pieces
// of work of their own, and a row has the same bits as among many.
#include "attention.h"

#include "amx.h"
#include "attend_tiles.h"
#include "rows.h"
#include "soften.h"

#include <algorithm>
#include <vector>

namespace rn {
namespace {

constexpr int SEGMENT = 64 * TILE;
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

// Tokens [from, to) of one span and all query heads of one KV head, over all they see or (`part` not negative) over that segment.
struct Piece {
    int span, head, from, to, part;
};

// How the two products of a tile are made: on tiles, 32 queries at once, or by vector instructions.
bool on_tiles(const Attention& a) { return tiled(a.kind) && a.kv.size % PANEL == 0; }
int at_once(const Attention& a) { return on_tiles(a) ? MOST_SEEN : WIDE_ROWS; }

// The first tile that a query at this position sees.
int first_tile(const Attention& a, int position) { return a.window ? std::max(0, position + 1 - a.window) / TILE * TILE : 0; }

void clear(const Sizes& z, const Queries& of, int count) {
    std::fill_n(of.acc, (size_t)count * z.width, 0.0f), std::fill_n(of.total, (size_t)count * LANES, 0.0f), std::fill_n(of.most, count, LOW);
}

// Sums of one query over some segments and over the next one -> over all, in `to`. Where either has seen nothing the other stays as it is.
void fold(const Sizes& z, const Queries& to, const Queries& next) {
    if (*next.most == LOW) return;
    const bool alone = *to.most == LOW;
    const V most = set1(std::max(*to.most, *next.most)), mine = power_of_two(sub(set1(*to.most), most)), its = power_of_two(sub(set1(*next.most), most));
    auto join = [&](float* at, const float* more) { store(at, alone ? load(more) : add(mul(load(at), mine), mul(load(more), its))); };
    for (int i = 0; i < z.width; i += LANES) join(to.acc + i, next.acc + i);
    join(to.total, next.total);
    store_n(to.most, most, 1);
}

// Sums that pieces over one segment leave: [segments][queries] of a row of acc, total and most each.
struct Parts {
    float* at;
    int queries;
    static size_t row(const Sizes& z) { return z.width + 2 * LANES; }
    Queries of(const Sizes& z, int part, int query) const {
        float* to = at + ((size_t)part * queries + query) * row(z);
        return {nullptr, nullptr, nullptr, to, to + z.width, to + z.width + LANES};
    }
    Queries cleared(const Sizes& z, int part, int query) const {
        const Queries made = of(z, part, query);
        *made.most = LOW;
        return made;
    }
};

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
    clear(z, to, count);
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

// Queries [first, first + count) of a piece. `after`: what this thread reads next; `parts`: where sums over one segment go.
void attend_queries(const Attention& a, const Span& span, const Piece& p, int first, int count, int written_to, const char* after, const Parts& parts) {
    const Sizes z(a.kind, a.kv.size);
    const int group = a.heads / a.kv.kv_heads, wide = at_once(a);
    const size_t tile_bytes = z.tile_bytes();
    scratch.begin(3 * tile_bytes + (size_t)wide * TILE * 8 + (size_t)count * (z.steps * 4 + (2 * (z.width + LANES + 1) + 2) * 4) + z.width * 4 + 2048);
    Slate slate{scratch.take<float>(wide * TILE), scratch.take<char>((size_t)wide * TILE * z.bytes)};
    const Packer packer{scratch.take<char>(tile_bytes), scratch.take<char>(tile_bytes), scratch.take<char>(tile_bytes)};
    const Queries all{scratch.take<char>((size_t)count * z.steps * 4), scratch.take<int32_t>(count), a.slopes ? scratch.take<float>(count) : nullptr,
                      scratch.take<float>((size_t)count * z.width), scratch.take<float>(count * LANES), scratch.take<float>(count)};
    gather(a, span, p, first, count, z, all);

    const auto ends = std::minmax_element(all.at, all.at + count);
    int from = first_tile(a, *ends.first), end = *ends.second + 1;
    if (p.part >= 0) from = std::max(from, p.part * SEGMENT), end = std::min(end, (p.part + 1) * SEGMENT);
    Queries sums = all;
    if (from < end && from / SEGMENT != (end - 1) / SEGMENT) {
        sums.acc = scratch.take<float>((size_t)count * z.width), sums.total = scratch.take<float>(count * LANES), sums.most = scratch.take<float>(count);
        clear(z, sums, count);
    }
    const size_t near = (size_t)std::min(TILE, a.kv.block) * a.kv.size * z.bytes;
    for (int start = from; start < end; start += TILE) {
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
        if (sums.acc == all.acc || (next && (start + TILE) % SEGMENT)) continue;
        for (int r = 0; r < count; r++) fold(z, sums.from(r, z), all.from(r, z));
        clear(z, all, count);
    }
    for (int r = 0; r < count; r++) {
        const int token = span.first + p.from + (first + r) / group, head = p.head * group + (first + r) % group;
        const Queries done = sums.from(r, z);
        if (p.part >= 0) fold(z, parts.cleared(z, p.part, token * a.heads + head), done);
        else settle(a, done.acc, done.total, token, head);
    }
}

// Where a piece begins to read.
const char* begins(const Attention& a, const Span* spans, const Piece& p) {
    const Span& span = spans[p.span];
    return a.kv.keys_at(span.row, p.head, std::max(first_tile(a, a.positions[span.first + p.from]), p.part * SEGMENT));
}

// `next`: the piece this thread does after this one, whose first tile is fetched while the last one of this is computed.
void attend_piece(const Attention& a, const Span* spans, const Piece& p, const Piece* next, const Parts& parts) {
    const Span& span = spans[p.span];
    const int queries = (p.to - p.from) * (a.heads / a.kv.kv_heads);
    const int most = on_tiles(a) && a.kv.panels ? at_once(a) : queries;  // what is packed is packed once for all; what is not needs little room
    const char* after = next ? begins(a, spans, *next) : nullptr;
    const int32_t* at = a.positions + span.first;
    const int written_to = *std::max_element(at, at + span.count) + 1;
    for (int r = 0; r < queries; r += most)
        attend_queries(a, span, p, r, std::min(most, queries - r), written_to, r + most < queries ? nullptr : after, parts);
    if (on_tiles(a)) rest_tiles();
}

// What pieces over one segment left -> the output.
void join(Pool& pool, const Attention& a, int tokens, const Parts& parts) {
    const Sizes z(a.kind, a.kv.size);
    pool.run(tokens, [&](int token) {
        for (int head = 0; head < a.heads; head++) {
            const int query = token * a.heads + head, last = a.positions[token] / SEGMENT;
            int part = first_tile(a, a.positions[token]) / SEGMENT;
            const Queries sums = parts.of(z, part, query);
            while (part < last) fold(z, sums, parts.of(z, ++part, query));
            settle(a, sums.acc, sums.total, token, head);
        }
    });
}

}  // namespace

void attend(Pool& pool, const Attention& a, const Span* spans, int count) {
    static thread_local std::vector<Piece> pieces;
    static thread_local std::vector<float> room;
    pieces.clear();
    int all_tokens = 0;
    for (int s = 0; s < count; s++) all_tokens += spans[s].count;
    const int group = a.heads / a.kv.kv_heads, share = all_tokens * a.heads / (pool.threads() * 8);  // every thread gets several pieces
    const int tokens = std::max(1, std::min(std::max(share, FEW_QUERIES), MANY_QUERIES) / group);
    const int last = *std::max_element(a.positions, a.positions + all_tokens) / SEGMENT;
    const bool apart = last > 0 && share <= FEW_QUERIES;
    for (int s = 0; s < count; s++)
        for (int t = (spans[s].count - 1) / tokens * tokens; t >= 0; t -= tokens) {  // the longest first
            const int to = std::min(spans[s].count, t + tokens);
            const int32_t* at = a.positions + spans[s].first;
            const int begin = apart ? first_tile(a, at[t]) / SEGMENT : -1, end = apart ? at[to - 1] / SEGMENT : -1;
            for (int part = begin; part <= end; part++)
                for (int g = 0; g < a.kv.kv_heads; g++) pieces.push_back({s, g, t, to, part});
        }
    const Sizes z(a.kind, a.kv.size);
    if (apart) room.resize(std::max(room.size(), (size_t)(last + 1) * all_tokens * a.heads * Parts::row(z)));
    const Parts parts{room.data(), all_tokens * a.heads};
    const Piece* all = pieces.data();
    const int n = (int)pieces.size(), by = std::max(1, n / (pool.threads() * 8));
    pool.run((n + by - 1) / by, [&, all](int i) {
        const int end = std::min(n, (i + 1) * by);
        for (int p = i * by; p < end; p++) attend_piece(a, spans, all[p], p + 1 < end ? all + p + 1 : nullptr, parts);
    });
    if (apart) join(pool, a, all_tokens, parts);
}

}  // namespace rn
