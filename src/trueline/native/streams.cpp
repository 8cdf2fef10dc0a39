// Hyper-connections: what a sub-layer reads of several residual streams, and how they take its
// output. Bits as in kernels.cpp: they depend on a token's own numbers alone.

#include "attention.h"
#include "pool.h"
#include "vectors.h"

static thread_local Scratch products_scratch;

static inline float sigmoid(float x) { return 1.0f / (1.0f + exp_lanes(same(-x))[0]); }

// to[c] = f(c's vector) for all channels; the last ones through memory of their own.
template <typename Make>
static inline void by_lanes(int64_t width, float* to, const Make& make) {
  int64_t c = 0;
  for (; c + LANES <= width; c += LANES) store(to + c, make(c, LANES));
  if (c == width) return;
  Vec last = make(c, width - c);
  std::memcpy(to + c, &last, (width - c) * sizeof(float));
}

static inline Vec load_few(const float* from, int64_t count) {
  if (count == LANES) return load(from);
  Vec v = {};
  std::memcpy(&v, from, count * sizeof(float));
  return v;
}

// products[row][token] = fn[row] . flat[token]: `rows` of fn, up to KEYS tokens.
static void project(const float* flat, int64_t tokens, const float* fn, int64_t rows, int64_t width,
                    float* products) {
  const float* keys[KEYS];
  for (int64_t j = 0; j < tokens; j++) keys[j] = flat + j * width;
  for (int64_t row = 0; row < rows; row += HEADS)
    with_heads(rows - row, [=](auto n) {
      const float *from = fn + row * width, *const *of = keys;
      float* to = products + row * TILE;
      if (tokens == KEYS) return dot<n.value, KEYS>(from, of, width, to);
      for (int64_t j = 0; j < tokens; j++) dot<n.value, 1>(from, of + j, width, to + j);
    });
}

// 1 / rms
static float inverse_rms(const float* flat, int64_t width, float eps) {
  Vec squares = {};
  int64_t c = 0;
  for (; c + LANES <= width; c += LANES) squares = fused(load(flat + c), load(flat + c), squares);
  float total = sum_lanes(squares);
  for (; c < width; c++) total += flat[c] * flat[c];
  return 1.0f / __builtin_sqrtf(total / width + eps);
}

// x = sum of weights[s] * h[s].
static void read_streams(const float* h, const float* weights, int64_t streams, int64_t width,
                         float* x) {
  by_lanes(width, x, [=](int64_t c, int64_t count) {
    Vec sum = same(weights[0]) * load_few(h + c, count);
    for (int64_t s = 1; s < streams; s++)
      sum = fused(same(weights[s]), load_few(h + s * width + c, count), sum);
    return sum;
  });
}

static inline __attribute__((always_inline)) void divide_rows(float* m, int64_t size, float eps) {
  for (int64_t row = 0; row < size; row++) {
    float total = m[row * size];
    for (int64_t i = 1; i < size; i++) total += m[row * size + i];
    total += eps;
    for (int64_t i = 0; i < size; i++) m[row * size + i] /= total;
  }
}

static inline __attribute__((always_inline)) void divide_columns(float* m, int64_t size, float eps) {
  for (int64_t i = 0; i < size; i++) {
    float total = m[i];
    for (int64_t row = 1; row < size; row++) total += m[row * size + i];
    total += eps;
    for (int64_t row = 0; row < size; row++) m[row * size + i] /= total;
  }
}

// m [size, size]: each row's softmax + eps, then columns, then rows and columns in turn.
static inline __attribute__((always_inline)) void sinkhorn(float* m, int64_t size, float eps,
                                                           int64_t iterations) {
  for (int64_t row = 0; row < size; row++) {
    float *of = m + row * size, top = of[0];
    for (int64_t i = 1; i < size; i++) top = of[i] > top ? of[i] : top;
    for (int64_t i = 0; i < size; i++) of[i] = exp_lanes(same(of[i] - top))[0];
  }
  divide_rows(m, size, 0.0f);
  for (int64_t i = 0; i < size * size; i++) m[i] += eps;
  divide_columns(m, size, eps);
  for (int64_t i = 1; i < iterations; i++) {
    divide_rows(m, size, eps);
    divide_columns(m, size, eps);
  }
}

// A token's `products`, TILE apart, become pre (in `pre`), post and carry.
static void finish(const float* products, float unit, const float* base, const float* scale,
                   int64_t streams, float eps, int64_t iterations, float* pre, float* post,
                   float* carry) {
  for (int64_t s = 0; s < streams; s++) {
    int64_t second = streams + s;
    pre[s] = sigmoid(products[s * TILE] * unit * scale[0] + base[s]) + eps;
    post[s] = 2.0f * sigmoid(products[second * TILE] * unit * scale[1] + base[second]);
  }
  for (int64_t i = 0; i < streams * streams; i++) {
    int64_t row = 2 * streams + i;
    carry[i] = products[row * TILE] * unit * scale[2] + base[row];
  }
  if (streams == 4) sinkhorn(carry, 4, eps, iterations);  // as many as published models have
  else sinkhorn(carry, streams, eps, iterations);
}

// h [n, streams, width] contiguous; x [n, width], post [n, streams], carry [n, streams, streams].
extern "C" void hc_mix(const float* h, const float* fn, const float* base, const float* scale,
                       float norm_eps, float eps, int64_t iterations, int64_t n, int64_t streams,
                       int64_t width, float* x, float* post, float* carry) {
  int64_t all = streams * width, made = streams * (2 + streams);
  parallel((n + KEYS - 1) / KEYS, KEYS * all * made / 8, [=](int64_t item) {
    int64_t first = item * KEYS, tokens = n - first < KEYS ? n - first : KEYS;
    float *products = products_scratch.get(made * TILE + streams), *pre = products + made * TILE;
    project(h + first * all, tokens, fn, made, all, products);
    for (int64_t j = 0, i = first; j < tokens; j++, i++) {
      float unit = inverse_rms(h + i * all, all, norm_eps);
      finish(products + j, unit, base, scale, streams, eps, iterations, pre, post + i * streams,
             carry + i * streams * streams);
      read_streams(h + i * all, pre, streams, width, x + i * width);
    }
  });
}

// The last layer's: fn [streams, streams width], one scale.
extern "C" void hc_head(const float* h, const float* fn, const float* base, const float* scale,
                        float norm_eps, float eps, int64_t n, int64_t streams, int64_t width,
                        float* x) {
  int64_t all = streams * width;
  parallel((n + KEYS - 1) / KEYS, KEYS * all * streams / 8, [=](int64_t item) {
    int64_t first = item * KEYS, tokens = n - first < KEYS ? n - first : KEYS;
    float *products = products_scratch.get(streams * (TILE + 1)), *pre = products + streams * TILE;
    project(h + first * all, tokens, fn, streams, all, products);
    for (int64_t j = 0, i = first; j < tokens; j++, i++) {
      float unit = inverse_rms(h + i * all, all, norm_eps);
      for (int64_t s = 0; s < streams; s++)
        pre[s] = sigmoid(products[s * TILE + j] * unit * scale[0] + base[s]) + eps;
      read_streams(h + i * all, pre, streams, width, x + i * width);
    }
  });
}

// Stream k of out is post[k] y + sum over j of carry[j][k] h[j].
extern "C" void hc_merge(const float* h, const float* y, const float* post, const float* carry,
                         int64_t n, int64_t streams, int64_t width, float* out) {
  parallel(n, 2 * streams * width, [=](int64_t i) {
    const float *from = h + i * streams * width, *added = y + i * width;
    const float *gain = post + i * streams, *mixed = carry + i * streams * streams;
    for (int64_t k = 0; k < streams; k++)
      by_lanes(width, out + (i * streams + k) * width, [=](int64_t c, int64_t count) {
        Vec sum = same(gain[k]) * load_few(added + c, count);
        for (int64_t j = 0; j < streams; j++)
          sum = fused(same(mixed[j * streams + k]), load_few(from + j * width + c, count), sum);
        return sum;
      });
  });
}
