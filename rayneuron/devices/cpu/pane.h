// A pane: 32 rows x one panel on tiles. Tiles 0 to 3 are sums (half of the rows, vector), 4 and 5 the rows, 6 and 7 the weights, so that
// every dot costs one load.
#pragma once
#include "matmul.h"
#include "tiles.h"

#include <algorithm>

namespace rn {

constexpr int DEEP = 16;  // steps of one tile
constexpr int PANE = 32, HALF_PANE = PANE / 2;  // rows

// The upper half always has a row, since the processor refuses tiles without.
inline void shape_pane(int rows) {
    TileShapes shapes;
    const int low = std::min(rows, HALF_PANE), high = std::max(1, rows - HALF_PANE), of[8] = {low, low, high, high, low, high, DEEP, DEEP};
    for (int t = 0; t < 8; t++) shapes.rows[t] = of[t], shapes.row_bytes[t] = 64;
    TILE_SHAPES(&shapes);
}

inline void clear_pane() {
    TILE_ZERO(0); TILE_ZERO(1); TILE_ZERO(2); TILE_ZERO(3);
}

// Sums [rows][ldo floats]; without `high` the upper half is not there.
inline void load_pane(const float* sums, size_t ldo, bool high) {
    TILE_LOAD(0, sums, ldo * 4);
    TILE_LOAD(1, sums + LANES, ldo * 4);
    if (!high) return;
    TILE_LOAD(2, sums + HALF_PANE * ldo, ldo * 4);
    TILE_LOAD(3, sums + HALF_PANE * ldo + LANES, ldo * 4);
}

inline void store_pane(float* sums, size_t ldo, bool high) {
    TILE_STORE(0, sums, ldo * 4);
    TILE_STORE(1, sums + LANES, ldo * 4);
    if (!high) return;
    TILE_STORE(2, sums + HALF_PANE * ldo, ldo * 4);
    TILE_STORE(3, sums + HALF_PANE * ldo + LANES, ldo * 4);
}

// One tile of k of rows at x and weights at w. `PAST`: the rows are loaded past the first cache, out of which they would push the weights.
template <Kind KIND, bool PAST> inline void deepen_pane(const char* x, size_t stride, const char* w, bool high) {
#define DOT(c, a, b) do { if constexpr (KIND == BF16) TILE_DOT_BF16(c, a, b); else TILE_DOT_U8S8(c, a, b); } while (0)
#define ROWS(t, at) do { if constexpr (PAST) TILE_STREAM(t, at, stride); else TILE_LOAD(t, at, stride); } while (0)
    ROWS(4, x);
    TILE_LOAD(6, w, STEP);
    DOT(0, 4, 6);
    TILE_LOAD(7, w + VECTOR, STEP);
    DOT(1, 4, 7);
    if (!high) return;
    ROWS(5, x + HALF_PANE * stride);
    DOT(2, 5, 6);
    DOT(3, 5, 7);
#undef DOT
#undef ROWS
}

// What is left of k beyond whole tiles: copies with zeros after it.
template <Kind KIND> inline void deepen_rest(const char* x, size_t stride, int rows, const char* w, int steps) {
    alignas(64) char xs[PANE * 64], ws[DEEP * STEP];
    memset(xs, 0, sizeof xs), memset(ws, 0, sizeof ws);
    for (int r = 0; r < rows; r++) memcpy(xs + r * 64, x + r * stride, (size_t)steps * 4);
    memcpy(ws, w, steps * STEP);
    deepen_pane<KIND, false>(xs, 64, ws, rows > HALF_PANE);
}

}  // namespace rn
