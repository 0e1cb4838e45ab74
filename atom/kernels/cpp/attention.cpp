// Norm, rope and cache write, and the attention of decodes, over a paged cache.
//
// A context is cut into parts, so that all threads have some; each part of a key/value head is read once for the query
// heads that share it, 16 positions at a time, and parts are merged by their highest scores and sums (flash decoding,
// Dao et al. 2023). All is computed in float32.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <type_traits>
#include <vector>

#include "numbers.h"

#ifdef __AMX_TILE__
#include <sys/syscall.h>
#include <unistd.h>
#endif

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
  const int64_t whole = dim / LANES * LANES;
  for (int64_t d = 0; d < whole; d += LANES)
    narrow(widen_vector(from + d), to + d);
  for (int64_t d = whole; d < dim; ++d)
    to[d] = widen(from[d]);
}

template <class T> void narrow_row(const float *from, int64_t dim, T *to) {
  const int64_t whole = dim / LANES * LANES;
  for (int64_t d = 0; d < whole; d += LANES)
    narrow(load<Floats>(from + d), to + d);
  for (int64_t d = whole; d < dim; ++d)
    narrow(from[d], to[d]);
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

// Prompts. Rows of queries are lanes, keys and values are broadcast: maxima, sums and masks of rows are then lane by
// lane, and only queries are transposed. One pass over tiles of keys (flash attention, Dao et al. 2022), which begin at
// multiples of KEYS and are walked in order: a row's bits in float32 depend neither on other rows nor on chunks.

constexpr int64_t KEYS = 128; // positions of a tile
constexpr int64_t TILE_ROWS = 192; // for which a tile of keys is read once
#ifdef __AVX512F__
constexpr int64_t DEPTH = 8, WIDE = 3; // sums in registers: DEPTH times WIDE vectors
#else
constexpr int64_t DEPTH = 4, WIDE = 1;
#endif

int64_t rounded_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

struct Visible {
  int64_t low = INT64_MAX, high = 0;         // of positions that any row sees
  int64_t all_low = 0, all_high = INT64_MAX; // of those that all rows see

  void add(int64_t first, int64_t last) {
    low = std::min(low, first), high = std::max(high, last + 1);
    all_low = std::max(all_low, first), all_high = std::min(all_high, last + 1);
  }
};

/// W vectors of rows: what each has seen so far.
template <int W> struct Rows {
  Floats tops[W], totals[W], slopes[W], positions[W];
  Ints first[W], last[W]; // positions that a row sees
  Visible seen;
  std::vector<float> q, sums;  // [D, W * LANES]
  std::vector<uint32_t> pairs; // of q in bf16, if a tile takes them: [D / 2, W * LANES]
};

struct Prompt { // what rows of a tile have in common
  int64_t dim, padded;
  Scores rule;
  bool has_slopes;
};

/// y[n, w] = y[n, w] kept[w] + the sum of a[n, i] b[i, w] over i, for DEPTH n; without kept y is only written.
template <int W, bool IS_KEYS>
void multiply_rows(const float *a, int64_t stride, const float *b, int64_t count, float *y, const Floats *kept) {
  Floats sums[DEPTH][W] = {};
  if (kept)
    for (int n = 0; n < DEPTH; ++n)
      for (int w = 0; w < W; ++w)
        sums[n][w] = load<Floats>(y + (n * W + w) * LANES) * kept[w];
  for (int64_t i = 0; i < count; ++i)
    for (int n = 0; n < DEPTH; ++n)
      for (int w = 0; w < W; ++w)
        sums[n][w] += load<Floats>(b + (i * W + w) * LANES) * a[IS_KEYS ? n * stride + i : i * stride + n];
  for (int n = 0; n < DEPTH; ++n)
    for (int w = 0; w < W; ++w)
      store(sums[n][w], y + (n * W + w) * LANES);
}

/// tanh within 1e-7.
Floats tanh_of(Floats x) {
  const Floats limit = Floats{} + 40, low = Floats{} - 40;
  const Floats bounded = Floats{} - highest(Floats{} - highest(x, low), Floats{} - limit);
  return Floats{} + 1.0f - (Floats{} + 2.0f) / (exp_of(bounded * 2.0f) + 1.0f);
}

/// -1 for rows that see a position, 0 for others.
Ints visible(Ints first, Ints last, int32_t position) { return ((first - (position + 1)) & (Ints{} + (position - 1) - last)) >> 31; }

/// Scores fp32[count, W * LANES] of positions from `first` on become exponentials. Gives what is kept of earlier sums.
template <int W> void exponentiate(Rows<W> &rows, const Prompt &prompt, int64_t first, int64_t count, float *scores, Floats (&kept)[W]) {
  const bool is_masked = first < rows.seen.all_low || first + count > rows.seen.all_high;
  const auto [scale, softcap] = prompt.rule;
  Floats tops[W], sums[W] = {};
  std::copy_n(rows.tops, W, tops);
  for (int64_t n = 0; n < count; ++n)
    for (int w = 0; w < W; ++w) {
      float *own = scores + (n * W + w) * LANES;
      Floats score = load<Floats>(own) * scale;
      if (softcap)
        score = tanh_of(score * (1 / softcap)) * softcap;
      if (prompt.has_slopes)
        score = score - rows.slopes[w] * (rows.positions[w] - (float)(first + n));
      if (is_masked) {
        const Ints is_seen = visible(rows.first[w], rows.last[w], first + n);
        score = (Floats)(((Ints)score & is_seen) | ((Ints)(Floats{} + LOWEST) & (Ints{} - is_seen - 1)));
      }
      tops[w] = highest(tops[w], score);
      store(score, own);
    }
  for (int w = 0; w < W; ++w) {
    kept[w] = exp_of(rows.tops[w] - tops[w]);
    rows.tops[w] = tops[w];
  }
  for (int64_t n = 0; n < count; ++n)
    for (int w = 0; w < W; ++w) {
      float *own = scores + (n * W + w) * LANES;
      Floats share = exp_of(load<Floats>(own) - tops[w]);
      if (is_masked)
        share = (Floats)((Ints)share & visible(rows.first[w], rows.last[w], first + n));
      sums[w] += share;
      store(share, own);
    }
  for (int w = 0; w < W; ++w)
    rows.totals[w] = rows.totals[w] * kept[w] + sums[w];
}

/// The tiles of keys and values that rows attend to, in float32.
struct FloatTile {
  static constexpr int WIDTH = WIDE, STEP = DEPTH, PAD = DEPTH;
  std::vector<float> keys, values, scores;

  explicit FloatTile(const Prompt &prompt) : keys(KEYS * prompt.dim), values(KEYS * prompt.padded), scores(KEYS * WIDE * LANES) {}

  /// Positions `begin` to `end` of the tile, from entries of a key, and the value `apart` numbers after it; zeros elsewhere.
  template <class T, class F> void read(const Prompt &prompt, int64_t begin, int64_t end, int64_t apart, const F &entry) {
    for (int64_t n = 0; n < KEYS; ++n) {
      float *key = keys.data() + n * prompt.dim, *value = values.data() + n * prompt.padded;
      if (n < begin || n >= end) {
        std::fill_n(key, prompt.dim, 0.0f);
        std::fill_n(value, prompt.padded, 0.0f);
        continue;
      }
      const T *from = entry(n);
      widen_row(from, prompt.dim, key);
      widen_row(from + apart, prompt.dim, value);
    }
  }

  template <int W> void set_queries(Rows<W> &, const Prompt &) {}

  /// Attend to `count` positions, from place `from` of the tile on, which is position `first`.
  template <int W> void attend(Rows<W> &rows, const Prompt &prompt, int64_t from, int64_t first, int64_t count) {
    Floats kept[W];
    for (int64_t n = 0; n < count; n += DEPTH)
      multiply_rows<W, true>(keys.data() + (from + n) * prompt.dim, prompt.dim, rows.q.data(), prompt.dim, scores.data() + n * W * LANES, nullptr);
    exponentiate(rows, prompt, first, count, scores.data(), kept);
    for (int64_t d = 0; d < prompt.padded; d += DEPTH)
      multiply_rows<W, false>(values.data() + from * prompt.padded + d, prompt.padded, scores.data(), count, rows.sums.data() + d * W * LANES, kept);
  }
};

#if defined __AMX_BF16__ && defined __AVX512BF16__ && defined __AVX512BW__
#define HAS_TILES 1

/// Whether the system lets this process use AMX.
bool has_tiles() {
  constexpr long REQUEST = 0x1023, TILES = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool is_allowed = syscall(SYS_arch_prctl, REQUEST, TILES) == 0;
  return is_allowed;
}

/// Registers of AMX for a scope: 8 tiles of 16 rows of 64 bytes.
struct TileRegisters {
  TileRegisters() {
    alignas(64) uint8_t shape[64] = {1};
    for (int tile = 0; tile < 8; ++tile)
      shape[16 + 2 * tile] = 64, shape[48 + tile] = 16;
    _tile_loadconfig(shape);
  }
  ~TileRegisters() { _tile_release(); }
};

/// y fp32[32, 32] = the sum over i of a bf16[32, count], rows of `stride`, times pairs of rows of b u32[count / 2, 32]; added
/// to y if it is kept. y and b have 32 numbers in a row.
void multiply_tiles(const uint16_t *a, int64_t stride, const uint32_t *b, int64_t count, float *y, bool is_kept) {
  constexpr int64_t ROW = 128; // bytes
  float *lower = y + 16 * 32;
  __asm__ volatile("" ::: "memory"); // GCC does not know what a tile reads
  if (is_kept) {
    _tile_loadd(0, y, ROW);
    _tile_loadd(1, y + 16, ROW);
    _tile_loadd(2, lower, ROW);
    _tile_loadd(3, lower + 16, ROW);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t i = 0; i < count; i += 32) {
    _tile_loadd(4, a + i, stride * 2);
    _tile_loadd(6, b + i * 16, ROW);
    _tile_loadd(7, b + i * 16 + 16, ROW);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + 16 * stride + i, stride * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, y, ROW);
  _tile_stored(1, y + 16, ROW);
  _tile_stored(2, lower, ROW);
  _tile_stored(3, lower + 16, ROW);
  __asm__ volatile("" ::: "memory");
}

/// 16 vectors become their columns.
void transpose(__m512i (&rows)[16]) {
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#pragma GCC unroll 4
  for (int step = 8; step; step /= 2) {
    const __mmask16 upper = _mm512_test_epi32_mask(lanes, _mm512_set1_epi32(step));
    const __m512i by = _mm512_set1_epi32(step), second = _mm512_set1_epi32(16);
    const __m512i low = _mm512_mask_add_epi32(lanes, upper, _mm512_sub_epi32(lanes, by), second);
    const __m512i high = _mm512_mask_add_epi32(_mm512_add_epi32(lanes, by), upper, lanes, second);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i)
      if (!(i & step)) {
        const __m512i a = rows[i], b = rows[i + step];
        rows[i] = _mm512_permutex2var_epi32(a, low, b);
        rows[i + step] = _mm512_permutex2var_epi32(a, high, b);
      }
  }
}

/// As FloatTile, of bf16, in which queries, keys and values are exact; exponentials are the sum of two.
struct Bf16Tile {
  static constexpr int WIDTH = 2, STEP = 32, PAD = 32;
  TileRegisters registers;
  int64_t inner;
  std::vector<uint16_t> keys, rows, values; // [KEYS, inner], the same of values, [padded, KEYS]
  std::vector<float> scores;
  std::vector<uint32_t> shares, rest; // [KEYS / 2, 32], pairs of positions

  explicit Bf16Tile(const Prompt &prompt)
      : inner(prompt.padded), keys(KEYS * inner), rows(KEYS * inner), values(KEYS * inner), scores(KEYS * 32), shares(KEYS * 16), rest(KEYS * 16) {}

  template <class T, class F> void read(const Prompt &prompt, int64_t begin, int64_t end, int64_t apart, const F &entry) {
    const auto copy = [&](const T *from, uint16_t *to) {
      if constexpr (std::is_same_v<T, uint16_t>)
        std::copy_n(from, prompt.dim, to);
      else
        for (int64_t d = 0; d < prompt.dim; ++d)
          narrow(widen(from[d]), to[d]);
    };
    for (int64_t n = 0; n < KEYS; ++n) {
      uint16_t *key = keys.data() + n * inner, *value = rows.data() + n * inner;
      if (n < begin || n >= end) {
        std::fill_n(key, inner, 0);
        std::fill_n(value, inner, 0);
        continue;
      }
      const T *from = entry(n);
      copy(from, key);
      copy(from + apart, value);
    }
    const int64_t last = rounded_up(end, STEP);
    for (int64_t n = begin / STEP * STEP; n < last; n += STEP)
      for (int64_t d = 0; d < inner; d += LANES) {
        __m512i pairs[16];
        for (int pair = 0; pair < 16; ++pair) {
          const uint16_t *own = rows.data() + (n + 2 * pair) * inner + d;
          pairs[pair] = (__m512i)(widen_integers(own) | widen_integers(own + inner) << 16);
        }
        transpose(pairs);
        for (int lane = 0; lane < 16; ++lane)
          store(pairs[lane], values.data() + (d + lane) * KEYS + n);
      }
  }

  /// Pairs of rows of numbers fp32[2 count, 32], that are rounded to bf16.
  /// rest: where what rounding leaves is rounded to bf16 too, if anywhere
  static void pair_rows(const float *from, int64_t count, uint32_t *to, uint32_t *rest = nullptr) {
    alignas(64) static constexpr uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i words = load<__m512i>(order);
    const auto pair = [&](Floats even, Floats odd) { return (Ints)_mm512_permutexvar_epi16(words, (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even)); };
    for (int64_t n = 0; n < count; ++n)
      for (int w = 0; w < 2; ++w) {
        const float *own = from + n * 64 + w * LANES;
        const Floats even = load<Floats>(own), odd = load<Floats>(own + 32);
        const Ints both = pair(even, odd);
        store(both, to + n * 32 + w * LANES);
        if (rest)
          store(pair(even - (Floats)(both << 16), odd - (Floats)(both & -0x10000)), rest + n * 32 + w * LANES);
      }
  }

  template <int W> void set_queries(Rows<W> &rows, const Prompt &prompt) {
    rows.q.resize(inner * 32, 0.0f);
    rows.pairs.resize(inner * 16);
    pair_rows(rows.q.data(), inner / 2, rows.pairs.data());
  }

  template <int W> void attend(Rows<W> &rows, const Prompt &prompt, int64_t from, int64_t first, int64_t count) {
    Floats kept[W];
    for (int64_t n = 0; n < count; n += 32)
      multiply_tiles(keys.data() + (from + n) * inner, inner, rows.pairs.data(), inner, scores.data() + n * 32, false);
    exponentiate(rows, prompt, first, count, scores.data(), kept);
    pair_rows(scores.data(), count / 2, shares.data(), rest.data());
    for (int64_t d = 0; d < inner; ++d)
      for (int w = 0; w < W; ++w) {
        float *own = rows.sums.data() + (d * W + w) * LANES;
        store(load<Floats>(own) * kept[w], own);
      }
    for (int64_t d = 0; d < inner; d += 32)
      for (const auto &each : {shares.data(), rest.data()})
        multiply_tiles(values.data() + d * KEYS + from, KEYS, each, count, rows.sums.data() + d * 32, true);
  }
};
#endif

/// Queries of one sequence, for one key/value head.
struct Queries {
  int64_t token, count, position, sequence, head; // of the first one
};

/// The tensors and attributes of a step's prompts.
struct Prompts {
  const Tensor &q, &stored, &table;
  const std::optional<Tensor> &ends;
  Cache cache;
  Prompt prompt;
  std::vector<float> sinks, slopes; // of heads
  float value_scale;
  int64_t window;
  bool chunked;

  int64_t heads, group; // query heads, and those of a key/value head

  int64_t first_visible(int64_t position) const {
    if (!window)
      return 0;
    return chunked ? position / window * window : std::max<int64_t>(0, position - window + 1);
  }

  /// What lane `lane` of rows begins with; rows after the last are the last one's copies.
  template <int W> void set_row(Rows<W> &rows, int64_t lane, const Queries &some, int64_t row) const {
    const auto put = [&]<class V, class E>(V (&to)[W], E value) { std::memcpy((char *)to + lane * sizeof value, &value, sizeof value); };
    const int64_t query = row / group, head = some.head * group + row % group, position = some.position + query;
    const int64_t last = ends ? std::max<int64_t>(position, elements<int32_t>(*ends)[some.token + query]) : position;
    put(rows.first, (int32_t)first_visible(position));
    put(rows.last, (int32_t)last);
    rows.seen.add(first_visible(position), last);
    put(rows.positions, (float)position);
    put(rows.slopes, slopes.empty() ? 0.0f : slopes[head]);
    put(rows.tops, sinks.empty() ? LOWEST : sinks[head]);
    put(rows.totals, sinks.empty() ? 0.0f : 1.0f);
  }

  /// Where the query of a row begins in q, and its output.
  int64_t offset(const Queries &some, int64_t row) const {
    return ((some.token + row / group) * heads + some.head * group + row % group) * cache.dim;
  }

  template <class Tile> void read(Tile &tile, const Queries &some, int64_t begin, int64_t low, int64_t high) const {
    const int32_t *blocks = elements<int32_t>(table) + some.sequence * table.stride(0);
    by_cache_dtype(stored, [&]<class T>() {
      tile.template read<T>(prompt, std::max<int64_t>(0, low - begin), std::min(KEYS, high - begin), cache.kv_heads * cache.dim, [&](int64_t n) {
        const int64_t position = begin + n;
        return elements<T>(stored) + cache.offset(blocks[position / cache.block_size], position % cache.block_size) + some.head * cache.dim;
      });
    });
  }

  template <int W, class Tile> void attend(Tile &tile, const Queries &some, Tensor &y) const {
    constexpr int64_t lanes = W * LANES;
    const int64_t num_rows = some.count * group;
    std::vector<Rows<W>> all((num_rows + lanes - 1) / lanes);
    Visible seen;
    for (size_t each = 0; each < all.size(); ++each) {
      all[each].q.resize(cache.dim * lanes);
      all[each].sums.assign(prompt.padded * lanes, 0.0f);
      for (int64_t lane = 0; lane < lanes; ++lane)
        set_row(all[each], lane, some, std::min<int64_t>(each * lanes + lane, num_rows - 1));
      by_dtype(q, [&]<class T>() {
        for (int64_t lane = 0; lane < std::min<int64_t>(lanes, num_rows - each * lanes); ++lane) {
          const T *from = elements<T>(q) + offset(some, each * lanes + lane);
          float *to = all[each].q.data() + lane;
          for (int64_t d = 0; d < cache.dim; ++d)
            to[d * lanes] = widen(from[d]);
        }
      });
      tile.set_queries(all[each], prompt);
      seen.add(all[each].seen.low, all[each].seen.high - 1);
    }
    for (int64_t begin = seen.low / KEYS * KEYS; begin < seen.high; begin += KEYS) {
      read(tile, some, begin, seen.low, seen.high);
      for (Rows<W> &rows : all) {
        const int64_t from = std::max<int64_t>(0, rows.seen.low - begin) / Tile::STEP * Tile::STEP;
        const int64_t to = std::min(KEYS, rounded_up(rows.seen.high - begin, Tile::STEP));
        if (from < to)
          tile.attend(rows, prompt, from, begin + from, to - from);
      }
    }
    by_dtype(y, [&]<class T>() {
      T *made = elements<T>(y);
      for (int64_t row = 0; row < num_rows; ++row) {
        const Rows<W> &rows = all[row / lanes];
        const int64_t lane = row % lanes;
        const float *from = rows.sums.data() + lane;
        T *to = made + offset(some, row);
        float total;
        std::memcpy(&total, (const char *)rows.totals + lane * sizeof total, sizeof total);
        const float factor = total == 0 ? 0 : value_scale / total;
        for (int64_t d = 0; d < cache.dim; ++d)
          narrow(from[d * lanes] * factor, to[d]);
      }
    });
  }

  template <class Tile> void attend_all(std::vector<Queries> &all, Tensor &y) {
    prompt.padded = rounded_up(cache.dim, Tile::PAD);
    std::atomic<size_t> next = 0; // causal tiles differ in size: threads take the next one, the largest first
    torch::stable::parallel_for(0, all.size(), 1, [&](int64_t, int64_t) {
      Tile tile(prompt);
      for (size_t own; (own = next++) < all.size();)
        if constexpr (Tile::WIDTH == WIDE && WIDE > 1)
          all[own].count * group <= LANES ? attend<1>(tile, all[own], y) : attend<WIDE>(tile, all[own], y);
        else
          attend<Tile::WIDTH>(tile, all[own], y);
    });
  }
};

/// As paged_decode, for the sequences after the first num_decodes: q [T, N, D], starts i32[S + 1], slopes [N], ends i32[T]
/// -> [T, N, D], zeros for tokens of no such sequence. A chunked window is cut at its multiples.
Tensor paged_prefill(const Tensor &q, const Tensor &stored, const Tensor &table, const Tensor &starts, const Tensor &lengths,
                     const std::optional<Tensor> &sinks, const std::optional<Tensor> &slopes, const std::optional<Tensor> &ends, int64_t num_decodes,
                     double scale, double value_scale, int64_t window, double softcap, bool chunked) {
  const Cache cache{stored.size(1), stored.size(3), stored.size(4)};
  for (const Tensor *each : {&q, &stored, &starts, &lengths})
    STD_TORCH_CHECK(each->is_contiguous(), "tensors have no gaps");
  STD_TORCH_CHECK(table.stride(1) == 1 && (!ends || ends->is_contiguous()), "tensors have no gaps");
  Prompts prompts{q, stored, table, ends, cache, {cache.dim, 0, {(float)scale, (float)softcap}, slopes.has_value()},
                  widened(sinks), widened(slopes), (float)value_scale, window, chunked, q.size(1), q.size(1) / cache.kv_heads};
  const int64_t most = std::max<int64_t>(1, TILE_ROWS / prompts.group);
  std::vector<Queries> all;
  for (int64_t s = num_decodes; s < lengths.size(0); ++s) {
    const int64_t begin = elements<int32_t>(starts)[s], end = elements<int32_t>(starts)[s + 1], length = elements<int32_t>(lengths)[s];
    for (int64_t token = begin; token < end; token += most)
      for (int64_t head = 0; head < cache.kv_heads; ++head)
        all.push_back({token, std::min(most, end - token), length - end + token, s, head});
  }
  std::stable_sort(all.begin(), all.end(), [](const Queries &a, const Queries &b) { return a.position > b.position; });
  Tensor y = torch::stable::new_zeros(q, {q.size(0), q.size(1), cache.dim});
#ifdef HAS_TILES
  const bool is_exact = stored.scalar_type() == ScalarType::BFloat16 || stored.scalar_type() == ScalarType::Float8_e4m3fn;
  if (q.scalar_type() == ScalarType::BFloat16 && is_exact && has_tiles()) {
    prompts.attend_all<Bf16Tile>(all, y);
    return y;
  }
#endif
  prompts.attend_all<FloatTile>(all, y);
  return y;
}

/// A row in place: divided by the root of its mean square, times weight.
void normalize(float *row, int64_t dim, const float *weight, float eps) {
  const int64_t whole = dim / LANES * LANES;
  Floats sums{};
  for (int64_t d = 0; d < whole; d += LANES)
    sums += load<Floats>(row + d) * load<Floats>(row + d);
  float sum = total(sums);
  for (int64_t d = whole; d < dim; ++d)
    sum += row[d] * row[d];
  const float by = 1 / std::sqrt(sum / dim + eps);
  for (int64_t d = 0; d < whole; d += LANES)
    store(load<Floats>(row + d) * (load<Floats>(weight + d) * by), row + d);
  for (int64_t d = whole; d < dim; ++d)
    row[d] *= by * weight[d];
}

/// A row in place: dim i turns with i + P, or 2 i with 2 i + 1 where they are interleaved (Su et al. 2021).
void rotate(float *row, int64_t half, const float *cos, const float *sin, bool interleaved) {
  const int64_t whole = interleaved ? 0 : half / LANES * LANES;
  for (int64_t i = 0; i < whole; i += LANES) {
    const Floats a = load<Floats>(row + i), b = load<Floats>(row + i + half), x = load<Floats>(cos + i), y = load<Floats>(sin + i);
    store(a * x - b * y, row + i);
    store(b * x + a * y, row + i + half);
  }
  for (int64_t i = whole; i < half; ++i) {
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
      T *queries = elements<T>(y);
      const T *own_q = elements<T>(q), *own_k = elements<T>(k), *own_values = elements<T>(v);
      const int64_t q_stride = q.stride(0), k_stride = k.stride(0), v_stride = v.stride(0), *own_slots = elements<int64_t>(slots);
      const float *own_cos = cos ? elements<float>(*cos) : nullptr, *own_sin = sin ? elements<float>(*sin) : nullptr;
      torch::stable::parallel_for(0, tokens, 16, [&](int64_t begin, int64_t end) {
        std::vector<float> row(dim);
        std::vector<T> rounded(dim);
        for (int64_t t = begin; t < end; ++t) {
          C *entry = entries + own_slots[t] * 2 * kv_heads * dim;
          for (int64_t head = 0; head < heads + kv_heads; ++head) {
            const bool is_key = head >= heads;
            widen_row(is_key ? own_k + t * k_stride + (head - heads) * dim : own_q + t * q_stride + head * dim, dim, row.data());
            if (const auto &weight = weights[is_key]; !weight.empty())
              normalize(row.data(), dim, weight.data(), (float)eps);
            if (cos)
              rotate(row.data(), half, own_cos + t * half, own_sin + t * half, interleaved);
            if (!is_key) {
              narrow_row(row.data(), dim, queries + (t * heads + head) * dim);
              continue;
            }
            if (is_fp8) {
              for (float &each : row)
                each /= of_keys;
            } else if constexpr (!std::is_same_v<T, C>) { // of what rounds to T
              narrow_row(row.data(), dim, rounded.data());
              widen_row(rounded.data(), dim, row.data());
            }
            narrow_row(row.data(), dim, entry + (head - heads) * dim);
          }
          const T *values = own_values + t * v_stride;
          if constexpr (std::is_same_v<T, C>)
            std::copy_n(values, kv_heads * dim, entry + kv_heads * dim);
          else
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
  library.impl("paged_prefill", TORCH_BOX(&paged_prefill));
  library.impl("paged_decode", TORCH_BOX(&paged_decode));
  library.impl("norm_rope_write", TORCH_BOX(&norm_rope_write));
}
