// Where keys and values lie, and how new ones get there.
#pragma once
#include "matmul.h"

namespace rn {

// Positions are taken in tiles that begin at multiples of TILE, so a query meets the same tiles in the same order in every step shape.
constexpr int TILE = 64;

// Units of one head of one block, its keys and then its values; which blocks a row holds, in order. A half of a unit is [block][size], or, in
// `panels`, tile after tile what products read: keys [2][dwords of a position][32 positions], values [size / 32][dwords of a value at 64
// positions][32 values] of dwords, so that bf16 of two positions share one.
struct Blocks {
    char* kv;              // [blocks][kv_heads][2] halves
    const int32_t* table;  // [batch][width]
    int32_t width, block, kv_heads, size, bytes, panels;  // bytes of a value

    size_t half() const { return (size_t)block * size * bytes; }
    char* keys(int id, int head, int offset) const { return kv + ((size_t)id * kv_heads + head) * 2 * half() + (size_t)offset * size * bytes; }
    char* keys_at(int row, int head, int position) const { return keys(table[(size_t)row * width + position / block], head, position % block); }
};

// Keep the keys and values [size] of one position and head, floats. Neighbours may be kept by other threads at the same time.
void keep(const Blocks& to, Kind kind, int id, int head, int offset, const float* k, const float* v);

// Sizes of one head as the products see it: `width` values padded to whole vectors, `steps` dwords of a query.
struct Sizes {
    int size, width, vectors, steps, bytes;  // bytes of a value
    Sizes(Kind kind, int head) {
        size = head, width = (head + LANES - 1) / LANES * LANES, vectors = width / LANES;
        bytes = kind == F32 ? 4 : 2, steps = width * bytes / 4;
    }
    size_t tile_bytes() const { return (size_t)TILE * ((vectors + 1) / 2 * PANEL) * bytes; }  // of keys, or of values
    size_t panel_bytes() const { return (size_t)TILE * bytes * PANEL; }                       // of values
};

// The panels of one tile.
struct Panels {
    const char *keys, *values;
};

// Panels of what lies in rows, copied; of odd sizes too.
struct Packer {
    char *keys, *values, *copy;  // tile_bytes of room each

    // `count` positions from `start` on, a multiple of TILE; zeros behind the last one's values.
    Panels pack(const Blocks& from, Kind kind, const Sizes& z, int row, int head, int start, int count) const;
};

// The panels at `at`, of which `count` positions are written: where those are not all, the values are copied to `room`, zeros behind them,
// because a weight of zero times what an earlier owner left there may be NaN.
Panels written(const char* at, size_t half, Kind kind, const Sizes& z, int count, char* room);

}  // namespace rn
