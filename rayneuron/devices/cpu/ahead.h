// Pages of KV are there before they are written. Blocks come into use from the first on; a machine that gives new memory slowly (a virtual one
// 0.7 GB/s) would hold the step that crosses into new huge pages, of all layers at once, for as long as ten others.
#pragma once
#include <condition_variable>
#include <mutex>
#include <sys/mman.h>
#include <sys/resource.h>
#include <thread>
#include <vector>

namespace rn {

class Ahead {
   public:
    // `at`: each layer's blocks, of so many bytes each.
    Ahead(std::vector<char*> at, size_t block_bytes, int blocks)
        : at_(std::move(at)), bytes_(block_bytes), blocks_(blocks), piece_((int)(HUGE / block_bytes) + 1) {}
    ~Ahead() {
        {
            std::lock_guard<std::mutex> held(lock_);
            stop_ = true;
        }
        told_.notify_one();
        if (thread_.joinable()) thread_.join();
    }

    // A step writes this block and none behind it. What lies a huge page or two behind is taken meanwhile.
    void reach(int block) {
        if (block < asked_ - piece_ || asked_ >= blocks_) return;
        {
            std::lock_guard<std::mutex> held(lock_);
            asked_ = std::min(blocks_, block + 1 + 2 * piece_);
        }
        if (!thread_.joinable()) thread_ = std::thread([this] { take(); });
        told_.notify_one();
    }

   private:
    static constexpr size_t HUGE = 2 << 20;
    static constexpr int NICE = 10;        // beside threads that compute it gets a tenth of a core, which is enough
    static constexpr int TO_WRITE = 23;    // MADV_POPULATE_WRITE, since Linux 5.14; what refuses it gives pages as they are touched

    void take() {
        setpriority(PRIO_PROCESS, 0, NICE);  // of this thread
        std::unique_lock<std::mutex> held(lock_);
        for (int done = 0; done < blocks_;) {
            told_.wait(held, [&] { return stop_ || done < asked_; });
            if (stop_) return;
            const int to = std::min(asked_, done + piece_);
            held.unlock();
            for (char* layer : at_) {
                const uintptr_t from = (uintptr_t)(layer + done * bytes_) & ~(uintptr_t)4095;
                if (madvise((void*)from, (uintptr_t)(layer + to * bytes_) - from, TO_WRITE) != 0) return;
            }
            held.lock();
            done = to;
        }
    }

    const std::vector<char*> at_;
    const size_t bytes_;
    const int blocks_, piece_;
    int asked_ = 0;
    bool stop_ = false;
    std::mutex lock_;
    std::condition_variable told_;
    std::thread thread_;
};

}  // namespace rn
