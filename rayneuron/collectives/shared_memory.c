/* The waiting and summing of collectives/shared_memory.py and group/board.py, outside Python's lock.
 *
 * The segment starts with one cache line a counter: line 0 is non-zero once the group is broken, line 1 + r counts the turns rank r has
 * written. Data slots follow; their places are the caller's business. A turn is published after its data (release) and read before it
 * (acquire). Sums run over ranks in rank order on every rank, hence give every rank the same bits.
 */
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define RELAX() _mm_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ __volatile__("yield")
#else
#define RELAX() ((void)0)
#endif

typedef struct {
  _Atomic uint64_t turn;
  double busy; /* a board's alone */
  char rest[48];
} line;

enum { YIELD_NS = 300 * 1000, NAP_NS = 50 * 1000 };
enum { READY = -1, BROKEN = -2 };

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* READY once the counters of lines [first, first + count) have all reached `turn`; the number of one that has not after `patience_ns`; or BROKEN.
 * Spins first, then yields, then naps: with more ranks than cores the one that is waited for needs the core. */
int rn_wait(char *base, int first, int count, uint64_t turn, int spins, int64_t patience_ns) {
  line *lines = (line *)base;
  int64_t start = 0;
  int left = spins;
  for (int r = first; r < first + count; r++) {
    while (atomic_load_explicit(&lines[r].turn, memory_order_acquire) < turn) {
      if (left > 0) {
        left--;
        RELAX();
        continue;
      }
      if (atomic_load_explicit(&lines[0].turn, memory_order_relaxed)) return BROKEN;
      int64_t now = now_ns();
      if (!start) start = now;
      if (now - start > patience_ns) return r;
      if (now - start < YIELD_NS) {
        sched_yield();
      } else {
        struct timespec nap = {0, NAP_NS};
        nanosleep(&nap, 0);
      }
    }
  }
  return READY;
}

/* Publish: what was written before is seen by whoever has seen the counter. */
void rn_post(char *base, int which, uint64_t turn) {
  atomic_store_explicit(&((line *)base)[which].turn, turn, memory_order_release);
}

static float widen(uint16_t half) {
  uint32_t bits = (uint32_t)half << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

static uint16_t narrow(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u); /* NaN stays one */
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);                 /* to nearest, ties to even */
}

/* out[i] = slot 0 [i] + slot 1 [i] + ...; `data`: slot 0, the others `stride` bytes apart. kind 0: float, 1: bfloat16, summed in float. */
void rn_sum(const char *data, int ranks, uint64_t stride, void *out, uint64_t count, int kind) {
  enum { BLOCK = 1024 };
  float sum[BLOCK];
  for (uint64_t at = 0; at < count; at += BLOCK) {
    uint64_t n = count - at < BLOCK ? count - at : BLOCK;
    for (int r = 0; r < ranks; r++) {
      const char *slot = data + (uint64_t)r * stride;
      if (kind == 0) {
        const float *x = (const float *)slot + at;
        if (r == 0) memcpy(sum, x, n * 4);
        else for (uint64_t i = 0; i < n; i++) sum[i] += x[i];
      } else {
        const uint16_t *x = (const uint16_t *)slot + at;
        if (r == 0) for (uint64_t i = 0; i < n; i++) sum[i] = widen(x[i]);
        else for (uint64_t i = 0; i < n; i++) sum[i] += widen(x[i]);
      }
    }
    if (kind == 0) memcpy((float *)out + at, sum, n * 4);
    else for (uint64_t i = 0; i < n; i++) ((uint16_t *)out + at)[i] = narrow(sum[i]);
  }
}

/* The whole all-reduce of a small tensor in one call: write, publish, wait, sum. Returns as rn_wait; only on READY is `out` written. */
int rn_reduce(char *base, char *data, int rank, int ranks, uint64_t stride, uint64_t turn, const void *in, void *out, uint64_t count, int kind,
              int spins, int64_t patience_ns) {
  memcpy(data + (uint64_t)rank * stride, in, count * (kind == 0 ? 4 : 2));
  rn_post(base, 1 + rank, turn);
  int state = rn_wait(base, 1, ranks, turn, spins, patience_ns);
  if (state == READY) rn_sum(data, ranks, stride, out, count, kind);
  return state;
}

/* A board's lines: what has been written, what all have answered, what is waited for. Nobody spins: many may share a core. */
enum { WRITTEN = 1, ANSWERED = 2, WANTED = 3 };

/* The half of a counter that changes with every turn: what the kernel looks at before it lets a process sleep. */
static uint32_t *low_half(line *l) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  return (uint32_t *)&l->turn;
#else
  return (uint32_t *)&l->turn + 1;
#endif
}

static void wake(line *l) { syscall(SYS_futex, low_half(l), FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

/* Publish a turn and wake all who sleep on it. */
void rn_ring(char *base, int which, uint64_t turn) {
  line *l = (line *)base + which;
  atomic_store(&l->turn, turn);
  wake(l);
}

/* End every sleep of a board, now and later. */
void rn_break(char *base) {
  line *lines = (line *)base;
  atomic_store(&lines[0].turn, 1);
  wake(&lines[WRITTEN]);
  wake(&lines[ANSWERED]);
}

/* Sleep until the counter of `which` has reached `turn`: READY; its number after `patience_ns` or at a signal; or BROKEN. */
static int sleep_until(char *base, int which, uint64_t turn, int64_t patience_ns) {
  line *lines = (line *)base, *l = lines + which;
  int64_t until = 0;
  uint64_t seen;
  while ((seen = atomic_load(&l->turn)) < turn) {
    if (atomic_load(&lines[0].turn)) return BROKEN;
    int64_t now = now_ns();
    if (!until) until = now + patience_ns;
    if (now >= until) return which;
    struct timespec left = {(until - now) / 1000000000, (until - now) % 1000000000};
    if (syscall(SYS_futex, low_half(l), FUTEX_WAIT, (uint32_t)seen, &left, NULL, 0) && errno == EINTR) return which;
  }
  return READY;
}

/* Wait for what is written at `turn`; `mine` says that what was written before has been read. */
int rn_read(char *base, int mine, uint64_t turn, int64_t patience_ns) {
  rn_post(base, mine, turn - 1);
  return sleep_until(base, WRITTEN, turn, patience_ns);
}

/* The first of lines [first, first + count) that has not reached `turn`, or READY. */
static int behind(line *lines, int first, int count, uint64_t turn) {
  for (int r = first; r < first + count; r++)
    if (atomic_load(&lines[r].turn) < turn) return r;
  return READY;
}

/* `mine` of lines [first, first + count) has done `turn`. Who finds that all have reached what is wanted says so: one wake for all of them. */
void rn_answer(char *base, int mine, uint64_t turn, double busy, int first, int count) {
  line *lines = (line *)base;
  lines[mine].busy = busy;
  atomic_store(&lines[mine].turn, turn);
  uint64_t wanted = atomic_load(&lines[WANTED].turn);
  if (atomic_load(&lines[ANSWERED].turn) < wanted && behind(lines, first, count, wanted) == READY) rn_ring(base, ANSWERED, wanted);
}

/* Sleep until all of them have done `turn`: READY; the first that has not after `patience_ns` or at a signal; or BROKEN. */
int rn_collect(char *base, uint64_t turn, int first, int count, int64_t patience_ns) {
  line *lines = (line *)base;
  atomic_store(&lines[WANTED].turn, turn); /* before the look: an answer that the look does not see will see this */
  if (behind(lines, first, count, turn) == READY) return READY;
  int state = sleep_until(base, ANSWERED, turn, patience_ns);
  return state == BROKEN ? BROKEN : behind(lines, first, count, turn);
}
