// Sparse attention: scores of the indexer's cached keys, the positions with the largest, attention
// over those. Bits as in kernels.cpp: they depend on a row's own numbers alone.

#include <algorithm>
#include <vector>

#include "attention.h"
#include "fp8.h"
#include "pool.h"
#include "vectors.h"

static thread_local Scratch tile_scratch;

// ---- scores of cached keys ---------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int WIDE = 4;  // vectors of keys multiplied together with QUERIES heads: fits the registers
#else
constexpr int WIDE = 2;
#endif
constexpr int QUERIES = 4;

struct Keys {
  const uint8_t* bytes;
  const int64_t *starts, *scales;  // of each place of a block
  int64_t block_size, block_bytes;
  int64_t run, distance;  // bytes of a key side by side, and from one such run to the next
  float step;             // fp8: the smallest number; 0 where keys are float32
  int32_t nan;            // fp8: the byte that is none
  int64_t dim;
};

// LANES vectors of LANES numbers, rows to columns.
static inline void transpose(Vec* v) {
  Vec w[LANES];
  for (int size = 1; size < LANES; size *= 2) {
    for (int i = 0; i < LANES / 2; i++) {
#if defined(__AVX512F__)
      w[2 * i] = __builtin_shufflevector(v[i], v[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21,
                                         6, 22, 7, 23);
      w[2 * i + 1] = __builtin_shufflevector(v[i], v[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28,
                                             13, 29, 14, 30, 15, 31);
#else
      w[2 * i] = __builtin_shufflevector(v[i], v[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
      w[2 * i + 1] = __builtin_shufflevector(v[i], v[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
#endif
    }
    std::memcpy(v, w, sizeof w);
  }
}

// LANES numbers of a key from `channel` on; zeros after its last.
static inline Vec numbers(const uint8_t* key, const Keys& keys, float scale, int64_t channel) {
  int64_t left = keys.dim - channel;
  uint8_t few[LANES * 4] = {};
  int64_t size = keys.step ? 1 : 4;
  const uint8_t* from = key + channel * size;
  if (left < LANES) {
    std::memcpy(few, from, left * size);
    from = few;
  }
  if (keys.step) return decode_fp8(from, keys.step, keys.nan) * same(scale);
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

// Keys of positions start .. start + count as columns: to [dim][TILE], zeros after the last.
static void read_tile(const Keys& keys, const int64_t* blocks, int64_t start, int64_t count,
                      float* to) {
  int64_t size = keys.dim * (keys.step ? 1 : 4);
  std::vector<uint8_t> joined(keys.run < size ? LANES * size : 0);
  for (int64_t first = 0; first < TILE; first += LANES) {
    const uint8_t* key[LANES];
    float scale[LANES] = {};
    for (int j = 0; j < LANES && first + j < count; j++) {
      int64_t position = start + first + j, place = position % keys.block_size;
      const uint8_t* block =
          keys.bytes + blocks[position / keys.block_size] * keys.block_bytes;
      if (keys.step) std::memcpy(&scale[j], block + keys.scales[place], sizeof(float));
      key[j] = block + keys.starts[place];
      if (keys.run == size) continue;
      for (int64_t b = 0; b < size; b += keys.run)
        std::memcpy(joined.data() + j * size + b, key[j] + b / keys.run * keys.distance, keys.run);
      key[j] = joined.data() + j * size;
    }
    for (int64_t channel = 0; channel < keys.dim; channel += LANES) {
      Vec v[LANES];
      for (int j = 0; j < LANES; j++)
        v[j] = first + j < count ? numbers(key[j], keys, scale[j], channel) : Vec{};
      transpose(v);
      for (int c = 0; c < LANES && channel + c < keys.dim; c++)
        store(to + (channel + c) * TILE + first, v[c]);
    }
  }
}

// sums += weights[h] * relu(q[h] . key) for N heads, and WIDE vectors of keys.
template <int N>
static inline void score_heads(const float* q, const float* weights, const float* tile, int64_t dim,
                               Vec* sums) {
  Vec dots[N][WIDE] = {};
  for (int64_t c = 0; c < dim; c++) {
    Vec key[WIDE];
    for (int w = 0; w < WIDE; w++) key[w] = load(tile + c * TILE + w * LANES);
#pragma GCC unroll 4
    for (int h = 0; h < N; h++)
      for (int w = 0; w < WIDE; w++)
        dots[h][w] = fused(same(q[h * dim + c]), key[w], dots[h][w]);
  }
  for (int h = 0; h < N; h++)
    for (int w = 0; w < WIDE; w++) {
      Vec positive = dots[h][w] < Vec{} ? Vec{} : dots[h][w];  // NaN stays NaN
      sums[w] = fused(same(weights[h]), positive, sums[w]);
    }
}

static void score_row(const float* q, const float* weights, const float* tile, int64_t heads,
                      int64_t dim, float* scores) {
  for (int64_t first = 0; first < TILE; first += WIDE * LANES) {
    Vec sums[WIDE] = {};
    const float* keys = tile + first;
    int64_t h = 0;
    for (; h + QUERIES <= heads; h += QUERIES)
      score_heads<QUERIES>(q + h * dim, weights + h, keys, dim, sums);
    for (; h < heads; h++) score_heads<1>(q + h * dim, weights + h, keys, dim, sums);
    for (int w = 0; w < WIDE; w++) store(scores + first + w * LANES, sums[w]);
  }
}

// runs [.., 2]: first row, row after the last. lengths [rows]: keys that a row sees.
// items [.., 2]: run, first key.
extern "C" void index_scores(const float* q, const float* weights, const uint8_t* bytes,
                             const int64_t* blocks, int64_t most, const int64_t* starts,
                             const int64_t* scales, int64_t block_size, int64_t block_bytes,
                             int64_t run, int64_t distance, float step, int64_t nan,
                             const int64_t* runs, const int64_t* lengths, int64_t count,
                             const int64_t* items, int64_t heads, int64_t dim, float* scores,
                             int64_t width) {
  Keys keys{bytes, starts,  scales, block_size,           block_bytes, run,
            distance, step, static_cast<int32_t>(nan), dim};
  // Most runs are a sequence's one row.
  parallel(count, TILE * dim * heads / 8, [=](int64_t item) {
    float* tile = tile_scratch.get(dim * TILE);
    float made[TILE];
    int64_t owner = items[2 * item], start = items[2 * item + 1];
    int64_t first = runs[2 * owner], stop = runs[2 * owner + 1], longest = lengths[stop - 1];
    read_tile(keys, blocks + owner * most, start, std::min<int64_t>(longest - start, TILE), tile);
    for (int64_t row = first; row < stop; row++) {
      int64_t length = lengths[row];
      if (length <= start) continue;
      score_row(q + row * heads * dim, weights + row * heads, tile, heads, dim, made);
      int64_t sees = std::min<int64_t>(length - start, TILE);
      std::memcpy(scores + row * width + start, made, sees * sizeof(float));
    }
  });
}

// ---- the largest scores ------------------------------------------------------------------

// In the order of the numbers; NaN with -inf, -0 with 0.
static inline uint32_t rank(float x) {
  if (x != x) x = -__builtin_inff();
  x += 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The topk-th largest of the ranks, digit by digit from the highest; `left` becomes how many of the
// equal ones are among the topk.
static uint32_t last_rank(const std::vector<uint32_t>& ranks, int64_t& left) {
  constexpr int DIGIT = 8;
  uint32_t found = 0, known = 0;
  for (int shift = 32 - DIGIT; shift >= 0; shift -= DIGIT) {
    int64_t counts[1 << DIGIT] = {};
    for (uint32_t r : ranks)
      if ((r & known) == found) counts[r >> shift & 0xff]++;
    uint32_t digit = 0xff;
    while (counts[digit] < left) left -= counts[digit--];
    found |= digit << shift;
    known |= 0xffu << shift;
  }
  return found;
}

extern "C" void index_topk(const float* scores, int64_t stride, const int64_t* lengths,
                              int64_t rows, int64_t topk, int64_t* out) {
  parallel(rows, 8 * stride, [=](int64_t row) {
    static thread_local std::vector<uint32_t> ranks;
    int64_t *to = out + row * topk, length = lengths[row], n = 0;
    if (length <= topk) {
      for (; n < topk; n++) to[n] = n < length ? n : -1;
      return;
    }
    ranks.resize(length);
    for (int64_t p = 0; p < length; p++) ranks[p] = rank(scores[row * stride + p]);
    int64_t left = topk;
    uint32_t last = last_rank(ranks, left);
    for (int64_t p = 0; n < topk; p++)
      if (ranks[p] > last || (ranks[p] == last && left-- > 0)) to[n++] = p;
  });
}

// ---- attention over chosen cells ----------------------------------------------------------

// cells [rows, most], of which the first counts[row] are a row's keys.
extern "C" void sparse_mla(const float* q, CACHED_ROWS(cached), const int64_t* cells, int64_t most,
                           const int64_t* counts, int64_t rows, int64_t heads, float scale,
                           float* out, float* lse) {
  auto cell = [=](int64_t i, int64_t j) { return cells[i * most + j]; };
  attend_rows(q, THE_CACHED_ROWS(cached), cell, counts, rows, heads, scale, out, lse);
}
