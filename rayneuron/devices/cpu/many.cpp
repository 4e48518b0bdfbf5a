// Products of many rows on tiles. A group of rows stays in the second cache while all panels pass, a chunk of a panel in the first while the
// rows of the group pass; sums wait in memory between chunks. Where the cuts lie changes no bit: a sum takes its tiles in the order of k.
#include "adapt.h"
#include "amx.h"

#ifdef RN_TILES
#include "finish.h"
#include "pane.h"

#include <vector>

namespace rn {
namespace {

constexpr int CHUNK = 18 * DEEP;         // steps, 36 KB of a panel
constexpr int MOST_ROWS = 512;           // of a group
constexpr size_t GROUP_BYTES = 1 << 20;  // of its rows
// Where few long rows would fit, more of them go together, and a part of k at a time: all panels pass it before the next.
constexpr int FEW_FIT = 160, LONG_ROWS = 256, LONG_CHUNK = 16 * DEEP, PART = 4 * LONG_CHUNK;

constexpr int up(int n, int by) { return (n + by - 1) / by * by; }

struct Cuts {
    int rows, chunk, part;  // of a group; steps; steps
    bool parted;
};

Cuts cuts_of(const Matrix& w, size_t stride, int rows) {
    const int fit = (int)(GROUP_BYTES / stride);
    const bool parted = fit < FEW_FIT && rows > 2 * PANE && w.steps > PART;
    const int most = parted ? LONG_ROWS : std::max(2 * PANE, std::min(MOST_ROWS, fit / PANE * PANE));
    const int groups = (rows + most - 1) / most, chunks = (w.steps + CHUNK - 1) / CHUNK;
    return {up((rows + groups - 1) / groups, PANE), parted ? LONG_CHUNK : up((w.steps + chunks - 1) / chunks, DEEP), parted ? PART : up(w.steps, DEEP), parted};
}

// What is fetched into the second cache meanwhile: some lines at every tile of k.
struct Ahead {
    const char *at, *end;
    int lines;
    void fetch() {
        for (int i = 0; i < lines && at < end; i++, at += 64) _mm_prefetch(at, _MM_HINT_T1);
    }
};

// `steps` steps of one pane: sums [rows][PANEL], begun before where `more`.
template <Kind KIND> void pane(const char* w, const char* x, size_t stride, int rows, int steps, float* sums, bool more, Ahead& ahead) {
    const bool high = rows > HALF_PANE;
    if (more) load_pane(sums, PANEL, high);
    else clear_pane();
    int s = 0;
    for (; s + DEEP <= steps; s += DEEP) {
        ahead.fetch();
        deepen_pane<KIND, true>(x + (size_t)s * 4, stride, w + s * STEP, high);
    }
    if (s < steps) deepen_rest<KIND>(x + (size_t)s * 4, stride, rows, w + s * STEP, steps - s);
    store_pane(sums, PANEL, high);
}

// Steps [from, to) of one panel for rows [first, first + rows): a chunk for all of them, then the next. `sums`: PANEL floats a row.
template <Kind KIND, How HOW>
void pass(const Matrix& w, const Input& x, const Output& out, const Cuts& cuts, int p, int first, int rows, int from, int to, float* sums,
          Adapting* more) {
    const char* panel = w.data + p * w.panel_bytes();
    const int tiles = (rows + PANE - 1) / PANE * ((to - from + DEEP - 1) / DEEP), lines = (to - from) * (int)(STEP / 64);
    const char* next = p + 1 < w.panels ? panel + w.panel_bytes() + from * STEP : nullptr;
    Ahead ahead{next, next ? next + lines * 64 : nullptr, (lines + tiles - 1) / tiles};
    const bool once = cuts.chunk >= w.steps;  // then no sum waits, and all use the same place
    int shaped = 0;
    for (int s = from; s < to; s += cuts.chunk)
        for (int m = 0; m < rows; m += PANE) {
            const int count = std::min(PANE, rows - m), steps = std::min(cuts.chunk, to - s);
            if (count != shaped) shape_pane(shaped = count);
            float* at = once ? sums : sums + m * PANEL;
            pane<KIND>(panel + s * STEP, x.rows + (first + m) * x.stride + (size_t)s * 4, x.stride, count, steps, at, s > 0, ahead);
            if (s + steps < w.steps) continue;
            const int vectors = std::min(2, w.vectors() - 2 * p);
            alignas(64) float added[PANE * PANEL];
            if (more) more->wait(), more->sums(first + m, count, 2 * p, vectors, added), shaped = 0;
            for (int r = 0, row = first + m; r < count; r++, row++)
                if (more && more->has(row)) finish(w, x, out, row, p, vectors, at + r * PANEL, 0, added + r * vectors * LANES);
                else finish_panel<KIND, HOW>(w, x, out, row, p, vectors, at + r * PANEL);
        }
    TILE_RELEASE();  // attention uses the same threads with other shapes
}

template <Kind KIND, How HOW> void groups(Pool& pool, const Matrix& w, const Input& x, int rows, const Output& out, Adapting* more) {
    const Cuts cuts = cuts_of(w, x.stride, rows);
    static thread_local std::vector<float> kept;  // sums of all panels, between parts
    if (cuts.parted) kept.resize(std::max(kept.size(), (size_t)w.panels * cuts.rows * PANEL + LANES));
    float* const waiting = (float*)(((uintptr_t)kept.data() + 63) & ~(uintptr_t)63);
    for (int first = 0; first < rows; first += cuts.rows)
        for (int from = 0; from < w.steps; from += cuts.part)
            pool.run(w.panels, [&](int p) {
                if (more) more->help();
                alignas(64) static thread_local float own[MOST_ROWS * PANEL];
                float* sums = cuts.parted ? waiting + (size_t)p * cuts.rows * PANEL : own;
                pass<KIND, HOW>(w, x, out, cuts, p, first, std::min(cuts.rows, rows - first), from, std::min(w.steps, from + cuts.part), sums, more);
            }, true);
}

template <Kind KIND> void many(Pool& pool, const Matrix& w, const Input& x, int rows, const Output& out, Adapting* more) {
    by_how(w, out, [&](auto how) { groups<KIND, how>(pool, w, x, rows, out, more); });
}

}  // namespace

void matmul_many(Pool& pool, const Matrix& w, const Input& x, int rows, const Output& out, Adapting* more) {
    w.kind == BF16 ? many<BF16>(pool, w, x, rows, out, more) : many<S8>(pool, w, x, rows, out, more);
}

}  // namespace rn
#endif
