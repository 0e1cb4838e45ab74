// Vectors of 16 numbers, and the dtypes of tensors as float32 and back.

#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t LANES = 16;
constexpr int64_t AHEAD = 4096; // bytes by which a weight that is read in order is fetched early

using Floats = float __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
using Halves = uint16_t __attribute__((vector_size(32)));
using SignedHalves = int16_t __attribute__((vector_size(32)));
using Bytes = uint8_t __attribute__((vector_size(16)));
using SignedBytes = int8_t __attribute__((vector_size(16)));

template <class V> V load(const void *from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

// GCC makes several instructions of a conversion from bytes to 32 bits, where AVX512 has one.
#ifdef __AVX512F__
Ints widen(Bytes bytes) { return (Ints)_mm512_cvtepu8_epi32((__m128i)bytes); }
Ints widen(SignedBytes bytes) { return (Ints)_mm512_cvtepi8_epi32((__m128i)bytes); }
Ints widen(Halves halves) { return (Ints)_mm512_cvtepu16_epi32((__m256i)halves); }
#else
Ints widen(Bytes bytes) { return __builtin_convertvector(__builtin_convertvector(bytes, Halves), Ints); }
Ints widen(SignedBytes bytes) { return __builtin_convertvector(__builtin_convertvector(bytes, SignedHalves), Ints); }
Ints widen(Halves halves) { return __builtin_convertvector(halves, Ints); }
#endif

/// 16 numbers in float16.
Floats widen_fp16(const void *from) {
#ifdef __AVX512F__
  return (Floats)_mm512_cvtph_ps(load<__m256i>(from));
#else
  Floats made;
  for (int lane = 0; lane < LANES; ++lane)
    made[lane] = (float)load<c10::Half>(static_cast<const uint16_t *>(from) + lane);
  return made;
#endif
}

/// 16 elements of float32, bfloat16, float16 or e4m3, as float32.
Floats widen_vector(const float *from) { return load<Floats>(from); }
Floats widen_vector(const uint16_t *from) { return (Floats)(widen(load<Halves>(from)) << 16); }
Floats widen_vector(const c10::Half *from) { return widen_fp16(from); }
Floats widen_vector(const uint8_t *from) { // an e4m3's bits are 2^-120 times its value, but for its NaN
  const Ints bits = widen(load<Bytes>(from)), size = bits & 0x7F;
  const Floats value = (Floats)((bits & 0x80) << 24 | size << 20) * 0x1p120f;
  return size == 0x7F ? Floats{} + NAN : value;
}

/// The sum of 16 numbers.
float total(Floats x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)x);
#endif
  using Eight = float __attribute__((vector_size(32)));
  using Four = float __attribute__((vector_size(16)));
  Eight eights[2];
  std::memcpy(eights, &x, sizeof x);
  const Eight eight = eights[0] + eights[1];
  Four fours[2];
  std::memcpy(fours, &eight, sizeof eight);
  const Four four = fours[0] + fours[1];
  return (four[0] + four[1]) + (four[2] + four[3]);
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

void narrow(Floats x, float *y) { std::memcpy(y, &x, sizeof x); }
void narrow(Floats x, uint16_t *y) {
  const Ints bits = (Ints)x;
  const Halves halves = __builtin_convertvector((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, Halves);
  std::memcpy(y, &halves, sizeof halves);
}
void narrow(Floats x, c10::Half *y) {
  for (int lane = 0; lane < LANES; ++lane)
    y[lane] = (c10::Half)x[lane];
}

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
