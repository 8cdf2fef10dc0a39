// Numbers in either variant of e4m3. `step`: the smallest one; `nan`: the byte that is none.

#pragma once

#include "vectors.h"

typedef uint8_t Bytes __attribute__((vector_size(LANES)));

// Exponent and fraction of a code, moved to where a float has its own, are the number times 2^-129
// of its steps; this holds next to zero too, where floats have no leading one either.
static inline Vec decode_fp8(const uint8_t* from, float step, int32_t nan) {
  Bytes raw;
  std::memcpy(&raw, from, sizeof raw);
  Ints code = __builtin_convertvector(raw, Ints);
  Ints bits = (code & 0x7f) << 20 | (code & 0x80) << 24;
  Vec value;
  std::memcpy(&value, &bits, sizeof value);
  value = value * same(step * 0x1p120f * 0x1p9f);
  return (code & (nan | 0x7f)) == nan ? same(__builtin_nanf("")) : value;
}

// `count` numbers of one scale, of which none after the last is read or written.
static inline void decode_group(const uint8_t* from, int64_t count, float scale, float step,
                                int32_t nan, float* to) {
  int64_t c = 0;
  for (; c + LANES <= count; c += LANES) store(to + c, decode_fp8(from + c, step, nan) * same(scale));
  if (c == count) return;
  uint8_t few[LANES] = {};
  std::memcpy(few, from + c, count - c);
  Vec last = decode_fp8(few, step, nan) * same(scale);
  std::memcpy(to + c, &last, (count - c) * sizeof(float));
}
