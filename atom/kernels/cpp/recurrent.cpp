// Ops with recurrent state: the causal convolution, the delta rule, lightning attention, and the scans of Mamba-2 and Mamba.
//
// The tokens of a step's sequences lie one after another. Each sequence has a slot with its last L states, that after n
// tokens in row n % L; one that begins has a state of zeros, whatever is in its slot. All is computed in float32.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <vector>

#include "numbers.h"

namespace {

constexpr int64_t CHUNK = 64;       // tokens of a sequence at a time
constexpr int64_t CHANNELS = 64;    // of a convolution or a scan that a thread takes at least
constexpr int64_t MAX_WIDTH = 1024; // channels at a time: rows that are read in order, taps in the first level's cache
constexpr int64_t MAX_TAPS = 8;
constexpr int64_t GRAIN = 1 << 14;  // multiplications below which a thread of its own is not worth it
#ifdef __AVX512F__
constexpr int WIDE = 4; // vectors of a state's row at a time; two sums of each stay in registers
#else
constexpr int WIDE = 2;
#endif

/// Tokens after which a state is kept.
struct Span {
  int64_t first, count;  // of tokens
  int64_t before, after; // rows of the states [(slots + 1) * L, …]
  bool is_new;
};

using Sequence = std::vector<Span>;

/// The sequences of a step that have tokens. states [slots + 1, L, …], slots and lengths i32[S], starts i32[S + 1]
std::vector<Sequence> sequences_of(const Tensor &states, const Tensor &slots, const Tensor &starts, const Tensor &lengths) {
  for (const Tensor *each : {&slots, &starts, &lengths})
    STD_TORCH_CHECK(each->is_contiguous() && each->scalar_type() == ScalarType::Int, "slots, starts and lengths are int32");
  const int64_t kept = states.size(1);
  std::vector<Sequence> made;
  int64_t last = -1;
  for (int64_t s = 0; s < slots.size(0); ++s) {
    const int64_t first = elements<int32_t>(starts)[s], count = elements<int32_t>(starts)[s + 1] - first;
    const int64_t slot = elements<int32_t>(slots)[s], before = elements<int32_t>(lengths)[s] - count; // tokens
    if (count > 0 && slot != last) // the rows of a sequence's drafts follow its own
      made.emplace_back();
    for (int64_t at = 0, end; at < count; at = end, last = slot) {
      end = std::max(at, count - kept) + 1;
      made.back().push_back({first + at, end - at, slot * kept + (before + at) % kept, slot * kept + (before + end) % kept, before + at == 0});
    }
  }
  return made;
}

/// A tensor like x, of zeros where tokens are of no sequence.
Tensor make_out(const Tensor &x, const std::vector<Sequence> &sequences) {
  Tensor y = torch::stable::new_empty(x, x.sizes());
  const int64_t row = x.numel() / std::max<int64_t>(x.size(0), 1);
  const int64_t used = sequences.empty() ? 0 : sequences.back().back().first + sequences.back().back().count;
  by_dtype(x, [&]<class T>() { std::fill_n(elements<T>(y) + used * row, (x.size(0) - used) * row, T{}); });
  return y;
}

/// A tensor of tokens whose rows may lie apart.
template <class T> struct Rows {
  const T *data;
  int64_t stride;
  explicit Rows(const Tensor &tensor) : data(elements<T>(tensor)), stride(tensor.stride(0)) {
    int64_t size = 1;
    for (int64_t dim = tensor.dim() - 1; dim > 0; size *= tensor.size(dim--))
      STD_TORCH_CHECK(tensor.size(dim) == 1 || tensor.stride(dim) == size, "a token's numbers must be contiguous");
  }
  const T *operator[](int64_t token) const { return data + token * stride; }
};

/// Runs f(begin, end) over items of so many multiplications in all threads.
template <class F> void share(int64_t items, int64_t multiplications, const F &f) {
  torch::stable::parallel_for(0, items, std::max<int64_t>(1, GRAIN / std::max<int64_t>(multiplications, 1)), f);
}

/// Runs f(first, width) over channels in all threads, at most `most` at a time.
template <class F> void share_channels(int64_t channels, int64_t most, int64_t multiplications, const F &f) {
  share((channels + CHANNELS - 1) / CHANNELS, multiplications * CHANNELS, [&](int64_t begin, int64_t end) {
    const int64_t last = std::min(end * CHANNELS, channels);
    for (int64_t first = begin * CHANNELS; first < last; first += most)
      f(first, std::min(most, last - first));
  });
}

/// Up to 16 elements, zeros after them.
template <class T> Floats widen_some(const T *from, int64_t count) {
  if (count >= LANES)
    return widen_vector(from);
  float numbers[LANES] = {};
  for (int64_t i = 0; i < count; ++i)
    numbers[i] = widen(from[i]);
  return load<Floats>(numbers);
}

/// Up to 16 elements.
template <class T> void narrow_some(Floats x, T *to, int64_t count) {
  if (count >= LANES)
    return narrow(x, to);
  float numbers[LANES];
  store(x, numbers);
  for (int64_t i = 0; i < count; ++i)
    narrow(numbers[i], to[i]);
}

int64_t padded(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

/// A row in float32, zeros up to a whole vector.
template <class T> void widen_row(const T *from, int64_t count, float *to) {
  for (int64_t at = 0; at < count; at += LANES)
    store(widen_some(from + at, count - at), to + at);
}

/// All numbers of a contiguous tensor in float32.
std::vector<float> widened(const Tensor &tensor) {
  STD_TORCH_CHECK(tensor.is_contiguous(), "weights have no gaps");
  std::vector<float> made(padded(tensor.numel()));
  by_dtype(tensor, [&]<class T>() { widen_row(elements<T>(tensor), tensor.numel(), made.data()); });
  return made;
}

/// The sum of the products of two rows of whole vectors.
float dot(const float *a, const float *b, int64_t size) {
  Floats sum{};
  for (int64_t at = 0; at < size; at += LANES)
    sum += load<Floats>(a + at) * load<Floats>(b + at);
  return total(sum);
}

/// `size` numbers of the state after a span, from `first` on, which begin as those of the state before it. Float32: they
/// are where they are stored, or a copy that is written back in the end.
struct OpenState {
  Tensor &states;
  int64_t place, size;
  std::vector<float> copy;
  float *numbers;
  OpenState(Tensor &states, const Span &span, int64_t first, int64_t size) : states(states), size(size) {
    STD_TORCH_CHECK(states.is_contiguous(), "states have no gaps");
    const int64_t row = states.numel() / (states.size(0) * states.size(1)), before = span.before * row + first;
    place = span.after * row + first;
    const bool is_wide = states.scalar_type() == ScalarType::Float;
    if (!is_wide)
      copy.resize(padded(size));
    numbers = is_wide ? elements<float>(states) + place : copy.data();
    if (span.is_new)
      std::fill_n(numbers, size, 0.0f);
    else if (!is_wide)
      by_dtype(states, [&]<class T>() { widen_row(elements<T>(states) + before, size, numbers); });
    else if (before != place)
      std::copy_n(elements<float>(states) + before, size, numbers);
  }
  OpenState(const OpenState &) = delete;
  ~OpenState() {
    if (!copy.empty())
      by_dtype(states, [&]<class T>() {
        for (int64_t at = 0; at < size; at += LANES)
          narrow_some(load<Floats>(numbers + at), elements<T>(states) + place + at, size - at);
      });
  }
};

/// x times its sigmoid
Floats silu(Floats x) { return x / (exp_of(Floats{} - highest(x, Floats{} - 87)) + 1.0f); }

/// Calls f with a number of taps that the compiler knows, or with 0.
template <class F> void by_taps(int64_t taps, const F &f) {
  switch (taps) {
  case 3: return f.template operator()<3>();
  case 4: return f.template operator()<4>();
  default: return f.template operator()<0>();
  }
}

/// Channels of a convolution, in float32, with what is added to each.
struct Taps {
  int64_t count, width;
  std::vector<float> weight, bias; // [count, width], [width]
  bool has_silu;
  Taps(int64_t count, bool has_silu) : count(count), weight(count * MAX_WIDTH), bias(MAX_WIDTH), has_silu(has_silu) {}

  template <int K, class T> void set(const T *from, int64_t channels) {
    width = channels;
    const int64_t taps = K ? K : count;
    for (int64_t c = 0; c < width; ++c)
      for (int64_t tap = 0; tap < taps; ++tap)
        weight[tap * MAX_WIDTH + c] = widen(from[c * taps + tap]);
  }
};

/// One sequence's channels. x is at its first token, state [taps - 1, channels], y [tokens, channels]
template <int K, class T>
void convolve(const Taps &own, int64_t tokens, const T *x, int64_t stride, T *state, T *y, int64_t channels) {
  const int64_t taps = K ? K : own.count, before = taps - 1;
  const auto input = [&](int64_t token) { return token < 0 ? state + (before + token) * channels : x + token * stride; };
  for (int64_t t = 0; t < tokens; ++t) {
    const T *rows[MAX_TAPS];
    for (int64_t tap = 0; tap < taps; ++tap)
      rows[tap] = input(t - before + tap);
    for (int64_t at = 0; at < own.width; at += LANES) {
      Floats sum = load<Floats>(own.bias.data() + at);
      for (int64_t tap = 0; tap < taps; ++tap)
        sum += load<Floats>(own.weight.data() + tap * MAX_WIDTH + at) * widen_some(rows[tap] + at, own.width - at);
      narrow_some(own.has_silu ? silu(sum) : sum, y + t * channels + at, own.width - at);
    }
  }
  for (int64_t row = 0; row < before; ++row) // each from a later one, so in order
    std::memmove(state + row * channels, input(tokens - before + row), own.width * sizeof(T));
}

/// x [T, C], states [slots + 1, L, taps - 1, C], weight [C, taps], bias [C] -> [T, C]
Tensor causal_conv(const Tensor &x, Tensor states, const Tensor &slots, const Tensor &starts, const Tensor &lengths,
                   const Tensor &weight, const std::optional<Tensor> &bias, bool has_silu) {
  const int64_t channels = x.size(1), taps = weight.size(1);
  STD_TORCH_CHECK(taps <= MAX_TAPS && weight.size(0) == channels && weight.is_contiguous(), "the weight has up to 8 taps a channel");
  STD_TORCH_CHECK(states.is_contiguous() && states.scalar_type() == x.scalar_type(), "states are as x, without gaps");
  const std::vector<Sequence> sequences = sequences_of(states, slots, starts, lengths);
  Tensor y = make_out(x, sequences);
  by_dtype(x, [&]<class T>() {
    const Rows<T> rows(x);
    T *made = elements<T>(y), *stored = elements<T>(states);
    share_channels(channels, MAX_WIDTH, x.size(0) * taps, [&](int64_t first, int64_t width) {
      Taps own(taps, has_silu);
      if (bias)
        by_dtype(*bias, [&]<class W>() { widen_row(elements<W>(*bias) + first, width, own.bias.data()); });
      by_taps(taps, [&]<int K>() {
        by_dtype(weight, [&]<class W>() { own.set<K>(elements<W>(weight) + first * taps, width); });
        for (const Sequence &sequence : sequences)
          for (const Span &each : sequence) {
            T *state = stored + each.after * (taps - 1) * channels + first;
            const T *before = stored + each.before * (taps - 1) * channels + first;
            for (int64_t row = 0; (each.is_new || before != state) && row < taps - 1; ++row)
              if (each.is_new)
                std::memset(state + row * channels, 0, width * sizeof(T));
              else
                std::memcpy(state + row * channels, before + row * channels, width * sizeof(T));
            convolve<K>(own, each.count, rows[each.first] + first, rows.stride, state, made + each.first * channels + first, channels);
          }
      });
    });
  });
  return y;
}

/// What the delta rule takes of up to CHUNK tokens of one head, rows of fp32[tokens, width]; after K dims zeros follow.
struct Keys {
  int64_t dim, width;
  std::vector<float> kept, keys, old_keys, old_queries; // the decay; the key; key and query that read the state before it decays
  float dots[CHUNK], betas[CHUNK];                      // of query and key
  explicit Keys(int64_t dim)
      : dim(dim), width(padded(dim)), kept(CHUNK * width), keys(CHUNK * width), old_keys(CHUNK * width), old_queries(CHUNK * width) {}

  /// decay: its logarithm, one number or `dim`
  template <class T> void set(int64_t token, const T *q, const T *k, const float *decay, bool by_dim, float scale, bool normalize) {
    float *key = keys.data() + token * width, *query = old_queries.data() + token * width;
    float *kept_here = kept.data() + token * width, *old_key = old_keys.data() + token * width;
    widen_row(k, dim, key);
    widen_row(q, dim, query);
    const float by_key = normalize ? 1 / std::sqrt(dot(key, key, width) + 1e-6f) : 1.0f;
    const float by_query = scale * (normalize ? 1 / std::sqrt(dot(query, query, width) + 1e-6f) : 1.0f);
    const Floats same = by_dim ? Floats{} : Floats{} + std::exp(*decay);
    Floats sum{};
    for (int64_t at = 0; at < width; at += LANES) {
      const Floats one = by_dim ? exp_of(widen_some(decay + at, dim - at)) : same;
      const Floats own_key = load<Floats>(key + at) * by_key, own_query = load<Floats>(query + at) * by_query;
      sum += own_key * own_query;
      store(one, kept_here + at);
      store(own_key, key + at);
      store(own_key * one, old_key + at);
      store(own_query * one, query + at);
    }
    dots[token] = total(sum);
  }
};

/// Tokens of a head, of up to WIDE vectors of columns: `columns` of v and y are there. state [dim, stride]
///
/// The update by a token is the same pass over the state as the next one's reads, so a state is read and written once.
template <class T>
void run_delta(const Keys &all, int64_t tokens, const T *v, int64_t v_stride, T *y, int64_t y_stride, int64_t columns, float *state,
               int64_t stride) {
  Floats by_key[WIDE] = {}, by_query[WIDE] = {};
  for (int64_t d = 0; d < all.dim; ++d)
#pragma GCC unroll 4
    for (int i = 0; i < WIDE; ++i) {
      const Floats row = load<Floats>(state + d * stride + i * LANES);
      by_key[i] += row * all.old_keys[d];
      by_query[i] += row * all.old_queries[d];
    }
  for (int64_t t = 0; t < tokens; ++t) {
    Floats step[WIDE];
    for (int i = 0; i < WIDE; ++i) {
      const int64_t at = i * LANES, left = std::max<int64_t>(0, columns - at);
      step[i] = (widen_some(v + t * v_stride + at, left) - by_key[i]) * all.betas[t];
      narrow_some(by_query[i] + step[i] * all.dots[t], y + t * y_stride + at, left);
      by_key[i] = by_query[i] = Floats{};
    }
    const float *kept = all.kept.data() + t * all.width, *key = all.keys.data() + t * all.width;
    const bool is_last = t + 1 == tokens;
    const float *old_key = is_last ? key : all.old_keys.data() + (t + 1) * all.width; // of the last they are not used
    const float *old_query = is_last ? key : all.old_queries.data() + (t + 1) * all.width;
    for (int64_t d = 0; d < all.dim; ++d)
#pragma GCC unroll 4
      for (int i = 0; i < WIDE; ++i) {
        float *row = state + d * stride + i * LANES;
        const Floats next = load<Floats>(row) * kept[d] + step[i] * key[d];
        store(next, row);
        by_key[i] += next * old_key[d];
        by_query[i] += next * old_query[d];
      }
  }
}

/// q and k [T, Nk, K], v [T, N, V], decay fp32[T, N] or fp32[T, N, K], beta [T, N], states [slots + 1, L, N, K, V] -> [T, N, V]
Tensor gated_delta(const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &decay, const Tensor &beta, Tensor states,
                   const Tensor &slots, const Tensor &starts, const Tensor &lengths, double scale, bool normalize) {
  const int64_t key_heads = q.size(1), dim = q.size(2), heads = v.size(1), columns = v.size(2);
  constexpr int64_t block = WIDE * LANES;
  const bool by_dim = decay.dim() == 3;
  const std::vector<Sequence> sequences = sequences_of(states, slots, starts, lengths);
  Tensor y = make_out(v, sequences);
  by_dtype(v, [&]<class T>() {
    const Rows<T> queries(q), keys(k), values(v);
    const Rows<float> decays(decay);
    T *made = elements<T>(y);
    share(sequences.size() * heads, v.size(0) * dim * columns / std::max<int64_t>(sequences.size(), 1), [&](int64_t begin, int64_t end) {
      Keys all(dim);
      std::vector<float> copy(dim * block);
      for (int64_t item = begin; item < end; ++item)
        for (const Span &each : sequences[item / heads]) {
          const int64_t head = item % heads, of_key = head / (heads / key_heads) * dim;
          OpenState open(states, each, head * dim * columns, dim * columns);
          float *state = open.numbers;
          for (int64_t from = 0; from < each.count; from += CHUNK) {
            const int64_t tokens = std::min(CHUNK, each.count - from), first = each.first + from;
            for (int64_t t = 0; t < tokens; ++t)
              all.set(t, queries[first + t] + of_key, keys[first + t] + of_key, decays[first + t] + head * (by_dim ? dim : 1), by_dim,
                      (float)scale, normalize);
            by_dtype(beta, [&]<class B>() {
              const Rows<B> betas(beta);
              for (int64_t t = 0; t < tokens; ++t)
                all.betas[t] = widen(betas[first + t][head]);
            });
            for (int64_t at = 0; at < columns; at += block) {
              const int64_t width = std::min(block, columns - at);
              const T *v_here = values[first] + head * columns + at;
              T *y_here = made + (first * heads + head) * columns + at;
              if (tokens == 1 && width == block) {
                run_delta(all, tokens, v_here, values.stride, y_here, heads * columns, width, state + at, columns);
                continue;
              }
              for (int64_t d = 0; d < dim; ++d) // what stays in the first level's cache for all tokens
                std::copy_n(state + d * columns + at, width, copy.data() + d * block);
              run_delta(all, tokens, v_here, values.stride, y_here, heads * columns, width, copy.data(), block);
              for (int64_t d = 0; d < dim; ++d)
                std::copy_n(copy.data() + d * block, width, state + d * columns + at);
            }
          }
        }
    });
  });
  return y;
}

/// A state's row of `size` numbers is updated, and read by c; size is a whole number of vectors.
float scan_row(float *row, int64_t size, float kept, float moved, const float *b, const float *c) {
  Floats sum{};
  for (int64_t at = 0; at < size; at += LANES) {
    const Floats next = load<Floats>(row + at) * kept + load<Floats>(b + at) * moved;
    store(next, row + at);
    sum += next * load<Floats>(c + at);
  }
  return total(sum);
}

/// The rows [count, size] of a state in whole vectors: themselves, or a copy that is written back in the end.
struct StateRows {
  float *stored, *rows;
  int64_t count, size, width;
  std::vector<float> copy;
  StateRows(float *stored, int64_t count, int64_t size) : stored(stored), rows(stored), count(count), size(size), width(padded(size)) {
    if (width == size)
      return;
    copy.resize(count * width);
    rows = copy.data();
    for (int64_t row = 0; row < count; ++row)
      std::copy_n(stored + row * size, size, rows + row * width);
  }
  ~StateRows() {
    for (int64_t row = 0; rows != stored && row < count; ++row)
      std::copy_n(rows + row * width, size, stored + row * size);
  }
};

/// x [T, N, P], dt fp32[T, N], b and c [T, G, S], states [slots + 1, L, N, P, S], a_log and d [N] -> [T, N, P]
Tensor ssd(const Tensor &x, const Tensor &dt, const Tensor &b, const Tensor &c, Tensor states, const Tensor &slots,
           const Tensor &starts, const Tensor &lengths, const Tensor &a_log, const Tensor &d) {
  const int64_t heads = x.size(1), dim = x.size(2), groups = b.size(1), size = b.size(2);
  const std::vector<Sequence> sequences = sequences_of(states, slots, starts, lengths);
  const std::vector<float> logs = widened(a_log), skips = widened(d);
  Tensor y = make_out(x, sequences);
  by_dtype(x, [&]<class T>() {
    const Rows<T> inputs(x), bs(b), cs(c);
    const Rows<float> steps(dt);
    T *made = elements<T>(y);
    share(sequences.size() * heads, x.size(0) * dim * size / std::max<int64_t>(sequences.size(), 1), [&](int64_t begin, int64_t end) {
      std::vector<float> own_b(padded(size)), own_c(padded(size)), own_x(padded(dim)), own_y(padded(dim));
      for (int64_t item = begin; item < end; ++item)
        for (const Span &each : sequences[item / heads]) {
          const int64_t head = item % heads, of_group = head / (heads / groups) * size;
          const float rate = -std::exp(logs[head]), skip = skips[head];
          OpenState open(states, each, head * dim * size, dim * size);
          StateRows state(open.numbers, dim, size);
          for (int64_t t = each.first; t < each.first + each.count; ++t) {
            const float step = steps[t][head], kept = std::exp(rate * step);
            widen_row(bs[t] + of_group, size, own_b.data());
            widen_row(cs[t] + of_group, size, own_c.data());
            widen_row(inputs[t] + head * dim, dim, own_x.data());
            for (int64_t p = 0; p < dim; ++p)
              own_y[p] = skip * own_x[p] +
                         scan_row(state.rows + p * state.width, state.width, kept, own_x[p] * step, own_b.data(), own_c.data());
            for (int64_t p = 0; p < dim; p += LANES)
              narrow_some(load<Floats>(own_y.data() + p), made + (t * heads + head) * dim + p, dim - p);
          }
        }
    });
  });
  return y;
}

/// x [T, I], dt fp32[T, I], b and c [T, S], states [slots + 1, L, I, S], a_log [I, S], d [I] -> [T, I]
Tensor selective_scan(const Tensor &x, const Tensor &dt, const Tensor &b, const Tensor &c, Tensor states, const Tensor &slots,
                      const Tensor &starts, const Tensor &lengths, const Tensor &a_log, const Tensor &d) {
  const int64_t channels = x.size(1), size = b.size(1), width = padded(size);
  STD_TORCH_CHECK(a_log.is_contiguous(), "weights have no gaps");
  const std::vector<Sequence> sequences = sequences_of(states, slots, starts, lengths);
  const std::vector<float> skips = widened(d);
  Tensor y = make_out(x, sequences);
  by_dtype(x, [&]<class T>() {
    const Rows<T> inputs(x), bs(b), cs(c);
    const Rows<float> steps(dt);
    T *made = elements<T>(y);
    share_channels(channels, CHANNELS, x.size(0) * size * 8, [&](int64_t first, int64_t count) { // an exponential costs about 8
      std::vector<float> own_b(width), own_c(width), rates(count * width);
      by_dtype(a_log, [&]<class W>() {
        for (int64_t i = 0; i < count; ++i)
          for (int64_t at = 0; at < width; at += LANES)
            store(Floats{} - exp_of(widen_some(elements<W>(a_log) + (first + i) * size + at, size - at)), rates.data() + i * width + at);
      });
      for (const Sequence &sequence : sequences)
        for (const Span &each : sequence) {
          OpenState open(states, each, first * size, count * size);
          StateRows state(open.numbers, count, size);
          for (int64_t t = each.first; t < each.first + each.count; ++t) {
            widen_row(bs[t], size, own_b.data());
            widen_row(cs[t], size, own_c.data());
            for (int64_t i = 0; i < count; ++i) {
              const float step = steps[t][first + i], input = widen(inputs[t][first + i]);
              Floats sum{};
              for (int64_t at = 0; at < width; at += LANES) {
                float *row = state.rows + i * width + at;
                const Floats kept = exp_of(load<Floats>(rates.data() + i * width + at) * step);
                const Floats next = load<Floats>(row) * kept + load<Floats>(own_b.data() + at) * (input * step);
                store(next, row);
                sum += next * load<Floats>(own_c.data() + at);
              }
              narrow(total(sum) + skips[first + i] * input, made[t * channels + first + i]);
            }
          }
        }
    });
  });
  return y;
}

/// q and k [T, N, K], v [T, N, V], states [slots + 1, L, N, K, V], slopes [N] -> [T, N, V]
Tensor lightning(const Tensor &q, const Tensor &k, const Tensor &v, Tensor states, const Tensor &slots, const Tensor &starts,
                 const Tensor &lengths, const Tensor &slopes, double scale) {
  const int64_t dim = q.size(2), heads = v.size(1), columns = v.size(2), width = padded(columns);
  const std::vector<Sequence> sequences = sequences_of(states, slots, starts, lengths);
  const std::vector<float> decays = widened(slopes);
  Tensor y = make_out(v, sequences);
  by_dtype(v, [&]<class T>() {
    const Rows<T> queries(q), keys(k), values(v);
    T *made = elements<T>(y);
    share(sequences.size() * heads, v.size(0) * dim * columns / std::max<int64_t>(sequences.size(), 1), [&](int64_t begin, int64_t end) {
      std::vector<float> key(padded(dim)), query(padded(dim)), value(width), sum(width);
      for (int64_t item = begin; item < end; ++item)
        for (const Span &each : sequences[item / heads]) {
          const int64_t head = item % heads;
          const float kept = std::exp(-decays[head]);
          OpenState open(states, each, head * dim * columns, dim * columns);
          StateRows state(open.numbers, dim, columns);
          for (int64_t t = each.first; t < each.first + each.count; ++t) {
            widen_row(keys[t] + head * dim, dim, key.data());
            widen_row(queries[t] + head * dim, dim, query.data());
            widen_row(values[t] + head * columns, columns, value.data());
            std::fill(sum.begin(), sum.end(), 0.0f);
            for (int64_t d = 0; d < dim; ++d) {
              float *row = state.rows + d * width;
              const float read = query[d] * (float)scale;
              for (int64_t at = 0; at < width; at += LANES) {
                const Floats next = load<Floats>(row + at) * kept + load<Floats>(value.data() + at) * key[d];
                store(next, row + at);
                store(load<Floats>(sum.data() + at) + next * read, sum.data() + at);
              }
            }
            for (int64_t at = 0; at < columns; at += LANES)
              narrow_some(load<Floats>(sum.data() + at), made + (t * heads + head) * columns + at, columns - at);
          }
        }
    });
  });
  return y;
}

} // namespace

// `kernels/cpp/recurrent.py` defines them
STABLE_TORCH_LIBRARY_IMPL(atom, CPU, library) {
  library.impl("causal_conv", TORCH_BOX(&causal_conv));
  library.impl("gated_delta", TORCH_BOX(&gated_delta));
  library.impl("lightning", TORCH_BOX(&lightning));
  library.impl("ssd", TORCH_BOX(&ssd));
  library.impl("selective_scan", TORCH_BOX(&selective_scan));
}
