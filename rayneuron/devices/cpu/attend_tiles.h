// One tile of positions on tiles of AMX, for at most 32 queries. Products and softening take turns: a dot holds the vector port that softening
// wants, so nothing is won by mixing them. What softening leaves free, the loads, fetches this tile's values and the next one's keys.
#pragma once
#include "soften.h"

#ifdef RN_TILES
#include "pane.h"
#endif

namespace rn {

// What some queries make of one tile: scores [rows][TILE], then weights of them. `shaped`: the rows tiles have now.
struct Slate {
    float* scores;
    char* weights;
    int shaped = 0;
};

#ifdef RN_TILES

static_assert(MOST_SEEN == PANE, "queries of a pane");

inline void rest_tiles() { TILE_RELEASE(); }

inline void mix_on_tiles(const Sizes& z, const Panels& tile, int start, const Queries& of, int rows, const Sight& sight, Slate& slate, const char* next) {
    const bool high = rows > HALF_PANE;
    const size_t query = (size_t)z.width * 2;
    if (slate.shaped != rows) shape_pane(slate.shaped = rows);
    for (int p = 0; p < TILE; p += PANEL) {
        if (p >= sight.count) continue;
        const char* keys = tile.keys + (size_t)p * query;
        clear_pane();
        for (int k = 0; k < z.steps; k += DEEP) deepen_pane<BF16, false>(of.q + (size_t)k * 4, query, keys + k * STEP, high);
        store_pane(slate.scores + p, TILE, high);
    }
    const int each = (int)(TILE * query / 64 + rows - 1) / rows * 64;  // bytes a row fetches of values, and of keys
    auto meanwhile = [&](int r) {
        for (int i = r * each; i < (r + 1) * each && i < TILE * (int)query; i += 64) {
            _mm_prefetch(tile.values + i, _MM_HINT_T0);
            if (next) _mm_prefetch(next + i, _MM_HINT_T0);
        }
    };
    soften<BF16>(sight, start, rows, slate.scores, of, z.width, slate.weights, meanwhile);
    for (int p = 0; p < z.width; p += PANEL) {
        const char* values = tile.values + (size_t)p / PANEL * z.panel_bytes();
        load_pane(of.acc + p, z.width, high);
        for (int k = 0; k < TILE / 2; k += DEEP) deepen_pane<BF16, false>(slate.weights + (size_t)k * 4, TILE * 2, values + k * STEP, high);
        store_pane(of.acc + p, z.width, high);
    }
}

#else
inline void rest_tiles() {}
inline void mix_on_tiles(const Sizes&, const Panels&, int, const Queries&, int, const Sight&, Slate&, const char*) {}
#endif

}  // namespace rn
