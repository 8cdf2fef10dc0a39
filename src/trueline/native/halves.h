// Numbers as caches have them: float32, or 16 bits.

#pragma once

#include "vectors.h"

enum class Plain : int32_t { FLOAT32, BFLOAT16, FLOAT16 };  // as in ops/mla_decode/native.py

typedef uint16_t Shorts __attribute__((vector_size(LANES * 2)));

// bfloat16 is the first half of a float. Of float16, exponent and fraction moved to where a float has
// its own are the number times 2^-112; this holds next to zero too, where neither has a leading one.
static inline Vec widened(const uint16_t* from, bool brain) {
  Shorts raw;
  std::memcpy(&raw, from, sizeof raw);
  Ints code = __builtin_convertvector(raw, Ints);
  Ints bits = brain ? code << 16 : (code & 0x7fff) << 13 | (code & 0x8000) << 16;
  Vec value;
  std::memcpy(&value, &bits, sizeof value);
  if (brain) return value;
  Vec none = (code & 0x3ff) != 0 ? same(__builtin_nanf("")) : value * same(__builtin_inff());
  return (code & 0x7c00) == 0x7c00 ? none : value * same(0x1p112f);
}

// `count` numbers, of which none after the last is read or written.
static inline void widen(const uint8_t* from, Plain plain, int64_t count, float* to) {
  if (plain == Plain::FLOAT32) {
    std::memcpy(to, from, count * sizeof(float));
    return;
  }
  bool brain = plain == Plain::BFLOAT16;
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(from);
  int64_t c = 0;
  for (; c + LANES <= count; c += LANES) store(to + c, widened(halves + c, brain));
  if (c == count) return;
  uint16_t few[LANES] = {};
  std::memcpy(few, halves + c, (count - c) * sizeof(uint16_t));
  Vec last = widened(few, brain);
  std::memcpy(to + c, &last, (count - c) * sizeof(float));
}
