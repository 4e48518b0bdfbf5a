// Online softmax: scores of one tile of positions become weights, and what was summed before shrinks where a maximum grows.
#pragma once
#include "blocks.h"

#include <algorithm>

namespace rn {

constexpr float LOW = -1e30f;  // a maximum nothing has reached yet
constexpr float LOG2_E = 1.44269504088896341f;
constexpr int MOST_SEEN = 32;  // rows that are looked at together

// Some queries of one KV head, [rows] of everything; what is kept of them between tiles: sums weighted by 2^(score - most), the weights' sums
// in lanes, the largest score.
struct Queries {
    char* q;           // as the products read it, `steps` dwords
    int32_t* at;       // positions
    float* slopes;     // alibi, or null
    float *acc, *total, *most;  // [width], [LANES], [1]

    Queries from(int r, const Sizes& z) const {
        return {q + (size_t)r * z.steps * 4, at + r, slopes ? slopes + r : nullptr, acc + (size_t)r * z.width, total + (size_t)r * LANES, most + r};
    }
};

// What some rows see of a tile.
struct Sight {
    uint64_t seen[MOST_SEEN];  // a bit a position
    int count;                 // positions that anybody sees lie before this one
    bool all;                  // every row sees every position, and there is no slope
};

inline Sight look(const Queries& rows, int count, int start, int window) {
    Sight sight;
    sight.count = 0, sight.all = !rows.slopes;
    for (int r = 0; r < count; r++) {
        const int to = std::min(rows.at[r] + 1 - start, TILE), from = window ? std::max(0, rows.at[r] + 1 - window - start) : 0;
        sight.seen[r] = to <= from ? 0 : (~0ull >> (TILE - to)) & (~0ull << from);
        sight.all &= sight.seen[r] == ~0ull;
        if (from < to) sight.count = std::max(sight.count, to);
    }
    return sight;
}

// Add alibi to one row of scores.
inline void lean(float slope, int start, float* scores) {
    alignas(64) static const float lane[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int i = 0; i < TILE; i += LANES) store(scores + i, fma(set1(slope), add(load(lane), set1((float)(start + i))), load(scores + i)));
}

// Scores [rows][TILE] (powers of two) -> weights of KIND. `meanwhile(r)` is called before each row, for what costs no vector unit.
template <Kind KIND, bool ALL, class F>
inline void soften(const Sight& sight, int start, int rows, float* scores, const Queries& of, int width, char* out, const F& meanwhile) {
    constexpr int VECTORS = TILE / LANES;
    for (int r = 0; r < rows; r++, scores += TILE, out += TILE * (KIND == F32 ? 4 : 2)) {
        meanwhile(r);
        if (!ALL && of.slopes) lean(of.slopes[r], start, scores);
        auto seen = [&](int i) { return (uint16_t)(sight.seen[r] >> i * LANES); };
        V s[VECTORS];
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS; i++) s[i] = ALL ? load(scores + i * LANES) : load_where(seen(i), scores + i * LANES, set1(LOW));
        const V highest_lanes = maximum(maximum(s[0], s[1]), maximum(s[2], s[3]));
        V sums = load(of.total + r * LANES), most = set1(of.most[r]);
        if (any_above(highest_lanes, most)) {
            const V now = set1(highest(highest_lanes)), shrink = power_of_two(sub(most, now));
            sums = mul(sums, shrink), most = now;
            store_n(of.most + r, now, 1);
            for (float* acc = of.acc + (size_t)r * width; acc < of.acc + (size_t)(r + 1) * width; acc += LANES) store(acc, mul(load(acc), shrink));
        }
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS; i++) {
            const V p = KIND == F32 ? power_of_two(sub(s[i], most)) : power_of_two_short(sub(s[i], most));
            s[i] = ALL ? p : zero_but(seen(i), p);
            sums = add(sums, s[i]);
        }
        store(of.total + r * LANES, sums);
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS; i += 2) {
            if (KIND == F32) store((float*)out + i * LANES, s[i]), store((float*)out + (i + 1) * LANES, s[i + 1]);
            else narrow2((bf16*)out + i * LANES, s[i], s[i + 1]);
        }
    }
}

template <Kind KIND, class F>
inline void soften(const Sight& sight, int start, int rows, float* scores, const Queries& of, int width, char* out, const F& meanwhile) {
    if (sight.all) soften<KIND, true>(sight, start, rows, scores, of, width, out, meanwhile);
    else soften<KIND, false>(sight, start, rows, scores, of, width, out, meanwhile);
}

}  // namespace rn
