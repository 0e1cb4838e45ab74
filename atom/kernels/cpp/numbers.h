// Vectors of 16 numbers, and the dtypes of tensors as float32 and back.

#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined __AVX512F__ || defined __AVX2__
#include <immintrin.h>
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t LANES = 16;
constexpr int64_t AHEAD = 4096; // bytes by which a weight that is read in order is fetched early

template <class V> V load(const void *from) {
  if constexpr (requires(V v) { v.low; }) { // GCC copies what is larger than a register in small parts, over the stack
    using Half = decltype(V::low);
    return {load<Half>(from), load<Half>(static_cast<const char *>(from) + sizeof(Half))};
  } else {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
  }
}

template <class V> void store(V v, void *to) {
  if constexpr (requires { v.low; }) {
    store(v.low, to);
    store(v.high, static_cast<char *>(to) + sizeof v.low);
  } else {
    std::memcpy(to, &v, sizeof v);
  }
}

#ifdef __AVX512F__
using Floats = float __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
#else
/// Two vectors as one of twice the size. GCC keeps a vector in memory that is larger than a register.
template <class V, class T> struct Twice {
  V low, high;

  template <class W, class U> explicit operator Twice<W, U>() const { return {(W)low, (W)high}; } // of the same bits
  friend Twice operator+(Twice a, Twice b) { return {a.low + b.low, a.high + b.high}; }
  friend Twice operator-(Twice a, Twice b) { return {a.low - b.low, a.high - b.high}; }
  friend Twice operator*(Twice a, Twice b) { return {a.low * b.low, a.high * b.high}; }
  friend Twice operator/(Twice a, Twice b) { return {a.low / b.low, a.high / b.high}; }
  friend Twice operator|(Twice a, Twice b) { return {a.low | b.low, a.high | b.high}; }
  friend Twice operator&(Twice a, Twice b) { return {a.low & b.low, a.high & b.high}; }
  friend Twice operator+(Twice a, T b) { return {a.low + b, a.high + b}; }
  friend Twice operator-(Twice a, T b) { return {a.low - b, a.high - b}; }
  friend Twice operator*(Twice a, T b) { return {a.low * b, a.high * b}; }
  friend Twice operator&(Twice a, T b) { return {a.low & b, a.high & b}; }
  friend Twice operator<<(Twice a, int b) { return {a.low << b, a.high << b}; }
  friend Twice operator>>(Twice a, int b) { return {a.low >> b, a.high >> b}; }
  friend Twice operator==(Twice a, T b) { return {(V)(a.low == b), (V)(a.high == b)}; } // -1 for true
  Twice &operator+=(Twice b) { return *this = *this + b; }
  Twice &operator*=(T b) { return *this = *this * b; }
};

#ifdef __AVX2__
using Floats = Twice<float __attribute__((vector_size(32))), float>;
using Ints = Twice<int32_t __attribute__((vector_size(32))), int32_t>;
#else
using Floats = Twice<Twice<float __attribute__((vector_size(16))), float>, float>;
using Ints = Twice<Twice<int32_t __attribute__((vector_size(16))), int32_t>, int32_t>;
#endif
#endif

/// Integers as numbers of another type.
template <class To, class From> To convert(From x) {
  if constexpr (requires { x.low; })
    return {convert<decltype(To::low)>(x.low), convert<decltype(To::high)>(x.high)};
  else
    return __builtin_convertvector(x, To);
}

/// The larger one of each two.
template <class V> V highest(V a, V b) {
  if constexpr (requires { a.low; })
    return {highest(a.low, b.low), highest(a.high, b.high)};
  else
    return a < b ? b : a;
}

/// e to the x of 16 numbers up to 87, within 2e-7 of it (Cody and Waite's reduction, Taylor's series)
Floats exp_of(Floats x) {
  x = highest(x, Floats{} - 87);
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

/// 16 numbers of 8 or 16 bits. GCC makes several instructions of a conversion for which a CPU has one.
#if defined __AVX512F__
Ints widen_integers(const uint8_t *from) { return (Ints)_mm512_cvtepu8_epi32(load<__m128i>(from)); }
Ints widen_integers(const int8_t *from) { return (Ints)_mm512_cvtepi8_epi32(load<__m128i>(from)); }
Ints widen_integers(const uint16_t *from) { return (Ints)_mm512_cvtepu16_epi32(load<__m256i>(from)); }
#elif defined __AVX2__
__m256i widen_half(const uint8_t *from) { return _mm256_cvtepu8_epi32(_mm_loadu_si64(from)); }
__m256i widen_half(const int8_t *from) { return _mm256_cvtepi8_epi32(_mm_loadu_si64(from)); }
__m256i widen_half(const uint16_t *from) { return _mm256_cvtepu16_epi32(load<__m128i>(from)); }
template <class T> Ints widen_integers(const T *from) {
  using Half = decltype(Ints::low);
  return {(Half)widen_half(from), (Half)widen_half(from + LANES / 2)};
}
#else
template <class T> Ints widen_integers(const T *from) {
  int32_t made[LANES];
  std::copy_n(from, LANES, made);
  return load<Ints>(made);
}
#endif

/// 16 numbers in float16.
Floats widen_fp16(const void *from) {
#if defined __AVX512F__
  return (Floats)_mm512_cvtph_ps(load<__m256i>(from));
#elif defined __AVX2__ && defined __F16C__
  using Half = decltype(Floats::low);
  const __m128i *halves = (const __m128i *)from;
  return {(Half)_mm256_cvtph_ps(_mm_loadu_si128(halves)), (Half)_mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
#else
  float made[LANES];
  for (int lane = 0; lane < LANES; ++lane)
    made[lane] = (float)load<c10::Half>(static_cast<const uint16_t *>(from) + lane);
  return load<Floats>(made);
#endif
}

/// 16 elements of float32, bfloat16, float16 or e4m3, as float32.
Floats widen_vector(const float *from) { return load<Floats>(from); }
Floats widen_vector(const uint16_t *from) { return (Floats)(widen_integers(from) << 16); }
Floats widen_vector(const c10::Half *from) { return widen_fp16(from); }
Floats widen_vector(const uint8_t *from) { // an e4m3's bits are 2^-120 times its value, but for its NaN
  const Ints bits = widen_integers(from), size = bits & 0x7F;
  const Floats value = (Floats)((bits & 0x80) << 24 | size << 20) * 0x1p120f;
  return (Floats)((Ints)value | ((Ints)(size == 0x7F) & 0x7FC00000));
}

/// The sum of 16 numbers.
float total(Floats x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)x);
#else
  using Four = float __attribute__((vector_size(16)));
  Four fours[LANES / 4];
  std::memcpy(fours, &x, sizeof x);
  const Four four = (fours[0] + fours[2]) + (fours[1] + fours[3]);
  return (four[0] + four[1]) + (four[2] + four[3]);
#endif
}

// Elements of float32, bfloat16, float16 and e4m3, as float32 and back.

float widen(float x) { return x; }
float widen(uint16_t x) { return std::bit_cast<float>((uint32_t)x << 16); }
float widen(c10::Half x) { return (float)x; }
float widen(uint8_t x) { // an e4m3's bits are 2^-120 times its value, but for its NaN
  const float value = std::bit_cast<float>((uint32_t)(x & 0x80) << 24 | (uint32_t)(x & 0x7F) << 20) * 0x1p120f;
  return (x & 0x7F) == 0x7F ? NAN : value;
}

void narrow(float x, float &y) { y = x; }
void narrow(float x, c10::Half &y) { y = (c10::Half)x; }
void narrow(float x, uint16_t &y) { // to the nearest, of two the even one
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  y = x != x ? 0x7FC0 : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}

void narrow(float x, uint8_t &y) { // at most 448, to the nearest, of two the even one
  const uint32_t bits = std::bit_cast<uint32_t>(x), sign = bits >> 24 & 0x80;
  const float size = std::min(std::abs(x), 448.0f);
  uint32_t number = std::bit_cast<uint32_t>(size);
  if (size < 0x1p-6f)
    number = (uint32_t)std::nearbyint(size * 0x1p9f);
  else
    number = (number + 0x7FFFF + (number >> 20 & 1)) >> 20;
  y = sign | (x != x ? 0x7F : size < 0x1p-6f ? number : number - (120 << 3));
}

void narrow(Floats x, float *y) { store(x, y); }
template <class T> void narrow(Floats x, T *y) {
  float numbers[LANES];
  narrow(x, numbers);
  for (int lane = 0; lane < LANES; ++lane)
    narrow(numbers[lane], y[lane]);
}
#ifdef __AVX512F__
void narrow(Floats x, uint16_t *y) {
  const Ints bits = (Ints)x;
  const __m256i halves = _mm512_cvtepi32_epi16((__m512i)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16));
  std::memcpy(y, &halves, sizeof halves);
}
#elif defined __AVX2__
void narrow(Floats x, uint16_t *y) {
  const Ints bits = (Ints)x, high = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF;
  const __m256i packed = _mm256_packus_epi32((__m256i)high.low, (__m256i)high.high);
  const __m256i halves = _mm256_permute4x64_epi64(packed, 0xD8); // packed by 128 bits
  std::memcpy(y, &halves, sizeof halves);
}
#endif

template <class F> void by_dtype(const Tensor &like, const F &f) {
  switch (like.scalar_type()) {
  case ScalarType::Float: return f.template operator()<float>();
  case ScalarType::BFloat16: return f.template operator()<uint16_t>();
  case ScalarType::Half: return f.template operator()<c10::Half>();
  default: STD_TORCH_CHECK(false, "takes float32, bfloat16 or float16");
  }
}

/// by_dtype, and an e4m3 too
template <class F> void by_cache_dtype(const Tensor &like, const F &f) {
  if (like.scalar_type() == ScalarType::Float8_e4m3fn)
    return f.template operator()<uint8_t>();
  by_dtype(like, f);
}

template <class T> const T *elements(const Tensor &tensor) { return static_cast<const T *>(tensor.const_data_ptr()); }
template <class T> T *elements(Tensor &tensor) { return static_cast<T *>(tensor.mutable_data_ptr()); }

} // namespace
