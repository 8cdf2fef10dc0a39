// Vectors of floats as wide as the machine has them, and what every kernel does with them.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

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

// a * b + c, rounded once where the machine can. Compilers are forbidden to fuse by themselves
// (-ffp-contract=off): they do it in one instance of a template and not in the next, and a head's
// bits would depend on how many others are computed with it.
static inline Vec fused(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

static inline Vec exp_lanes(Vec x) {
  // 2^n * e^r with |r| <= ln(2)/2; zero below the smallest normal number, infinity above the largest.
  Ints low = x < same(-87.0f), high = x > same(88.0f);
  Vec y = low || high ? Vec{} : x;
  const Vec magic = same(12582912.0f);  // adding it rounds to an integer
  Vec t = fused(y, same(1.44269504088896341f), magic);
  Vec n = t - magic;
  Vec r = fused(n, same(-0.693359375f), y);
  r = fused(n, same(2.12194440e-4f), r);
  Vec p = same(1.9875691500e-4f);
  p = fused(p, r, same(1.3981999507e-3f));
  p = fused(p, r, same(8.3334519073e-3f));
  p = fused(p, r, same(4.1665795894e-2f));
  p = fused(p, r, same(1.6666665459e-1f));
  p = fused(p, r, same(5.0000001201e-1f));
  p = fused(p * r, r, r) + same(1.0f);
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
