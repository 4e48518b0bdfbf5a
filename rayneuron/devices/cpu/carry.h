// Stretches of memory hashed, and copied in the same pass.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace rn {

constexpr size_t CARRY_LEAST = 241;  // bytes; of what is shorter XXH3 is another function

// XXH3, 64 bits, of `size` bytes at `from`, which come to lie at `to` too unless that is null. Each byte that is written is the one
// that was hashed, whoever else writes at `from` meanwhile.
uint64_t carry(const char* from, char* to, size_t size);
void carried();

}  // namespace rn
