// Linears of few rows and embeddings over plain weights in oneDNN's blocks.
//
// A weight [O, I] lies in blocks of 64 rows, a block column by column: 4 bytes of each row, a float32 or a pair of
// bfloat16. Rows are padded to whole blocks and columns to whole blocks of 16 times 4 bytes, with zeros. Sums are in
// float32. kernels/cpp/blocks.py sees to it that a weight lies so.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/shim_utils.h>

#include <array>
#include <type_traits>
#include <utility>
#include <vector>

#include "numbers.h"

namespace {

constexpr int64_t ROWS = 64;             // of a block
constexpr int64_t VECTORS = ROWS / LANES;
constexpr int64_t FEW = 32;              // rows of x up to which this is faster than oneDNN
constexpr int TILE = 6;                  // rows of x that are multiplied at a time

template <class T> constexpr int64_t PER_LANE = 4 / sizeof(T); // columns

/// y += weight x, of as many columns as a lane holds
void add(Floats &y, const float *weight, const float *x) { y += load<Floats>(weight) * *x; }
#ifdef __AVX512BF16__
void add(Floats &y, const uint16_t *weight, const uint16_t *x) {
  y = (Floats)_mm512_dpbf16_ps((__m512)y, (__m512bh)load<Ints>(weight), (__m512bh)_mm512_set1_epi32(load<int32_t>(x)));
}
#else
void add(Floats &y, const uint16_t *weight, const uint16_t *x) {
  const Ints pairs = load<Ints>(weight);
  y += (Floats)(pairs << 16) * widen(x[0]);
  y += (Floats)(pairs & -0x10000) * widen(x[1]);
}
#endif

/// A weight's block, or its first or second half, of as many vectors: y fp32[M, VECTORS, 16] = block x of M rows.
template <int NUM, int M, class T> void multiply(const T *block, const T *x, int64_t inner, Floats *y) {
  constexpr int64_t PER = PER_LANE<T>;
  Floats sum[M][NUM] = {};
  for (int64_t i = 0; i < inner; i += PER) {
    const T *column = block + i * ROWS;
    for (int v = 0; v < NUM; ++v)
      __builtin_prefetch(reinterpret_cast<const char *>(column + v * LANES * PER) + AHEAD);
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < NUM; ++v)
        add(sum[m][v], column + v * LANES * PER, x + m * inner + i);
  }
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < NUM; ++v)
      y[m * VECTORS + v] = sum[m][v];
}

/// The same of any rows, in tiles of about the same size.
template <int NUM, class T> void multiply_rows(const T *block, const T *x, int64_t inner, int64_t rows, Floats *y) {
  const int64_t tiles = (rows + TILE - 1) / TILE;
  for (int64_t tile = 0, row = 0; tile < tiles; ++tile) {
    const int64_t count = rows * (tile + 1) / tiles - row;
    [&]<int... M>(std::integer_sequence<int, M...>) {
      ((count == M + 1 ? multiply<NUM, M + 1>(block, x + row * inner, inner, y + row * VECTORS) : void()), ...);
    }(std::make_integer_sequence<int, TILE>());
    row += count;
  }
}

template <class T> int64_t padded(int64_t inner) {
  constexpr int64_t BLOCK = LANES * PER_LANE<T>;
  return (inner + BLOCK - 1) / BLOCK * BLOCK;
}

template <class T> const T *blocks(const Tensor &weight) { return static_cast<const T *>(weight.data_ptr()); }

template <class T> void multiply_few(const Tensor &weight, const T *x, const T *bias, int64_t rows, T *y) {
  const int64_t out = weight.size(0), inner = weight.size(1), width = (inner + PER_LANE<T> - 1) / PER_LANE<T> * PER_LANE<T>;
  std::vector<T> whole;
  if (width > inner) { // the last lanes hold a column less
    whole.resize(rows * width);
    for (int64_t row = 0; row < rows; ++row)
      std::copy_n(x + row * inner, inner, whole.data() + row * width);
    x = whole.data();
  }
  constexpr int64_t HALF = ROWS / 2; // what a thread takes at least
  torch::stable::parallel_for(0, (out + HALF - 1) / HALF, 1, [&](int64_t begin, int64_t end) {
    std::vector<Floats> made(rows * VECTORS);
    for (int64_t half = begin; half < end;) {
      const bool is_whole = half % 2 == 0 && half + 2 <= end;
      const T *block = blocks<T>(weight) + half / 2 * ROWS * padded<T>(inner) + half % 2 * HALF * PER_LANE<T>;
      (is_whole ? multiply_rows<VECTORS, T> : multiply_rows<VECTORS / 2, T>)(block, x, width, rows, made.data());
      const int64_t first = half * HALF, last = std::min(out, first + (is_whole ? ROWS : HALF));
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t o = first; o < last; o += LANES) {
          const int64_t count = std::min(LANES, last - o);
          float added[LANES] = {};
          for (int64_t lane = 0; bias && lane < count; ++lane)
            added[lane] = widen(bias[o + lane]);
          T numbers[LANES];
          narrow(made[row * VECTORS + (o - first) / LANES] + load<Floats>(added), numbers);
          std::copy_n(numbers, count, y + row * out + o);
        }
      half += is_whole ? 2 : 1;
    }
  });
}

template <class F> void by_plain_dtype(const Tensor &like, const F &f) {
  switch (like.scalar_type()) {
  case ScalarType::Float: return f.template operator()<float>();
  case ScalarType::BFloat16: return f.template operator()<uint16_t>();
  default: STD_TORCH_CHECK(false, "takes float32 or bfloat16");
  }
}

/// x [T, I], bias [O] -> [T, O]
Tensor linear(const Tensor &x, const Tensor &weight, const std::optional<Tensor> &bias) {
  const int64_t rows = x.size(0);
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) == weight.size(1) && x.is_contiguous(), "x is [T, I], without gaps");
  STD_TORCH_CHECK(x.scalar_type() == weight.scalar_type(), "x has its weight's dtype");
  if (rows > FEW) {
    std::array<StableIValue, 3> stack{torch::stable::detail::from(x), torch::stable::detail::from(weight), torch::stable::detail::from(bias)};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("atom::packed_linear", "", stack.data(), TORCH_ABI_VERSION));
    return torch::stable::detail::to<Tensor>(stack[0]);
  }
  Tensor y = torch::stable::new_empty(x, {rows, weight.size(0)});
  by_plain_dtype(x, [&]<class T>() {
    multiply_few<T>(weight, elements<T>(x), bias ? elements<T>(*bias) : nullptr, rows, elements<T>(y));
  });
  return y;
}

/// tokens i64[T] -> [T, H]
Tensor embedding(const Tensor &tokens, const Tensor &weight) {
  const int64_t *rows = elements<int64_t>(tokens), inner = weight.size(1);
  for (int64_t t = 0; t < tokens.numel(); ++t)
    STD_TORCH_CHECK(rows[t] >= 0 && rows[t] < weight.size(0), "there is no token ", rows[t]);
  Tensor y = torch::stable::new_empty(tokens, {tokens.numel(), inner}, weight.scalar_type());
  by_plain_dtype(y, [&]<class T>() {
    constexpr int64_t PER = PER_LANE<T>;
    T *made = elements<T>(y);
    torch::stable::parallel_for(0, tokens.numel(), 16, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const T *row = blocks<T>(weight) + rows[t] / ROWS * ROWS * padded<T>(inner) + rows[t] % ROWS * PER;
        for (int64_t i = 0; i < inner; ++i)
          made[t * inner + i] = row[i / PER * PER * ROWS + i % PER];
      }
    });
  });
  return y;
}

} // namespace

// `kernels/cpp/blocks.py` defines them
STABLE_TORCH_LIBRARY_IMPL(atom, MkldnnCPU, library) {
  library.impl("block_linear", TORCH_BOX(&linear));
  library.impl("block_embedding", TORCH_BOX(&embedding));
}
