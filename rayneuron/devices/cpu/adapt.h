// What adapters add to finished products: B (A x) of every row that has one. Rows without are not touched.
#pragma once
#include "rows.h"

#include <vector>

namespace rn {

// a [rank, inputs], b [outputs, rank] with the scale in it; a.data null: nothing is added.
struct Pair {
    Matrix a, b;
};

// One adapter's part of a layer. Mirrored by `adapters.py: LoraFields`.
struct Lora {
    Pair q, k, v, o, gate, up, down;
};

// Tokens [first, first + count) that have the adapter in `slot`.
struct Run {
    int slot, first, count;
};

// Where the outputs of a pair go in a row of floats: a vector of them every `step` floats from `column` on.
struct Lanes {
    Pair Lora::*pair;
    int column, step;
};

class Adapting {
   public:
    std::vector<Run> runs;

    // y [tokens][stride floats] += what the runs' adapters of `table`, one a slot, make of x. A row's sums run over its inputs, then over
    // the rank, in order: they depend on no other row.
    void add(Pool& pool, const Lora* table, std::initializer_list<Lanes> parts, const Input& x, float* y, size_t stride);

   private:
    struct Job {
        const Pair* pair;
        Lanes part;
        int first, count;
        size_t at;  // of A x
    };
    struct Piece {
        int job, panel;
    };
    std::vector<Job> jobs_;
    std::vector<Piece> pieces_;
    std::vector<char> between_;
};

// A row of sums as a product `w` lays them out, before its activation -> [width] values of `kind`.
void activate_row(const float* sums, int width, bool gated, Act act, Kind kind, char* y);

}  // namespace rn
