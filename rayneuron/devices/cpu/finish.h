// What is done with finished sums: the general form, and forms without branches for the products that most models are made of.
#pragma once
#include "matmul.h"

#include <type_traits>

namespace rn {

// One row of `vectors` vectors of sums that begin at panel p; `slot`: where BEST keeps the row's largest; `more`: what is added to the
// values before the activation, or null.
void finish(const Matrix& w, const Input& x, const Output& out, int row, int p, int vectors, const float* acc, int slot, const float* more);

inline V silu(V x) { return div(x, add(set1(1), exponential(sub(zero(), x)))); }

enum How { ANY, STORES, ADDS, SILU_GATED, SILU_GATED_FLOAT };

// Whole panels without a bias, stored, added or gated as usual.
inline How how(const Matrix& w, const Output& out) {
    if (w.n % PANEL || w.bias || (w.scale != nullptr) != (w.kind == S8)) return ANY;
    if (out.finish == ACT) return !w.gated || out.act != SILU ? ANY : out.kind == BF16 ? SILU_GATED : SILU_GATED_FLOAT;
    return out.kind != F32 ? ANY : out.finish == STORE ? STORES : out.finish == ADD ? ADDS : ANY;
}

template <Kind KIND> inline V plain_value(const Matrix& w, const Input& x, int row, int at, const float* acc) {
    if constexpr (KIND == S8) return mul(mul(to_float(dsub(dload(acc), dload(w.sums + at))), set1(x.scale[row])), load(w.scale + at));
    return load(acc);
}

// As `finish` for one panel: the same roundings in the same order.
template <Kind KIND, How HOW> inline void finish_panel(const Matrix& w, const Input& x, const Output& out, int row, int p, int vectors, const float* acc) {
    if constexpr (HOW == ANY) {
        finish(w, x, out, row, p, vectors, acc, 0, nullptr);
    } else {
        const int at = p * PANEL;
        char* y = out.y + row * out.stride;
        const V a = plain_value<KIND>(w, x, row, at, acc), b = plain_value<KIND>(w, x, row, at + LANES, acc + LANES);
        if constexpr (HOW == SILU_GATED) narrow((bf16*)y + at / 2, mul(silu(a), b));
        else if constexpr (HOW == SILU_GATED_FLOAT) store((float*)y + at / 2, mul(silu(a), b));
        else {
            float* to = (float*)y + at;
            if constexpr (HOW == ADDS) store(to, add(load(to), a)), store(to + LANES, add(load(to + LANES), b));
            else store(to, a), store(to + LANES, b);
        }
    }
}

// f(HOW) with what `how` says as a constant.
template <class F> inline void by_how(const Matrix& w, const Output& out, const F& f) {
    switch (how(w, out)) {
        case STORES: return f(std::integral_constant<How, STORES>());
        case ADDS: return f(std::integral_constant<How, ADDS>());
        case SILU_GATED: return f(std::integral_constant<How, SILU_GATED>());
        case SILU_GATED_FLOAT: return f(std::integral_constant<How, SILU_GATED_FLOAT>());
        default: return f(std::integral_constant<How, ANY>());
    }
}

}  // namespace rn
