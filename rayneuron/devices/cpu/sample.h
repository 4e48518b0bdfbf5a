// Choosing from logits: the next token of a row, and what is told about one. A row's result depends on nothing but the row.
#pragma once
#include "simd.h"

namespace rn {

// How one row is sampled; temperature 0 is greedy, top_k 0, top_p 1 and min_p 0 filter nothing. uniform: [0, 1).
struct Draw {
    float temperature, top_p, min_p, uniform;
    int32_t top_k;
};

// The id drawn from x [n], as engine/sampling.py defines it with the whole vocabulary as candidates.
int32_t draw(const float* x, int n, const Draw& how);

// The same among the ids whose bits are set, the lowest of a word first; any id where none is.
int32_t draw_allowed(const float* x, int n, const Draw& how, const uint32_t* mask);

// The log-probability of `token` under x [n], its rank (1: the likeliest), and the `count` likeliest ids with theirs, the lowest id among equals.
void describe(const float* x, int n, int token, int count, double* logprob, int32_t* rank, int32_t* ids, double* logprobs);

}  // namespace rn
