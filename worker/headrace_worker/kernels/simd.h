// Vectors of 16 float32 lanes, and what attention does with them.
//
// They are the compiler's own vector types, which it maps to whatever the CPU has; intrinsics stand
// only where they say what the compiler cannot find by itself. Multiply-adds are fused where written
// so, and nowhere else.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kv_layout.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace headrace {

constexpr int64_t kLanes = 16;

using Floats16 = float __attribute__((vector_size(64)));
using Words16 = uint32_t __attribute__((vector_size(64)));
using Ints16 = int32_t __attribute__((vector_size(64)));

template <class V, class S>
inline V load16(const S* from) {
  V vector;
  std::memcpy(&vector, from, sizeof(V));
  return vector;
}

template <class V, class S>
inline void store16(S* to, const V& vector) {
  std::memcpy(to, &vector, sizeof(V));
}

inline Floats16 spread(float x) { return Floats16{} + x; }

inline float as_float(uint32_t word) {
  float x;
  std::memcpy(&x, &word, sizeof(x));
  return x;
}

inline uint32_t as_word(float x) {
  uint32_t word;
  std::memcpy(&word, &x, sizeof(word));
  return word;
}

inline Floats16 multiply_add(Floats16 a, Floats16 b, Floats16 c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__) || defined(__aarch64__)
  for (int i = 0; i < kLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}

// sum + left * right, where left is one word of T in every lane and right has a word in each.
template <class T>
inline Floats16 accumulate(Floats16 sum, uint32_t left, Words16 right);

template <>
inline Floats16 accumulate<float>(Floats16 sum, uint32_t left, Words16 right) {
  return multiply_add(spread(as_float(left)), (Floats16)right, sum);
}

template <>
inline Floats16 accumulate<c10::BFloat16>(Floats16 sum, uint32_t left, Words16 right) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(left), (__m512bh)right);
#else
  // A bfloat16 is the upper half of a float32.
  const Floats16 low = (Floats16)(right << 16), high = (Floats16)(right & 0xffff0000u);
  sum = multiply_add(spread(as_float(left & 0xffff0000u)), high, sum);
  return multiply_add(spread(as_float(left << 16)), low, sum);
#endif
}

// The larger of each lane; NaN where `b` is NaN.
inline Floats16 larger(Floats16 a, Floats16 b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

inline float sum_of(Floats16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(v);
#else
  float lanes[kLanes];
  store16(lanes, v);
  for (int64_t width = kLanes / 2; width > 0; width /= 2)
    for (int64_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
#endif
}

inline float largest_of(Floats16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(v);
#else
  float lanes[kLanes];
  store16(lanes, v);
  for (int64_t width = kLanes / 2; width > 0; width /= 2)
    for (int64_t i = 0; i < width; ++i) lanes[i] = std::max(lanes[i], lanes[i + width]);
  return lanes[0];
#endif
}

// 2^x, within 1e-7 of it, relatively; exactly 1 for 0, exactly 0 below -126, NaN for NaN.
inline Floats16 exp2(Floats16 x) {
  constexpr float kPowers[] = {0.00015353359f, 0.0013398874f, 0.0096184369f,
                               0.055503324f,   0.24022648f,   0.69314718f};
  constexpr float kLeast = -126;
#if defined(__AVX512F__)
  const Floats16 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const Floats16 wanted = x;
  x = x < kLeast ? spread(kLeast) : x;
  // Adding 1.5 * 2^23 leaves no bits for a fraction.
  const Floats16 whole = (x + 12582912.0f) - 12582912.0f;
#endif
  const Floats16 part = x - whole;
  Floats16 sum = spread(kPowers[0]);
  for (int i = 1; i < 6; ++i) sum = multiply_add(sum, part, spread(kPowers[i]));
  sum = multiply_add(sum, part, spread(1.0f));
#if defined(__AVX512F__)
  // A result too small for a normal number would cost a hundred times as much.
  const __mmask16 is_normal = _mm512_cmp_ps_mask(x, spread(kLeast), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(is_normal, sum, whole);
#else
  // In two steps, so that neither factor leaves the range of exponents.
  const Ints16 exponent = __builtin_convertvector(whole, Ints16), half = exponent >> 1;
  const Floats16 power = (Floats16)((half + 127) << 23) * (Floats16)((exponent - half + 127) << 23);
  return wanted < kLeast ? Floats16{} : sum * power;
#endif
}

// tanh, within 3e-7.
inline Floats16 tanh(Floats16 x) {
  constexpr float kTwiceLog2E = 2.8853901f;
  const Floats16 far = 1.0f - 2.0f / (exp2(x * kTwiceLog2E) + 1.0f);
  const Floats16 square = x * x;
  Floats16 near = spread(62.0f / 2835);
  near = multiply_add(near, square, spread(-17.0f / 315));
  near = multiply_add(near, square, spread(2.0f / 15));
  near = multiply_add(near, square, spread(-1.0f / 3));
  near = multiply_add(near * square, x, x);
  return square < 0.0625f ? near : far;
}

// Rounds 16 floats to 16 elements side by side.
inline void store_as(float* to, Floats16 v) { store16(to, v); }

inline void store_as(c10::BFloat16* to, Floats16 v) {
#if defined(__AVX512BF16__)
  const __m256bh rounded = _mm512_cvtneps_pbh(v);
  std::memcpy(to, &rounded, sizeof(rounded));
#else
  for (int i = 0; i < kLanes; ++i) to[i] = v[i];
#endif
}

}  // namespace headrace
