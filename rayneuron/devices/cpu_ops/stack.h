// The layers of one rank, run in one call. Every struct here is mirrored field by field in `stack.py`.
#pragma once
#include "attention.h"
#include "rows.h"

namespace rn {

struct Norm {
    const float *w, *b;
};

struct Layer {
    Matrix qkv, o, up, down;  // up: gate_up where gated
    Norm ln1, ln2, q_norm, k_norm;
    const float *o_bias, *down_bias;  // added after the sum over ranks; with one rank they are the products' own
    char* kv;
    int32_t window, second;  // second: the feed-forward has a norm of its own
};

struct Model {
    const Layer* layer;
    const float *cos, *sin;  // [positions][half], or null
    const float* slopes;     // per query head, or null
    int32_t layers, hidden, heads, kv_heads, head_dim, inner, half, pairs;
    int32_t norm, post_norm, parallel, gated, act, qk_norm, kind, kv_rows, kv_length;
    float eps, clip, scale;
};

// One step: x, y [rows][tokens][hidden] of `kind`; summand [true tokens][hidden] floats where ranks add theirs up between the halves of
// a layer, else null.
struct Call {
    const void* x;
    void* y;
    const int32_t *positions, *rows;
    float* summand;
    int32_t batch, tokens;
};

// With several ranks a layer is ATTENTION, sum, JOIN_ATTENTION, FEED, sum, JOIN_FEED; where both halves read the same residual it is
// ATTENTION | FEED, one sum, JOIN_ATTENTION | JOIN_FEED.
enum Part : int32_t { BEGIN = 1, ATTENTION = 2, JOIN_ATTENTION = 4, FEED = 8, JOIN_FEED = 16, END = 32 };

class Stack;
Stack* open_stack(Pool& pool, const Model& model);
void close_stack(Stack* stack);
int run_stack(Stack* stack, const Call& call, int first, int last, int parts);  // -> true tokens

}  // namespace rn
