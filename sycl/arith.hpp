// The arithmetic that every kernel shares: bf16, exp, roundings, quantisation, epilogue, ordered sums.
//
// Built with -ffp-contract=off, and on a GPU with correctly rounded division and square root: every f32 operation here
// rounds once, to nearest even. bf16 is converted with integer operations, because sycl::ext::oneapi::bfloat16 pulls in
// a device library that a SYCLBIN then lacks.
#pragma once
#include <sycl/bit_cast.hpp>
#include <sycl/builtins.hpp>

#include <cstdint>

inline float bf16_to_f32(uint16_t x) { return sycl::bit_cast<float>(uint32_t(x) << 16); }

// Round to nearest even; every NaN becomes 0x7fc0.
inline uint16_t rn_bf16(float x) {
  uint32_t u = sycl::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

// exp in f64, rounded once to f32.
inline float exp_cr(float x) { return float(sycl::exp(double(x))); }

inline float silu(float g) { return g / (1.0f + exp_cr(-g)); }

inline float sigmoid(float x) { return 1.0f / (1.0f + exp_cr(-x)); }

// ---------------------------------------------------------------- activation

enum Activation : int { silu_round_twice = 0, silu_round_once = 1, silu_f32 = 2 };

// What is quantised after the activation, from a bf16 gate and a bf16 up.
inline float activate(uint16_t gate, uint16_t up, int mode) {
  float s = silu(bf16_to_f32(gate)), u = bf16_to_f32(up);
  if (mode == silu_round_twice) return bf16_to_f32(rn_bf16(bf16_to_f32(rn_bf16(s)) * u));
  if (mode == silu_round_once) return bf16_to_f32(rn_bf16(s * u));
  return s * u;
}

// ---------------------------------------------------------------- quantisation

enum Quant : int { recip_half_away = 0, recip_half_even = 1, div_half_even = 2, rmsnorm_int8 = 3, group_trunc = 4 };

// |x| as an integer: the order of magnitudes, with NaN above infinity, so that an integer maximum is exact in any order.
inline uint32_t magnitude(float x) { return sycl::bit_cast<uint32_t>(x) & 0x7fffffffu; }

// A row's scale, and what its elements are multiplied (or divided) by.
struct RowScale {
  float scale, factor;
  bool finite;
};

inline RowScale row_scale(uint32_t absmax, int mode) {
  float m = sycl::bit_cast<float>(absmax);
  if (absmax >= 0x7f800000u) return {m, 0.0f, false};
  if (mode == rmsnorm_int8) {
    float scale = m > 0.0f ? m / 127.0f : 1.0f;
    return {scale, 1.0f / scale, true};
  }
  m = m > 1e-10f ? m : 1e-10f;
  float scale = m / 127.0f;
  return {scale, mode == div_half_even || mode == group_trunc ? scale : 127.0f / m, true};
}

inline float clamp(float y, float low) { return y < low ? low : y > 127.0f ? 127.0f : y; }

// One code of a finite row. Selects instead of branches, so that a loop over a row vectorises.
template <int MODE> inline int8_t code(float x, float factor) {
  float y = MODE == div_half_even || MODE == group_trunc ? x / factor : x * factor;
  y = y == y ? y : 0.0f;  // 0·inf, when 1/scale overflows on a denormal row
  if constexpr (MODE == recip_half_away) {  // C roundf: adding 0.5 to y would be wrong at 0.49999997
    float whole = sycl::trunc(y), rest = y - whole;
    y = whole + (rest >= 0.5f ? 1.0f : 0.0f) - (rest <= -0.5f ? 1.0f : 0.0f);
  } else if constexpr (MODE != group_trunc) {
    y = sycl::rint(y);
  }
  return int8_t(int(clamp(y, MODE == rmsnorm_int8 || MODE == group_trunc ? -128.0f : -127.0f)));
}

// Codes of elements first, first + step, … below n; read(i) is element i in f32.
template <int MODE, class Read> inline void codes(Read read, int8_t *to, RowScale row, int first, int step, int n) {
  for (int i = first; i < n; i += step) to[i] = code<MODE>(read(i), row.factor);
}

template <int STEP, class Read> inline void quantize(Read read, int8_t *to, RowScale row, int first, int n, int mode) {
  if (!row.finite)
    for (int i = first; i < n; i += STEP) to[i] = 0;
  else if (mode == recip_half_away) codes<recip_half_away>(read, to, row, first, STEP, n);
  else if (mode == recip_half_even) codes<recip_half_even>(read, to, row, first, STEP, n);
  else if (mode == div_half_even) codes<div_half_even>(read, to, row, first, STEP, n);
  else if (mode == rmsnorm_int8) codes<rmsnorm_int8>(read, to, row, first, STEP, n);
  else codes<group_trunc>(read, to, row, first, STEP, n);
}

// ---------------------------------------------------------------- epilogue

enum Epilogue : int { row_then_col = 0, scales_first = 1 };

// The s32 sum to bf16, in the association that the mode names. `bias` may be null.
inline uint16_t epilogue(int32_t acc, float row_scale, float col_scale, const float *bias, int64_t column, int mode) {
  float y = float(acc);
  y = mode == row_then_col ? (y * row_scale) * col_scale : y * (row_scale * col_scale);
  if (bias) y = y + bias[column];
  return rn_bf16(y);
}

// ---------------------------------------------------------------- ordered sums

// The contract's float sum: 32 virtual lanes, lane l adds k = l, l+32, … from +0.0, then the lanes fold by halves.
inline float fold32(float *lanes) {
  for (int half = 16; half > 0; half /= 2)
    for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];
  return lanes[0];
}
