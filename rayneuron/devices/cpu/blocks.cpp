#include "blocks.h"

#include "rows.h"

namespace rn {
namespace {

// 16 rows of dwords, `stride` dwords apart -> their columns, the vectors of a panel: out[c * PANEL + row].
void columns(const uint32_t* in, size_t stride, int cols, uint32_t* out) {
    int c = 0;
#ifdef RN_AVX512
    for (; c + 16 <= cols; c += 16) {
        __m512i r[16], t[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(in + i * stride + c);
#pragma GCC unroll 8
        for (int i = 0; i < 16; i += 2) t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
#pragma GCC unroll 4
        for (int i = 0; i < 16; i += 4) {
            r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]), r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
            r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]), r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88), t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
            t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88), t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            _mm512_storeu_si512(out + (c + i) * PANEL, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
            _mm512_storeu_si512(out + (c + i + 4) * PANEL, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88));
            _mm512_storeu_si512(out + (c + i + 8) * PANEL, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
            _mm512_storeu_si512(out + (c + i + 12) * PANEL, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd));
        }
    }
#endif
    for (; c < cols; c++)
        for (int i = 0; i < 16; i++) out[c * PANEL + i] = in[i * stride + c];
}

// `count` positions of one head copied to rows of `width` values, zeros after them up to the next vector.
const char* padded(const char* at, int count, const Sizes& z, char* room) {
    const size_t from = (size_t)z.size * z.bytes, to = (size_t)z.width * z.bytes;
    memset(room, 0, (count + LANES - 1) / LANES * LANES * to);
    for (int i = 0; i < count; i++) memcpy(room + i * to, at + i * from, from);
    return room;
}

// Values of `count` positions, the `first` of a tile (even) and those behind it -> panels over positions: for every 16 values, step by step,
// one float or the bf16 of two positions.
void pack_values(Kind kind, const char* v, int first, int count, const Sizes& z, char* out) {
    for (int p = 0; p < z.vectors; p++) {
        char* to = out + (size_t)(p / 2) * z.panel_bytes() + p % 2 * VECTOR + (size_t)first * z.bytes / 4 * STEP;
        if (kind == F32) {
            for (int i = 0; i < count; i++, to += STEP) store((float*)to, load((const float*)v + (size_t)i * z.width + p * LANES));
            continue;
        }
        const bf16* from = (const bf16*)v + p * LANES;
        int i = 0;
        for (; i + 2 <= count; i += 2, to += STEP) dstore(to, both(low16(from + (size_t)i * z.width), high16(from + (size_t)(i + 1) * z.width)));
        if (i < count) dstore(to, low16(from + (size_t)i * z.width));
    }
}

// Zeros in every panel of a tile of values from step `from` on.
void clear_values(const Sizes& z, int from, char* values) {
    for (int p = 0; p < (z.vectors + 1) / 2; p++) memset(values + p * z.panel_bytes() + from * STEP, 0, z.panel_bytes() - from * STEP);
}

int value_steps(int count, const Sizes& z) { return (count * z.bytes + 3) / 4; }

}  // namespace

void keep(const Blocks& to, Kind kind, int id, int head, int offset, const float* k, const float* v) {
    if (!to.panels) {
        char* at = to.keys(id, head, offset);
        narrow_row(k, kind, to.size, at);
        narrow_row(v, kind, to.size, at + to.half());
        return;
    }
    const int place = offset % TILE, dwords = LANES * to.bytes / 4;
    char* tile = to.keys(id, head, offset - place);
    uint32_t* key = (uint32_t*)tile + (size_t)(place / PANEL) * (to.size * to.bytes / 4) * PANEL + place % PANEL;
    char* value = tile + to.half() + (size_t)place * to.bytes / 4 * STEP;
    for (int i = 0; i < to.size; i += LANES) {
        alignas(64) uint32_t t[LANES];
        narrow_row(k + i, kind, LANES, t);
        for (int s = 0; s < dwords; s++, key += PANEL) *key = t[s];
        char* at = value + (size_t)(i / PANEL) * TILE * to.bytes * PANEL + i % PANEL * 4;
        if (kind == F32) store((float*)at, load(v + i));
        else store_halves(at, load(v + i), place % 2);
    }
}

Panels Packer::pack(const Blocks& from, Kind kind, const Sizes& z, int row, int head, int start, int count) const {
    const bool whole = z.size == z.width;
    for (int i = 0; i < count;) {
        const int left = from.block - (start + i) % from.block, n = std::min(count - i, left), vectors = (n + LANES - 1) / LANES;
        const char* at = from.keys_at(row, head, start + i);
        const char* rows = whole && vectors * LANES <= left ? at : padded(at, n, z, copy);  // what is read beyond `n` is masked
        for (int p = 0; p < vectors; p++) {
            const int vector = i / LANES + p;
            columns((const uint32_t*)rows + (size_t)p * LANES * z.steps, z.steps, z.steps, (uint32_t*)keys + (size_t)(vector / 2) * PANEL * z.steps + vector % 2 * LANES);
        }
        at += from.half();
        pack_values(kind, whole ? at : padded(at, n, z, copy), i, n, z, values);
        i += n;
    }
    if (count < TILE) clear_values(z, value_steps(count, z), values);
    return {keys, values};
}

Panels written(const char* at, size_t half, Kind kind, const Sizes& z, int count, char* room) {
    if (count == TILE || kind == F32) return {at, at + half};
    const int steps = value_steps(count, z);
    for (int p = 0; p < z.vectors / 2; p++) memcpy(room + p * z.panel_bytes(), at + half + p * z.panel_bytes(), steps * STEP);
    clear_values(z, steps, room);
    for (int p = 0; p < z.vectors / 2 && count % 2; p++) {
        char* last = room + p * z.panel_bytes() + (steps - 1) * STEP;
        dstore(last, low_halves(dload(last))), dstore(last + VECTOR, low_halves(dload(last + VECTOR)));
    }
    return {at, room};
}

}  // namespace rn
