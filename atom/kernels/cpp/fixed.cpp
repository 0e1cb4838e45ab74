// Linears, norms, activations and rotations whose bits for a row depend on that row only.
//
// Each number is the result of one chain of operations, the same whatever else is computed with it: a sum runs over the
// columns in 16 lanes from the first to the last, then over the lanes; nothing is cut by the number of rows or threads.
// All is computed in float32.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include "numbers.h"

namespace {

constexpr int64_t TILE = 4; // rows of x, and of the weight, that are multiplied at a time

int64_t padded(int64_t columns) { return (columns + LANES - 1) / LANES * LANES; }

/// Rows as float32, zeros after the end of each.
template <class T> void widen_rows(const T *from, int64_t rows, int64_t columns, float *to) {
  const int64_t width = padded(columns), whole = columns / LANES * LANES;
  for (int64_t row = 0; row < rows; ++row, from += columns, to += width) {
    for (int64_t i = 0; i < whole; i += LANES)
      narrow(widen_vector(from + i), to + i);
    for (int64_t i = whole; i < width; ++i)
      to[i] = i < columns ? widen(from[i]) : 0.0f;
  }
}

/// M rows of x by TILE rows of a weight, all fp32[width]: sums y fp32[M, TILE]
template <int M> void multiply(const float *x, const float *weight, int64_t width, float *y) {
  Floats sum[M][TILE] = {};
  for (int64_t i = 0; i < width; i += LANES)
    for (int m = 0; m < M; ++m) {
      const Floats own = load<Floats>(x + m * width + i);
      for (int n = 0; n < TILE; ++n)
        sum[m][n] += own * load<Floats>(weight + n * width + i);
    }
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < TILE; ++n)
      y[m * TILE + n] = total(sum[m][n]);
}

/// x [T, I], weight [O, I], bias [O] -> [T, O], in the dtype of x, or in float32 if wide
Tensor linear(const Tensor &x, const Tensor &weight, const std::optional<Tensor> &bias, bool wide) {
  const int64_t rows = x.size(0), inner = x.size(1), out = weight.size(0), width = padded(inner);
  STD_TORCH_CHECK(inner == weight.size(1) && x.is_contiguous() && weight.is_contiguous(), "x is [T, I], the weight [O, I], without gaps");
  Tensor y = torch::stable::new_empty(x, {rows, out}, wide ? ScalarType::Float : x.scalar_type());
  std::vector<float> own(rows * width), added(out, 0.0f);
  by_dtype(x, [&]<class T>() { widen_rows(elements<T>(x), rows, inner, own.data()); });
  if (bias)
    by_dtype(*bias, [&]<class T>() {
      for (int64_t o = 0; o < out; ++o)
        added[o] = widen(elements<T>(*bias)[o]);
    });
  by_dtype(weight, [&]<class W>() {
    by_dtype(y, [&]<class T>() {
      T *made = elements<T>(y);
      torch::stable::parallel_for(0, (out + TILE - 1) / TILE, 1, [&](int64_t begin, int64_t end) {
        std::vector<float> some(TILE * width, 0.0f);
        float sums[TILE * TILE];
        for (int64_t first = begin * TILE; first < end * TILE; first += TILE) {
          const int64_t count = std::min(TILE, out - first);
          widen_rows(elements<W>(weight) + first * inner, count, inner, some.data());
          for (int64_t row = 0; row < rows; row += TILE) {
            const int64_t taken = std::min(TILE, rows - row);
            [&]<int... M>(std::integer_sequence<int, M...>) {
              ((taken == M + 1 ? multiply<M + 1>(own.data() + row * width, some.data(), width, sums) : void()), ...);
            }(std::make_integer_sequence<int, TILE>());
            for (int64_t m = 0; m < taken; ++m)
              for (int64_t n = 0; n < count; ++n)
                narrow(sums[m * TILE + n] + added[first + n], made[(row + m) * out + first + n]);
          }
        }
      });
    });
  });
  return y;
}

/// a and b [T, H], weight [H] -> rms_norm(a + b) and a + b, which is a without b
std::tuple<Tensor, Tensor> norm(const Tensor &a, const std::optional<Tensor> &b, const Tensor &weight, double eps) {
  const int64_t columns = weight.size(0), rows = a.numel() / std::max<int64_t>(columns, 1), width = padded(columns);
  STD_TORCH_CHECK(a.is_contiguous() && (!b || b->is_contiguous()) && weight.is_contiguous(), "rows have no gaps");
  Tensor y = torch::stable::empty_like(a), sum = b ? torch::stable::empty_like(a) : a;
  std::vector<float> by(columns);
  by_dtype(weight, [&]<class W>() {
    for (int64_t i = 0; i < columns; ++i)
      by[i] = widen(elements<W>(weight)[i]);
  });
  by_dtype(a, [&]<class T>() {
    T *made = elements<T>(y), *sums = b ? elements<T>(sum) : nullptr;
    torch::stable::parallel_for(0, rows, 8, [&](int64_t begin, int64_t end) {
      std::vector<float> own(width, 0.0f);
      for (int64_t row = begin; row < end; ++row) {
        const T *from = elements<T>(a) + row * columns;
        if (b) {
          const T *other = elements<T>(*b) + row * columns;
          for (int64_t i = 0; i < columns; ++i)
            narrow(widen(from[i]) + widen(other[i]), sums[row * columns + i]);
          from = sums + row * columns;
        }
        widen_rows(from, 1, columns, own.data());
        Floats squares{};
        for (int64_t i = 0; i < width; i += LANES)
          squares += load<Floats>(own.data() + i) * load<Floats>(own.data() + i);
        const float factor = 1 / std::sqrt(total(squares) / columns + (float)eps);
        for (int64_t i = 0; i < columns; ++i)
          narrow(own[i] * factor * by[i], made[row * columns + i]);
      }
    });
  });
  return {y, sum};
}

float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

/// An activation, of those that kernels/cpp/fixed.py numbers.
float activated(float x, int64_t kind) {
  switch (kind) {
  case 0: return x / (1 + std::exp(-x));
  case 1: return 1 / (1 + std::exp(-x));
  case 2: return softplus(x);
  case 3: return x * 0.5f * (1 + std::erf(x * 0.70710678f));
  case 4: return 0.5f * x * (1 + std::tanh(0.79788456f * (x + 0.044715f * x * x * x)));
  case 5: return x / (1 + std::exp(-1.702f * x));
  case 6: return x < 0 ? 0 : x;
  default: return x < 0 ? 0 : x * x;
  }
}

/// x [T, W] -> activated [T, W]; gated: x [T, 2 W], gate before up -> activated gate, rounded, times up
Tensor activate(const Tensor &x, int64_t kind, bool gated) {
  const int64_t all = x.size(-1), columns = gated ? all / 2 : all, rows = x.numel() / std::max<int64_t>(all, 1);
  STD_TORCH_CHECK(x.is_contiguous(), "rows have no gaps");
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = columns;
  Tensor y = torch::stable::new_empty(x, shape);
  by_dtype(x, [&]<class T>() {
    T *made = elements<T>(y);
    torch::stable::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        for (int64_t i = 0; i < columns; ++i) {
          const T *from = elements<T>(x) + row * all + i;
          T rounded;
          narrow(activated(widen(*from), kind), rounded);
          if (gated)
            narrow(widen(rounded) * widen(from[columns]), rounded);
          made[row * columns + i] = rounded;
        }
    });
  });
  return y;
}

/// logits fp32[T, E] -> their softmax
Tensor softmax(const Tensor &logits) {
  const int64_t rows = logits.size(0), columns = logits.size(1);
  STD_TORCH_CHECK(logits.is_contiguous() && logits.scalar_type() == ScalarType::Float, "logits are float32, without gaps");
  Tensor y = torch::stable::empty_like(logits);
  float *made = elements<float>(y);
  for (int64_t row = 0; row < rows; ++row) {
    const float *own = elements<float>(logits) + row * columns, top = *std::max_element(own, own + columns);
    float *to = made + row * columns, all = 0;
    for (int64_t i = 0; i < columns; ++i)
      all += to[i] = std::exp(own[i] - top);
    for (int64_t i = 0; i < columns; ++i)
      to[i] /= all;
  }
  return y;
}

/// positions i64[T], freqs fp32[P] -> cos and sin fp32[T, P], times scale
std::tuple<Tensor, Tensor> rotary(const Tensor &positions, const Tensor &freqs, double scale, int64_t every) {
  const int64_t rows = positions.numel(), half = freqs.numel();
  STD_TORCH_CHECK(positions.is_contiguous() && freqs.is_contiguous() && freqs.scalar_type() == ScalarType::Float, "freqs are float32, without gaps");
  Tensor cos = torch::stable::new_empty(freqs, {rows, half}), sin = torch::stable::new_empty(freqs, {rows, half});
  float *of_cos = elements<float>(cos), *of_sin = elements<float>(sin);
  for (int64_t row = 0; row < rows; ++row) {
    const float position = elements<int64_t>(positions)[row] / every * every;
    for (int64_t i = 0; i < half; ++i) {
      const float angle = position * elements<float>(freqs)[i];
      of_cos[row * half + i] = std::cos(angle) * (float)scale;
      of_sin[row * half + i] = std::sin(angle) * (float)scale;
    }
  }
  return {cos, sin};
}

} // namespace

// `kernels/cpp/fixed.py` defines them
STABLE_TORCH_LIBRARY_IMPL(atom, CPU, library) {
  library.impl("fixed_linear", TORCH_BOX(&linear));
  library.impl("fixed_norm", TORCH_BOX(&norm));
  library.impl("fixed_activate", TORCH_BOX(&activate));
  library.impl("fixed_softmax", TORCH_BOX(&softmax));
  library.impl("fixed_rotary", TORCH_BOX(&rotary));
}
