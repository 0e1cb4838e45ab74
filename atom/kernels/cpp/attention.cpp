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

struct Cache {
  int64_t block_size, kv_heads, dim;
  /// Vectors of a row, of which there are 4 at least: a power of 2.
  int64_t vectors() const { return std::max<int64_t>(4, std::bit_ceil((uint64_t)(dim + LANES - 1) / LANES)); }
  /// Where the entry of a place in a block begins, in elements: keys of all heads, then values.
  int64_t offset(int64_t block, int64_t place) const { return (block * block_size + place) * 2 * kv_heads * dim; }
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

/// A head's row as vectors, zeros after its end.
template <class T, int V> void widen_vectors(const T *from, int64_t dim, Floats (&to)[V]) {
  for (int64_t v = 0; v < V; ++v) {
    if ((v + 1) * LANES <= dim) {
      to[v] = widen_vector(from + v * LANES);
      continue;
    }
    float rest[LANES] = {};
    if (v * LANES < dim)
      widen_row(from + v * LANES, dim - v * LANES, rest);
    to[v] = load<Floats>(rest);
  }
}

/// One part of a context, for the `group` query heads of a key/value head, of rows of V vectors.
/// q fp32[group, V * LANES], sums as q, of values, tops and totals fp32[group] of the scores' exponentials
template <class T, int V>
void attend_part(const Cache &cache, const T *entries, const int32_t *table, int64_t head, int64_t begin, int64_t end, Scores rule,
                 int64_t group, const float *q, float *sums, float *tops, float *totals) {
  constexpr int64_t width = V * LANES;
  std::vector<float> scores(group * LANES);
  Floats values[LANES][V];
  std::fill(sums, sums + group * width, 0.0f);
  std::fill(tops, tops + group, LOWEST);
  std::fill(totals, totals + group, 0.0f);
  int64_t block = begin / cache.block_size, place = begin % cache.block_size;
  for (int64_t first = begin; first < end; first += LANES) {
    const int64_t count = std::min(LANES, end - first);
    for (int64_t n = 0; n < count; ++n) {
      const T *entry = entries + cache.offset(table[block], place) + head * cache.dim;
      if (++place == cache.block_size)
        place = 0, ++block;
      Floats key[V];
      widen_vectors(entry, cache.dim, key);
      for (int64_t g = 0; g < group; ++g) {
        Floats sum{};
        for (int64_t v = 0; v < V; ++v)
          sum += load<Floats>(q + g * width + v * LANES) * key[v];
        scores[g * LANES + n] = total(sum) * rule.scale;
      }
      widen_vectors(entry + cache.kv_heads * cache.dim, cache.dim, values[n]);
    }
    for (int64_t g = 0; g < group; ++g) {
      float *own = scores.data() + g * LANES;
      if (rule.softcap)
        for (int64_t n = 0; n < count; ++n)
          own[n] = rule.softcap * std::tanh(own[n] / rule.softcap);
      std::fill(own + count, own + LANES, -INFINITY);
      const float top = std::max(tops[g], *std::max_element(own, own + count));
      const float kept = top > tops[g] ? std::exp(tops[g] - top) : 1.0f;
      tops[g] = top;
      const Floats shares = exp_of(load<Floats>(own) - top);
      narrow(shares, own);
      std::fill(own + count, own + LANES, 0.0f);
      totals[g] = totals[g] * kept + total(load<Floats>(own));
      Floats sum[V];
      for (int64_t v = 0; v < V; ++v)
        sum[v] = load<Floats>(sums + g * width + v * LANES) * kept;
      for (int64_t n = 0; n < count; ++n)
        for (int64_t v = 0; v < V; ++v)
          sum[v] += values[n][v] * own[n];
      for (int64_t v = 0; v < V; ++v)
        narrow(sum[v], sums + g * width + v * LANES);
    }
  }
}

/// Calls f with the number of vectors of a row of this many, which it may have more of.
template <class F> void by_vectors(int64_t vectors, const F &f) {
  switch (vectors) {
  case 4: return f.template operator()<4>();
  case 8: return f.template operator()<8>();
  case 16: return f.template operator()<16>();
  case 32: return f.template operator()<32>();
  default: STD_TORCH_CHECK(false, "takes heads of up to 512 dims");
  }
}

/// q [S, N, D], cache [blocks, block size, 2, K, D], table i32[S, M] and lengths i32[S], or of each head i32[S K, M] and
/// i32[S K], sinks [N] -> [S, N, D]; a sequence of no positions gives zeros. window and softcap: 0 for none
Tensor paged_decode(const Tensor &q, const Tensor &stored, const Tensor &table, const Tensor &lengths,
                    const std::optional<Tensor> &sinks, double scale, double value_scale, int64_t window, double softcap) {
  const Cache cache{stored.size(1), stored.size(3), stored.size(4)};
  const int64_t sequences = q.size(0), heads = q.size(1), group = heads / cache.kv_heads, width = cache.vectors() * LANES;
  STD_TORCH_CHECK(q.is_contiguous() && stored.is_contiguous() && lengths.is_contiguous() && table.stride(1) == 1, "tensors have no gaps");
  const bool by_head = lengths.size(0) > sequences;
  const auto row_of = [&](int64_t s, int64_t h) { return by_head ? s * cache.kv_heads + h : s; }; // of the table
  struct Part {
    int64_t sequence, head, begin, end;
  };
  std::vector<Part> parts;
  std::vector<int64_t> first_part(sequences * cache.kv_heads + 1, 0); // of a sequence's head
  for (int64_t s = 0; s < sequences; ++s) {
    for (int64_t h = 0; h < cache.kv_heads; ++h) {
      const int64_t length = elements<int32_t>(lengths)[row_of(s, h)], begin = window ? std::max<int64_t>(0, length - window) : 0;
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
        by_vectors(cache.vectors(), [&]<int V>() {
          const int32_t *blocks = elements<int32_t>(table) + row_of(part.sequence, part.head) * table.stride(0);
          attend_part<T, V>(cache, elements<T>(stored), blocks, part.head, part.begin, part.end,
                            Scores{(float)scale, (float)softcap}, group, wide.data() + (part.sequence * heads + part.head * group) * width, sums.data() + p * group * width,
                            tops.data() + p * group, totals.data() + p * group);
        });
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
    STD_TORCH_CHECK(each->stride(2) == 1 && each->stride(1) == dim, "heads must be contiguous");
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
