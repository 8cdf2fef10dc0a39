// Attention of a few heads over lists of cached rows, in tiles of 64 list entries.

#pragma once

#include <type_traits>

#include "fp8.h"
#include "halves.h"
#include "pool.h"
#include "vectors.h"

#if defined(__AVX512F__)
constexpr int KEYS = 3;  // keys multiplied together with all heads of a group: fits the registers
constexpr int RUNS = 2;  // runs of channels added up together: the same
#else
constexpr int KEYS = 1;
constexpr int RUNS = 1;
#endif
constexpr int TILE = 64;  // keys taken together, counted from the first
constexpr int HEADS = 8;  // heads that share one reading of the keys

// Rows of the latent cache: [latent | rotated key], plain; or fp8 codes of the latent, a scale per
// group of its channels from byte `scales` on, and the plain key from byte `key` on.
struct CachedRows {
  const uint8_t* bytes;
  int64_t row_bytes, latent, rope;
  int64_t group, scales, key;
  float step;  // fp8: the smallest number; 0 where rows are plain
  int32_t nan;  // fp8: the byte that is none
  Plain plain;

  int64_t width() const { return latent + rope; }
  bool decoded() const { return step || plain != Plain::FLOAT32; }
  // The numbers of a cell: where they lie, or decoded into row `place` of `tile`.
  const float* read(int64_t cell, float* tile, int64_t place) const {
    const uint8_t* row = bytes + cell * row_bytes;
    if (!decoded()) return reinterpret_cast<const float*>(row);
    float* to = tile + place * width();
    if (!step) {
      widen(row, plain, width(), to);
      return to;
    }
    const uint8_t* scale_at = row + scales;
    for (int64_t first = 0; first < latent; first += group, scale_at += sizeof(float)) {
      float scale;
      std::memcpy(&scale, scale_at, sizeof scale);
      int64_t count = latent - first < group ? latent - first : group;
      decode_group(row + first, count, scale, step, nan, to + first);
    }
    widen(row + key, plain, rope, to + latent);
    return to;
  }
};

// How Python passes them.
#define CACHED_ROWS(of)                                                                     \
  const uint8_t *of##_bytes, int64_t of##_row, int64_t of##_latent, int64_t of##_rope,      \
      int64_t of##_group, int64_t of##_scales, int64_t of##_key, float of##_step,           \
      int64_t of##_nan, int64_t of##_plain
#define THE_CACHED_ROWS(of)                                                                 \
  CachedRows {                                                                              \
    of##_bytes, of##_row, of##_latent, of##_rope, of##_group, of##_scales, of##_key,        \
        of##_step, static_cast<int32_t>(of##_nan), static_cast<Plain>(of##_plain)           \
  }

static thread_local Scratch decoded_scratch;

// scores[h][j] = q[h] . keys[j], for N heads and K keys.
template <int N, int K>
static inline void dot(const float* q, const float* const* keys, int64_t width, float* scores) {
  Vec total[N][K] = {};
  int64_t c = 0;
  for (; c + LANES <= width; c += LANES) {
    Vec key[K];
    for (int j = 0; j < K; j++) key[j] = load(keys[j] + c);
#pragma GCC unroll 8
    for (int h = 0; h < N; h++) {
      Vec query = load(q + h * width + c);
      for (int j = 0; j < K; j++) total[h][j] = fused(query, key[j], total[h][j]);
    }
  }
  for (int h = 0; h < N; h++)
    for (int j = 0; j < K; j++) {
      float rest = 0;
      for (int64_t i = c; i < width; i++) rest += q[h * width + i] * keys[j][i];
      scores[h * TILE + j] = sum_lanes(total[h][j]) + rest;
    }
}

// out[h] += sum over the tile's keys of p[h][key] * latent[key], for W runs of LANES channels.
template <int N, int W>
static inline void add_values(const float (*p)[TILE], const float* const* keys, int64_t count,
                              float* out, int64_t latent) {
  Vec total[N][W];
  for (int h = 0; h < N; h++)
    for (int w = 0; w < W; w++) total[h][w] = load(out + h * latent + w * LANES);
  for (int64_t j = 0; j < count; j++) {
    Vec value[W];
    for (int w = 0; w < W; w++) value[w] = load(keys[j] + w * LANES);
#pragma GCC unroll 8
    for (int h = 0; h < N; h++)
      for (int w = 0; w < W; w++) total[h][w] = fused(same(p[h][j]), value[w], total[h][w]);
  }
  for (int h = 0; h < N; h++)
    for (int w = 0; w < W; w++) store(out + h * latent + w * LANES, total[h][w]);
}

template <int N>
static void add_tile(const float (*p)[TILE], const float** keys, int64_t count, float* out,
                     int64_t latent) {
  int64_t c = 0;
  for (; c + RUNS * LANES <= latent; c += RUNS * LANES) {
    add_values<N, RUNS>(p, keys, count, out + c, latent);
    for (int64_t j = 0; j < count; j++) keys[j] += RUNS * LANES;
  }
  for (; c + LANES <= latent; c += LANES) {
    add_values<N, 1>(p, keys, count, out + c, latent);
    for (int64_t j = 0; j < count; j++) keys[j] += LANES;
  }
  for (int h = 0; h < N; h++)
    for (int64_t i = 0; i < latent - c; i++) {
      float total = out[h * latent + c + i];
      for (int64_t j = 0; j < count; j++) total += p[h][j] * keys[j][i];
      out[h * latent + c + i] = total;
    }
}

// One softmax of N heads over lists of keys, which come one after the other.
template <int N>
struct Softmax {
  const float* q;      // [N, width]
  float* out;          // [N, values]
  int64_t values;      // the first numbers of a key, which are its value
  float scale;
  bool begun = false;
  float top[N], norm[N];

  Softmax(const float* q, float* out, int64_t values, float scale)
      : q(q), out(out), values(values), scale(scale) {
    for (int h = 0; h < N; h++) top[h] = -__builtin_inff(), norm[h] = 0;
    std::memset(out, 0, N * values * sizeof(float));
  }

  // `cell(j)` is that of the j-th key. Tiles begin with the list.
  template <typename Cell>
  void add(const CachedRows& cached, Cell cell, int64_t length) {
    const int64_t width = cached.width();
    float* decoded = cached.decoded() ? decoded_scratch.get(TILE * width) : nullptr;
    float scores[N][TILE];
    const float* keys[TILE];
    for (int64_t start = 0; start < length; start += TILE) {
      int64_t count = length - start < TILE ? length - start : TILE;
      for (int64_t j = 0; j < count; j++) keys[j] = cached.read(cell(start + j), decoded, j);
      int64_t j = 0;
      for (; j + KEYS <= count; j += KEYS) dot<N, KEYS>(q, keys + j, width, &scores[0][j]);
      for (; j < count; j++) dot<N, 1>(q, keys + j, width, &scores[0][j]);
      for (int h = 0; h < N; h++) weigh(h, scores[h], count);
      add_tile<N>(scores, keys, count, out, values);
      begun = true;
    }
  }

  // Scores become weights, and what there was is weighed anew.
  void weigh(int h, float* scores, int64_t count) {
    float best = top[h];
    for (int64_t j = 0; j < count; j++) {
      scores[j] *= scale;
      best = scores[j] > best ? scores[j] : best;
    }
    for (int64_t j = count; j < TILE; j++) scores[j] = -__builtin_inff();
    Vec sums = {};
    for (int64_t j = 0; j < TILE; j += LANES) {
      Vec p = exp_lanes(load(scores + j) - same(best));
      store(scores + j, p);
      sums += p;
    }
    float fade = begun ? exp_lanes(same(top[h] - best))[0] : 0.0f;
    norm[h] = norm[h] * fade + sum_lanes(sums);
    top[h] = best;
    if (begun && fade != 1.0f) times(h, fade);
  }

  void times(int h, float factor) {
    for (int64_t c = 0; c < values; c++) out[h * values + c] *= factor;
  }
};

template <int N, typename Cell>
static void attend_heads(const float* q, const CachedRows& cached, Cell cell, int64_t length,
                         float scale, float* out, float* lse) {
  Softmax<N> sum(q, out, cached.latent, scale);
  sum.add(cached, cell, length);
  for (int h = 0; h < N; h++) {
    bool some = sum.norm[h] > 0;
    sum.times(h, some ? 1.0f / sum.norm[h] : 0.0f);
    lse[h] = some ? sum.top[h] + __builtin_logf(sum.norm[h]) : -__builtin_inff();
  }
}

// use(n) for as many heads as are left, at most HEADS; n.value is known when it is compiled.
template <typename Use>
static inline void with_heads(int64_t left, const Use& use) {
  switch (left < HEADS ? left : HEADS) {
    case 1: return use(std::integral_constant<int, 1>());
    case 2: return use(std::integral_constant<int, 2>());
    case 3: return use(std::integral_constant<int, 3>());
    case 4: return use(std::integral_constant<int, 4>());
    case 5: return use(std::integral_constant<int, 5>());
    case 6: return use(std::integral_constant<int, 6>());
    case 7: return use(std::integral_constant<int, 7>());
    case 8: return use(std::integral_constant<int, 8>());
  }
}

// q [rows, heads, width] and out [rows, heads, latent], contiguous. `cell(i, j)` is that of the j-th
// of row i's `lengths[i]` keys: the first `latent` numbers of a key are its value too.
template <typename Cell>
static void attend_rows(const float* q, const CachedRows& cached, Cell cell, const int64_t* lengths,
                        int64_t rows, int64_t heads, float scale, float* out, float* lse) {
  const int64_t width = cached.width(), latent = cached.latent;
  int64_t groups = (heads + HEADS - 1) / HEADS;
  int64_t most = 0;
  for (int64_t i = 0; i < rows; i++) most = lengths[i] > most ? lengths[i] : most;
  parallel(rows * groups, most * width, [=](int64_t item) {
    int64_t i = item / groups, head = item % groups * HEADS, length = lengths[i];
    auto key = [=](int64_t j) { return cell(i, j); };
    const float* from = q + (i * heads + head) * width;
    float* to = out + (i * heads + head) * latent;
    float* z = lse + i * heads + head;
    with_heads(heads - head, [=](auto n) {
      attend_heads<n.value>(from, cached, key, length, scale, to, z);
    });
  });
}
