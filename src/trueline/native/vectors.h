// Vectors of floats as wide as the machine has them, and what every kernel does with them.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));

static inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
static inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
static inline Vec same(float x) { return x - Vec{}; }

static inline Vec exp_lanes(Vec x) {
  // 2^n * e^r with |r| <= ln(2)/2; zero below the smallest normal number, infinity above the largest.
  Ints low = x < same(-87.0f), high = x > same(88.0f);
  Vec y = low || high ? Vec{} : x;
  const Vec magic = same(12582912.0f);  // adding it rounds to an integer
  Vec t = y * same(1.44269504088896341f) + magic;
  Vec n = t - magic;
  Vec r = y - n * same(0.693359375f);
  r = r - n * same(-2.12194440e-4f);
  Vec p = same(1.9875691500e-4f);
  p = p * r + same(1.3981999507e-3f);
  p = p * r + same(8.3334519073e-3f);
  p = p * r + same(4.1665795894e-2f);
  p = p * r + same(1.6666665459e-1f);
  p = p * r + same(5.0000001201e-1f);
  p = p * r * r + r + same(1.0f);
  Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  Vec scale;
  std::memcpy(&scale, &power, sizeof scale);
  return low ? Vec{} : high ? same(__builtin_inff()) : p * scale;
}

typedef float Four __attribute__((vector_size(16)));
typedef float Eight __attribute__((vector_size(32)));

static inline float sum_lanes(Vec v) {
#if defined(__AVX512F__)
  Eight half = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
               __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  Eight half = v;
#endif
  Four four = __builtin_shufflevector(half, half, 0, 1, 2, 3) +
              __builtin_shufflevector(half, half, 4, 5, 6, 7);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// Scratch that grows and stays; one per thread, never shared.
struct Scratch {
  float* data = nullptr;
  size_t size = 0;
  float* get(size_t count) {
    if (count > size) {
      std::free(data);
      size = count + count / 2;
      data = static_cast<float*>(std::aligned_alloc(64, (size * 4 + 63) / 64 * 64));
    }
    return data;
  }
};
