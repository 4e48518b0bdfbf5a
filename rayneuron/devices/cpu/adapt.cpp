// Both products are small, so that they share the pool's pieces among all adapters of a step instead of going one after the other.
#include "adapt.h"

#include <algorithm>

namespace rn {
namespace {

constexpr int BLOCK = 16;  // rows of a job
constexpr int WIDE = 8;    // panels of B in a piece

}  // namespace

void Adapting::add(Pool& pool, const Lora* table, std::initializer_list<Lanes> parts, const Input& x, float* y, size_t stride) {
    jobs_.clear(), pieces_.clear();
    size_t bytes = 0;
    for (const Run& run : runs)
        for (const Lanes& part : parts) {
            const Pair& pair = table[run.slot].*part.pair;
            for (int done = 0; pair.a.data && done < run.count; done += BLOCK) {
                const int count = std::min(BLOCK, run.count - done);
                for (int p = 0; p < pair.b.panels; p += WIDE) pieces_.push_back({(int)jobs_.size(), p});
                jobs_.push_back({&pair, part, run.first + done, count, bytes});
                bytes += count * pair.b.row_bytes();
            }
        }
    if (between_.size() < bytes) between_.resize(bytes);
    char* const between = between_.data();
    pool.run((int)jobs_.size(), [&](int j) {
        const Job& job = jobs_[j];
        const Matrix &a = job.pair->a, &b = job.pair->b;
        const int vectors = a.vectors(), width = vectors * LANES;
        thread_local std::vector<float> acc;
        acc.resize((size_t)BLOCK * width);
        multiply((Kind)a.kind, a.data, a.panel_bytes(), vectors, x.rows + job.first * x.stride, x.stride, job.count, a.steps, acc.data(), width, false, nullptr);
        for (int i = 0; i < job.count; i++) {
            float scale;
            encode_row(acc.data() + (size_t)i * width, a.n, (Kind)b.kind, b.steps, between + job.at + i * b.row_bytes(), &scale);
        }
    });
    pool.run((int)pieces_.size(), [&](int i) {
        const Job& job = jobs_[pieces_[i].job];
        const Matrix& b = job.pair->b;
        const int p = pieces_[i].panel, vectors = std::min(2 * WIDE, b.vectors() - 2 * p), width = vectors * LANES;
        alignas(64) float acc[BLOCK * 2 * WIDE * LANES];
        multiply((Kind)b.kind, b.data + p * b.panel_bytes(), b.panel_bytes(), vectors, between + job.at, b.row_bytes(), job.count, b.steps, acc, width, false, nullptr);
        for (int r = 0; r < job.count; r++)
            for (int v = 0; v < vectors; v++) {
                const int at = 2 * p + v, count = std::min(b.n - at * LANES, LANES);
                float* to = y + (job.first + r) * stride + job.part.column + (size_t)at * job.part.step;
                store_n(to, rn::add(load_n(to, count), load(acc + (size_t)r * width + v * LANES)), count);
            }
    });
}

void activate_row(const float* sums, int width, bool gated, Act act, Kind kind, char* y) {
    for (int j = 0; j < width; j += LANES, sums += gated ? 2 * LANES : LANES) {
        V v = activate(act, load(sums));
        if (gated) v = mul(v, load(sums + LANES));
        if (kind == F32) store_n((float*)y + j, v, std::min(LANES, width - j));
        else narrow((bf16*)y + j, v);  // whole vectors: else the next product would not read them as they are
    }
}

}  // namespace rn
