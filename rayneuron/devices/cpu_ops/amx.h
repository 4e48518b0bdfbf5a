// Products of bf16 and int8 on AMX tiles, where the library is built for them (RN_TILES); else nothing of this is compiled in.
// Compiled and emulated, never run on hardware.
#pragma once
#include "matmul.h"

namespace rn {

#ifdef RN_TILES
// Whether products of this kind are made of tiles: then all of them, whatever the number of rows, since TDPBF16PS sums in another order
// than VDPBF16PS.
constexpr bool tiled(int32_t kind) { return kind != F32; }

// As a strip of matmul.cpp: out[m][panel * 16 + lane] = rows x panels, at most 16 rows.
void tile_strip(Kind kind, int rows, const char* w, size_t panel, int panels, const char* x, size_t stride, int steps, float* out, size_t ldo, size_t ahead);

// Whether the tiles of this processor compute what they should: small products against plain arithmetic, and rows alone against rows together.
bool tiles_work();
#else
constexpr bool tiled(int32_t) { return false; }
inline void tile_strip(Kind, int, const char*, size_t, int, const char*, size_t, int, float*, size_t, size_t) {}
inline bool tiles_work() { return true; }
#endif

}  // namespace rn
