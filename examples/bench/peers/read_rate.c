// How fast this machine reads memory: every thread adds up its part of a buffer as four streams of 64-byte vectors.
// cc -O3 -march=native -fopenmp -shared -fPIC read_rate.c -o read_rate.so

typedef long long vector __attribute__((vector_size(64)));

long long read_all(const vector *buffer, long long vectors, int threads) {
    long long total = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : total) schedule(static)
    for (int t = 0; t < threads; t++) {
        const long long stream = vectors / threads / 4;
        const vector *at = buffer + t * (vectors / threads);
        vector a = {0}, b = {0}, c = {0}, d = {0};
        for (long long i = 0; i < stream; i++) {
            a += at[i];
            b += at[i + stream];
            c += at[i + 2 * stream];
            d += at[i + 3 * stream];
        }
        a += b + c + d;
        for (int i = 0; i < 8; i++) total += a[i];
    }
    return total;
}
