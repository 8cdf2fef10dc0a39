// Attention over a window and compressed entries, with a sink per head. Bits as in kernels.cpp: they
// depend on a token's own numbers alone.

#include "attention.h"
#include "pool.h"
#include "vectors.h"

// The tables [runs, most] of blocks of `size` rows.
struct Blocks {
  const int64_t* ids;
  int64_t most, size;

  int64_t cell(int64_t run, int64_t number) const {
    return ids[run * most + number / size] * size + number % size;
  }
};

// A sink is a key without a value. One far above all scores makes the total infinite and the output
// zero, which it then is to a float's last digit.
template <int N>
static void end_with_sinks(Softmax<N>& sum, const float* sinks) {
  for (int h = 0; h < N; h++)
    sum.times(h, 1.0f / (sum.norm[h] + exp_lanes(same(sinks[h] - sum.top[h]))[0]));
}

// q and out [rows, heads, width], contiguous. Row i is of sequence runs[i] and sees its positions
// from oldest[i] on, near[i] of them, and far[i] entries: its first ones, or those of the cells
// [rows, chosen_most] where they are given.
extern "C" void sink_attention(const float* q, CACHED_ROWS(window), CACHED_ROWS(entries),
                               const int64_t* window_blocks, int64_t window_most,
                               int64_t window_size, const int64_t* entry_blocks,
                               int64_t entry_most, int64_t entry_size, const int64_t* runs,
                               const int64_t* oldest, const int64_t* near, const int64_t* far,
                               const int64_t* chosen, int64_t chosen_most, const float* sinks,
                               int64_t rows, int64_t heads, float scale, float* out) {
  const CachedRows positions = THE_CACHED_ROWS(window), made = THE_CACHED_ROWS(entries);
  const Blocks held{window_blocks, window_most, window_size};
  const Blocks kept{entry_blocks, entry_most, entry_size};
  const int64_t width = positions.width(), groups = (heads + HEADS - 1) / HEADS;
  int64_t most = 0;
  for (int64_t i = 0; i < rows; i++) most = near[i] + far[i] > most ? near[i] + far[i] : most;
  parallel(rows * groups, most * width, [=](int64_t item) {
    int64_t i = item / groups, head = item % groups * HEADS, run = runs[i];
    int64_t at = (i * heads + head) * width;
    with_heads(heads - head, [=](auto n) {
      Softmax<n.value> sum(q + at, out + at, width, scale);
      sum.add(positions, [=](int64_t j) { return held.cell(run, oldest[i] + j); }, near[i]);
      auto entry = [=](int64_t j) {
        return chosen ? chosen[i * chosen_most + j] : kept.cell(run, j);
      };
      sum.add(made, entry, far[i]);
      end_with_sinks(sum, sinks + head);
    });
  });
}
