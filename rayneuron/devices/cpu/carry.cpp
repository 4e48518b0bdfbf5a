// XXH3 as its specification has it: 8 sums of 64 bits over stripes of 64 bytes, stirred every 16 stripes.
#include "carry.h"

#include "simd.h"

namespace rn {

namespace {

constexpr int STRIPE = 64, BLOCK = 16;  // bytes, stripes
constexpr uint64_t P32_1 = 0x9E3779B1, P32_2 = 0x85EBCA77, P32_3 = 0xC2B2AE3D;
constexpr uint64_t P64_1 = 0x9E3779B185EBCA87, P64_2 = 0xC2B2AE3D27D4EB4F, P64_3 = 0x165667B19E3779F9, P64_4 = 0x85EBCA77C2B2AE63, P64_5 = 0x27D4EB2F165667C5;
constexpr int LAST = 192 - STRIPE;  // of the secret: what stirs
constexpr int AHEAD = 1024;  // bytes that are fetched before they are needed
enum How { HASH, COPY, STREAM };  // STREAM: what is copied is read much later, and spares the caches and a read of what is overwritten

alignas(64) const uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb,
    0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc,
    0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

template <How how> inline D taken(D sums, const char* from, char* to, int secret) {
    __builtin_prefetch(from + AHEAD);
    const D data = held(dload(from));
    if (how == COPY) dstore(to, data);
    if (how == STREAM) dstream(to, data);
    const D keyed = dxor(data, dload(SECRET + secret));
    return qadd(qadd(sums, qswap(data)), qmul(keyed, qright<32>(keyed)));
}

inline D stirred(D sums) {
    const D prime = dset1((uint32_t)P32_1), mixed = dxor(dxor(sums, qright<47>(sums)), dload(SECRET + LAST));
    return qadd(qmul(mixed, prime), qleft32(qmul(qright<32>(mixed), prime)));
}

uint64_t secret_at(int at) {
    uint64_t found;
    memcpy(&found, SECRET + at, 8);
    return found;
}

uint64_t merged(const uint64_t* sums, size_t size) {
    uint64_t all = size * P64_1;
    for (int i = 0; i < 4; i++) {
        const unsigned __int128 product = (unsigned __int128)(sums[2 * i] ^ secret_at(11 + 16 * i)) * (sums[2 * i + 1] ^ secret_at(19 + 16 * i));
        all += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    all ^= all >> 37;
    all *= 0x165667919E3779F9;
    return all ^ (all >> 32);
}

template <How how> uint64_t over(const char* from, char* to, size_t size) {
    alignas(64) uint64_t lanes[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    D sums = dload(lanes);
    const size_t stripes = (size - 1) / STRIPE;  // without the last, which ends where the bytes end
    size_t at = 0;
    for (; at + BLOCK <= stripes; at += BLOCK) {
        for (int i = 0; i < BLOCK; i++) sums = taken<how>(sums, from + (at + i) * STRIPE, to + (at + i) * STRIPE, 8 * i);
        sums = stirred(sums);
    }
    for (int i = 0; at + i < stripes; i++) sums = taken<how>(sums, from + (at + i) * STRIPE, to + (at + i) * STRIPE, 8 * i);
    sums = taken<how == HASH ? HASH : COPY>(sums, from + size - STRIPE, to + size - STRIPE, LAST - 7);
    dstore(lanes, sums);
    return merged(lanes, size);
}

}  // namespace

uint64_t carry(const char* from, char* to, size_t size) {
    if (!to) return over<HASH>(from, to, size);
    return (uintptr_t)to % STRIPE ? over<COPY>(from, to, size) : over<STREAM>(from, to, size);
}

void carried() { _mm_sfence(); }

}  // namespace rn
