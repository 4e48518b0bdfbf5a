// What Python calls, by ctypes: plain pointers and numbers. The caller keeps everything alive.
#include <algorithm>
#include <vector>

#include "amx.h"
#include "carry.h"
#include "sample.h"
#include "stack.h"

using namespace rn;

namespace {

// Rows of x [rows][k] as `w` reads them.
Input encoded(Pool& pool, const Matrix& w, const void* x, Kind kind, int rows, std::vector<char>& room) {
    const size_t from = (size_t)w.k * (kind == F32 ? 4 : 2), to = w.row_bytes(), stride = apart(to);
    const bool same = kind == w.kind && from == to;
    if (same && (rows == 1 || stride == to)) return {(const char*)x, to, nullptr};
    room.resize(rows * (stride + 4));
    float* scale = (float*)(room.data() + rows * stride);
    const int by = std::max(4, rows / (pool.threads() * 8));
    pool.run((rows + by - 1) / by, [&](int p) {
        thread_local std::vector<float> row;
        row.resize(w.k);
        for (int i = p * by; i < std::min(rows, (p + 1) * by); i++) {
            const char* at = (const char*)x + i * from;
            if (same) {
                memcpy(room.data() + i * stride, at, to);
                continue;
            }
            widen_row(at, kind, w.k, row.data());
            encode_row(row.data(), w.k, (Kind)w.kind, w.steps, room.data() + i * stride, scale + i);
        }
    });
    return {room.data(), stride, scale};
}

}  // namespace

extern "C" {

// 1: AVX-512, 2: bf16 products, 4: int8 products, 8: both on AMX tiles.
int rn_features() {
    int found = 0;
#ifdef RN_AVX512
    found |= 1;
#endif
#ifdef __AVX512BF16__
    found |= 2;
#endif
#ifdef __AVX512VNNI__
    found |= 4;
#endif
#ifdef RN_TILES
    found |= 4 | 8;
#endif
    return found;
}

// Sizes of the structs that Python mirrors, in the order of `ops.MIRRORS`: a field on one side only would be read as another.
void rn_sizes(int32_t* sizes) {
    const size_t all[] = {sizeof(Matrix), sizeof(Norm), sizeof(Layer), sizeof(Model), sizeof(Call), sizeof(Draw), sizeof(Lora)};
    for (size_t size : all) *sizes++ = (int32_t)size;
}

int rn_tiles_work() { return tiles_work(); }

Pool* rn_pool_open(int threads) { return new Pool(threads); }
void rn_pool_close(Pool* pool) { delete pool; }

void rn_linear(Pool* pool, const Matrix* w, const void* x, int x_kind, int rows, void* y, int y_kind) {
    static thread_local std::vector<char> room;
    matmul(*pool, *w, encoded(*pool, *w, x, (Kind)x_kind, rows, room), rows,
           {STORE, NONE, (Kind)y_kind, (char*)y, (size_t)w->n * (y_kind == F32 ? 4 : 2), nullptr, nullptr});
}

// ids[i]: the output with the largest value of row i, the lowest among equals, of the first `count` outputs. leads[i], where it is not null:
// how much larger that is than the next.
void rn_best(Pool* pool, const Matrix* w, const void* x, int x_kind, int rows, int count, int32_t* ids, float* leads) {
    static thread_local std::vector<char> room;
    static thread_local std::vector<float> best, second;
    static thread_local std::vector<int32_t> index;
    Matrix head = *w;
    head.n = std::min(count, w->n);
    const int pieces = best_pieces(head, rows, pool->threads());
    best.resize((size_t)pieces * rows), index.resize((size_t)pieces * rows), second.resize((size_t)pieces * rows);
    const Output out{BEST, NONE, F32, nullptr, 0, best.data(), index.data(), leads ? second.data() : nullptr};
    matmul(*pool, head, encoded(*pool, *w, x, (Kind)x_kind, rows, room), rows, out);
    for (int i = 0; i < rows; i++) {
        ids[i] = 0;
        float top = -INFINITY, next = -INFINITY;
        for (int p = 0; p < pieces; p++) {
            const size_t at = (size_t)p * rows + i;
            if (index[at] < 0) continue;
            if (best[at] > top) next = leads ? std::max(top, second[at]) : top, top = best[at], ids[i] = index[at];
            else next = std::max(next, best[at]);
        }
        if (leads) leads[i] = top - next;
    }
}

void rn_norm(Pool* pool, const void* x, int kind, int rows, int n, const float* w, const float* b, int how, float eps, void* y) {
    const size_t bytes = (size_t)n * (kind == F32 ? 4 : 2);
    const int by = std::max(4, rows / (pool->threads() * 8));
    pool->run((rows + by - 1) / by, [&](int p) {
        thread_local std::vector<float> row;
        row.resize(n);
        for (int i = p * by; i < std::min(rows, (p + 1) * by); i++) {
            widen_row((const char*)x + i * bytes, (Kind)kind, n, row.data());
            norm_row(row.data(), w, b, n, (NormKind)how, eps, row.data());
            narrow_row(row.data(), (Kind)kind, n, (char*)y + i * bytes);
        }
    });
}

void rn_attend(Pool* pool, const Attention* a, const Span* spans, int count) { attend(*pool, *a, spans, count); }

Stack* rn_stack_open(Pool* pool, const Model* model) { return open_stack(*pool, *model); }
void rn_stack_close(Stack* stack) { close_stack(stack); }
int rn_stack_run(Stack* stack, const Call* call, int first, int last, int parts) { return run_stack(stack, *call, first, last, parts); }

// One id a row [n] of `logits`, of those whose bit is set in the row's mask, if it has one (-1: none above -infinity is); without a pool by the calling thread.
void rn_draw(Pool* pool, const float* const* logits, int rows, int n, const Draw* how, const uint32_t* const* masks, int32_t* ids) {
    auto one = [&](int i) { ids[i] = masks && masks[i] ? draw_allowed(logits[i], n, how[i], masks[i]) : draw(logits[i], n, how[i]); };
    if (pool) return pool->run(rows, one);
    for (int i = 0; i < rows; i++) one(i);
}

// For every row [n] of `rows`: log-probability and rank of its token, and ids and log-probabilities of the `count` likeliest.
void rn_describe(const float* const* logits, int rows, int n, const int32_t* tokens, int count, double* logprob, int32_t* rank, int32_t* ids, double* logprobs) {
    for (int i = 0; i < rows; i++) describe(logits[i], n, tokens[i], count, logprob + i, rank + i, ids + (size_t)i * count, logprobs + (size_t)i * count);
}

// sums[i]: of the `size` bytes, at least CARRY_LEAST, at from[i], which are copied to to[i] where there is a `to`.
void rn_carry(const char* const* from, char* const* to, int64_t size, int count, uint64_t* sums) {
    for (int i = 0; i < count; i++) sums[i] = carry(from[i], to ? to[i] : nullptr, size);
    if (to) carried();
}

}  // extern "C"
