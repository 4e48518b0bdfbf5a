#include "adapt.h"

#include <algorithm>
#include <sched.h>

namespace rn {
namespace {

constexpr int BLOCK = 16;     // rows of a job
constexpr int SPINS = 20000;  // pauses, before the processor is left to whoever is to be waited for

}  // namespace

Adapting* Adapting::of(const Lora* table, Pair Lora::*pair, const Input& x, Kind kind, int tokens) {
    shares_.clear(), jobs_.clear();
    for (const Run& run : runs)
        if ((table[run.slot].*pair).a) shares_.push_back({&(table[run.slot].*pair), run.first, run.count});
    if (shares_.empty()) return nullptr;
    const size_t bytes = LANES * (kind == F32 ? 4 : 2);  // of a vector of A x
    has_.assign(tokens, 0);
    stride_ = 0;
    for (const Share& s : shares_) {
        stride_ = std::max(stride_, s.pair->ranks * bytes);
        std::fill_n(has_.begin() + s.first, s.count, 1);
        for (int done = 0; done < s.count; done += BLOCK)
            for (int v = 0; v < s.pair->ranks; v++) jobs_.push_back({s.pair, s.first + done, std::min(BLOCK, s.count - done), v});
    }
    if (between_.size() < tokens * stride_) between_.resize(tokens * stride_);
    x_ = x, kind_ = kind;
    next_.store(0), done_.store(0);
    return this;
}

void Adapting::help() {
    const int all = (int)jobs_.size();
    const size_t bytes = LANES * (kind_ == F32 ? 4 : 2);
    for (int i; next_.load(std::memory_order_relaxed) < all && (i = next_.fetch_add(1)) < all; done_.fetch_add(1, std::memory_order_release)) {
        const Job& job = jobs_[i];
        const int steps = job.pair->a_steps;
        alignas(64) float acc[BLOCK * LANES];
        thin(kind_, job.count, job.pair->a + (size_t)job.vector * steps * VECTOR, 1, x_.rows + job.first * x_.stride, x_.stride, nullptr, steps, acc, LANES);
        char* to = between_.data() + job.first * stride_ + job.vector * bytes;
        for (int r = 0; r < job.count; r++, to += stride_)
            if (kind_ == F32) store((float*)to, load(acc + r * LANES));
            else narrow((bf16*)to, load(acc + r * LANES));
    }
}

void Adapting::wait() const {
    for (int spins = 0; done_.load(std::memory_order_acquire) < (int)jobs_.size(); spins++)
        if (spins < SPINS) __builtin_ia32_pause();
        else sched_yield();
}

void Adapting::fetch(int first, int count, int vector, int vectors) const {
    for (const Share& s : shares_) {
        if (s.first >= first + count || s.first + s.count <= first) continue;
        const size_t each = s.pair->b_steps * VECTOR;
        for (const char *at = s.pair->b + vector * each, *end = at + vectors * each; at < end; at += 64) _mm_prefetch(at, _MM_HINT_T1);
    }
}

void Adapting::sums(int first, int count, int vector, int vectors, float* out) const {
    for (const Share& s : shares_) {
        const int from = std::max(first, s.first), rows = std::min(first + count, s.first + s.count) - from;
        if (rows <= 0) continue;
        const Pair& p = *s.pair;
        const size_t width = vectors * LANES;
        thin(kind_, rows, p.b + (size_t)vector * p.b_steps * VECTOR, vectors, between_.data() + from * stride_, stride_, p.from + vector, p.b_steps,
             out + (from - first) * width, width);
    }
}

}  // namespace rn
