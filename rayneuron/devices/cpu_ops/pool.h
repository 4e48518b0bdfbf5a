// A team of threads for one rank. Work is claimed, never assigned: the caller takes part, and waits only for pieces somebody has begun.
// So a thread that the machine gives to somebody else costs its share of the work, never a stall, and nobody spins longer than SPINS.
#pragma once
#include <atomic>
#include <cstdint>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace rn {

class Pool {
   public:
    explicit Pool(int threads) {
        for (int i = 1; i < threads; i++) crew_.emplace_back([this] { serve(); });
    }
    ~Pool() {
        stop_.store(true);
        call();
        for (auto& t : crew_) t.join();
    }
    int threads() const { return (int)crew_.size() + 1; }

    // f(i) for every i in [0, pieces), on whichever threads are free. Returns when all are done.
    template <class F> void run(int pieces, const F& f) {
        if (crew_.empty() || pieces <= 1) {
            for (int i = 0; i < pieces; i++) f(i);
            return;
        }
        work_ = [](const void* at, int i) { (*static_cast<const F*>(at))(i); };
        at_ = &f;
        done_.store(0, std::memory_order_relaxed);
        open_.store((uint64_t)pieces << 32);
        if (asleep_.load()) call();
        while (take()) {
        }
        finish(pieces);
    }

   private:
    static constexpr int SPINS = 1500;  // pauses, about 20 to 50 us: longer than the gap between two pieces of a step

    static void wait_on(std::atomic<int>& word, int value) { syscall(SYS_futex, (int*)&word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0); }
    static void wake(std::atomic<int>& word) { syscall(SYS_futex, (int*)&word, FUTEX_WAKE_PRIVATE, 1 << 20, nullptr, nullptr, 0); }

    void call() {
        calls_.fetch_add(1);
        wake(calls_);
    }

    // Claim one piece of the open work and do it; false where none is left. What is claimed cannot be replaced before it is done.
    bool take() {
        uint64_t s = open_.load();
        do {
            if ((uint32_t)s >= (uint32_t)(s >> 32)) return false;
        } while (!open_.compare_exchange_weak(s, s + 1));
        work_(at_, (int)(uint32_t)s);
        const int all = (int)(s >> 32);
        if (done_.fetch_add(1) + 1 == all && waiting_.load()) wake(done_);
        return true;
    }

    void finish(int pieces) {
        for (int i = 0; i < SPINS; i++) {
            if (done_.load(std::memory_order_acquire) == pieces) return;
            __builtin_ia32_pause();
        }
        waiting_.store(true);
        for (int d; (d = done_.load()) != pieces;) wait_on(done_, d);
        waiting_.store(false);
    }

    void serve() {
        for (int idle = 0; !stop_.load(std::memory_order_relaxed);) {
            if (take()) {
                idle = 0;
            } else if (++idle < SPINS) {
                __builtin_ia32_pause();
            } else {
                const int seen = calls_.load();
                asleep_.fetch_add(1);
                if (uint64_t s = open_.load(); (uint32_t)s >= (uint32_t)(s >> 32) && !stop_.load()) wait_on(calls_, seen);
                asleep_.fetch_sub(1);
                idle = 0;
            }
        }
    }

    std::vector<std::thread> crew_;
    alignas(64) std::atomic<uint64_t> open_{0};  // pieces << 32 | next
    void (*work_)(const void*, int) = nullptr;
    const void* at_ = nullptr;
    alignas(64) std::atomic<int> done_{0};
    alignas(64) std::atomic<int> calls_{0};
    std::atomic<int> asleep_{0};
    std::atomic<bool> waiting_{false};
    std::atomic<bool> stop_{false};
};

}  // namespace rn
