// The residual stays in float from the first layer to the last. Padding and idle rows are left out of all work: a step costs what its
// true tokens cost, whatever the bucket.
#include "stack.h"

#include "ahead.h"

#include <algorithm>
#include <memory>
#include <new>
#include <numeric>
#include <stdlib.h>
#include <sys/mman.h>
#include <vector>

namespace rn {
namespace {

// Floats that grow and are never given back while the model lives; in huge pages, as rows a page apart want more of the first TLB than there is.
class Room {
   public:
    float* floats(size_t n) {
        if (size_ < n + 32) grow((n + 32) * sizeof(float));  // vectors may be read beyond the end
        return at_.get();
    }

   private:
    static constexpr size_t HUGE_PAGE = 2 << 20;
    std::unique_ptr<float, decltype(&free)> at_{nullptr, free};
    size_t size_ = 0;

    void grow(size_t bytes) {
        const size_t unit = bytes < HUGE_PAGE ? 4096 : HUGE_PAGE, whole = (bytes + unit - 1) / unit * unit;
        at_.reset((float*)aligned_alloc(unit, whole));
        if (!at_) throw std::bad_alloc();
        madvise(at_.get(), whole, MADV_HUGEPAGE);  // a wish: what it gives does not matter
        size_ = whole / sizeof(float);
    }
};

}  // namespace

class Stack {
   public:
    Stack(Pool& pool, const Model& model)
        : pool_(pool), m_(model), layer_(model.layer, model.layer + model.layers), ahead_(units(), block_bytes(), model.blocks) {}

    int run(const Call& c, int first, int last, int parts) {
        if (parts & BEGIN) begin(c);
        for (int i = first; i < last && tokens_; i++) {
            if (parts & ATTENTION) attention(layer_[i], c, i + 1 == m_.layers && c.read);
            if (parts & JOIN_ATTENTION) join(c, layer_[i].o_bias, layer_[i].ln1, true);
            if (parts & FEED && tokens_) feed(layer_[i], c);
            if (parts & JOIN_FEED) join(c, layer_[i].down_bias, layer_[i].ln2, !m_.parallel);
        }
        if (parts & END) end(c);
        return tokens_;
    }

   private:
    Pool& pool_;
    const Model m_;
    const std::vector<Layer> layer_;
    Ahead ahead_;
    std::vector<Span> spans_;
    std::vector<int32_t> where_, position_, slot_;  // of every true token: its place in the batch, its position, where its KV goes
    Blocks blocks_{};
    int tokens_ = 0;
    Room x_, h_, qkv_, mixed_, inner_, fed_room_, gathered_, plain_room_;
    std::vector<int> order_;
    Adapting adapting_;
    float* x() { return x_.floats((size_t)tokens_ * m_.hidden); }

    size_t block_bytes() const { return (size_t)m_.kv_heads * 2 * m_.block * m_.head_dim * (m_.kind == F32 ? 4 : 2); }
    std::vector<char*> units() const {
        std::vector<char*> all;
        for (const Layer& layer : layer_) all.push_back(layer.kv);
        return all;
    }

    int qkv_width() const { return (m_.heads + 2 * m_.kv_heads) * m_.head_dim; }

    template <class F> void each(int n, const F& f) {
        const int by = std::max(4, n / (pool_.threads() * 8));
        pool_.run((n + by - 1) / by, [&](int p) {
            for (int i = p * by; i < std::min(n, (p + 1) * by); i++) f(i);
        }, true);
    }

    // Which tokens are true: position `limit` is padding, row `rows` is idle. Tokens of one adapter lie behind each other.
    void begin(const Call& c) {
        spans_.clear(), where_.clear(), position_.clear(), slot_.clear();
        blocks_ = {nullptr, c.table, c.width, m_.block, m_.kv_heads, m_.head_dim, m_.kind == F32 ? 4 : 2, m_.panels};
        adapting_.runs.clear();
        order_.resize(c.batch);
        std::iota(order_.begin(), order_.end(), 0);
        if (c.adapters) std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) { return c.adapters[a] < c.adapters[b]; });
        int last = -1;  // the last place that is written of blocks that are somebody's
        for (int b : order_) {
            if (c.rows[b] == m_.rows) continue;
            const int first = (int)where_.size();
            for (int t = 0; t < c.tokens; t++) {
                const int at = c.positions[b * c.tokens + t];
                if (at >= m_.limit) continue;
                where_.push_back(b * c.tokens + t);
                position_.push_back(at);
                const int slot = c.slots[b * c.tokens + t];
                slot_.push_back(slot);
                if (slot < m_.blocks * m_.block) last = std::max(last, slot);
            }
            const int count = (int)where_.size() - first;
            if (count) spans_.push_back({b, first, count});
            if (!count || !c.adapters || c.adapters[b] < 0) continue;
            std::vector<Run>& runs = adapting_.runs;
            if (!runs.empty() && runs.back().slot == c.adapters[b]) runs.back().count += count;
            else runs.push_back({c.adapters[b], first, count});
        }
        tokens_ = (int)where_.size();
        if (last >= 0) ahead_.reach(last / m_.block);
        float* to = x();
        const size_t bytes = (size_t)m_.hidden * (m_.kind == F32 ? 4 : 2);
        each(tokens_, [&](int i) { widen_row((const char*)c.x + where_[i] * bytes, (Kind)m_.kind, m_.hidden, to + (size_t)i * m_.hidden); });
    }

    void end(const Call& c) {
        const size_t bytes = (size_t)m_.hidden * (m_.kind == F32 ? 4 : 2);
        if (tokens_ < c.batch * c.tokens) memset(c.y, 0, bytes * c.batch * c.tokens);
        const float* from = x();
        each(tokens_, [&](int i) { narrow_row(from + (size_t)i * m_.hidden, (Kind)m_.kind, m_.hidden, (char*)c.y + where_[i] * bytes); });
    }

    // Rows of floats -> what `w` reads, normed on the way where asked.
    Input encode(const float* from, int rows, int n, const Matrix& w, const Norm* norm, Room& room) {
        const size_t stride = apart(w.row_bytes());
        float* scale = room.floats((size_t)rows * (stride / 4 + 1) + LANES);
        char* to = (char*)(scale + (rows + LANES - 1) / LANES * LANES);
        each(rows, [&](int i) {
            const float* row = from + (size_t)i * n;
            if (!norm) return encode_row(row, n, (Kind)w.kind, w.steps, to + i * stride, scale + i);
            thread_local std::vector<float> normed;
            normed.resize(n);
            norm_row(row, norm->w, norm->b, n, (NormKind)m_.norm, m_.eps, normed.data());
            encode_row(normed.data(), n, (Kind)w.kind, w.steps, to + i * stride, scale + i);
        });
        return {to, stride, scale};
    }

    // What adapters read of the input `in` of `w`, made of `from`: the model's own kind of numbers.
    Input plain(const Input& in, const Matrix& w, const float* from, int n, const Norm* norm, Room& room) {
        if (adapting_.runs.empty() || w.kind == m_.kind) return in;
        Matrix kind{};
        kind.kind = m_.kind, kind.k = n, kind.steps = (n + LANES - 1) / LANES * LANES / (m_.kind == F32 ? 1 : 2);
        return encode(from, tokens_, n, kind, norm, room);
    }

    // What adapters add to a product of the layer, which read `x`; null: nothing.
    Adapting* adapters(const Layer& w, Pair Lora::*pair, const Input& x) {
        return adapting_.runs.empty() ? nullptr : adapting_.of(w.lora, pair, x, (Kind)m_.kind, tokens_);
    }

    void norm_rows(const Norm& norm) {
        float* at = x();
        each(tokens_, [&](int i) { norm_row(at + (size_t)i * m_.hidden, norm.w, norm.b, m_.hidden, (NormKind)m_.norm, m_.eps, at + (size_t)i * m_.hidden); });
    }

    // A product whose result is added to the residual, or is this rank's summand.
    Output onto(const Call& c, bool second = false) {
        const size_t stride = (size_t)m_.hidden * 4;
        return c.summand ? Output{second && m_.parallel ? ADD : STORE, NONE, F32, (char*)c.summand, stride, nullptr, nullptr} : Output{ADD, NONE, F32, (char*)x(), stride, nullptr, nullptr};
    }

    // Norms of heads, rotation, and the new keys and values into their slots.
    void place(const Layer& w, float* qkv) {
        const int d = m_.head_dim, width = qkv_width();
        const Blocks to = of(w);
        each(tokens_, [&](int i) {
            float* at = qkv + (size_t)i * width;
            if (m_.clip > 0)
                for (int j = 0; j < width; j += LANES) store_n(at + j, minimum(maximum(load_n(at + j, width - j), set1(-m_.clip)), set1(m_.clip)), width - j);
            for (int h = 0; h < m_.heads + m_.kv_heads; h++) {
                const Norm& norm = h < m_.heads ? w.q_norm : w.k_norm;
                if (m_.qk_norm) norm_row(at + h * d, norm.w, norm.b, d, (NormKind)m_.norm, m_.eps, at + h * d);
                if (m_.cos && !w.nope) rotate_row(at + h * d, m_.cos + (size_t)position_[i] * m_.half, m_.sin + (size_t)position_[i] * m_.half, m_.half, m_.pairs);
            }
            const int id = slot_[i] / m_.block;
            for (int g = 0; g < m_.kv_heads && id < m_.blocks; g++)
                keep(to, (Kind)m_.kind, id, g, slot_[i] % m_.block, at + (m_.heads + g) * d, at + (m_.heads + m_.kv_heads + g) * d);
        });
    }
    Blocks of(const Layer& w) const {
        Blocks made = blocks_;
        made.kv = w.kv;
        return made;
    }

    // From here on the step is of the tokens that are read alone: their residual, queries, places and runs of adapters lie where all did.
    void leave_unread(const Call& c, float* qkv) {
        kept_.clear();
        for (Span& s : spans_) {
            const int first = s.first, before = (int)kept_.size();
            for (int i = first; i < first + s.count; i++)
                if (where_[i] - s.row * c.tokens == c.read[s.row]) kept_.push_back(i);
            s.first = before, s.count = (int)kept_.size() - before;
        }
        auto left = [&](int token) { return (int)(std::lower_bound(kept_.begin(), kept_.end(), token) - kept_.begin()); };
        for (Run& r : adapting_.runs) {
            const int first = left(r.first);
            r.count = left(r.first + r.count) - first, r.first = first;
        }
        spans_.erase(std::remove_if(spans_.begin(), spans_.end(), [](const Span& s) { return !s.count; }), spans_.end());
        float* residual = x();
        for (int i = 0; i < (int)kept_.size(); i++) {
            const int from = kept_[i];
            where_[i] = where_[from], position_[i] = position_[from];
            memmove(residual + (size_t)i * m_.hidden, residual + (size_t)from * m_.hidden, m_.hidden * sizeof(float));
            memmove(qkv + (size_t)i * qkv_width(), qkv + (size_t)from * qkv_width(), qkv_width() * sizeof(float));
        }
        tokens_ = (int)kept_.size();
    }
    std::vector<int> kept_;

    // `last`: nobody reads what this layer gives for some tokens, but their KV.
    void attention(const Layer& w, const Call& c, bool last) {
        float* qkv = qkv_.floats((size_t)tokens_ * qkv_width());
        const Norm* norm = m_.post_norm ? nullptr : &w.ln1;
        const Input in = encode(x(), tokens_, m_.hidden, w.qkv, norm, h_);
        const Input beside = plain(in, w.qkv, x(), m_.hidden, norm, plain_room_);
        foresee(pool_, w.o, tokens_);
        const Output three{STORE, NONE, F32, (char*)qkv, (size_t)qkv_width() * 4, nullptr, nullptr};
        matmul(pool_, w.qkv, in, tokens_, three, adapters(w, &Lora::qkv, beside));
        place(w, qkv);
        if (last) leave_unread(c, qkv);
        if (!tokens_) return;
        if (m_.parallel) enter_feed(w);  // before the residual changes
        const int width = m_.heads * m_.head_dim;
        const bool direct = w.o.kind == BF16 && w.o.steps * 2 == width;  // attention can write what the product reads
        const Kind kind = direct ? BF16 : F32;
        const size_t stride = direct ? apart((size_t)width * 2) : (size_t)width * 4;
        float* mixed = mixed_.floats(tokens_ * stride / 4);
        attend(pool_, {qkv, (size_t)qkv_width(), of(w), m_.slopes, position_.data(), (char*)mixed, stride, (Kind)m_.kind, kind, m_.heads, w.window, m_.scale},
               spans_.data(), (int)spans_.size());
        const Input out = direct ? Input{(const char*)mixed, stride, nullptr} : encode(mixed, tokens_, width, w.o, nullptr, h_);
        foresee(pool_, w.up, tokens_);
        matmul(pool_, w.o, out, tokens_, onto(c), adapters(w, &Lora::o, plain(out, w.o, mixed, width, nullptr, plain_room_)));
        if (m_.post_norm && !c.summand) norm_rows(w.ln1);
    }

    Input fed_{}, fed_plain_{};
    Room fed_plain_room_;
    void enter_feed(const Layer& w) {
        const Norm* norm = m_.post_norm ? nullptr : w.second ? &w.ln2 : &w.ln1;
        fed_ = encode(x(), tokens_, m_.hidden, w.up, norm, fed_room_);
        if (!w.expert_up) fed_plain_ = plain(fed_, w.up, x(), m_.hidden, norm, fed_plain_room_);
    }

    void feed(const Layer& w, const Call& c) {
        if (!m_.parallel) enter_feed(w);
        if (w.expert_up) return mixture(w, c);
        const int width = m_.inner;
        const bool direct = w.down.kind == BF16 && w.down.steps * 2 == width;
        const size_t stride = direct ? apart((size_t)width * 2) : (size_t)width * 4;
        float* inner = inner_.floats(tokens_ * stride / 4);
        foresee(pool_, w.down, tokens_);
        const Output acted{ACT, (Act)m_.act, direct ? BF16 : F32, (char*)inner, stride, nullptr, nullptr};
        matmul(pool_, w.up, fed_, tokens_, acted, adapters(w, &Lora::up, fed_plain_));
        const Input in = direct ? Input{(const char*)inner, stride, nullptr} : encode(inner, tokens_, width, w.down, nullptr, h_);
        if (&w != &layer_.back()) foresee(pool_, (&w + 1)->qkv, tokens_);
        else pool_.foresee(nullptr, 0, 0);
        matmul(pool_, w.down, in, tokens_, onto(c, true), adapters(w, &Lora::down, plain(in, w.down, inner, width, nullptr, plain_room_)));
        if (m_.post_norm && !c.summand) norm_rows(w.ln2);
    }

    // Every expert on exactly the tokens that chose it; a token's shares are added in the order of its experts.
    void mixture(const Layer& w, const Call& c) {
        const int k = m_.top_k, e = m_.hidden;
        float* scores = inner_.floats((size_t)tokens_ * m_.experts);
        matmul(pool_, w.up, fed_, tokens_, {STORE, NONE, F32, (char*)scores, (size_t)m_.experts * 4, nullptr, nullptr});
        which_.resize((size_t)tokens_ * k), share_.resize((size_t)tokens_ * k);
        for (int i = 0; i < tokens_; i++) choose(scores + (size_t)i * m_.experts, m_.experts, k, m_.renormalise, &which_[(size_t)i * k], &share_[(size_t)i * k]);
        const Norm* norm = m_.post_norm ? nullptr : w.second ? &w.ln2 : &w.ln1;
        const Input all = w.expert_up->kind == w.up.kind ? fed_ : encode(x(), tokens_, e, *w.expert_up, norm, fed_room_);
        float* total = mixed_.floats((size_t)tokens_ * e);
        memset(total, 0, (size_t)tokens_ * e * 4);
        for (int expert = 0; expert < m_.experts; expert++) {
            chosen_.clear(), chosen_share_.clear();
            for (int j = 0; j < tokens_ * k; j++)
                if (which_[j] == expert) chosen_.push_back(j / k), chosen_share_.push_back(share_[j]);
            if (!chosen_.empty()) one_expert(w.expert_up[expert], w.expert_down[expert], all, total);
        }
        const bool add = !c.summand || m_.parallel;
        float* to = c.summand ? c.summand : x();
        each(tokens_, [&](int i) {
            for (int j = 0; j < e; j += LANES) {
                const size_t at = (size_t)i * e + j;
                V v = load_n(total + at, e - j);
                store_n(to + at, add ? rn::add(load_n(to + at, e - j), v) : v, e - j);
            }
        });
        if (m_.post_norm && !c.summand) norm_rows(w.ln2);
    }

    void one_expert(const Matrix& up, const Matrix& down, const Input& all, float* total) {
        const int n = (int)chosen_.size(), e = m_.hidden, width = down.k;
        float* scale = gathered_.floats((size_t)n * (up.steps + 1) + LANES);
        char* rows = (char*)(scale + (n + LANES - 1) / LANES * LANES);
        for (int i = 0; i < n; i++) {
            memcpy(rows + i * up.row_bytes(), all.rows + chosen_[i] * all.stride, up.row_bytes());
            scale[i] = all.scale[chosen_[i]];
        }
        float* inner = inner_.floats((size_t)n * width);
        matmul(pool_, up, {rows, up.row_bytes(), scale}, n, {ACT, (Act)m_.act, F32, (char*)inner, (size_t)width * 4, nullptr, nullptr});
        const Input in = encode(inner, n, width, down, nullptr, h_);
        float* out = qkv_.floats((size_t)n * e);
        matmul(pool_, down, in, n, {STORE, NONE, F32, (char*)out, (size_t)e * 4, nullptr, nullptr});
        each(n, [&](int i) {
            float* to = total + (size_t)chosen_[i] * e;
            const V share = set1(chosen_share_[i]);
            for (int j = 0; j < e; j += LANES) store_n(to + j, fma(load_n(out + (size_t)i * e + j, e - j), share, load_n(to + j, e - j)), e - j);
        });
    }
    std::vector<int32_t> which_, chosen_;
    std::vector<float> share_, chosen_share_;

    // The ranks' sum (once a sum) and a bias into the residual.
    void join(const Call& c, const float* bias, const Norm& norm, bool sum) {
        float* at = x();
        const int n = m_.hidden;
        each(tokens_, [&](int i) {
            float* to = at + (size_t)i * n;
            const float* from = c.summand + (size_t)i * n;
            for (int j = 0; j < n; j += LANES) {
                V v = load_n(to + j, n - j);
                if (sum) v = add(v, load_n(from + j, n - j));
                if (bias) v = add(v, load_n(bias + j, n - j));
                store_n(to + j, v, n - j);
            }
        });
        if (m_.post_norm) norm_rows(norm);
    }
};

void choose(const float* scores, int experts, int k, bool renormalise, int32_t* which, float* share) {
    float most = scores[0], total = 0, kept = 0;
    for (int e = 1; e < experts; e++) most = std::max(most, scores[e]);
    for (int e = 0; e < experts; e++) total += expf(scores[e] - most);
    for (int i = 0; i < k; i++) {
        int best = -1;
        for (int e = 0; e < experts; e++)
            if (std::find(which, which + i, e) == which + i && (best < 0 || scores[e] > scores[best])) best = e;
        which[i] = best, share[i] = expf(scores[best] - most) / total;
        kept += share[i];
    }
    for (int i = 0; i < k && renormalise; i++) share[i] /= kept;
}

Stack* open_stack(Pool& pool, const Model& model) { return new Stack(pool, model); }
void close_stack(Stack* stack) { delete stack; }
int run_stack(Stack* stack, const Call& call, int first, int last, int parts) { return stack->run(call, first, last, parts); }

}  // namespace rn
