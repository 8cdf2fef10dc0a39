// CPU kernels in float32 that torch has no fast form of: GEMMs with few rows, routed experts,
// attention over the paged latent cache.
//
// Every number is made by the same operations in the same order whatever else is computed in the
// call: a sum runs over its terms from first to last in one lane, keys are taken in tiles at
// absolute positions. So bits never depend on the batch, the number of threads or the block size.

#include "attention.h"
#include "pool.h"
#include "vectors.h"
#include "weights.h"

#if defined(__AVX512F__)
constexpr int ROWS = 8;  // rows computed together: accumulators and operands fit the registers
#else
constexpr int ROWS = 4;
#endif
// Rows from which on a panel of codes is made plain numbers once, instead of once for every ROWS.
constexpr int MANY_ROWS = 2 * ROWS;

static thread_local Scratch rows_scratch, hidden_scratch, output_scratch, panel_scratch;

// ---- GEMM: y = x W^T --------------------------------------------------------------------

// put(k, c, number) for a panel of a weight, zeros where there is no row. `source(c)` is the row that
// lane c holds, or null. A run of channels at a time, so that both sides stay in the nearest cache.
template <typename Source, typename Put>
static void pack_panel(Source source, int64_t inner, Put put) {
  constexpr int64_t RUN = 64;
  for (int64_t start = 0; start < inner; start += RUN) {
    int64_t stop = start + RUN < inner ? start + RUN : inner;
    for (int c = 0; c < PANEL; c++) {
      auto row = source(c);
      for (int64_t k = start; k < stop; k++) put(k, c, row ? row[k] : 0);
    }
  }
}

// W [columns, inner] as panels [columns / PANEL][inner][PANEL].
template <typename W>
static void pack_columns(const W* w, int64_t columns, int64_t inner, W* packed) {
  parallel((columns + PANEL - 1) / PANEL, inner * PANEL, [=](int64_t panel) {
    auto source = [=](int c) {
      int64_t column = panel * PANEL + c;
      return column < columns ? w + column * inner : nullptr;
    };
    W* to = packed + panel * inner * PANEL;
    pack_panel(source, inner, [=](int64_t k, int c, W number) { to[k * PANEL + c] = number; });
  });
}

// Gate and up rows side by side, so that one pass over a panel has both: LANES of gate, LANES of up.
template <typename W>
static void pack_pairs(const W* w, int64_t width, int64_t inner, W* packed) {
  parallel((width + LANES - 1) / LANES, inner * PANEL, [=](int64_t panel) {
    auto source = [=](int c) {
      int64_t row = panel * LANES + c % LANES;
      return row < width ? w + (c < LANES ? row : width + row) * inner : nullptr;
    };
    W* to = packed + panel * inner * PANEL;
    pack_panel(source, inner, [=](int64_t k, int c, W number) { to[k * PANEL + c] = number; });
  });
}

// Codes [rows, inner], a byte each, and scales [scale rows, runs] into the places that `packed` has for
// them. `rows` has the row of each lane of the panels, -1 where there is none; `scale_rows` has each
// row's scales.
template <typename Codes>
static void pack_codes(ScaledWeights<Codes> packed, const uint8_t* codes, const uint8_t* scales,
                       const int64_t* rows, const int64_t* scale_rows, int64_t panels,
                       int64_t inner) {
  parallel(panels, inner * PANEL, [=](int64_t index) {
    const int64_t* lanes = rows + index * PANEL;
    auto panel = packed.panel(0, index);
    uint8_t* to = const_cast<uint8_t*>(panel.codes);
    auto source = [=](int c) { return lanes[c] < 0 ? nullptr : codes + lanes[c] * inner; };
    pack_panel(source, inner, [=](int64_t k, int c, uint8_t code) {
      Codes::put(to + k * Codes::BYTES, c, code);
    });
    to = const_cast<uint8_t*>(panel.scales);
    int64_t size = scale_bytes(panel.scale_type);
    for (int64_t run = 0; run < panel.runs(); run++)
      for (int c = 0; c < PANEL; c += panel.by_column ? 1 : LANES, to += size)
        if (lanes[c] < 0) std::memset(to, 0, size);
        else std::memcpy(to, scales + (scale_rows[lanes[c]] * panel.runs() + run) * size, size);
  });
}

// Rows in blocks of ROWS, inner index first: [blocks][inner][rows of the block].
static void gather_rows(const float* x, int64_t stride, const int64_t* ids, int64_t count,
                        int64_t inner, float* to) {
  for (int64_t first = 0; first < count; first += ROWS) {
    int64_t rows = count - first < ROWS ? count - first : ROWS;
    for (int64_t i = 0; i < rows; i++) {
      const float* from = x + (ids ? ids[first + i] : first + i) * stride;
      for (int64_t k = 0; k < inner; k++) to[first * inner + k * rows + i] = from[k];
    }
  }
}

// The same for all rows.
static void block_rows(const float* x, int64_t stride, int64_t count, int64_t inner, float* to) {
  parallel((count + ROWS - 1) / ROWS, ROWS * inner, [=](int64_t block) {
    int64_t first = block * ROWS;
    gather_rows(x + first * stride, stride, nullptr, count - first < ROWS ? count - first : ROWS,
                inner, to + first * inner);
  });
}

// What a panel costs: to be read once, and multiplied by every row, eight times as fast.
static int64_t panel_cost(int64_t rows, int64_t inner) { return inner * PANEL * (8 + rows) / 8; }

template <int N, typename Panel>
static inline void multiply(const float* x, const Panel& w, Vec (*sums)[2]) {
  Vec total[N][2] = {};
  int64_t k = 0;
  for (int64_t run = 0; run < w.runs(); run++) {
    auto numbers = w.run(run);
    for (int64_t stop = w.stop(run); k < stop; k++) {
      Vec left, right;
      numbers.read(k, left, right);
#pragma GCC unroll 8
      for (int i = 0; i < N; i++) {
        Vec value = same(x[k * N + i]);
        total[i][0] = fused(value, left, total[i][0]);
        total[i][1] = fused(value, right, total[i][1]);
      }
    }
  }
  for (int i = 0; i < N; i++) sums[i][0] = total[i][0], sums[i][1] = total[i][1];
}

template <typename Panel>
static inline void multiply_rows(int64_t rows, const float* x, const Panel& w, Vec (*sums)[2]) {
  switch (rows) {
    case 1: return multiply<1>(x, w, sums);
    case 2: return multiply<2>(x, w, sums);
    case 3: return multiply<3>(x, w, sums);
    case 4: return multiply<4>(x, w, sums);
#if defined(__AVX512F__)
    case 5: return multiply<5>(x, w, sums);
    case 6: return multiply<6>(x, w, sums);
    case 7: return multiply<7>(x, w, sums);
    case 8: return multiply<8>(x, w, sums);
#endif
  }
}

// take(row, its sums) for every row.
template <typename Panel, typename Take>
static void multiply_blocks(const float* x, int64_t count, const Panel& w, int64_t inner,
                            const Take& take) {
  Vec sums[ROWS][2];
  for (int64_t first = 0; first < count; first += ROWS) {
    int64_t rows = count - first < ROWS ? count - first : ROWS;
    multiply_rows(rows, x + first * inner, w, sums);
    for (int64_t i = 0; i < rows; i++) take(first + i, sums[i]);
  }
}

template <typename W, typename Take>
static void multiply_panel(const float* x, int64_t count, const DensePanel<W>& w, int64_t inner,
                           const Take& take) {
  multiply_blocks(x, count, w, inner, take);
}

// A number is code * scale, rounded, whether it is made in registers or, for many rows, in memory: a
// row's bits do not depend on how many there are.
template <typename Codes, typename Take>
static void multiply_panel(const float* x, int64_t count, const ScaledPanel<Codes>& w,
                           int64_t inner, const Take& take) {
  if (count < MANY_ROWS) return multiply_blocks(x, count, w, inner, take);
  float* numbers = panel_scratch.get(inner * PANEL);
  int64_t k = 0;
  for (int64_t run = 0; run < w.runs(); run++) {
    auto codes = w.run(run);
    for (int64_t stop = w.stop(run); k < stop; k++) {
      Vec left, right;
      codes.read(k, left, right);
      store(numbers + k * PANEL, left);
      store(numbers + k * PANEL + LANES, right);
    }
  }
  multiply_blocks(x, count, DensePanel<float>{numbers, inner}, inner, take);
}

static inline void store_panel(float* y, const Vec* sums, int64_t columns) {
  if (columns >= PANEL) {
    store(y, sums[0]);
    store(y + LANES, sums[1]);
  } else {
    std::memcpy(y, sums, columns * sizeof(float));
  }
}

// `places`, where given, says which row of y each row of x goes to.
template <typename Panel>
static void panel_gemm(const float* x, int64_t count, const Panel& w, int64_t inner, float* y,
                       int64_t stride, int64_t columns, const int64_t* places = nullptr) {
  multiply_panel(x, count, w, inner, [=](int64_t row, const Vec* sums) {
    store_panel(y + (places ? places[row] : row) * stride, sums, columns);
  });
}

// `batch` GEMMs at once (one per head): x, w and y of one follow the other at the given strides.
template <typename Weights>
static void batched_gemm(const float* x, int64_t x_row, int64_t x_batch, const Weights& w, float* y,
                         int64_t y_row, int64_t y_batch, int64_t batch, int64_t count,
                         int64_t columns, int64_t inner) {
  int64_t panels = (columns + PANEL - 1) / PANEL;
  float* blocks = rows_scratch.get(batch * count * inner);
  parallel(batch * ((count + ROWS - 1) / ROWS), ROWS * inner, [=](int64_t item) {
    int64_t b = item % batch, first = item / batch * ROWS;
    int64_t rows = count - first < ROWS ? count - first : ROWS;
    gather_rows(x + b * x_batch + first * x_row, x_row, nullptr, rows, inner,
                blocks + (b * count + first) * inner);
  });
  parallel(batch * panels, panel_cost(count, inner), [=](int64_t item) {
    int64_t b = item / panels, panel = item % panels;
    panel_gemm(blocks + b * count * inner, count, w.panel(b, panel), inner,
               y + b * y_batch + panel * PANEL, y_row, columns - panel * PANEL);
  });
}

// ---- small things that cost more to start than to compute ---------------------------------

// x / sqrt(mean(x^2) + eps) * weight, per row.
extern "C" void rms_norm(const float* x, int64_t x_row, const float* weight, float eps, float* y,
                         int64_t rows, int64_t width) {
  parallel(rows, width, [=](int64_t row) {
    const float* from = x + row * x_row;
    float* to = y + row * width;
    Vec squares = {};
    int64_t c = 0;
    for (; c + LANES <= width; c += LANES)
      squares = fused(load(from + c), load(from + c), squares);
    float total = sum_lanes(squares);
    for (; c < width; c++) total += from[c] * from[c];
    float scale = 1.0f / __builtin_sqrtf(total / width + eps);
    for (c = 0; c < width; c++) to[c] = from[c] * scale * weight[c];
  });
}

// x [n, heads, 2 half] at these strides -> y, contiguous. interleaved: channels (2i, 2i + 1) rotate
// together; else (i, i + half).
extern "C" void rotate(const float* x, int64_t x_row, int64_t x_head, const float* cos,
                       const float* sin, float* y, int64_t n, int64_t heads, int64_t half,
                       int64_t interleaved) {
  int64_t step = interleaved ? 2 : 1, apart = interleaved ? 1 : half;
  parallel(n, heads * half, [=](int64_t row) {
    for (int64_t head = 0; head < heads; head++) {
      const float* from = x + row * x_row + head * x_head;
      float* to = y + (row * heads + head) * 2 * half;
      for (int64_t i = 0; i < half; i++) {
        float a = from[i * step], b = from[i * step + apart];
        float c = cos[row * half + i], s = sin[row * half + i];
        to[i * step] = a * c - b * s;
        to[i * step + apart] = b * c + a * s;
      }
    }
  });
}

// ---- routing ------------------------------------------------------------------------------

// The largest, the lowest index among equals; it becomes -inf.
static int64_t take_largest(float* values, int64_t size) {
  int64_t best = 0;
  for (int64_t i = 1; i < size; i++)
    if (values[i] > values[best]) best = i;
  values[best] = -__builtin_inff();
  return best;
}

// Keeps the best groups: those left out become -inf. A group's strength is the sum of its `pair`
// largest values (1 or 2).
static void limit_groups(float* choice, int64_t experts, int64_t groups, int64_t keep, int64_t pair,
                         float* strength) {
  int64_t size = experts / groups;
  for (int64_t g = 0; g < groups; g++) {
    float first = -__builtin_inff(), second = -__builtin_inff();
    for (int64_t i = 0; i < size; i++) {
      float value = choice[g * size + i];
      if (value > first) second = first, first = value;
      else if (value > second) second = value;
    }
    strength[g] = pair == 1 ? first : first + second;
  }
  for (int64_t k = 0; k < keep; k++) take_largest(strength, groups);
  for (int64_t g = 0; g < groups; g++)
    if (strength[g] != -__builtin_inff())  // not taken
      for (int64_t i = 0; i < size; i++) choice[g * size + i] = -__builtin_inff();
}

// sqrt(log(1 + e^x)). Far below zero that is e^(x / 2), which float32 has where it has no e^x.
static float sqrt_softplus(float x) {
  if (x < -17.0f) return exp_lanes(same(0.5f * x))[0];
  float above = x > 0 ? x : 0.0f, size = x > 0 ? x : -x;
  return std::sqrt(above + std::log1p(exp_lanes(same(-size))[0]));
}

enum Scoring { SIGMOID, SOFTMAX, SQRT_SOFTPLUS };  // as in ops/route/native.py

static void score(const float* logits, int64_t experts, int64_t scoring, float* scores) {
  if (scoring == SQRT_SOFTPLUS) {
    for (int64_t e = 0; e < experts; e++) scores[e] = sqrt_softplus(logits[e]);
    return;
  }
  bool softmax = scoring == SOFTMAX;
  float top = 0, total = 1;
  if (softmax) {
    top = logits[0];
    for (int64_t e = 1; e < experts; e++) top = logits[e] > top ? logits[e] : top;
  }
  for (int64_t e = 0; e < experts; e++)
    scores[e] = exp_lanes(same(softmax ? logits[e] - top : -logits[e]))[0];
  if (softmax) {
    total = 0;
    for (int64_t e = 0; e < experts; e++) total += scores[e];
  }
  for (int64_t e = 0; e < experts; e++)
    scores[e] = softmax ? scores[e] / total : 1.0f / (1.0f + scores[e]);
}

// Scores, choice (with the bias), weights (without it), as RouterSpec says. `pair` = 0: no groups.
// `forced`: ids are given.
extern "C" void route(const float* logits, const float* bias, int64_t n, int64_t experts,
                      int64_t scoring, int64_t groups, int64_t keep, int64_t pair, int64_t top,
                      int64_t renormalise, float factor, int64_t forced, int64_t* ids,
                      float* weights) {
  parallel(n, 16 * experts, [=](int64_t t) {  // an exponential costs as much as reading many
    float* scores = rows_scratch.get(2 * experts + groups);
    float *choice = scores + experts, *strength = choice + experts;
    score(logits + t * experts, experts, scoring, scores);
    if (!forced) {
      for (int64_t e = 0; e < experts; e++) choice[e] = scores[e] + (bias ? bias[e] : 0.0f);
      if (pair) limit_groups(choice, experts, groups, keep, pair, strength);
      for (int64_t k = 0; k < top; k++) ids[t * top + k] = take_largest(choice, experts);
    }
    float total = 0;
    for (int64_t k = 0; k < top; k++) total += weights[t * top + k] = scores[ids[t * top + k]];
    for (int64_t k = 0; k < top; k++) {
      float weight = weights[t * top + k];
      weights[t * top + k] = (renormalise ? weight / (total + 1e-20f) : weight) * factor;
    }
  });
}

// ---- routed experts ---------------------------------------------------------------------

// The tokens of each expert, in the order of the tokens: begin[e] .. begin[e + 1] of `pairs`, where
// pair = token * top + place.
static void sort_by_expert(const int64_t* ids, int64_t count, int64_t first, int64_t experts,
                           int64_t* begin, int64_t* pairs) {
  std::memset(begin, 0, (experts + 1) * sizeof(int64_t));
  for (int64_t i = 0; i < count; i++) {
    int64_t e = ids[i] - first;
    if (e >= 0 && e < experts) begin[e + 1]++;
  }
  for (int64_t e = 0; e < experts; e++) begin[e + 1] += begin[e];
  for (int64_t i = 0; i < count; i++) {
    int64_t e = ids[i] - first;
    if (e >= 0 && e < experts) pairs[begin[e]++] = i;
  }
  for (int64_t e = experts; e > 0; e--) begin[e] = begin[e - 1];
  begin[0] = 0;
}

// silu(gate) * up, the gate clamped to `limit` from above, up on both sides; NaN stays NaN.
static inline Vec swiglu(Vec gate, Vec up, float limit) {
  Vec most = same(limit), least = same(-limit);
  gate = gate > most ? most : gate;
  up = up > most ? most : up < least ? least : up;
  return gate / (same(1.0f) + exp_lanes(-gate)) * up;
}

// The same for one panel of each row. `limit` is infinite where a model has none.
template <typename Panel>
static void gated_panel(const float* x, int64_t count, const Panel& w, int64_t inner, float limit,
                        float* y, int64_t stride, int64_t columns,
                        const int64_t* places = nullptr) {
  multiply_panel(x, count, w, inner, [=](int64_t row, const Vec* sums) {
    Vec value = swiglu(sums[0], sums[1], limit);
    std::memcpy(y + (places ? places[row] : row) * stride, &value,
                (columns < LANES ? columns : LANES) * sizeof(float));
  });
}

// For all panels.
template <typename Weights>
static void gated_rows(const float* x, int64_t n, const Weights& w, int64_t inner, float limit,
                       float* y, int64_t width) {
  parallel((width + LANES - 1) / LANES, panel_cost(n, inner), [=](int64_t panel) {
    gated_panel(x, n, w.panel(0, panel), inner, limit, y + panel * LANES, width,
                width - panel * LANES);
  });
}

// silu(gate x) * up x for every row.
template <typename Weights>
static void gated_half(const float* x, int64_t x_row, const Weights& gate_up, float* out, int64_t n,
                       int64_t hidden, int64_t width, float limit) {
  float* inputs = rows_scratch.get(n * hidden);
  block_rows(x, x_row, n, hidden, inputs);
  gated_rows(inputs, n, gate_up, hidden, limit, out, width);
}

// down(silu(gate x) * up x) for every row: the MLP of dense layers and of shared experts.
template <typename Weights>
static void gated_mlp(const float* x, int64_t x_row, const Weights& gate_up, const Weights& down,
                      float* out, int64_t n, int64_t hidden, int64_t width, float limit) {
  int64_t downs = (hidden + PANEL - 1) / PANEL;
  float* inputs = rows_scratch.get(n * (hidden + width));
  float* blocked = inputs + n * hidden;
  float* middle = hidden_scratch.get(n * width);
  block_rows(x, x_row, n, hidden, inputs);
  gated_rows(inputs, n, gate_up, hidden, limit, middle, width);
  block_rows(middle, width, n, width, blocked);
  parallel(downs, panel_cost(n, width), [=](int64_t panel) {
    panel_gemm(blocked, n, down.panel(0, panel), width, out + panel * PANEL, hidden,
               hidden - panel * PANEL);
  });
}

// Pairs sorted by expert. Experts outside first .. first + experts belong to another rank: theirs
// are left out. In the caller's memory: `begin` has experts + 1 places, `pairs` has n * top.
struct Sorted {
  int64_t top, experts, *begin, *pairs;

  Sorted(const int64_t* ids, int64_t n, int64_t top, int64_t first, int64_t experts, int64_t* begin,
         int64_t* pairs)
      : top(top), experts(experts), begin(begin), pairs(pairs) {
    sort_by_expert(ids, n * top, first, experts, begin, pairs);
  }
  int64_t count() const { return begin[experts]; }
  int64_t rows(int64_t e) const { return begin[e + 1] - begin[e]; }
  int64_t share() const { return (count() + experts - 1) / experts; }  // of an expert, about
};

// middle[t, k] = silu(gate x) * up x of t's k-th expert; others' are not written. `tokens` is scratch
// of the caller, as many as pairs.
template <typename Weights>
static void expert_middles(const float* x, int64_t x_row, const Sorted& sorted,
                           const Weights& gate_up, float* middle, int64_t hidden, int64_t width,
                           float limit, int64_t* tokens) {
  for (int64_t i = 0; i < sorted.count(); i++) tokens[i] = sorted.pairs[i] / sorted.top;
  int64_t gates = (width + LANES - 1) / LANES;
  float* inputs = rows_scratch.get(sorted.count() * hidden);
  parallel(sorted.experts, sorted.share() * hidden, [=](int64_t e) {
    int64_t at = sorted.begin[e];
    gather_rows(x, x_row, tokens + at, sorted.rows(e), hidden, inputs + at * hidden);
  });
  parallel(sorted.experts * gates, panel_cost(sorted.share(), hidden), [=](int64_t item) {
    int64_t e = item / gates, panel = item % gates, at = sorted.begin[e];
    if (sorted.rows(e))
      gated_panel(inputs + at * hidden, sorted.rows(e), gate_up.panel(e, panel), hidden,
                  limit, middle + panel * LANES, width, width - panel * LANES, sorted.pairs + at);
  });
}

// parts[t, k] = down middle[t, k] of t's k-th expert; others' are not written.
template <typename Weights>
static void expert_downs(const float* middle, const Sorted& sorted, const Weights& down,
                         float* parts, int64_t width, int64_t columns) {
  int64_t downs = (columns + PANEL - 1) / PANEL;
  float* inputs = rows_scratch.get(sorted.count() * width);
  parallel(sorted.experts, sorted.share() * width, [=](int64_t e) {
    int64_t at = sorted.begin[e];
    gather_rows(middle, width, sorted.pairs + at, sorted.rows(e), width, inputs + at * width);
  });
  parallel(sorted.experts * downs, panel_cost(sorted.share(), width), [=](int64_t item) {
    int64_t e = item / downs, panel = item % downs, at = sorted.begin[e];
    if (sorted.rows(e))
      panel_gemm(inputs + at * width, sorted.rows(e), down.panel(e, panel), width,
                 parts + panel * PANEL, columns, columns - panel * PANEL, sorted.pairs + at);
  });
}

// out[t] = sum over t's experts here, in the order of its ids, of weight * part. `ids` null: all are
// here. A part may be 0 for -0, which ranks that add zeros make of it: no sum is ever -0.
static void add_parts(const float* parts, const float* weights, const int64_t* ids, int64_t first,
                      int64_t experts, float* out, int64_t n, int64_t top, int64_t hidden) {
  parallel(n, top * hidden, [=](int64_t t) {
    float* to = out + t * hidden;
    std::memset(to, 0, hidden * sizeof(float));
    for (int64_t i = t * top; i < (t + 1) * top; i++) {
      if (ids && (ids[i] < first || ids[i] >= first + experts)) continue;
      float weight = weights[i];
      for (int64_t c = 0; c < hidden; c++) to[c] += weight * parts[i * hidden + c];
    }
  });
}

extern "C" void combine(const float* parts, const float* weights, float* out, int64_t n, int64_t top,
                        int64_t hidden) {
  add_parts(parts, weights, nullptr, 0, 0, out, n, top, hidden);
}

// All three.
template <typename Weights>
static void routed_experts(const float* x, int64_t x_row, const int64_t* ids, const float* weights,
                           const Weights& gate_up, const Weights& down, float* out, int64_t n,
                           int64_t top, int64_t hidden, int64_t width, int64_t first, int64_t experts,
                           float limit, int64_t* begin, int64_t* pairs, int64_t* tokens) {
  Sorted sorted(ids, n, top, first, experts, begin, pairs);
  float* middle = hidden_scratch.get(n * top * width);
  float* parts = output_scratch.get(n * top * hidden);
  expert_middles(x, x_row, sorted, gate_up, middle, hidden, width, limit, tokens);
  expert_downs(middle, sorted, down, parts, width, hidden);
  add_parts(parts, weights, ids, first, experts, out, n, top, hidden);
}

// ---- latent attention over the paged cache ----------------------------------------------

// Keys are the positions from 0 on; block_ids [rows, most].
extern "C" void mla_decode(const float* q, CACHED_ROWS(cached), const int64_t* block_ids, int64_t most,
                           const int64_t* lengths, int64_t block_size, int64_t rows, int64_t heads,
                           float scale, float* out, float* lse) {
  auto cell = [=](int64_t i, int64_t position) {
    int64_t block = block_ids[i * most + position / block_size];
    return block * block_size + position % block_size;
  };
  attend_rows(q, THE_CACHED_ROWS(cached), cell, lengths, rows, heads, scale, out, lse);
}

// ---- for weights in float32, in bfloat16 and as stored --------------------------------------

static int64_t panels_of(int64_t columns) { return (columns + PANEL - 1) / PANEL; }

// use(gate_up, down) of MLPs.
template <typename W, typename Use>
static void open_mlps(const W* gate_up, const W* down, int64_t hidden, int64_t width,
                      const Use& use) {
  open_weights(gate_up, (width + LANES - 1) / LANES, hidden, [&](auto first) {
    use(first, alike(first, down, panels_of(hidden), width));
  });
}

#define FOR_WEIGHTS(W, SUFFIX)                                                                     \
  extern "C" void gemm##SUFFIX(const float* x, int64_t x_row, int64_t x_batch, const W* packed,    \
                               float* y, int64_t y_row, int64_t y_batch, int64_t batch,            \
                               int64_t count, int64_t columns, int64_t inner) {                    \
    open_weights(packed, panels_of(columns), inner, [=](auto weights) {                            \
      batched_gemm(x, x_row, x_batch, weights, y, y_row, y_batch, batch, count, columns, inner);   \
    });                                                                                            \
  }                                                                                                \
  extern "C" void middle##SUFFIX(const float* x, int64_t x_row, const W* packed, float* out,       \
                                 int64_t n, int64_t hidden, int64_t width, float limit) {          \
    open_weights(packed, (width + LANES - 1) / LANES, hidden, [=](auto gate_up) {                  \
      gated_half(x, x_row, gate_up, out, n, hidden, width, limit);                                 \
    });                                                                                            \
  }                                                                                                \
  extern "C" void gated##SUFFIX(const float* x, int64_t x_row, const W* first, const W* second,    \
                                float* out, int64_t n, int64_t hidden, int64_t width,              \
                                float limit) {                                                     \
    open_mlps(first, second, hidden, width, [=](auto gate_up, auto down) {                         \
      gated_mlp(x, x_row, gate_up, down, out, n, hidden, width, limit);                            \
    });                                                                                            \
  }                                                                                                \
  extern "C" void routed##SUFFIX(const float* x, int64_t x_row, const int64_t* ids,                \
                                 const float* weights, const W* first_packed, const W* second,     \
                                 float* out, int64_t n, int64_t top, int64_t hidden,               \
                                 int64_t width, int64_t first, int64_t experts, float limit,       \
                                 int64_t* begin, int64_t* pairs, int64_t* tokens) {                \
    open_mlps(first_packed, second, hidden, width, [=](auto gate_up, auto down) {                  \
      routed_experts(x, x_row, ids, weights, gate_up, down, out, n, top, hidden, width, first,     \
                     experts, limit, begin, pairs, tokens);                                        \
    });                                                                                            \
  }                                                                                                \
  extern "C" void routed_middle##SUFFIX(const float* x, int64_t x_row, const int64_t* ids,         \
                                        const W* packed, float* out, int64_t n, int64_t top,       \
                                        int64_t hidden, int64_t width, int64_t first,              \
                                        int64_t experts, float limit, int64_t* begin,              \
                                        int64_t* pairs, int64_t* tokens) {                         \
    open_weights(packed, (width + LANES - 1) / LANES, hidden, [=](auto gate_up) {                  \
      Sorted sorted(ids, n, top, first, experts, begin, pairs);                                    \
      expert_middles(x, x_row, sorted, gate_up, out, hidden, width, limit, tokens);                \
    });                                                                                            \
  }                                                                                                \
  extern "C" void routed_down##SUFFIX(const float* middle, const int64_t* ids, const W* packed,    \
                                      float* out, int64_t n, int64_t top, int64_t width,           \
                                      int64_t columns, int64_t first, int64_t experts,             \
                                      int64_t* begin, int64_t* pairs) {                            \
    open_weights(packed, panels_of(columns), width, [=](auto down) {                               \
      Sorted sorted(ids, n, top, first, experts, begin, pairs);                                    \
      expert_downs(middle, sorted, down, out, width, columns);                                     \
    });                                                                                            \
  }

FOR_WEIGHTS(float, )
FOR_WEIGHTS(Bf16, _bf16)
FOR_WEIGHTS(Scaled, _scaled)

#define FOR_PLAIN_WEIGHTS(W, SUFFIX)                                                               \
  extern "C" void pack_weight##SUFFIX(const W* w, int64_t columns, int64_t inner, W* packed) {     \
    pack_columns(w, columns, inner, packed);                                                       \
  }                                                                                                \
  extern "C" void pack_gate_up##SUFFIX(const W* w, int64_t width, int64_t inner, W* packed) {      \
    pack_pairs(w, width, inner, packed);                                                           \
  }

FOR_PLAIN_WEIGHTS(float, )
FOR_PLAIN_WEIGHTS(Bf16, _bf16)

extern "C" void pack_scaled(const uint8_t* codes, const uint8_t* scales, const int64_t* rows,
                            const int64_t* scale_rows, int64_t panels, int64_t inner,
                            Scaled* packed) {
  open_weights(packed, panels, inner, [=](auto weights) {
    pack_codes(weights, codes, scales, rows, scale_rows, panels, inner);
  });
}

extern "C" int32_t panel_width() { return PANEL; }
