// What adapters add to a product: B (A x) of every row that has one, to sums that are finished but for it. Rows without are not touched.
#pragma once
#include "rows.h"

#include <atomic>
#include <vector>

namespace rn {

// One adapter's part of one product, in vectors of 16 outputs that lie one behind the other, [steps] dwords of each. A [ranks vectors][inputs]
// is of all that the product is made of; B has the product's own vectors of outputs, with the scale in it, and `from` says at which byte of
// a row of A x each of them begins to read, negative: nothing is added there. a null: nothing is added at all. Mirrored by `adapters.py`.
struct Pair {
    const char *a, *b;
    const int32_t* from;
    int32_t ranks, a_steps, b_steps;
};

// One adapter's part of a layer; up: of gate and up where gated.
struct Lora {
    Pair qkv, o, up, down;
};

// Tokens [first, first + count) that have the adapter in `slot`.
struct Run {
    int slot, first, count;
};

// The adapters' part of one product at a time. It needs no pass of the pool to itself: whoever takes a piece of the product first takes what
// is left of A x, and waits for others' before it adds B of that to its sums.
class Adapting {
   public:
    std::vector<Run> runs;

    // Of the next product, which reads what is `kind` in `x`; null where no run's adapter has a part of it.
    Adapting* of(const Lora* table, Pair Lora::*pair, const Input& x, Kind kind, int tokens);

    void help();
    void wait() const;

    // Ask memory for what `sums` is going to read.
    void fetch(int first, int count, int vector, int vectors) const;

    // For rows [first, first + count) and vectors of outputs from `vector` on: what is added, [count][vectors * LANES]. Only what belongs to
    // rows that `has` names is written. A row's sums run over its inputs, then over the rank, in order: they depend on no other row.
    void sums(int first, int count, int vector, int vectors, float* out) const;
    bool has(int row) const { return has_[row]; }

   private:
    struct Share {
        const Pair* pair;
        int first, count;
    };
    struct Job {
        const Pair* pair;
        int first, count, vector;  // of A
    };
    std::vector<Share> shares_;
    std::vector<Job> jobs_;
    std::vector<char> between_, has_;
    Input x_{};
    Kind kind_ = F32;
    size_t stride_ = 0;  // of a row of A x
    std::atomic<int> next_{0}, done_{0};
};

}  // namespace rn
