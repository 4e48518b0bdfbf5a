// One pass finds the largest, one adds the weights 2^(log2 e (x / temperature - largest)) up, and only the likeliest are ever sorted: those
// not below a bound that is found among the maxima of 16 neighbours each.
#include "sample.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace rn {
namespace {

constexpr float LOG2_E = 1.44269504088896341f;
constexpr int BLOCK = 1024;          // values whose weights are added in float; the sums of blocks are added in double
constexpr int FEW = 256;             // candidates sorted at first; a nucleus that is larger is found in buckets
constexpr int BUCKETS = 1024, FINE = 32;  // of values by their weight, FINE to each halving of it
constexpr double BELOW_ONE = 1.0 - 1.0 / (1 << 23);

struct Candidate {
    float x;
    int32_t id;
    bool operator<(const Candidate& o) const { return x != o.x ? x > o.x : id < o.id; }  // the likeliest first
};

float largest(const float* x, int n) {
    V top = set1(-INFINITY);
    int i = 0;
    for (; i + LANES <= n; i += LANES) top = maximum(top, load(x + i));
    float most = highest(top);
    for (; i < n; i++) most = std::max(most, x[i]);
    return most;
}

int first_largest(const float* x, int n) {
    float most = -INFINITY;
    int at = 0;
    for (int i = 0; i < n; i += BLOCK) {
        const float here = largest(x + i, std::min(BLOCK, n - i));
        if (here > most) most = here, at = i;
    }
    return (int)(std::find(x + at, x + n, most) - x) % n;  // nothing equals NaN: then 0
}

V some(const float* x, int n) {  // up to 16 values, then such as can never come
    if (n >= LANES) return load(x);
    alignas(64) float t[LANES];
    std::fill_n(t, LANES, -INFINITY);
    std::copy_n(x, n, t);
    return load(t);
}

// The same among the ids whose bit is set; -1 where none is above -infinity. What a word forbids may bring a look at it, not a choice.
int first_largest_allowed(const float* x, int n, const uint32_t* mask) {
    float most = -INFINITY;
    int first = -1;
    auto choose = [&](int i, uint32_t bits) {
        for (; bits; bits &= bits - 1) {
            const int id = i + __builtin_ctz(bits);
            if (x[id] > most) most = x[id], first = id;
        }
    };
    V bound = set1(most);
    int i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES)
        if (mask[i / 32] && any_above(maximum(load(x + i), load(x + i + LANES)), bound)) choose(i, mask[i / 32]), bound = set1(most);
    if (i < n) choose(i, mask[i / 32] & (0xffffffffu >> (32 - (n - i))));
    return first;
}

// Weights of n values relative to `most`: exactly 1 there, 0 for what can never come.
struct Weigher {
    V by, most;
    Weigher(float temperature, float largest) : by(set1(1.0f / temperature)), most(mul(set1(largest), by)) {}
    V operator()(V x) const { return power_of_two(maximum(mul(sub(mul(x, by), most), set1(LOG2_E)), set1(-200.0f))); }
    V bucket(V x) const { return minimum(mul(sub(most, mul(x, by)), set1(LOG2_E * FINE)), set1(BUCKETS - 1)); }
};

double weight_of(const Weigher& weigh, const float* x, int n) {
    V total = zero();
    for (int i = 0; i < n; i += LANES) total = add(total, weigh(some(x + i, n - i)));
    return sum(total);
}

// The `count` likeliest of x [n], sorted.
void likeliest(const float* x, int n, int count, std::vector<Candidate>& out) {
    thread_local std::vector<float> tops, order;
    out.clear();
    const int groups = (n + LANES - 1) / LANES;
    float bound = -INFINITY;
    if (2 * count < groups) {  // as many groups have a largest value of at least the bound, so as many values do
        tops.resize(groups);
        for (int g = 0; g < groups; g++) tops[g] = highest(some(x + g * LANES, n - g * LANES));
        order = tops;
        std::nth_element(order.begin(), order.begin() + count - 1, order.end(), std::greater<float>());
        bound = order[count - 1];
        for (int g = 0; g < groups; g++)
            if (tops[g] >= bound)
                for (int i = g * LANES; i < std::min(n, (g + 1) * LANES); i++)
                    if (x[i] >= bound) out.push_back({x[i], i});
    } else {
        for (int i = 0; i < n; i++) out.push_back({x[i], i});
    }
    if ((int)out.size() > count) std::nth_element(out.begin(), out.begin() + count - 1, out.end()), out.resize(count);
    std::sort(out.begin(), out.end());
}

// The index at which the running sum of weights passes the drawn share of `total`; never one without weight.
int passed(int n, double total, float uniform, const float* weight, double reached = 0) {
    const double target = std::min(uniform * total, total * BELOW_ONE);
    int last = 0;
    for (int i = 0; i < n; i++) {
        if (weight[i] <= 0) continue;
        last = i;
        if ((reached += weight[i]) > target) break;
    }
    return last;
}

int draw_from_all(const float* x, int n, const Draw& how, float most) {
    const Weigher weigh(how.temperature, most);
    thread_local std::vector<double> sums;
    sums.clear();
    double total = 0;
    for (int i = 0; i < n; i += BLOCK) sums.push_back(weight_of(weigh, x + i, std::min(BLOCK, n - i))), total += sums.back();
    const double target = std::min(how.uniform * total, total * BELOW_ONE);
    double reached = 0;
    int block = 0;
    while (block + 1 < (int)sums.size() && reached + sums[block] <= target) reached += sums[block++];
    const int from = block * BLOCK, count = std::min(BLOCK, n - from);
    alignas(64) float w[BLOCK];
    for (int i = 0; i < count; i += LANES) store(w + i, weigh(some(x + from + i, count - i)));
    return from + passed(count, total, how.uniform, w, reached);
}

// How much of some sorted candidates is kept: their number, at least one, and their mass. `before`: the mass of whoever is likelier.
struct Kept {
    int count;
    double mass;
};
Kept keep(const std::vector<float>& weight, int count, double before, double limit, float least, bool first) {
    Kept kept{0, 0};
    while (kept.count < count && ((first && !kept.count) || (before + kept.mass < limit && weight[kept.count] >= least))) kept.mass += weight[kept.count++];
    return kept;
}

void weigh_all(const Weigher& weigh, const std::vector<Candidate>& of, std::vector<float>& weight) {
    weight.assign(of.size() + LANES, -INFINITY);
    for (size_t i = 0; i < of.size(); i++) weight[i] = of[i].x;
    for (size_t i = 0; i < of.size(); i += LANES) store(&weight[i], weigh(load(&weight[i])));
}

// A nucleus of any size in one pass: values fall into buckets by weight, and only two of those are sorted: the one in which what is kept
// ends, and the one in which the drawn share does. `limit` of `total` is kept, so nothing whose equals could all go beyond it.
int draw_from_buckets(const float* x, int n, const Draw& how, const Weigher& weigh, double limit, double total_mass) {
    struct Heavy {
        Candidate one;
        float weight;
        int32_t bucket;
    };
    thread_local std::vector<Heavy> room;
    thread_local std::vector<Candidate> inside;
    thread_local std::vector<float> weight;
    room.resize(n);
    Heavy* all = room.data();
    const float faint = std::max(how.min_p, limit < total_mass ? (float)((total_mass - limit) / n) : 0) * 0.999f;
    int found = 0;
    for (int i = 0; i < n; i += LANES) {
        const V v = some(x + i, n - i), heavy = weigh(v);
        if (!any_above(heavy, set1(faint))) continue;
        alignas(64) float at[LANES], w[LANES];
        store(at, weigh.bucket(v)), store(w, heavy);
        for (int j = 0; j < std::min(LANES, n - i); j++) {  // written before it is known to stay: no branch to guess
            all[found] = {{x[i + j], i + j}, w[j], (int32_t)at[j]};
            found += w[j] > faint;
        }
    }
    std::vector<double> mass(BUCKETS);
    for (int i = 0; i < found; i++) mass[all[i].bucket] += all[i].weight;
    auto open = [&](int b) {
        inside.clear();
        for (int i = 0; i < found; i++)
            if (all[i].bucket == b) inside.push_back(all[i].one);
        std::sort(inside.begin(), inside.end());
        weigh_all(weigh, inside, weight);
    };
    double whole = 0;  // of the buckets kept whole
    int end = 0;
    const int faintest = how.min_p > 0 ? std::min(BUCKETS - 1, (int)(-std::log2(how.min_p) * FINE) - 1) : BUCKETS - 1;
    while (end < faintest && whole + mass[end] < limit) whole += mass[end++];
    Kept part{0, 0};
    for (;; whole += mass[end++]) {  // min-p may end in the next bucket yet
        open(end);
        part = keep(weight, (int)inside.size(), whole, limit, how.min_p, end == 0);
        if (part.count < (int)inside.size() || end == BUCKETS - 1) break;
    }
    const double total = whole + part.mass, target = std::min(how.uniform * total, total * BELOW_ONE);
    double reached = 0;
    int b = 0;
    while (b < end && reached + mass[b] <= target) reached += mass[b++];
    const int count = b < end ? (open(b), (int)inside.size()) : part.count;
    int i = 0;
    while (i + 1 < count && (reached += weight[i]) <= target) i++;
    return inside[i].id;
}

// temperature, then top-k, then top-p over what is left, then min-p.
int draw_from_likeliest(const float* x, int n, const Draw& how, float most) {
    thread_local std::vector<Candidate> top;
    thread_local std::vector<float> weight;
    const Weigher weigh(how.temperature, most);
    const bool whole = how.top_k <= 0 || how.top_k >= n;
    const int count = whole ? std::min(n, FEW) : how.top_k;
    likeliest(x, n, count, top);
    weigh_all(weigh, top, weight);
    double limit = INFINITY, total = 0;
    if (how.top_p < 1) {
        if (whole)
            for (int i = 0; i < n; i += BLOCK) total += weight_of(weigh, x + i, std::min(BLOCK, n - i));
        else
            for (int i = 0; i < count; i++) total += weight[i];
        limit = how.top_p * total;
    }
    const Kept kept = keep(weight, count, 0, limit, how.min_p, true);
    if (whole && kept.count == count && count < n) return draw_from_buckets(x, n, how, weigh, limit, total);
    return top[passed(kept.count, kept.mass, how.uniform, weight.data())].id;
}

}  // namespace

int32_t draw(const float* x, int n, const Draw& how) {
    if (how.temperature <= 0) return first_largest(x, n);
    const float most = largest(x, n);
    const bool filtered = how.top_k > 0 || how.top_p < 1 || how.min_p > 0;
    return filtered ? draw_from_likeliest(x, n, how, most) : draw_from_all(x, n, how, most);
}

int32_t draw_allowed(const float* x, int n, const Draw& how, const uint32_t* mask) {
    if (how.temperature <= 0) return first_largest_allowed(x, n, mask);
    thread_local std::vector<float> allowed;
    allowed.assign(x, x + n);
    for (int i = 0; i < n; i += 32) {  // most words are all of one kind
        const uint32_t bits = mask[i / 32];
        const int count = std::min(32, n - i);
        if (!bits) std::fill_n(&allowed[i], count, -INFINITY);
        else if (~bits)
            for (int j = 0; j < count; j++)
                if (!(bits >> j & 1)) allowed[i + j] = -INFINITY;
    }
    const int32_t id = draw(allowed.data(), n, how);
    return allowed[id] == -INFINITY ? -1 : id;
}

// A row is read once: each part of it, while it is near, gives its largest value, its weights, and who is above the token.
void describe(const float* x, int n, int token, int count, double* logprob, int32_t* rank, int32_t* ids, double* logprobs) {
    thread_local std::vector<Candidate> top;
    const float own = x[token];
    float most = -INFINITY;
    double total = 0;  // relative to `most`
    int above = 0;
    for (int i = 0; i < n; i += BLOCK) {
        const float* part = x + i;
        const int size = std::min(BLOCK, n - i);
        const float here = largest(part, size);
        if (here == -INFINITY) continue;
        if (here > own)
            for (int j = 0; j < size; j++) above += part[j] > own;
        if (here > most) total *= std::exp((double)most - here), most = here;
        total += weight_of(Weigher(1.0f, most), part, size);
    }
    const double base = most + std::log(total);
    *logprob = own - base, *rank = above + 1;
    if (count) likeliest(x, n, count, top);
    for (int i = 0; i < count; i++) ids[i] = top[i].id, logprobs[i] = top[i].x - base;
}

}  // namespace rn
