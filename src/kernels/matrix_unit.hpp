// Products of 32 x 32 results on a matrix unit that multiplies tiles of bf16 pairs and adds in f32 (AMX on x86); with a
// plain body, so that what is built on it can be tested on any CPU.
//
// Both operands are made of blocks for one step of 32 along the sum, of 64-byte lines:
//   A: a line is a row's 32 values, [rows][32]                        (K by keys; V transposed, by dims)
//   B: a line is one pair of the sum for 16 columns, [16][32][2]      (Q^T by rows; the weights by rows)
// An operand may have parts whose sum it is (dtype.hpp: parts): a value of 16 bits or less of mantissa is exactly the
// sum of two bf16.
//
// AMX has eight tile registers of 16 x 64 bytes: 2 x 2 of results, 2 of A, 2 of B; four products of 16 cycles a step
// against four loads of 8.
#pragma once

#include "dtype.hpp"

namespace manyhead::MH_ISA {
namespace {

inline constexpr int64_t unit_rows = 32;  // of A, and columns of B
inline constexpr int64_t unit_step = 32;  // values along the sum

struct unit_a {
  const uint16_t* base;
  int64_t part, step;  // distances, in elements
};

struct unit_b {
  const uint32_t* base;  // words: pairs of bf16, the even one low
  int64_t part, step;
};

// Which parts are multiplied: part i of A with the first b_parts[i] parts of B.
struct unit_terms {
  int a_parts;
  int b_parts[2];
};

#if defined(__AMX_BF16__)

// Palette 1, eight tiles of 16 lines of 64 bytes. A constant, as compilers do not know that the intrinsic reads it.
struct alignas(64) tile_shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t lines[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
inline constexpr tile_shapes unit_shapes;

// The unit is told the shape of its tiles; afterwards it is given back, so that the system need not save it.
class matrix_unit {
 public:
  matrix_unit() { _tile_loadconfig(&unit_shapes); }
  ~matrix_unit() { _tile_release(); }
  matrix_unit(const matrix_unit&) = delete;
  matrix_unit& operator=(const matrix_unit&) = delete;

  // c (32 x 32, c_stride apart) = A B, or += where `add`.
  MH_INLINE void product(const unit_a& a, const unit_b& b, const unit_terms& terms, int64_t steps, float* c,
                         int64_t c_stride, bool add) const {
    const auto stride = static_cast<int>(c_stride * 4);
    asm volatile("" ::: "memory");  // nor that the loads do: what they read is to be written before
    if (add) {
      _tile_loadd(0, c, stride);
      _tile_loadd(1, c + 16, stride);
      _tile_loadd(2, c + 16 * c_stride, stride);
      _tile_loadd(3, c + 16 * c_stride + 16, stride);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int i = 0; i < terms.a_parts; ++i) {
      for (int64_t step = 0; step < steps; ++step) {
        const uint16_t* at = a.base + i * a.part + step * a.step;
        _tile_loadd(4, at, 64);
        _tile_loadd(5, at + 16 * unit_step, 64);
        for (int j = 0; j < terms.b_parts[i]; ++j) {
          const uint32_t* bt = b.base + j * b.part + step * b.step;
          _tile_loadd(6, bt, 128);
          _tile_loadd(7, bt + 16, 128);
          _tile_dpbf16ps(0, 4, 6);
          _tile_dpbf16ps(1, 4, 7);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
    }
    _tile_stored(0, c, stride);
    _tile_stored(1, c + 16, stride);
    _tile_stored(2, c + 16 * c_stride, stride);
    _tile_stored(3, c + 16 * c_stride + 16, stride);
  }
};

#else

class matrix_unit {
 public:
  void product(const unit_a& a, const unit_b& b, const unit_terms& terms, int64_t steps, float* c, int64_t c_stride,
               bool add) const {
    for (int64_t m = 0; m < unit_rows; ++m) {
      for (int64_t n = 0; n < unit_rows; ++n) {
        float sum = add ? c[m * c_stride + n] : 0.0F;
        for (int i = 0; i < terms.a_parts; ++i) {
          for (int64_t step = 0; step < steps; ++step) {
            const uint16_t* line = a.base + i * a.part + step * a.step + m * unit_step;
            for (int j = 0; j < terms.b_parts[i]; ++j) {
              const uint32_t* words = b.base + j * b.part + step * b.step + n;
              for (int64_t k = 0; k < unit_step / 2; ++k) {
                const uint32_t word = words[k * unit_rows];
                sum += bf16::widen(line[2 * k]) * bf16::widen(static_cast<uint16_t>(word)) +
                       bf16::widen(line[2 * k + 1]) * bf16::widen(static_cast<uint16_t>(word >> 16));
              }
            }
          }
        }
        c[m * c_stride + n] = sum;
      }
    }
  }
};

#endif

}  // namespace
}  // namespace manyhead::MH_ISA
