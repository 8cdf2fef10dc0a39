// Packed weights: panels of PANEL columns, as plain numbers or as a checkpoint stores them, in codes
// with scales. Kernels read one row of a panel at a time, whatever it is made of.

#pragma once

#include "vectors.h"

constexpr int PANEL = 2 * LANES;  // columns of a packed weight that lie side by side

// A bfloat16 is the upper half of a float32: weights stored so are exact, and read at half the cost.
typedef uint16_t Bf16;
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

static inline Vec as_floats(Ints bits) {
  Vec v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

static inline Ints widen(Halves raw) { return __builtin_convertvector(raw, Ints); }
static inline Ints widen(Bytes raw) {  // compilers make scalar code of the same for bytes
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepu8_epi32((__m128i)raw);
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)raw));
#else
  return __builtin_convertvector(raw, Ints);
#endif
}

template <typename Narrow>
static inline Ints load_wide(const void* p) {
  Narrow raw;
  std::memcpy(&raw, p, sizeof raw);
  return widen(raw);
}

static inline Vec load(const Bf16* p) { return as_floats(load_wide<Halves>(p) << 16); }

// ---- plain numbers ----------------------------------------------------------------------------

template <typename W>
struct DensePanel {
  const W* numbers;  // [inner][PANEL]
  int64_t inner;

  // Runs of rows with one scale a column; where there are no scales, all are one run.
  int64_t runs() const { return 1; }
  int64_t stop(int64_t) const { return inner; }
  DensePanel run(int64_t) const { return *this; }

  void read(int64_t k, Vec& left, Vec& right) const {
    left = load(numbers + k * PANEL);
    right = load(numbers + k * PANEL + LANES);
  }
};

template <typename W>
struct DenseWeights {
  const W* numbers;  // [matrices][panels][inner][PANEL]
  int64_t panels, inner;

  DensePanel<W> panel(int64_t matrix, int64_t panel) const {
    return {numbers + (matrix * panels + panel) * inner * PANEL, inner};
  }
};

// ---- codes ------------------------------------------------------------------------------------

// The two columns of a byte, or of a pair of bytes, are LANES apart: one read has a vector of each.

// e4m3, times 2^-8: with its exponent and fraction where a half has its own. Exact near zero too,
// where neither has a leading one. The scales that are packed with it make up for 2^-8.
struct Fp8 {
  static constexpr int64_t BYTES = PANEL;  // of a row of a panel

  static void put(uint8_t* row, int lane, uint8_t code) {
    row[lane % LANES * 2 + lane / LANES] = code;
  }

  static void read(const uint8_t* row, Vec& left, Vec& right) {
#if defined(__AVX512F__)
    __m256i keep = _mm256_set1_epi16((short)0xbf80);
    __m256i pairs = _mm256_loadu_si256((const __m256i*)row);
    __m256i low = _mm256_srai_epi16(_mm256_slli_epi16(pairs, 8), 1);
    left = (Vec)_mm512_cvtph_ps(_mm256_and_si256(low, keep));
    right = (Vec)_mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(pairs, 1), keep));
#elif defined(__AVX2__) && defined(__F16C__)
    __m128i keep = _mm_set1_epi16((short)0xbf80);
    __m128i pairs = _mm_loadu_si128((const __m128i*)row);
    __m128i low = _mm_srai_epi16(_mm_slli_epi16(pairs, 8), 1);
    left = (Vec)_mm256_cvtph_ps(_mm_and_si128(low, keep));
    right = (Vec)_mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(pairs, 1), keep));
#else
    Ints pairs = load_wide<Halves>(row);
    left = number(pairs & 0xff);
    right = number(pairs >> 8);
#endif
  }

  static Vec number(Ints code) {
    Vec size = as_floats((code & 0x7f) << 20) * same(0x1p112f);
    return (code & 0x80) != 0 ? -size : size;
  }
};

// Entry code % 16 of a table; further bits are ignored.
static inline Vec look_up(Ints code, const float* table) {
#if defined(__AVX512F__)
  return (Vec)_mm512_permutexvar_ps((__m512i)code, _mm512_loadu_ps(table));
#elif defined(__AVX2__)
  __m256i at = (__m256i)code;
  __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), at);
  __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), at);
  return (Vec)_mm256_blendv_ps(low, high, (__m256)_mm256_slli_epi32(at, 28));
#else
  Vec found;
  for (int i = 0; i < LANES; i++) found[i] = table[code[i] & 15];
  return found;
#endif
}

// Four bits that stand for a number of a table.
template <const float* TABLE>
struct Nibbles {
  static constexpr int64_t BYTES = LANES;

  static void put(uint8_t* row, int lane, uint8_t code) {
    uint8_t& pair = row[lane % LANES];
    pair = lane < LANES ? (pair & 0xf0) | code : (pair & 0x0f) | code << 4;
  }

  static void read(const uint8_t* row, Vec& left, Vec& right) {
    Ints pairs = load_wide<Bytes>(row);
    left = look_up(pairs, TABLE);
    right = look_up(pairs >> 4, TABLE);
  }
};

constexpr float INTEGERS[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
constexpr float E2M1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                            -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
typedef Nibbles<INTEGERS> Int4;
typedef Nibbles<E2M1> Fp4;

// ---- scales -----------------------------------------------------------------------------------

enum ScaleType : int64_t { F32, BF16, F16, E8M0 };

static inline int64_t scale_bytes(int64_t type) { return type == F32 ? 4 : type == E8M0 ? 1 : 2; }

static inline Vec load_scales(const uint8_t* p, int64_t type) {
  if (type == F32) return load((const float*)p);
  if (type == BF16) return load((const Bf16*)p);
  if (type == F16) {
    Ints half = load_wide<Halves>(p);
    Vec size = as_floats((half & 0x7fff) << 13) * same(0x1p112f);
    return (half & 0x8000) != 0 ? -size : size;
  }
  Ints power = load_wide<Bytes>(p);  // a power of two: the exponent of a float
  Ints smallest = Ints{} + 0x400000;
  return as_floats(power == 0 ? smallest : power << 23);
}

// ---- weights as stored ------------------------------------------------------------------------

// A matrix is packed into one piece of memory: this, `runs` stops, a PanelPlace for each panel, then
// scales and codes of one panel after the other. native/scaled.py writes it.
struct Scaled {
  int64_t code_type, scale_type;
  int64_t bytes;  // to the next matrix
  int64_t runs;
};
enum CodeType : int64_t { FP8, INT4, FP4 };

struct PanelPlace {
  int64_t scales, codes;  // offsets
  int64_t by_column;      // a scale for each column in a run, or one for the columns of each half
};

constexpr int64_t PAGE = 4096;  // where the CPU's own prefetching ends

template <typename Codes>
struct ScaledRun {
  const uint8_t* codes;
  Vec left_scale, right_scale;

  void read(int64_t k, Vec& left, Vec& right) const {
    __builtin_prefetch(codes + k * Codes::BYTES + PAGE);
    Codes::read(codes + k * Codes::BYTES, left, right);
    left = left * left_scale;
    right = right * right_scale;
  }
};

template <typename Codes>
struct ScaledPanel {
  const int64_t* stops;
  const uint8_t *scales, *codes;
  int64_t count, scale_type, by_column;

  int64_t runs() const { return count; }
  int64_t stop(int64_t run) const { return stops[run]; }

  ScaledRun<Codes> run(int64_t run) const {
    if (!by_column) {
      const float* both = (const float*)scales + 2 * run;
      return {codes, same(both[0]), same(both[1])};
    }
    int64_t half = LANES * scale_bytes(scale_type);
    const uint8_t* from = scales + 2 * run * half;
    return {codes, load_scales(from, scale_type), load_scales(from + half, scale_type)};
  }
};

template <typename Codes>
struct ScaledWeights {
  const Scaled* first;

  ScaledPanel<Codes> panel(int64_t matrix, int64_t panel) const {
    const uint8_t* data = (const uint8_t*)first + matrix * first->bytes;
    const Scaled* own = (const Scaled*)data;
    const int64_t* stops = (const int64_t*)(own + 1);
    const PanelPlace& place = ((const PanelPlace*)(stops + own->runs))[panel];
    return {stops,     data + place.scales, data + place.codes,
            own->runs, own->scale_type,     place.by_column};
  }
};

// use(weights) for packed weights of any kind, as a stack of matrices of so many panels.
template <typename W, typename Use>
static void open_weights(const W* packed, int64_t panels, int64_t inner, const Use& use) {
  use(DenseWeights<W>{packed, panels, inner});
}

template <typename Use>
static void open_weights(const Scaled* packed, int64_t, int64_t, const Use& use) {
  switch (packed->code_type) {
    case FP8: return use(ScaledWeights<Fp8>{packed});
    case INT4: return use(ScaledWeights<Int4>{packed});
    case FP4: return use(ScaledWeights<Fp4>{packed});
  }
}

// Another stack of the same kind.
template <typename W>
static DenseWeights<W> alike(DenseWeights<W>, const W* packed, int64_t panels, int64_t inner) {
  return {packed, panels, inner};
}

template <typename Codes>
static ScaledWeights<Codes> alike(ScaledWeights<Codes>, const Scaled* packed, int64_t, int64_t) {
  return {packed};
}
