// Norm, rope and cache write, and the attention of decodes, over a paged cache.
//
// A context is cut into parts, so that all threads have some; each part of a key/value head is read once for the query
// heads that share it, 16 positions at a time, and parts are merged by their highest scores and sums (flash decoding,
// Dao et al. 2023). All is computed in float32.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <vector>

#include "numbers.h"

namespace {

constexpr int64_t PART = 128; // positions
constexpr float LOWEST = -1e30f;

/// e to the x of 16 numbers up to 0, within 2e-7 of it (Cody and Waite's reduction, Taylor's series)
Floats exp_of(Floats x) {
  const Floats least = Floats{} - 87;
  x = x < least ? least : x;
  const Floats shifted = x * 1.44269504f + 12582912.0f; // 1.5 * 2^23: what is left of the point is in the low bits
  const Floats times = shifted - 12582912.0f;
  const Floats rest = x - times * 0.693359375f + times * 2.12194440e-4f;
  Floats sum = rest * (1.0f / 5040) + 1.0f / 720;
  sum = sum * rest + 1.0f / 120;
  sum = sum * rest + 1.0f / 24;
  sum = sum * rest + 1.0f / 6;
  sum = sum * rest + 0.5f;
  sum = sum * rest + 1.0f;
  sum = sum * rest + 1.0f;
  return (Floats)((Ints)sum + ((Ints)shifted << 23));
}

struct Cache {
  int64_t block_size, kv_heads, dim;
  int64_t padded() const { return (dim + LANES - 1) / LANES * LANES; }
  /// Where the keys of a head begin, in elements; its values lie kv_heads * dim behind.
  int64_t offset(const int32_t *table, int64_t position, int64_t head) const {
    const int64_t slot = table[position / block_size] * block_size + position % block_size;
    return (slot * 2 * kv_heads + head) * dim;
  }
};

template <class T> void widen_row(const T *from, int64_t dim, float *to) {
  for (int64_t d = 0; d < dim; ++d)
    to[d] = widen(from[d]);
}

/// The numbers of a tensor, or none.
std::vector<float> widened(const std::optional<Tensor> &tensor) {
  std::vector<float> made(tensor ? tensor->numel() : 0);
  if (tensor)
    by_dtype(*tensor, [&]<class T>() { widen_row(elements<T>(*tensor), made.size(), made.data()); });
  return made;
}

struct Scores {
  float scale, softcap; // softcap: 0 for none
};

/// One part of a context, for the `group` query heads of a key/value head.
/// q fp32[group, padded], sums fp32[group, padded] of values, tops and totals fp32[group] of the scores' exponentials
template <class T>
void attend_part(const Cache &cache, const T *entries, const int32_t *table, int64_t head, int64_t begin, int64_t end, Scores rule,
                 int64_t group, const float *q, float *sums, float *tops, float *totals) {
  const int64_t width = cache.padded(), vectors = width / LANES;
  std::vector<float> row(width), scores(group * LANES);
  std::fill(sums, sums + group * width, 0.0f);
  std::fill(tops, tops + group, LOWEST);
  std::fill(totals, totals + group, 0.0f);
  for (int64_t first = begin; first < end; first += LANES) {
    const int64_t count = std::min(LANES, end - first);
    const T *keys[LANES];
    for (int64_t n = 0; n < count; ++n) {
      keys[n] = entries + cache.offset(table, first + n, head);
      widen_row(keys[n], cache.dim, row.data());
      for (int64_t g = 0; g < group; ++g) {
        Floats sum{};
        for (int64_t v = 0; v < vectors; ++v)
          sum += load<Floats>(q + g * width + v * LANES) * load<Floats>(row.data() + v * LANES);
        const float score = total(sum) * rule.scale;
        scores[g * LANES + n] = rule.softcap ? rule.softcap * std::tanh(score / rule.softcap) : score;
      }
    }
    for (int64_t g = 0; g < group; ++g) {
      float *own = scores.data() + g * LANES;
      const float top = std::max(tops[g], *std::max_element(own, own + count));
      if (top > tops[g]) {
        const float kept = std::exp(tops[g] - top);
        totals[g] *= kept;
        for (int64_t d = 0; d < width; ++d)
          sums[g * width + d] *= kept;
        tops[g] = top;
      }
      std::fill(own + count, own + LANES, -INFINITY);
      const Floats shares = exp_of(load<Floats>(own) - top);
      std::memcpy(own, &shares, sizeof shares);
      std::fill(own + count, own + LANES, 0.0f);
      totals[g] += total(load<Floats>(own));
    }
    for (int64_t n = 0; n < count; ++n) {
      widen_row(keys[n] + cache.kv_heads * cache.dim, cache.dim, row.data());
      for (int64_t g = 0; g < group; ++g)
        for (int64_t v = 0; v < vectors; ++v) {
          float *at = sums + g * width + v * LANES;
          narrow(load<Floats>(at) + load<Floats>(row.data() + v * LANES) * scores[g * LANES + n], at);
        }
    }
  }
}

/// q [S, N, D], cache [blocks, block size, 2, K, D], table i32[S, M], lengths i32[S], sinks [N] -> [S, N, D]; a sequence
/// of no positions gives zeros. window and softcap: 0 for none
Tensor paged_decode(const Tensor &q, const Tensor &stored, const Tensor &table, const Tensor &lengths,
                    const std::optional<Tensor> &sinks, double scale, double value_scale, int64_t window, double softcap) {
  const Cache cache{stored.size(1), stored.size(3), stored.size(4)};
  const int64_t sequences = q.size(0), heads = q.size(1), group = heads / cache.kv_heads, width = cache.padded();
  STD_TORCH_CHECK(q.is_contiguous() && stored.is_contiguous() && lengths.is_contiguous() && table.stride(1) == 1, "tensors have no gaps");
  struct Part {
    int64_t sequence, head, begin, end;
  };
  std::vector<Part> parts;
  std::vector<int64_t> first_part(sequences * cache.kv_heads + 1, 0); // of a sequence's head
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t length = elements<int32_t>(lengths)[s], begin = window ? std::max<int64_t>(0, length - window) : 0;
    for (int64_t h = 0; h < cache.kv_heads; ++h) {
      for (int64_t at = begin; at < length; at += PART)
        parts.push_back({s, h, at, std::min(length, at + PART)});
      first_part[s * cache.kv_heads + h + 1] = parts.size();
    }
  }
  std::vector<float> wide(sequences * heads * width, 0.0f), sums(parts.size() * group * width), tops(parts.size() * group),
      totals(parts.size() * group);
  const std::vector<float> own_sinks = widened(sinks);
  Tensor y = torch::stable::new_empty(q, {sequences, heads, cache.dim});
  by_dtype(q, [&]<class T>() {
    for (int64_t row = 0; row < sequences * heads; ++row)
      widen_row(elements<T>(q) + row * cache.dim, cache.dim, wide.data() + row * width);
  });
  torch::stable::parallel_for(0, parts.size(), 1, [&](int64_t begin, int64_t end) {
    by_cache_dtype(stored, [&]<class T>() {
      for (int64_t p = begin; p < end; ++p) {
        const Part &part = parts[p];
        attend_part<T>(cache, elements<T>(stored), elements<int32_t>(table) + part.sequence * table.stride(0), part.head, part.begin,
                       part.end, Scores{(float)scale, (float)softcap}, group,
                       wide.data() + (part.sequence * heads + part.head * group) * width, sums.data() + p * group * width,
                       tops.data() + p * group, totals.data() + p * group);
      }
    });
  });
  by_dtype(q, [&]<class T>() {
    T *made = elements<T>(y);
    for (int64_t row = 0; row < sequences * heads; ++row) {
      const int64_t pair = row / group, g = row % group;
      float top = sinks ? own_sinks[row % heads] : LOWEST, all = 0;
      for (int64_t p = first_part[pair]; p < first_part[pair + 1]; ++p)
        top = std::max(top, tops[p * group + g]);
      if (sinks)
        all += std::exp(own_sinks[row % heads] - top);
      std::vector<float> merged(width, 0.0f);
      for (int64_t p = first_part[pair]; p < first_part[pair + 1]; ++p) {
        const float share = std::exp(tops[p * group + g] - top);
        all += totals[p * group + g] * share;
        for (int64_t d = 0; d < width; ++d)
          merged[d] += sums[(p * group + g) * width + d] * share;
      }
      const float factor = all == 0 ? 0 : (float)value_scale / all;
      for (int64_t d = 0; d < cache.dim; ++d)
        narrow(merged[d] * factor, made[row * cache.dim + d]);
    }
  });
  return y;
}

/// A row in place: divided by the root of its mean square, times weight.
void normalize(float *row, int64_t dim, const float *weight, float eps) {
  float sum = 0;
  for (int64_t d = 0; d < dim; ++d)
    sum += row[d] * row[d];
  const float by = 1 / std::sqrt(sum / dim + eps);
  for (int64_t d = 0; d < dim; ++d)
    row[d] *= by * weight[d];
}

/// A row in place: dim i turns with i + P, or 2 i with 2 i + 1 where they are interleaved (Su et al. 2021).
void rotate(float *row, int64_t half, const float *cos, const float *sin, bool interleaved) {
  for (int64_t i = 0; i < half; ++i) {
    float &a = row[interleaved ? 2 * i : i], &b = row[interleaved ? 2 * i + 1 : i + half];
    const float first = a * cos[i] - b * sin[i], second = b * cos[i] + a * sin[i];
    a = first, b = second;
  }
}

/// q [T, N, D], k and v [T, K, D], cos and sin fp32[T, P], norms [D], cache [blocks, block size, 2, K, D], slots i64[T],
/// k_scale and v_scale fp32[1] of entries in fp8 -> q [T, N, D]. It rounds once, after the rotation.
Tensor norm_rope_write(const Tensor &q, const Tensor &k, const Tensor &v, const std::optional<Tensor> &cos, const std::optional<Tensor> &sin,
                       const std::optional<Tensor> &q_norm, const std::optional<Tensor> &k_norm, Tensor stored, const Tensor &slots,
                       const std::optional<Tensor> &k_scale, const std::optional<Tensor> &v_scale, double eps, bool interleaved) {
  const int64_t tokens = q.size(0), heads = q.size(1), kv_heads = k.size(1), dim = q.size(2), half = cos ? cos->size(1) : 0;
  for (const Tensor *each : {&q, &k, &v})
    STD_TORCH_CHECK(each->stride(2) == 1 && each->stride(1) == dim, "heads lie one behind the other");
  STD_TORCH_CHECK(stored.is_contiguous() && slots.is_contiguous(), "tensors have no gaps");
  STD_TORCH_CHECK(!cos || (cos->is_contiguous() && sin->is_contiguous()), "turns have no gaps");
  const bool is_fp8 = stored.scalar_type() == ScalarType::Float8_e4m3fn;
  const float of_keys = k_scale ? *elements<float>(*k_scale) : 1.0f, of_values = v_scale ? *elements<float>(*v_scale) : 1.0f;
  const std::vector<float> weights[] = {widened(q_norm), widened(k_norm)}; // whose dtype may be another one
  Tensor y = torch::stable::new_empty(q, {tokens, heads, dim});
  by_dtype(q, [&]<class T>() {
    by_cache_dtype(stored, [&]<class C>() {
      C *entries = elements<C>(stored);
      torch::stable::parallel_for(0, tokens, 16, [&](int64_t begin, int64_t end) {
        std::vector<float> row(dim);
        for (int64_t t = begin; t < end; ++t) {
          C *entry = entries + elements<int64_t>(slots)[t] * 2 * kv_heads * dim;
          for (int64_t head = 0; head < heads + kv_heads; ++head) {
            const bool is_key = head >= heads;
            const Tensor &from = is_key ? k : q;
            widen_row(elements<T>(from) + t * from.stride(0) + (is_key ? head - heads : head) * dim, dim, row.data());
            if (const auto &weight = weights[is_key]; !weight.empty())
              normalize(row.data(), dim, weight.data(), (float)eps);
            if (cos)
              rotate(row.data(), half, elements<float>(*cos) + t * half, elements<float>(*sin) + t * half, interleaved);
            for (int64_t d = 0; d < dim; ++d) {
              T rounded;
              narrow(row[d], rounded);
              if (!is_key)
                elements<T>(y)[(t * heads + head) * dim + d] = rounded;
              else
                narrow(is_fp8 ? row[d] / of_keys : widen(rounded), entry[(head - heads) * dim + d]);
            }
          }
          const T *values = elements<T>(v) + t * v.stride(0);
          for (int64_t d = 0; d < kv_heads * dim; ++d)
            narrow(is_fp8 ? widen(values[d]) / of_values : widen(values[d]), entry[kv_heads * dim + d]);
        }
      });
    });
  });
  return y;
}

} // namespace

// `kernels/cpp/attention.py` defines them
STABLE_TORCH_LIBRARY_IMPL(atom, CPU, library) {
  library.impl("paged_decode", TORCH_BOX(&paged_decode));
  library.impl("norm_rope_write", TORCH_BOX(&norm_rope_write));
}
