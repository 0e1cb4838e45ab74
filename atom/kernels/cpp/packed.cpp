// Linears and embeddings over packed weights, for any CPU.
//
// A weight [O, I] lies in panels of 16 rows, the lanes of a vector, and a panel in groups of columns that share a scale:
// the scales of its rows, maybe their minima, then the numbers of its columns. All is read once and in order. Scales of 8
// bits have a factor, a float16, for each of some groups, ahead of the first: that of a row's scales, maybe that of its
// minima. A number is (value - middle) * scale + minimum.
//
// Numbers of a column, or of two of 4 bits, are 16 bytes, an even column's in the lower halves. Numbers of 5 bits of 32
// columns, and of 6 bits of 16, are 32-bit words: 16 times a row's first 32 bits, then the next ones.
//
// With AVX512_BF16 and no AMX, bfloat16 x is multiplied by pairs of columns, in which every value is exact. One or two rows
// of what has no table of values take longer so.
//
// e4m3 becomes float32 by shifting its bits, 2^-120 times its value: x and the scales are larger by half of that each. Sums
// are in float32.
//
// With AVX512_VNNI, unless pairs of bfloat16 are faster, rows of 16 bits are multiplied by integers as integers of 15 bits,
// blocks of 32 columns summed in 32 bits: a few rows as two digits of 8 bits (vpdpbusd), more as 16 bits (vpdpwssd). With
// AVX2 only, more than a few rows are, too (vpmaddwd). So x has the numbers that it has in bfloat16 elsewhere.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <array>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "numbers.h"

namespace {

constexpr int64_t ROWS = LANES;      // of a panel
constexpr int64_t AT_ONCE = 1 << 20; // numbers that are unpacked at a time for oneDNN
#ifdef __AVX512F__
constexpr int64_t FEW = 32; // rows of x up to which numbers are unpacked in registers
constexpr int MOST = 8;     // rows whose sums stay in registers; of bfloat16 twice as many
#else
constexpr int64_t FEW = 8;
constexpr int MOST = 4;
#endif
#ifdef __AVX512BF16__
constexpr bool HAS_SHORT_PRODUCTS = true; // whether oneDNN multiplies 16-bit numbers faster than float32
#else
constexpr bool HAS_SHORT_PRODUCTS = false;
#endif
#if defined __AVX512BF16__ && !defined __AMX_TILE__ // CPUs with AMX multiply pairs of bfloat16 no faster than float32
#define HAS_BFLOAT_PAIRS
#elif defined __AVX512VNNI__
#define HAS_INTEGER_DOTS // of rows of 16 bits
#elif defined __AVX2__ && !defined __AVX512F__
#define HAS_INTEGER_PRODUCTS // of rows of 16 bits
#endif

enum Kind : int64_t { INT4, INT8, FP8, FP4, INT5, INT6 }; // as kernels/cpp/panels.py numbers them

enum ScaleDtype : int64_t { BF16, FP32, FP16, INT8_TIMES_FP16 };

/// Columns whose numbers lie together, and the bytes of these.
constexpr int columns_of(Kind kind) { return kind == INT5 ? 32 : kind == INT6 ? 16 : kind == INT4 || kind == FP4 ? 2 : 1; }
constexpr int bits_of(Kind kind) { return kind == INT4 || kind == FP4 ? 4 : kind == INT5 ? 5 : kind == INT6 ? 6 : 8; }
constexpr int64_t bytes_of(Kind kind) { return ROWS * columns_of(kind) * bits_of(kind) / 8; }

constexpr bool has_middle(Kind kind) { return kind == INT4 || kind == INT5 || kind == INT6; }
constexpr bool has_table(Kind kind) { return kind == INT4 || kind == FP4; } // of its values

struct Layout {
  Kind kind;
  int64_t out, inner, group; // group: columns that share a scale
  ScaleDtype dtype;          // of scales and minima
  bool has_minima;
  int64_t middle, per_factor; // per_factor: groups

  int64_t num_panels() const { return (out + ROWS - 1) / ROWS; }
  int64_t num_groups() const { return (inner + group - 1) / group; }
  int64_t num_factors() const { return dtype == INT8_TIMES_FP16 ? (num_groups() + per_factor - 1) / per_factor : 0; }
  int64_t panel_size() const {
    const int64_t scale = dtype == FP32 ? 4 : dtype == INT8_TIMES_FP16 ? 1 : 2;
    const int64_t scales = (num_groups() * scale + num_factors() * 2) * (has_minima ? 2 : 1);
    return ROWS * (inner * bits_of(kind) / 8 + scales);
  }

  /// What x and scales are multiplied by each, so that values are those of their format.
  float half_power() const { return kind == FP8 ? 0x1p60f : 1.0f; }
};

/// Reads the scales and minima of a panel's groups, one after the other.
class Scales {
public:
  explicit Scales(const Layout &layout) : layout(layout) {}

  std::array<Floats, 2> take(const uint8_t *&at) {
    if (layout.dtype == INT8_TIMES_FP16 && left-- == 0) {
      left = layout.per_factor - 1;
      for (int which = 0; which <= layout.has_minima; ++which, at += 2 * ROWS)
        factors[which] = widen_fp16(at);
    }
    const Floats scale = next(at, 0);
    return {scale, layout.has_minima ? next(at, 1) : Floats{}};
  }

private:
  const Layout &layout;
  int64_t left = 0; // groups that have the same factors
  Floats factors[2] = {};

  Floats next(const uint8_t *&at, int which) const {
    const uint8_t *from = at;
    switch (layout.dtype) {
    case FP32: at += 4 * ROWS; return load<Floats>(from);
    case BF16: at += 2 * ROWS; return widen_vector((const uint16_t *)from);
    case FP16: at += 2 * ROWS; return widen_fp16(from);
    default: at += ROWS; return convert<Floats>(widen_integers((const int8_t *)from)) * factors[which];
    }
  }
};

/// Numbers of so many bits in the words of 16 rows, from a bit on.
template <int BITS, int FIRST> [[gnu::always_inline]] inline Ints extract(const uint8_t *words) {
  constexpr int SHIFT = FIRST % 32, LEFT = 32 - SHIFT; // LEFT: bits of the first word
  const uint8_t *at = words + FIRST / 32 * sizeof(Ints);
  Ints numbers = load<Ints>(at) >> SHIFT;
  if constexpr (LEFT < BITS)
    numbers = (numbers & ((1 << LEFT) - 1)) | load<Ints>(at + sizeof(Ints)) << LEFT;
  return numbers & ((1 << BITS) - 1);
}

/// The values of e2m1 in the lowest 4 bits. As shifted bits, 0.5 is no normal number, which takes Intel's CPUs 40 times as long.
[[gnu::always_inline]] inline Floats widen_e2m1(Ints n) {
#if defined __AVX512F__
  const __m512 values = _mm512_setr_ps(0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6);
  return (Floats)_mm512_permutexvar_ps((__m512i)n, values);
#elif defined __AVX2__
  using Half = decltype(Floats::low);
  const __m256 sizes = _mm256_setr_ps(0, 0.5, 1, 1.5, 2, 3, 4, 6);
  const Ints signs = (n & 8) << 28;
  const Floats made{(Half)_mm256_permutevar8x32_ps(sizes, (__m256i)n.low), (Half)_mm256_permutevar8x32_ps(sizes, (__m256i)n.high)};
  return (Floats)((Ints)made | signs);
#else
  return (Floats)((n & 8) << 28 | (n & 7) << 22) * 0x1p126f;
#endif
}

/// Calls use(column, values of 16 rows) for the columns that lie together.
template <Kind K, class Use> [[gnu::always_inline]] inline void decode(const uint8_t *from, const Use &use) {
  if constexpr (K == INT8) {
    use(0, convert<Floats>(widen_integers((const int8_t *)from)));
  } else if constexpr (K == FP8) {
    const Ints n = widen_integers(from);
    use(0, (Floats)((n & 0x80) << 24 | (n & 0x7F) << 20));
  } else if constexpr (K == FP4) {
    const Ints n = widen_integers(from);
    use(0, widen_e2m1(n));
    use(1, widen_e2m1(n >> 4));
  } else if constexpr (K == INT4) {
    const Ints n = widen_integers(from);
    use(0, convert<Floats>(n & 15));
    use(1, convert<Floats>(n >> 4));
  } else {
    [&]<int... COLUMN>(std::integer_sequence<int, COLUMN...>) __attribute__((always_inline)) {
      (use(COLUMN, convert<Floats>(extract<bits_of(K), bits_of(K) * COLUMN>(from))), ...);
    }(std::make_integer_sequence<int, columns_of(K)>());
  }
}

/// y = panel x of M rows. x fp32[M, inner], sums fp32[M, groups] of x, y fp32[M, 16]
template <Kind K, int M> void multiply(const Layout &layout, const uint8_t *panel, const float *x, const float *sums, Floats *y) {
  constexpr int COLUMNS = columns_of(K), CHAINS = M < MOST ? 2 : 1; // sums that do not wait for each other
  constexpr int AT_ONCE = bytes_of(K) == 16 ? 4 : 1;
  const int64_t inner = layout.inner, num_groups = layout.num_groups();
  const float middle = layout.middle;
  const uint8_t *at = panel;
  Scales scales(layout);
  Floats total[M] = {};
  for (int64_t g = 0; g < num_groups; ++g) {
    const auto [scale, minimum] = scales.take(at);
    const int64_t end = std::min(inner, (g + 1) * layout.group);
    int64_t i = g * layout.group;
    Floats part[M][CHAINS] = {};
    if (has_middle(K))
      for (int m = 0; m < M; ++m)
        part[m][0] = Floats{} - middle * sums[m * num_groups + g];
    auto add = [&](int n) __attribute__((always_inline)) {
      decode<K>(at, [&](int column, Floats values) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m)
          part[m][(n + column) % CHAINS] += values * x[m * inner + i + column];
      });
      at += bytes_of(K);
      i += COLUMNS;
    };
    while (i + AT_ONCE * COLUMNS <= end) {
      for (int64_t line = 0; line < AT_ONCE * bytes_of(K); line += 64)
        __builtin_prefetch(at + AHEAD + line);
#pragma GCC unroll 4
      for (int n = 0; n < AT_ONCE; ++n)
        add(n);
    }
    while (AT_ONCE > 1 && i < end)
      add(0);
    for (int m = 0; m < M; ++m) {
      Floats sum = part[m][0];
      for (int n = 1; n < CHAINS; ++n)
        sum += part[m][n];
      total[m] += sum * scale;
    }
    if (layout.has_minima)
      for (int m = 0; m < M; ++m)
        total[m] += minimum * sums[m * num_groups + g];
  }
  for (int m = 0; m < M; ++m)
    y[m] = total[m];
}

#ifdef HAS_BFLOAT_PAIRS
constexpr bool HAS_PAIRS = true; // products of two bfloat16 and their sum in float32

/// Calls use(pair, values of 16 rows in two columns) for the columns that lie together, or two: pairs of bfloat16, exact.
template <Kind K, class Use> [[gnu::always_inline]] inline void decode_pairs(const uint8_t *from, float middle, const Use &use) {
  if constexpr (has_table(K)) {
    constexpr float VALUES[2][LANES] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                        {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6}};
    const Floats numbers = load<Floats>(VALUES[K == FP4]);
    const Ints table = (Ints)(K == INT4 ? numbers - middle : numbers), n = widen_integers(from);
    const Ints even = (Ints)_mm512_permutexvar_epi32((__m512i)n, (__m512i)table); // by the lowest 4 bits
    const Ints odd = (Ints)_mm512_permutexvar_epi32((__m512i)(n >> 4), (__m512i)table);
    use(0, (even >> 16 & 0xFFFF) | odd); // a table's lower halves are zeros
  } else {
    Floats even;
    auto gather = [&](int column, Floats values) __attribute__((always_inline)) {
      if constexpr (K == FP8)
        values *= 0x1p120f;
      else if constexpr (has_middle(K))
        values = values - middle;
      if (column % 2)
        use(column / 2, ((Ints)even >> 16 & 0xFFFF) | ((Ints)values & -0x10000));
      else
        even = values;
    };
    decode<K>(from, gather);
    if constexpr (columns_of(K) == 1)
      decode<K>(from + ROWS, [&](int, Floats values) { gather(1, values); });
  }
}

/// multiply, of bfloat16 x and groups of whole pairs
template <Kind K, int M> void multiply(const Layout &layout, const uint8_t *panel, const uint16_t *x, const float *sums, Floats *y) {
  constexpr int COLUMNS = std::max(columns_of(K), 2), PAIRS = COLUMNS / 2;
  constexpr int64_t STEP = bytes_of(K) * COLUMNS / columns_of(K);
  constexpr int CHAINS = M > 2 ? 1 : 4 / M; // sums that do not wait for each other
  constexpr int AT_ONCE = std::max(CHAINS / PAIRS, 1);
  const int64_t inner = layout.inner, num_groups = layout.num_groups();
  const float middle = layout.middle;
  const uint8_t *at = panel;
  Scales scales(layout);
  Floats total[M] = {};
  for (int64_t g = 0; g < num_groups; ++g) {
    const auto [scale, minimum] = scales.take(at);
    Floats part[CHAINS][M] = {};
    const int64_t end = std::min(inner, (g + 1) * layout.group);
    int64_t i = g * layout.group;
    auto add = [&](int chain) __attribute__((always_inline)) {
      decode_pairs<K>(at, middle, [&](int pair, Ints values) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
          Floats &sum = part[(chain + pair) % CHAINS][m];
          const __m512i both = _mm512_set1_epi32(load<int32_t>(x + m * inner + i + 2 * pair));
          sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)values, (__m512bh)both);
        }
      });
      at += STEP;
      i += COLUMNS;
    };
    while (i + AT_ONCE * COLUMNS <= end) {
      for (int64_t line = 0; line < AT_ONCE * STEP; line += 64)
        __builtin_prefetch(at + AHEAD + line);
#pragma GCC unroll 4
      for (int n = 0; n < AT_ONCE; ++n)
        add(n * PAIRS);
    }
    while (AT_ONCE > 1 && i < end)
      add(0);
    for (int m = 0; m < M; ++m)
      for (int chain = 1; chain < CHAINS; ++chain)
        part[0][m] += part[chain][m];
    for (int m = 0; m < M; ++m)
      total[m] += part[0][m] * scale;
    if (layout.has_minima)
      for (int m = 0; m < M; ++m)
        total[m] += minimum * sums[m * num_groups + g];
  }
  for (int m = 0; m < M; ++m)
    y[m] = total[m];
}
#else
constexpr bool HAS_PAIRS = false;
#endif

template <Kind K, class X> void multiply_rows(const Layout &layout, const uint8_t *panel, const X *x, const float *sums, int64_t rows, Floats *y) {
  int64_t row = 0;
  auto step = [&]<int M>() {
    for (; row + M <= rows; row += M)
      multiply<K, M>(layout, panel, x + row * layout.inner, sums + row * layout.num_groups(), y + row);
  };
  if constexpr (std::is_same_v<X, uint16_t>)
    step.template operator()<2 * MOST>();
  step.template operator()<MOST>();
  if constexpr (MOST > 4)
    step.template operator()<4>();
  step.template operator()<2>();
  step.template operator()<1>();
}

/// A panel's numbers, plain: y fp32[inner, 16]
template <Kind K> void unpack(const Layout &layout, const uint8_t *panel, Floats *y) {
  Scales scales(layout);
  const float power = layout.half_power(), middle = layout.middle;
  for (int64_t g = 0; g < layout.num_groups(); ++g) {
    auto [scale, minimum] = scales.take(panel);
    scale *= power;
    if (has_middle(K))
      minimum = minimum - scale * middle;
    const int64_t end = std::min(layout.inner, (g + 1) * layout.group);
    for (int64_t i = g * layout.group; i < end; i += columns_of(K)) {
      decode<K>(panel, [&](int column, Floats values) { y[i + column] = values * power * scale + minimum; });
      panel += bytes_of(K);
    }
  }
}

template <class F> void by_kind(Kind kind, const F &f) {
  switch (kind) {
  case INT4: return f.template operator()<INT4>();
  case INT8: return f.template operator()<INT8>();
  case FP8: return f.template operator()<FP8>();
  case FP4: return f.template operator()<FP4>();
  case INT5: return f.template operator()<INT5>();
  case INT6: return f.template operator()<INT6>();
  }
}

float sum(const float *x, int64_t count) {
  Floats sums{};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES)
    sums += load<Floats>(x + i);
  float rest = 0;
  for (; i < count; ++i)
    rest += x[i];
  return total(sums) + rest;
}

/// Write a panel's part of y [rows, O]. made: fp32[rows, 16], each `stride` from the last, to be multiplied by `power`
template <class T> void write(const Layout &layout, int64_t panel, const Floats *made, int64_t stride, float power, const T *bias, int64_t rows, T *y) {
  const int64_t first = panel * ROWS, count = std::min(ROWS, layout.out - first);
  for (int64_t row = 0; row < rows; ++row) {
    const Floats sums = made[row * stride] * power;
    if (count == ROWS) {
      narrow(bias ? sums + widen_vector(bias + first) : sums, y + row * layout.out + first);
      continue;
    }
    float numbers[ROWS];
    narrow(sums, numbers);
    for (int64_t lane = 0; lane < count; ++lane)
      narrow(numbers[lane] + (bias ? widen(bias[first + lane]) : 0.0f), y[row * layout.out + first + lane]);
  }
}

/// y = numbers x of M rows, whose sums stay in registers. numbers fp32[inner, 16], x fp32[M, inner]
template <int M> void multiply_plain(const Floats *numbers, const float *x, int64_t inner, Floats *y) {
  Floats sums[M] = {};
  for (int64_t i = 0; i < inner; ++i)
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m)
      sums[m] += numbers[i] * x[m * inner + i];
  for (int m = 0; m < M; ++m)
    y[m] = sums[m];
}

/// Multiply more rows by a panel at a time, whose numbers are unpacked to a core's cache. x fp32[rows, I]
template <class T> void multiply_by_panels(const Layout &layout, const uint8_t *panels, const float *x, const T *bias, int64_t rows, T *y) {
  torch::stable::parallel_for(0, layout.num_panels(), 1, [&](int64_t begin, int64_t end) {
    std::vector<Floats> numbers(layout.inner), made(rows);
    for (int64_t p = begin; p < end; ++p) {
      by_kind(layout.kind, [&]<Kind K>() { unpack<K>(layout, panels + p * layout.panel_size(), numbers.data()); });
      int64_t row = 0;
      auto step = [&]<int M>() {
        for (; row + M <= rows; row += M)
          multiply_plain<M>(numbers.data(), x + row * layout.inner, layout.inner, made.data() + row);
      };
      step.template operator()<6>();
      step.template operator()<2>();
      step.template operator()<1>();
      write(layout, p, made.data(), 1, 1.0f, bias, rows, y);
    }
  });
}

/// Rows of which a sum of a part is not finite once more, by plain numbers: x times a scale, or a middle that is taken off
/// later, makes NaN of an infinite number. sums fp32[rows, parts]
template <class T>
void multiply_infinite(const Layout &layout, const uint8_t *panels, const std::vector<float> &sums, const T *x, const T *bias, int64_t rows, T *y) {
  const int64_t parts = sums.size() / std::max<int64_t>(rows, 1);
  std::vector<float> wide(layout.inner);
  for (int64_t row = 0; row < rows; ++row) {
    int num_infinite = 0;
    for (int64_t part = 0; part < parts; ++part)
      num_infinite += !(std::abs(sums[row * parts + part]) <= std::numeric_limits<float>::max());
    if (!num_infinite)
      continue;
    for (int64_t i = 0; i < layout.inner; ++i)
      wide[i] = widen(x[row * layout.inner + i]);
    multiply_by_panels(layout, panels, wide.data(), bias, 1, y + row * layout.out);
  }
}

/// Multiply a few rows, whose numbers are unpacked in registers.
template <class T> void multiply_few(const Layout &layout, const uint8_t *panels, const T *x, const T *bias, int64_t rows, T *y) {
  const int64_t inner = layout.inner, num_groups = layout.num_groups();
  const bool is_even = inner % 2 == 0 && layout.group % 2 == 0;
  const bool by_pairs = HAS_PAIRS && std::is_same_v<T, uint16_t> && is_even && (rows > 2 || has_table(layout.kind));
  const float power = by_pairs ? 1.0f : layout.half_power();
  std::vector<float> wide(rows * inner), sums(rows * num_groups);
  if (!by_pairs || layout.has_minima) {
    for (int64_t i = 0; i < rows * inner; ++i)
      wide[i] = widen(x[i]);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t g = 0; g < num_groups; ++g)
        sums[row * num_groups + g] = sum(wide.data() + row * inner + g * layout.group, std::min(layout.group, inner - g * layout.group));
    for (float &each : wide)
      each *= power;
  }
  torch::stable::parallel_for(0, layout.num_panels(), 1, [&](int64_t begin, int64_t end) {
    std::vector<Floats> made(rows);
    for (int64_t p = begin; p < end; ++p) {
      const uint8_t *panel = panels + p * layout.panel_size();
      by_kind(layout.kind, [&]<Kind K>() {
        if constexpr (HAS_PAIRS && std::is_same_v<T, uint16_t>)
          if (by_pairs)
            return multiply_rows<K>(layout, panel, x, sums.data(), rows, made.data());
        multiply_rows<K>(layout, panel, wide.data(), sums.data(), rows, made.data());
      });
      write(layout, p, made.data(), 1, power, bias, rows, y);
    }
  });
  multiply_infinite(layout, panels, sums, x, bias, rows, y);
}

/// Calls f<M>(row) for the rows in groups of M, the last ones in smaller groups.
template <class F> void by_rows(int64_t rows, const F &f) {
  int64_t row = 0;
  auto step = [&]<int M>() {
    for (; row + M <= rows; row += M)
      f.template operator()<M>(row);
  };
#ifdef HAS_INTEGER_DOTS
  step.template operator()<6>();
#else
  step.template operator()<4>();
#endif
  step.template operator()<2>();
  step.template operator()<1>();
}

#ifdef HAS_INTEGER_PRODUCTS
// products of pairs of 16 bits, of which a core adds twice as many as of float32
constexpr int64_t SHORT_ROWS = 512; // at a time
constexpr int64_t BLOCK = 32;       // columns whose products are summed in 32 bits: 15 bits of x, 8 of a weight

/// x in 16 bits, as multiples of a power of 2 for each block of a row: of what 8 or 11 bits hold nothing is lost, but
/// below 2^-16 of the block's largest number or 2^-115.
struct Shorts {
  std::vector<int16_t> numbers;    // groups of M rows, [inner / 2, M, 2]
  std::vector<float> scales, sums; // [rows, blocks], of the numbers of x
};

template <class T> Shorts shorten(const T *x, int64_t rows, int64_t inner) {
  const int64_t blocks = inner / BLOCK;
  Shorts made{std::vector<int16_t>(rows * inner), std::vector<float>(rows * blocks), std::vector<float>(rows * blocks)};
  torch::stable::parallel_for(0, blocks, 4, [&](int64_t begin, int64_t end) {
    by_rows(rows, [&]<int M>(int64_t first) {
      for (int64_t block = begin; block < end; ++block)
        for (int m = 0; m < M; ++m) {
          float wide[BLOCK], largest = 0;
          for (int64_t i = 0; i < BLOCK; ++i) {
            wide[i] = widen(x[(first + m) * inner + block * BLOCK + i]);
            largest = std::max(largest, std::abs(wide[i]));
          }
          const float total = sum(wide, BLOCK);
          int exponent = 0;
          std::frexp(largest, &exponent);
          exponent = std::max(exponent, -100);
          const bool is_finite = std::isfinite(total);
          const float factor = is_finite ? std::ldexp(1.0f, 15 - exponent) : 0.0f;
          int16_t *to = made.numbers.data() + first * inner + block * BLOCK * M + m * 2;
          for (int64_t i = 0; i < BLOCK; ++i)
            to[i / 2 * M * 2 + i % 2] = is_finite ? (int16_t)std::clamp(wide[i] * factor, -32767.0f, 32767.0f) : 0;
          made.scales[(first + m) * blocks + block] = is_finite ? std::ldexp(1.0f, exponent - 15) : NAN;
          made.sums[(first + m) * blocks + block] = total;
        }
    });
  });
  return made;
}

/// A panel's integers, the pairs of two columns side by side: y [inner / 2, 16]; scales and minima of blocks.
template <Kind K> void unpack_pairs(const Layout &layout, const uint8_t *panel, Ints *y, Floats *block_scales, Floats *block_minima) {
  Scales scales(layout);
  const float middle = layout.middle;
  for (int64_t g = 0; g < layout.num_groups(); ++g) {
    const auto [scale, minimum] = scales.take(panel);
    const int64_t end = std::min(layout.inner, (g + 1) * layout.group);
    for (int64_t block = g * layout.group / BLOCK; block < end / BLOCK; ++block)
      block_scales[block] = scale, block_minima[block] = minimum;
    Ints even{};
    for (int64_t i = g * layout.group; i < end; i += columns_of(K)) {
      decode<K>(panel, [&](int column, Floats values) {
        const Ints numbers = convert<Ints>(has_middle(K) ? values - middle : values);
        if ((i + column) % 2)
          y[(i + column) / 2] = (even & 0xFFFF) | numbers << 16;
        else
          even = numbers;
      });
      panel += bytes_of(K);
    }
  }
}

/// y = panel x of M rows. pairs of unpack_pairs, x of a group of Shorts, scales of its rows
template <int M> void multiply_pairs(const Ints *pairs, const Floats *block_scales, int64_t blocks, const int16_t *x, const float *scales, Floats *y) {
  Floats total[M] = {};
  for (int64_t block = 0; block < blocks; ++block) {
    __m256i sums[M][2] = {};
    for (int64_t pair = 0; pair < BLOCK / 2; ++pair, ++pairs, x += 2 * M) {
      const __m256i low = _mm256_loadu_si256((const __m256i *)pairs), high = _mm256_loadu_si256((const __m256i *)pairs + 1);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const __m256i both = _mm256_set1_epi32(load<int32_t>(x + 2 * m));
        sums[m][0] = _mm256_add_epi32(sums[m][0], _mm256_madd_epi16(low, both));
        sums[m][1] = _mm256_add_epi32(sums[m][1], _mm256_madd_epi16(high, both));
      }
    }
    for (int m = 0; m < M; ++m)
      total[m] += convert<Floats>(Ints{(decltype(Ints::low))sums[m][0], (decltype(Ints::low))sums[m][1]}) * (block_scales[block] * scales[m * blocks + block]);
  }
  for (int m = 0; m < M; ++m)
    y[m] = total[m];
}

/// Multiply some rows of 16 bits by a panel of integers at a time.
template <class T> void multiply_some_shorts(const Layout &layout, const uint8_t *panels, const T *x, const T *bias, int64_t rows, T *y) {
  const int64_t inner = layout.inner, blocks = inner / BLOCK;
  const Shorts shorts = shorten(x, rows, inner);
  torch::stable::parallel_for(0, layout.num_panels(), 1, [&](int64_t begin, int64_t end) {
    std::vector<Ints> pairs(inner / 2);
    std::vector<Floats> scales(blocks), minima(blocks), made(rows);
    for (int64_t p = begin; p < end; ++p) {
      by_kind(layout.kind, [&]<Kind K>() {
        if constexpr (K != FP8 && K != FP4)
          unpack_pairs<K>(layout, panels + p * layout.panel_size(), pairs.data(), scales.data(), minima.data());
      });
      by_rows(rows, [&]<int M>(int64_t row) {
        multiply_pairs<M>(pairs.data(), scales.data(), blocks, shorts.numbers.data() + row * inner, shorts.scales.data() + row * blocks, made.data() + row);
      });
      if (layout.has_minima)
        for (int64_t row = 0; row < rows; ++row)
          for (int64_t block = 0; block < blocks; ++block)
            made[row] += minima[block] * shorts.sums[row * blocks + block];
      write(layout, p, made.data(), 1, 1.0f, bias, rows, y);
    }
  });
  multiply_infinite(layout, panels, shorts.sums, x, bias, rows, y);
}

/// The same of any number of rows: of so many at a time that each panel finds them in the last cache.
template <class T> void multiply_shorts(const Layout &layout, const uint8_t *panels, const T *x, const T *bias, int64_t rows, T *y) {
  for (int64_t row = 0; row < rows; row += SHORT_ROWS)
    multiply_some_shorts(layout, panels, x + row * layout.inner, bias, std::min(SHORT_ROWS, rows - row), y + row * layout.out);
}

bool takes_shorts(const Layout &layout) {
  return layout.kind != FP8 && layout.kind != FP4 && layout.inner % BLOCK == 0 && layout.group % BLOCK == 0;
}
#endif

#ifdef HAS_INTEGER_DOTS
constexpr int64_t BLOCK = 32;            // columns whose products are summed in 32 bits: 15 bits of x, 8 of a weight
constexpr int64_t PANELS = 2;            // that are multiplied at a time
constexpr int64_t FEW_DIGITS = 8;        // rows of x up to which numbers stay in registers
constexpr int64_t MOST_SHORTS = HAS_SHORT_PRODUCTS ? 64 : INT64_MAX; // rows up to which this is faster than oneDNN
constexpr int64_t SHORT_BYTES = 1 << 19; // of rows of x that are multiplied at a time: they stay in a core's cache

/// x as integers of up to 2^14, multiples of a power of 2 for each block of a row: of what 8 or 11 bits hold nothing is
/// lost, but below 2^-15 of the block's largest number.
struct Shorts {
  std::vector<int16_t> numbers;    // [rows, inner]
  std::vector<float> scales, sums; // [rows, blocks], of the numbers of x
};

template <class T> Shorts shorten(const T *x, int64_t rows, int64_t inner) {
  const int64_t blocks = inner / BLOCK;
  Shorts made{std::vector<int16_t>(rows * inner), std::vector<float>(rows * blocks), std::vector<float>(rows * blocks)};
  torch::stable::parallel_for(0, rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin * blocks; block < end * blocks; ++block) {
      const Floats low = widen_vector(x + block * BLOCK), high = widen_vector(x + block * BLOCK + LANES);
      const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps((__m512)low), _mm512_abs_ps((__m512)high)));
      const float all = total(low + high);
      const bool is_finite = std::isfinite(all);
      const int32_t exponent = std::max(std::bit_cast<int32_t>(largest) >> 23, 27) - 126;
      const float factor = is_finite ? std::bit_cast<float>((14 - exponent + 127) << 23) : 0.0f;
      const __m512i top = _mm512_cvtps_epi32((__m512)(high * factor)), bottom = _mm512_cvtps_epi32((__m512)(low * factor));
      int16_t *to = made.numbers.data() + block * BLOCK;
      _mm256_storeu_si256((__m256i *)to, is_finite ? _mm512_cvtsepi32_epi16(bottom) : __m256i{});
      _mm256_storeu_si256((__m256i *)(to + LANES), is_finite ? _mm512_cvtsepi32_epi16(top) : __m256i{});
      made.scales[block] = is_finite ? std::bit_cast<float>((exponent - 14 + 127) << 23) : NAN;
      made.sums[block] = all;
    }
  });
  return made;
}

/// A panel's integers, two columns in a lane, and the scales and minima of its blocks; each with room for PANELS.
template <Kind K> void unpack_pairs(const Layout &layout, const uint8_t *panel, Ints *y, Floats *block_scales, Floats *block_minima) {
  Scales scales(layout);
  const int32_t middle = has_middle(K) ? layout.middle : 0;
  for (int64_t g = 0; g < layout.num_groups(); ++g) {
    const auto [scale, minimum] = scales.take(panel);
    const int64_t end = std::min(layout.inner, (g + 1) * layout.group);
    for (int64_t block = g * layout.group / BLOCK; block < end / BLOCK; ++block)
      block_scales[block * PANELS] = scale, block_minima[block * PANELS] = minimum;
    for (int64_t i = g * layout.group; i < end; i += std::max(columns_of(K), 2)) {
      Ints *to = y + i / 2 * PANELS;
      if constexpr (K == INT4) {
        const Ints n = widen_integers(panel);
        *to = (Ints)_mm512_sub_epi16((__m512i)((n | n << 12) & 0x000F000F), _mm512_set1_epi16(middle));
      } else if constexpr (K == INT8) {
        *to = (widen_integers((const int8_t *)panel) & 0xFFFF) | widen_integers((const int8_t *)panel + ROWS) << 16;
      } else {
        [&]<int... PAIR>(std::integer_sequence<int, PAIR...>) __attribute__((always_inline)) {
          constexpr int BITS = bits_of(K);
          ((to[PAIR * PANELS] = (Ints)_mm512_sub_epi16((__m512i)(extract<BITS, 2 * BITS * PAIR>(panel) | extract<BITS, 2 * BITS * PAIR + BITS>(panel) << 16),
                                                       _mm512_set1_epi16(middle))),
           ...);
        }(std::make_integer_sequence<int, columns_of(K) / 2>());
      }
      panel += bytes_of(K) * std::max(2 / columns_of(K), 1);
    }
  }
}

/// y = panels x of M rows. pairs of unpack_pairs, x [M, inner] and scales and sums [M, blocks] of Shorts, y [M, PANELS]
template <int M, bool HAS_MINIMA>
void multiply_pairs(const Ints *pairs, const Floats *block_scales, const Floats *block_minima, int64_t blocks, const int16_t *x, const float *scales,
                    const float *sums, Floats *y) {
  Floats total[M][PANELS] = {};
  for (int64_t block = 0; block < blocks; ++block, pairs += BLOCK / 2 * PANELS) {
    __m512i part[M][PANELS] = {};
    const int16_t *from = x + block * BLOCK;
#pragma GCC unroll 16
    for (int64_t pair = 0; pair < BLOCK / 2; ++pair)
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const __m512i both = _mm512_set1_epi32(load<int32_t>(from + m * blocks * BLOCK + 2 * pair));
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; ++p)
          part[m][p] = _mm512_dpwssd_epi32(part[m][p], load<__m512i>(pairs + pair * PANELS + p), both);
      }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
      for (int p = 0; p < PANELS; ++p) {
        total[m][p] += (Floats)_mm512_cvtepi32_ps(part[m][p]) * (block_scales[block * PANELS + p] * scales[m * blocks + block]);
        if (HAS_MINIMA)
          total[m][p] += block_minima[block * PANELS + p] * sums[m * blocks + block];
      }
  }
  for (int m = 0; m < M; ++m)
    for (int p = 0; p < PANELS; ++p)
      y[m * PANELS + p] = total[m][p];
}

/// Multiply some rows of 16 bits by panels of integers.
template <class T> void multiply_some_shorts(const Layout &layout, const uint8_t *panels, const T *x, const T *bias, int64_t rows, T *y) {
  const int64_t inner = layout.inner, blocks = inner / BLOCK, num_panels = layout.num_panels();
  const Shorts shorts = shorten(x, rows, inner);
  torch::stable::parallel_for(0, (num_panels + PANELS - 1) / PANELS, 1, [&](int64_t begin, int64_t end) {
    std::vector<Ints> pairs(inner / 2 * PANELS);
    std::vector<Floats> scales(blocks * PANELS), minima(blocks * PANELS), made(rows * PANELS);
    for (int64_t first = begin * PANELS; first < std::min(end * PANELS, num_panels); first += PANELS) {
      const int64_t count = std::min(PANELS, num_panels - first);
      by_kind(layout.kind, [&]<Kind K>() {
        if constexpr (K != FP8 && K != FP4)
          for (int64_t p = 0; p < count; ++p)
            unpack_pairs<K>(layout, panels + (first + p) * layout.panel_size(), pairs.data() + p, scales.data() + p, minima.data() + p);
      });
      by_rows(rows, [&]<int M>(int64_t row) {
        const auto multiply = layout.has_minima ? multiply_pairs<M, true> : multiply_pairs<M, false>;
        multiply(pairs.data(), scales.data(), minima.data(), blocks, shorts.numbers.data() + row * inner, shorts.scales.data() + row * blocks,
                 shorts.sums.data() + row * blocks, made.data() + row * PANELS);
      });
      for (int64_t p = 0; p < count; ++p)
        write(layout, first + p, made.data() + p, PANELS, 1.0f, bias, rows, y);
    }
  });
  multiply_infinite(layout, panels, shorts.sums, x, bias, rows, y);
}

/// The same of any number of rows.
template <class T> void multiply_shorts(const Layout &layout, const uint8_t *panels, const T *x, const T *bias, int64_t rows, T *y) {
  const int64_t at_once = std::max<int64_t>(SHORT_BYTES / (2 * layout.inner) / 6 * 6, 48);
  for (int64_t row = 0; row < rows; row += at_once)
    multiply_some_shorts(layout, panels, x + row * layout.inner, bias, std::min(at_once, rows - row), y + row * layout.out);
}

bool takes_shorts(const Layout &layout) {
  return layout.kind != FP8 && layout.kind != FP4 && layout.inner % BLOCK == 0 && layout.group % BLOCK == 0;
}

/// Shorts as two digits of 8 bits, four columns of a row side by side as multiply_digits takes them: bytes [rows, blocks, 64].
/// Of a block: lower and upper digits of columns 0, 2, 4, 6, then of 1, 3, 5, 7, …; of 8-bit weights, of 0 to 3, 4 to 7, …
std::vector<int8_t> split_digits(Kind kind, const std::vector<int16_t> &numbers) {
  std::vector<int8_t> made(numbers.size() * 2);
  const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
  for (size_t i = 0; i < numbers.size(); i += BLOCK) {
    const __m512i n = _mm512_loadu_si512(numbers.data() + i);
    __m256i low = _mm512_cvtepi16_epi8(n), high = _mm512_cvtepi16_epi8(_mm512_srai_epi16(_mm512_add_epi16(n, _mm512_set1_epi16(128)), 8));
    if (kind == INT4)
      low = _mm256_shuffle_epi8(low, order), high = _mm256_shuffle_epi8(high, order);
    const __m256i first = _mm256_unpacklo_epi32(low, high), second = _mm256_unpackhi_epi32(low, high);
    _mm256_storeu_si256((__m256i *)(made.data() + 2 * i), _mm256_permute2x128_si256(first, second, 0x20));
    _mm256_storeu_si256((__m256i *)(made.data() + 2 * i + BLOCK), _mm256_permute2x128_si256(first, second, 0x31));
  }
  return made;
}

/// 4 x 16 bytes transposed: a lane has those of its row.
[[gnu::always_inline]] inline __m512i transpose_bytes(const uint8_t *from) {
  const __m512i fours = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), load<__m512i>(from));
  return _mm512_shuffle_epi8(fours, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)));
}

/// y = panel x of M rows, of 4 or 8 bits. digits of split_digits, scales and sums [M, blocks] of Shorts
/// offsets i32[M, blocks]: -middle times the sum of a block's integers
template <Kind K, int M>
void multiply_digits(const Layout &layout, const uint8_t *panel, const int8_t *digits, const float *scales, const float *sums, const int32_t *offsets,
                     Floats *y) {
  constexpr int PARTS = K == INT4 ? 2 : 1;
  constexpr int CHAINS = M > 2 ? 1 : 2; // sums that do not wait for each other
  const int64_t blocks = layout.inner / BLOCK;
  const uint8_t *at = panel;
  Scales of_groups(layout);
  Floats total[M] = {};
  int64_t block = 0;
  for (int64_t g = 0; g < layout.num_groups(); ++g) {
    const auto [scale, minimum] = of_groups.take(at);
    for (const int64_t end = std::min(layout.inner, (g + 1) * layout.group) / BLOCK; block < end; ++block) {
      __m512i low[M][CHAINS] = {}, high[M][CHAINS] = {};
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m)
        low[m][0] = _mm512_set1_epi32(offsets[m * blocks + block]);
#pragma GCC unroll 8
      for (int chunk = 0; chunk < 8 / PARTS; ++chunk, at += 64) {
        __builtin_prefetch(at + AHEAD);
        const __m512i bytes = transpose_bytes(at);
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; ++part) {
          const __m512i numbers = K == INT8 ? _mm512_xor_si512(bytes, _mm512_set1_epi8(-128))
                                            : _mm512_and_si512(part ? _mm512_srli_epi16(bytes, 4) : bytes, _mm512_set1_epi8(15));
#pragma GCC unroll 4
          for (int m = 0; m < M; ++m) {
            const int8_t *own = digits + (m * blocks + block) * 2 * BLOCK + (chunk * PARTS + part) * 8;
            const int chain = (chunk * PARTS + part) % CHAINS;
            low[m][chain] = _mm512_dpbusd_epi32(low[m][chain], numbers, _mm512_set1_epi32(load<int32_t>(own)));
            high[m][chain] = _mm512_dpbusd_epi32(high[m][chain], numbers, _mm512_set1_epi32(load<int32_t>(own + 4)));
          }
        }
      }
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        Ints all = (Ints)low[m][0], upper = (Ints)high[m][0];
        if (CHAINS > 1)
          all += (Ints)low[m][CHAINS - 1], upper += (Ints)high[m][CHAINS - 1];
        total[m] += convert<Floats>(all + (upper << 8)) * (scale * scales[m * blocks + block]);
        if (layout.has_minima)
          total[m] += minimum * sums[m * blocks + block];
      }
    }
  }
  for (int m = 0; m < M; ++m)
    y[m] = total[m];
}

/// Multiply a few rows of 16 bits by numbers of 4 or 8 bits, which stay in registers.
template <class T> void multiply_few_digits(const Layout &layout, const uint8_t *panels, const T *x, const T *bias, int64_t rows, T *y) {
  const int64_t inner = layout.inner, blocks = inner / BLOCK;
  const Shorts shorts = shorten(x, rows, inner);
  const std::vector<int8_t> digits = split_digits(layout.kind, shorts.numbers);
  std::vector<int32_t> offsets(rows * blocks);
  const int32_t middle = layout.kind == INT8 ? 128 : layout.middle;
  if (middle)
    for (int64_t block = 0; block < rows * blocks; ++block) {
      const __m512i ones = _mm512_set1_epi16(1), numbers = _mm512_loadu_si512(shorts.numbers.data() + block * BLOCK);
      offsets[block] = -middle * _mm512_reduce_add_epi32(_mm512_madd_epi16(numbers, ones));
    }
  torch::stable::parallel_for(0, layout.num_panels(), 1, [&](int64_t begin, int64_t end) {
    std::vector<Floats> made(rows);
    for (int64_t p = begin; p < end; ++p) {
      const uint8_t *panel = panels + p * layout.panel_size();
      int64_t row = 0;
      auto step = [&]<int M>() {
        const auto multiply = layout.kind == INT4 ? multiply_digits<INT4, M> : multiply_digits<INT8, M>;
        for (; row + M <= rows; row += M)
          multiply(layout, panel, digits.data() + row * inner * 2, shorts.scales.data() + row * blocks, shorts.sums.data() + row * blocks,
                   offsets.data() + row * blocks, made.data() + row);
      };
      step.template operator()<4>();
      step.template operator()<2>();
      step.template operator()<1>();
      write(layout, p, made.data(), 1, 1.0f, bias, rows, y);
    }
  });
  multiply_infinite(layout, panels, shorts.sums, x, bias, rows, y);
}
#endif

/// Multiply many rows of Ts by numbers that are unpacked to Ts first, some panels at a time, in oneDNN.
template <class T> void multiply_many(const Layout &layout, const uint8_t *panels, const Tensor &x, const std::optional<Tensor> &bias, Tensor &y) {
  const int64_t at_once = std::clamp(AT_ONCE / (layout.inner * ROWS), int64_t{1}, layout.num_panels());
  Tensor plain = torch::stable::new_empty(x, {layout.inner, at_once * ROWS});
  for (int64_t first = 0; first < layout.num_panels(); first += at_once) {
    const int64_t count = std::min(at_once, layout.num_panels() - first), width = at_once * ROWS;
    T *numbers = elements<T>(plain);
    torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      std::vector<Floats> made(layout.inner);
      for (int64_t p = begin; p < end; ++p) {
        const uint8_t *panel = panels + (first + p) * layout.panel_size();
        by_kind(layout.kind, [&]<Kind K>() { unpack<K>(layout, panel, made.data()); });
        for (int64_t i = 0; i < layout.inner; ++i)
          narrow(made[i], numbers + i * width + p * ROWS);
      }
    });
    const int64_t row = first * ROWS, rows = std::min(count * ROWS, layout.out - row);
    Tensor weight = torch::stable::transpose(torch::stable::narrow(plain, 1, 0, rows), 0, 1);
    std::optional<Tensor> part;
    if (bias) {
      Tensor whole = *bias;
      part = torch::stable::narrow(whole, 0, row, rows);
    }
    std::array<StableIValue, 3> stack{torch::stable::detail::from(x), torch::stable::detail::from(weight), torch::stable::detail::from(part)};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
    Tensor target = torch::stable::narrow(y, 1, row, rows);
    torch::stable::copy_(target, torch::stable::detail::to<Tensor>(stack[0]));
  }
}

Tensor as_floats(const Tensor &x) {
  if (x.scalar_type() == ScalarType::Float)
    return x;
  Tensor made = torch::stable::new_empty(x, x.sizes(), ScalarType::Float);
  torch::stable::copy_(made, x);
  return made;
}

Layout layout_of(const std::vector<int64_t> &numbers, const Tensor &panels) {
  const Layout layout{(Kind)numbers[0], numbers[1], numbers[2], numbers[3], (ScaleDtype)numbers[4], numbers[5] != 0,
                      numbers[6], numbers[7]};
  STD_TORCH_CHECK(panels.numel() == layout.num_panels() * layout.panel_size(), "a weight's panels have another size");
  return layout;
}

/// x [T, I], bias [O] -> [T, O]
Tensor linear(const Tensor &x, const Tensor &panels, const std::optional<Tensor> &bias, std::vector<int64_t> numbers) {
  const Layout layout = layout_of(numbers, panels);
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) == layout.inner && x.is_contiguous(), "x is [T, I], without gaps");
  const int64_t rows = x.size(0);
  Tensor y = torch::stable::new_empty(x, {rows, layout.out});
  by_dtype(x, [&]<class T>() {
    const uint8_t *stored = elements<uint8_t>(panels);
    const T *shift = bias ? elements<T>(*bias) : nullptr;
#ifdef HAS_INTEGER_DOTS
    if constexpr (!std::is_same_v<T, float>)
      if (takes_shorts(layout) && rows <= MOST_SHORTS) {
        const bool has_digits = layout.kind == INT4 || layout.kind == INT8;
        if (has_digits && rows <= FEW_DIGITS)
          return multiply_few_digits<T>(layout, stored, elements<T>(x), shift, rows, elements<T>(y));
        if (rows > FEW_DIGITS / 2)
          return multiply_shorts<T>(layout, stored, elements<T>(x), shift, rows, elements<T>(y));
      }
#endif
    if (rows <= FEW)
      return multiply_few<T>(layout, stored, elements<T>(x), shift, rows, elements<T>(y));
    if constexpr (HAS_SHORT_PRODUCTS)
      return multiply_many<T>(layout, stored, x, bias, y);
    const Tensor wide = as_floats(x);
#ifdef __AVX512F__
    multiply_many<float>(layout, stored, wide, bias ? std::optional(as_floats(*bias)) : bias, y);
#else
#ifdef HAS_INTEGER_PRODUCTS
    if constexpr (!std::is_same_v<T, float>)
      if (takes_shorts(layout))
        return multiply_shorts<T>(layout, stored, elements<T>(x), shift, rows, elements<T>(y));
#endif
    multiply_by_panels<T>(layout, stored, elements<float>(wide), shift, rows, elements<T>(y));
#endif
  });
  return y;
}

/// tokens i64[T] -> [T, H]; dtype_number: the place of its dtype in DTYPES of panels.py
Tensor embedding(const Tensor &tokens, const Tensor &panels, int64_t dtype_number, std::vector<int64_t> numbers) {
  constexpr ScalarType dtypes[] = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};
  const ScalarType dtype = dtypes[dtype_number];
  const Layout layout = layout_of(numbers, panels);
  const int64_t *rows = elements<int64_t>(tokens);
  for (int64_t t = 0; t < tokens.numel(); ++t)
    STD_TORCH_CHECK(rows[t] >= 0 && rows[t] < layout.out, "there is no token ", rows[t]);
  Tensor y = torch::stable::new_empty(tokens, {tokens.numel(), layout.inner}, dtype);
  by_dtype(y, [&]<class T>() {
    T *made = elements<T>(y);
    torch::stable::parallel_for(0, tokens.numel(), 16, [&](int64_t begin, int64_t end) {
      std::vector<Floats> numbers(layout.inner);
      for (int64_t t = begin; t < end; ++t) {
        const uint8_t *panel = elements<uint8_t>(panels) + rows[t] / ROWS * layout.panel_size();
        by_kind(layout.kind, [&]<Kind K>() { unpack<K>(layout, panel, numbers.data()); });
        for (int64_t i = 0; i < layout.inner; ++i)
          narrow(load<float>((const float *)&numbers[i] + rows[t] % ROWS), made[t * layout.inner + i]);
      }
    });
  });
  return y;
}

} // namespace

// `kernels/cpp/panels.py` defines them
STABLE_TORCH_LIBRARY_IMPL(atom, CPU, library) {
  library.impl("panel_linear", TORCH_BOX(&linear));
  library.impl("panel_embedding", TORCH_BOX(&embedding));
}
