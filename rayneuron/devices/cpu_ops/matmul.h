// Products with a packed weight: the layout, the register tiles, and what is done with a finished tile.
//
// A weight [n, k] is cut into panels of 16 outputs. A panel holds, for each step, one dword of every output: one float, two bf16 or four
// int8 along k. A row of the input is read dword by dword and spread over the lanes, so lane j of an accumulator is output j of one row:
// its sum runs over k in order, whatever the number of rows. That is what makes results independent of the batch.
#pragma once
#include "pool.h"
#include "simd.h"

namespace rn {

enum Kind : int32_t { F32 = 0, BF16 = 1, S8 = 2 };

// Mirrored by `packing.py: MatrixFields`.
struct Matrix {
    const char* data;     // panels, each `steps` x 64 bytes
    const float* scale;   // per output [panels * 16], or null
    const int32_t* sums;  // S8: 128 x the sum of each output's weights
    const float* bias;    // [panels * 16], or null
    int32_t kind, n, k, panels, steps, gated;  // gated: panels alternate gate, up; n counts both
    size_t panel_bytes() const { return (size_t)steps * 64; }
    size_t row_bytes() const { return (size_t)steps * 4; }
};

// Bytes from one row of an input to the next: rows a power of two apart would all want the same few places of the first cache.
constexpr size_t apart(size_t row_bytes) { return row_bytes % 512 ? row_bytes : row_bytes + 64; }

// The rows a product reads: `kind` of the matrix, padded with zeros to whole steps.
struct Input {
    const char* rows;
    size_t stride;       // bytes
    const float* scale;  // S8: per row
};

enum Finish : int32_t { STORE, ADD, ACT, BEST };
enum Act : int32_t { NONE, SILU, GELU, GELU_TANH, QUICK_GELU, RELU };

// Where finished values go. STORE: to y; ADD: added to y; ACT: the activation (of the gate, times up where gated) to y; BEST: only the
// largest value of a row and its index, a pair for every piece of work.
struct Output {
    Finish finish;
    Act act;
    Kind kind;      // of y: F32 or BF16
    char* y;
    size_t stride;  // bytes
    float* best;    // BEST: [pieces][rows]
    int32_t* index;
};

V activate(Act act, V x);

#ifdef RN_AVX512
constexpr int WIDE_ROWS = 6;  // rows that make the best of four panels
#else
constexpr int WIDE_ROWS = 5;
#endif

// out[m][panel * 16 + lane] (+)= rows x panels; out has ldo floats a row (ints for S8). `next`: memory of the panels' size that is read
// after this, fetched meanwhile; null: nothing.
void multiply(Kind kind, const char* w, size_t panel_bytes, int panels, const char* x, size_t stride, int rows, int steps, float* out, size_t ldo, bool more,
              const char* next);

void matmul(Pool& pool, const Matrix& w, const Input& x, int rows, const Output& out);
int best_pieces(const Matrix& w, int rows, int threads);

}  // namespace rn
