// Linears and embeddings over packed weights, for any CPU.
//
// A weight [O, I] lies in panels of 16 rows, the lanes of a vector, and a panel in groups of columns that share a scale:
// the scales of its rows, maybe their minima, then the numbers column by column, bytes of 16 rows, of one column or of an
// even one (the lower halves) and the next. All is read once and in order. A number is value * scale + minimum, where an
// int4's value is its bits less 8; minima in float16 are those of a GGUF file, where it is its bits.
//
// With AVX512_BF16, bfloat16 x is multiplied by pairs of columns, in which every value is exact. One or two rows of what
// has no table of values take longer so.
//
// e4m3 and e2m1 become float32 by their bits alone, 2^-120 and 2^-126 times their value: x and the scales are larger by
// half of that each. Sums are in float32.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <array>
#include <type_traits>
#include <vector>

#include "numbers.h"

namespace {

constexpr int64_t ROWS = LANES;      // of a panel
constexpr int64_t AT_ONCE = 1 << 20; // numbers that are unpacked at a time for oneDNN
#ifdef __AVX512F__
constexpr bool HAS_SHORT_PRODUCTS = true; // whether oneDNN multiplies 16-bit numbers faster than float32
constexpr int64_t FEW = 32;               // rows of x up to which numbers are unpacked in registers
#else
constexpr bool HAS_SHORT_PRODUCTS = false;
constexpr int64_t FEW = 2; // sums of more would leave the registers
#endif

enum Kind : int64_t { INT4, INT8, FP8, FP4 }; // as kernels/cpp/panels.py numbers them

enum ScaleDtype : int64_t { BF16, FP32, FP16 };

constexpr bool is_pair(Kind kind) { return kind == INT4 || kind == FP4; }

struct Layout {
  Kind kind;
  int64_t out, inner, group; // group: columns that share a scale
  ScaleDtype dtype;          // of scales and minima
  bool has_minima;

  int64_t num_panels() const { return (out + ROWS - 1) / ROWS; }
  int64_t num_groups() const { return (inner + group - 1) / group; }
  int64_t values_size() const { return ROWS * (is_pair(kind) ? inner / 2 : inner); }
  int64_t scales_size() const { return ROWS * (dtype == FP32 ? 4 : 2); } // of a group
  int64_t panel_size() const { return values_size() + num_groups() * scales_size() * (has_minima ? 2 : 1); }

  /// What x and scales are multiplied by each, so that values are those of their format.
  float half_power() const { return kind == FP8 ? 0x1p60f : kind == FP4 ? 0x1p63f : 1.0f; }

  /// The next scales or minima.
  Floats take(const uint8_t *&at) const {
    const uint8_t *from = at;
    at += scales_size();
    return dtype == FP32 ? load<Floats>(from) : dtype == BF16 ? (Floats)(widen(load<Halves>(from)) << 16) : widen_fp16(from);
  }

  /// The next scales, and minima of an int4 whose value is its bits less 8; the file's are of one whose value is its bits.
  std::array<Floats, 2> take_both(const uint8_t *&at) const {
    const Floats scale = take(at);
    if (!has_minima)
      return {scale, Floats{}};
    const Floats minimum = take(at);
    return {scale, dtype == FP16 ? minimum + 8 * scale : minimum};
  }
};

/// The values of 16 rows in a column, or, of pairs, in two.
template <Kind K> void decode(const uint8_t *from, Floats *values) {
  if constexpr (K == INT8) {
    values[0] = __builtin_convertvector(widen(load<SignedBytes>(from)), Floats);
    return;
  }
  Ints n = widen(load<Bytes>(from));
  if constexpr (K == INT4) {
    values[0] = __builtin_convertvector(n & 15, Floats);
    values[1] = __builtin_convertvector(n >> 4, Floats);
  } else if constexpr (K == FP8) {
    values[0] = (Floats)(((n & 0x80) << 24) | ((n & 0x7F) << 20));
  } else {
    values[0] = (Floats)(((n & 0x08) << 28) | ((n & 0x07) << 22));
    values[1] = (Floats)(((n & 0x80) << 24) | ((n & 0x70) << 18));
  }
}

/// y = panel x of M rows. x fp32[M, inner], sums fp32[M, groups] of x, y fp32[M, 16]
template <Kind K, int M> void multiply(const Layout &layout, const uint8_t *panel, const float *x, const float *sums, Floats *y) {
  constexpr int PER_BYTE = is_pair(K) ? 2 : 1, CHAINS = M > 2 || is_pair(K) ? 1 : 2; // sums that do not wait for each other
  constexpr int STEP = CHAINS * PER_BYTE;
  const int64_t inner = layout.inner, num_groups = layout.num_groups();
  const uint8_t *at = panel;
  Floats total[M] = {};
  for (int64_t g = 0; g < num_groups; ++g) {
    const auto [scale, minimum] = layout.take_both(at);
    const int64_t end = std::min(inner, (g + 1) * layout.group);
    int64_t i = g * layout.group;
    Floats part[M][STEP] = {};
    if constexpr (K == INT4)
      for (int m = 0; m < M; ++m)
        part[m][0] = Floats{} - 8 * sums[m * num_groups + g];
    auto add = [&](int first, int64_t column) {
      Floats values[PER_BYTE];
      decode<K>(at, values);
      at += ROWS;
      for (int m = 0; m < M; ++m)
        for (int n = 0; n < PER_BYTE; ++n)
          part[m][first + n] += values[n] * x[m * inner + column + n];
    };
    for (; i + 4 * PER_BYTE <= end; i += 4 * PER_BYTE) { // 64 bytes
      __builtin_prefetch(at + AHEAD);
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n)
        add(n % CHAINS * PER_BYTE, i + n * PER_BYTE);
    }
    for (; i < end; i += PER_BYTE)
      add(0, i);
    for (int m = 0; m < M; ++m) {
      Floats sum = part[m][0];
      for (int n = 1; n < STEP; ++n)
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

#ifdef __AVX512BF16__
constexpr bool HAS_PAIRS = true; // products of two bfloat16 and their sum in float32

/// The values of 16 rows in two columns, exact: pairs of bfloat16.
template <Kind K> Ints decode_pair(const uint8_t *from) {
  if constexpr (is_pair(K)) {
    constexpr float VALUES[2][LANES] = {{-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7},
                                        {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6}};
    const Ints table = load<Ints>(VALUES[K == FP4]), n = widen(load<Bytes>(from));
    const Ints even = (Ints)_mm512_permutexvar_epi32((__m512i)n, (__m512i)table); // by the lowest 4 bits
    const Ints odd = (Ints)_mm512_permutexvar_epi32((__m512i)(n >> 4), (__m512i)table);
    return (even >> 16 & 0xFFFF) | odd; // a table's lower halves are zeros
  } else {
    Floats even, odd;
    decode<K>(from, &even);
    decode<K>(from + ROWS, &odd);
    if constexpr (K == FP8)
      even *= 0x1p120f, odd *= 0x1p120f;
    return ((Ints)even >> 16 & 0xFFFF) | ((Ints)odd & (Ints{} - 0x10000));
  }
}

/// multiply, of bfloat16 x and groups of whole pairs
template <Kind K, int M> void multiply(const Layout &layout, const uint8_t *panel, const uint16_t *x, const float *sums, Floats *y) {
  constexpr int64_t STEP = is_pair(K) ? ROWS : 2 * ROWS; // bytes
  constexpr int CHAINS = M > 2 ? 1 : 4 / M; // sums that do not wait for each other
  const int64_t inner = layout.inner, num_groups = layout.num_groups();
  const uint8_t *at = panel;
  Floats total[M] = {};
  for (int64_t g = 0; g < num_groups; ++g) {
    const auto [scale, minimum] = layout.take_both(at);
    Floats part[CHAINS][M] = {};
    auto add = [&](Floats *sums, int64_t column) {
      const __m512bh pairs = (__m512bh)decode_pair<K>(at);
      at += STEP;
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m)
        sums[m] = (Floats)_mm512_dpbf16_ps((__m512)sums[m], pairs, (__m512bh)_mm512_set1_epi32(load<int32_t>(x + m * inner + column)));
    };
    const int64_t end = std::min(inner, (g + 1) * layout.group);
    int64_t i = g * layout.group;
    for (; i + 2 * CHAINS <= end; i += 2 * CHAINS) {
      for (int64_t line = 0; line < CHAINS * STEP; line += 64)
        __builtin_prefetch(at + AHEAD + line);
#pragma GCC unroll 4
      for (int chain = 0; chain < CHAINS; ++chain)
        add(part[chain], i + 2 * chain);
    }
    for (; i < end; i += 2)
      add(part[0], i);
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
    step.template operator()<16>();
  step.template operator()<8>();
  step.template operator()<4>();
  step.template operator()<2>();
  step.template operator()<1>();
}

/// A panel's numbers, plain: y fp32[inner, 16]
template <Kind K> void unpack(const Layout &layout, const uint8_t *panel, Floats *y) {
  constexpr int PER_BYTE = is_pair(K) ? 2 : 1;
  for (int64_t g = 0; g < layout.num_groups(); ++g) {
    auto [scale, minimum] = layout.take_both(panel);
    scale *= layout.half_power();
    if constexpr (K == INT4)
      minimum -= 8 * scale;
    const int64_t end = std::min(layout.inner, (g + 1) * layout.group);
    for (int64_t i = g * layout.group; i < end; i += PER_BYTE) {
      decode<K>(panel, y + i);
      panel += ROWS;
      for (int n = 0; n < PER_BYTE; ++n)
        y[i + n] = y[i + n] * layout.half_power() * scale + minimum;
    }
  }
}

template <class F> void by_kind(Kind kind, const F &f) {
  switch (kind) {
  case INT4: return f.template operator()<INT4>();
  case INT8: return f.template operator()<INT8>();
  case FP8: return f.template operator()<FP8>();
  case FP4: return f.template operator()<FP4>();
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

/// Write a panel's part of y [rows, O]. made: fp32[rows, 16], to be multiplied by `power`
template <class T> void write(const Layout &layout, int64_t panel, const Floats *made, float power, const T *bias, int64_t rows, T *y) {
  const int64_t first = panel * ROWS, count = std::min(ROWS, layout.out - first);
  for (int64_t row = 0; row < rows; ++row) {
    const Floats numbers = made[row] * power;
    for (int64_t lane = 0; lane < count; ++lane)
      narrow(numbers[lane] + (bias ? widen(bias[first + lane]) : 0.0f), y[row * layout.out + first + lane]);
  }
}

/// Multiply a few rows, whose numbers are unpacked in registers.
template <class T> void multiply_few(const Layout &layout, const uint8_t *panels, const T *x, const T *bias, int64_t rows, T *y) {
  const int64_t inner = layout.inner, num_groups = layout.num_groups();
  const bool is_even = inner % 2 == 0 && layout.group % 2 == 0;
  const bool by_pairs = HAS_PAIRS && std::is_same_v<T, uint16_t> && is_even && (rows > 2 || is_pair(layout.kind));
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
      write(layout, p, made.data(), power, bias, rows, y);
    }
  });
}

/// y = numbers x of M rows, whose sums stay in registers. numbers fp32[inner, 16], x fp32[M, inner]
template <int M> void multiply_plain(const Floats *numbers, const float *x, int64_t inner, Floats *y) {
#ifdef __AVX__
  using Part = float __attribute__((vector_size(32), may_alias)); // GCC has no larger ones than a CPU in registers
#else
  using Part = float __attribute__((vector_size(16), may_alias));
#endif
  constexpr int PARTS = sizeof(Floats) / sizeof(Part);
  const Part *column = (const Part *)numbers;
  Part sums[M][PARTS] = {}, *to = (Part *)y;
  for (int64_t i = 0; i < inner; ++i, column += PARTS)
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int part = 0; part < PARTS; ++part)
        sums[m][part] += column[part] * x[m * inner + i];
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; ++part)
      to[m * PARTS + part] = sums[m][part];
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
      write(layout, p, made.data(), 1.0f, bias, rows, y);
    }
  });
}

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
  const Layout layout{(Kind)numbers[0], numbers[1], numbers[2], numbers[3], (ScaleDtype)numbers[4], numbers[5] != 0};
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
    if (rows <= FEW)
      multiply_few<T>(layout, elements<uint8_t>(panels), elements<T>(x), bias ? elements<T>(*bias) : nullptr, rows, elements<T>(y));
    else if constexpr (HAS_SHORT_PRODUCTS)
      multiply_many<T>(layout, elements<uint8_t>(panels), x, bias, y);
    else {
      const Tensor wide = as_floats(x);
      multiply_by_panels<T>(layout, elements<uint8_t>(panels), elements<float>(wide), bias ? elements<T>(*bias) : nullptr, rows, elements<T>(y));
    }
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
          narrow(numbers[i][rows[t] % ROWS], made[t * layout.inner + i]);
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
