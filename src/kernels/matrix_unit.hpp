// Products of 32 x 32 results on a unit that multiplies bf16 and adds in f32: AMX or VDPBF16PS on x86, BFMMLA on AArch64;
// with a plain body, so that what is built on it can be tested on any CPU and with any vectors.
//
// Both operands are made of blocks for one step of 32 along the sum:
//   A: [rows][32]     K by keys; V transposed, by dims
//   B: [32][columns]  Q^T by rows; the weights by rows
// in an order that is the unit's own: put_row, put_columns and put_weights bring vectors of words there, each word two
// neighbours along the sum, the even one low. 32 rows of a block of A lie together, or `row` apart; blocks of B follow each other.
// An operand may have parts whose sum it is (unit_number.hpp): a value of 16 bits or less of mantissa is exactly the
// sum of two bf16.
//
// All but BFMMLA: lines of 64 bytes; of A a row's 32 values, of B [16][32][2], a pair for each column.
// AMX has eight tile registers of 16 x 64 bytes: 2 x 2 of results, 2 of A, 2 of B; four products of 16 cycles a step
// against four loads of 8.
//
// VDPBF16PS adds the product of two pairs to each float of a vector. Register budget for 12 rows: 24 of results + 2 of B
// + 1 broadcast pair of A = 27 of 32; 24 VDPBF16PS against 14 loads and a line asked for, so that multiplying is the bound where two of
// each begin in a cycle (Zen 5: twice the multiply-adds of FMA). At the end B takes 4, and scores that are closed 2 of maxima + 2 of
// words + -inf: the maxima wait on the stack then. A is read pair by pair, so that it may lie anywhere, V need not be transposed, and no
// row and no pair is multiplied that is not there. Of half the columns, for panels of 16 rows and less, 16 rows of A at a time: 16
// VDPBF16PS against 17 loads. With all that is done besides such a panel takes 0.56 to 0.6 of the time of a whole one (Zen 5, heads of
// 32 to 128; 12 rows at a time 0.59 to 0.63).
//
// BFMMLA adds a 2 x 4 times a 4 x 2 product to 2 x 2 results. Both operands lie as it takes them, [lines / 8][8][8][4]:
// of 8 rows or columns, four values of each after the other. Register budget for 8 x 8 results: 16 of results + 4 of A
// + 4 of B = 24 of 32; 16 BFMMLA against 8 loads. Each has four times the multiply-adds of an FMA of f32, and by the
// vendor's guides for Neoverse V1 and N2 as many of them begin in a cycle (4 and 2; latency 5, 3 from sum to sum), so
// that 16 chains are enough. Its speed is unmeasured here.
#pragma once

#include "lines_ahead.hpp"
#include "unit_number.hpp"

namespace manyhead::MH_ISA {
namespace {

inline constexpr int64_t unit_step = 32;                          // values along the sum
inline constexpr int64_t unit_block = unit_step / 2 * unit_rows;  // words of a step of B

struct unit_a {
  const uint16_t* base;
  int64_t part, step;  // distances, in elements
  int64_t row;         // from one row to the next: unit_step in packed blocks, others only with unit_takes_memory
  int64_t pair = 2;    // from one pair along the sum to the next, with unit_takes_columns: steps lie no further apart
};

struct unit_b {
  const uint32_t* base;
  int64_t part, step;  // distances, in words
};

// What counts of a product: rows of A, at most unit_rows, values along the sum, and columns of B. A unit may do more, up to whole
// unit_grain; what it multiplies then behind the values along the sum are zeros, and nobody looks at more rows. One that
// unit_takes_halves does the first half of the columns alone if no more count: results of the others are 0, or as they were.
struct unit_extent {
  int64_t rows, sums, columns = unit_rows;
};

// What else is done to results of one part that are not added, with unit_finds_tops, in this order. All are multiplied with `scale`.
// open[32], if given: bit r of a column's word tells whether row r of it counts; others become -inf. top[32]: raised to the largest of
// each column; it may be NULL where neither of the others is asked for.
struct unit_scores {
  float scale = 1;
  const uint32_t* open = nullptr;
  float* top = nullptr;
};

MH_INLINE int64_t steps_of(int64_t sums) { return (sums + unit_step - 1) / unit_step; }

// From so many rows and keys on the unit wins over FMA.
struct unit_size {
  int32_t rows, keys;
};

// The same for the layer's products (linear_unit.hpp): rows of an entry. How many times as fast as FMA it is there, about; and
// how much of the sum is multiplied at a time, at most.
struct unit_linear {
  int64_t least_rows;
  int32_t speed;
  int64_t most_depth;
};

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

// Numbers of more parts are left to FMA: f16 takes 4 products a score and 3 a value.
inline constexpr int unit_parts = 1;
inline constexpr unit_extent unit_grain = {8, unit_step};
inline constexpr bool unit_takes_memory = false;
inline constexpr bool unit_takes_columns = false;
inline constexpr bool unit_takes_halves = false;
inline constexpr bool unit_finds_tops = false;
inline constexpr bool unit_asks_ahead = false;
// FMA does 4 rows at a time where the unit does 32 columns whatever their number: an estimate from the instructions of both
// routes, head_dim 64, weights in two parts (24 rows: 870 a key and 1300; 16 rows: 870 and 900).
template <int Parts>
inline constexpr unit_size unit_least = {24, 32};
// Eight rows at a time, of which the unit takes a quarter of FMA's instructions. Of the sum 32 outputs (24 KB) stay in L1.
// Unmeasured.
template <int Parts>
inline constexpr unit_linear linear_on_unit = {8, 2, 384};
inline constexpr int weight_pairs = 2;  // that put_weights takes at a time

// Four values of line `line` from value k of the sum on.
MH_INLINE int64_t unit_place(int64_t line, int64_t k) {
  return (line / 8 * (unit_step / 4) + k / 4) * 32 + line % 8 * 4;
}

// 2 x lanes values of a row of A from k on, within a step whose block begins at `a`.
MH_INLINE void put_row(uint16_t* a, int64_t, int64_t row, int64_t k, word_vec x) {
  const uint16x8_t values = vreinterpretq_u16_u32(x);
  vst1_u16(a + unit_place(row, k), vget_low_u16(values));
  vst1_u16(a + unit_place(row, k + 4), vget_high_u16(values));
}

// As many of each of `lanes` neighbouring columns of B, which begins at `b`.
MH_INLINE void put_columns(uint32_t* b, int64_t column, int64_t k, const word_vec (&x)[lanes<float>][1]) {
  auto* block = reinterpret_cast<uint16_t*>(b + k / unit_step * unit_block);
#pragma GCC unroll 4
  for (int l = 0; l < lanes<float>; ++l) put_row(block, unit_step, column + l, k % unit_step, x[l][0]);
}

// Pairs from k on of `lanes` neighbouring columns.
MH_INLINE void put_weights(uint32_t* b, int64_t column, int64_t k, const word_vec (&x)[weight_pairs]) {
  uint32_t* to = b + k / unit_step * unit_block + unit_place(column, k % unit_step) / 2;
  vst1q_u32(to, vzip1q_u32(x[0], x[1]));
  vst1q_u32(to + 4, vzip2q_u32(x[0], x[1]));
}

#else

inline constexpr bool unit_takes_memory = true;  // rows of A anywhere, the values of a step side by side
#if MH_UNIT_COLUMNS
inline constexpr bool unit_takes_columns = true;  // and pairs anywhere, rows side by side: V need not be transposed
inline constexpr bool unit_takes_halves = true;   // of columns
inline constexpr bool unit_finds_tops = true;     // the largest results of each column, which it holds in registers
inline constexpr unit_extent unit_grain = {1, 2};
#else
inline constexpr bool unit_takes_columns = false;
inline constexpr bool unit_takes_halves = false;
inline constexpr bool unit_finds_tops = false;
inline constexpr unit_extent unit_grain = {unit_rows, unit_step};
#endif
#if defined(__AVX512BF16__)
inline constexpr bool unit_asks_ahead = true;  // for lines, in products that are given them
inline constexpr int unit_parts =
    1;  // twice the multiply-adds of FMA are too few for f16 (7 products for 2) and f32 (12)
#else
inline constexpr bool unit_asks_ahead = false;
inline constexpr int unit_parts = 3;
#endif
#if defined(__AVX512BF16__)
// On Zen 5, 8 heads of 16, 32, 64 and 128, 32 to 256 keys: 16 rows 0.77 to 1.25, 20 rows 1.06 to 1.76, but 16 keys 0.67 to 0.92,
// and 28 to 31 rows and keys 1.1 to 1.37.
template <int Parts>
inline constexpr unit_size unit_least = {17, 28};
// On Zen 4 one row is 1.0 to 1.36 times as fast as with FMAs, and more are 1.5 to 2.8 times as fast
// (docs/performance-other-cpus.md). So all rows, which then have the same bits whatever their number. Of the sum all at once: pieces
// of 24 KB, for an L1 of 32, 0.8 to 1.0, with 768 numbers and more than 4 rows 0.8 to 0.98.
template <int Parts>
inline constexpr unit_linear linear_on_unit = {1, 2, 4096};
#else
// By the parts of a number (of three: route.cpp). AMX on one thread, head_dim 64, its speed beside the tile route's: bf16
// 10 x 10 0.5, 32 x 16 0.85, 16 x 64 1.1, 32 x 32 1.25, 64 x 64 1.6; f16 in two parts 32 x 32 0.84, 16 x 1024 0.8, 32 x 64
// 1.0, 32 x 256 1.1; f32 in three 64 x 64 0.9, 64 x 512 1.0, 128 x 128 1.13. Beside the decode route's, bf16: 8 rows x 64
// keys 0.7, x 512 0.94, 10 rows 0.93 and 1.2, 12 rows 1.02 and 1.3.
template <int Parts>
inline constexpr unit_size unit_least = Parts == 1   ? unit_size{11, 32}
                                        : Parts == 2 ? unit_size{32, 64}
                                                     : unit_size{96, 64};
// AMX beside AVX-512, one core:
//   f32   768 x 768: 192 and 128 rows 1.8 times as fast, 96 1.55, 64 1.3, 32 as fast. Whole layers of 64 rows: 128 x 128 1.05
//         times as fast, 64 x 64 0.9. Of 48 rows: one entry 0.97 to 1.02, eight 1.2 to 1.7; of 40 and 32 one entry 0.89 to 0.98,
//         eight and more 1.2 to 1.7, and one entry must have the bits of eight.
//   bf16  whole layers of 768, 2048 and 4096, one row 0.83 to 0.99 and 1.3, 4 rows 1.0, 8 1.4 to 2.2, 16 2.5, 32 4.4: so all rows, which
//         then have the same bits whatever their number. Unmeasured: f16 on units that have it; taken as bf16.
//   f16   in two bf16, 768 and 2048: 4 rows 0.55 to 0.78, 8 0.73 to 0.94, 12 0.97 to 1.4, 16 1.1 to 1.3, 32 1.5 to 1.9.
// Of the sum 32 outputs (24 to 32 KB) stay in L1 while rows pass by.
template <int Parts>
inline constexpr unit_linear linear_on_unit = Parts == 1   ? unit_linear{1, 6, 512}
                                              : Parts == 2 ? unit_linear{12, 3, 192}
                                                           : unit_linear{48, 2, 128};
#endif
inline constexpr int weight_pairs = 1;

// 2 x lanes values of a row of A from k on, rows `stride` apart.
MH_INLINE void put_row(uint16_t* a, int64_t stride, int64_t row, int64_t k, word_vec x) {
  x.store_aligned(reinterpret_cast<uint32_t*>(a + row * stride + k));
}

// The pair k of `lanes` neighbouring columns of B, which begins at `b`.
MH_INLINE void put_pair(uint32_t* b, int64_t column, int64_t k, word_vec x) {
  x.store_aligned(b + k / 2 * unit_rows + column);
}

// 2 x lanes values of each of them.
MH_INLINE void put_columns(uint32_t* b, int64_t column, int64_t k, const word_vec (&x)[lanes<float>][1]) {
  word_vec pairs[lanes<float>];
#pragma GCC unroll 16
  for (int l = 0; l < lanes<float>; ++l) pairs[l] = x[l][0];
  transpose_words(pairs);
#pragma GCC unroll 16
  for (int i = 0; i < lanes<float>; ++i) put_pair(b, column, k + 2 * i, pairs[i]);
}

MH_INLINE void put_weights(uint32_t* b, int64_t column, int64_t k, const word_vec (&x)[weight_pairs]) {
  put_pair(b, column, k, x[0]);
}

#endif

#if defined(__AMX_BF16__)

// Palette 1, eight tiles of 64 bytes a line; five of 16 lines, and three of `rows`. Constants, as compilers do not know that the
// intrinsic reads them.
struct alignas(64) tile_shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t lines[16] = {16, 16, 16, 16, 16};
  constexpr explicit tile_shapes(uint8_t rows) {
    for (int i = 5; i < 8; ++i) lines[i] = rows;
  }
};
inline constexpr tile_shapes unit_shapes(16);

// sums += A B of f16, by their tiles. By its bytes, as neither g++ 12 nor the assemblers of its time know tdpfp16ps.
template <int Sums, int A, int B>
MH_INLINE void tile_dpfp16ps() {
  asm volatile(".byte 0xc4, 0xe2, %c0, 0x5c, %c1" : : "i"(0x43 | (~B & 7) << 3), "i"(0xc0 | Sums << 3 | A));
}

// The unit is told the shape of its tiles; afterwards it is given back, so that the system need not save it.
class matrix_unit {
 public:
  static constexpr int turn_lines = 4;  // asked for in each meanwhile(): as many as memory brings in 64 cycles

  matrix_unit() { _tile_loadconfig(&unit_shapes); }
  ~matrix_unit() { _tile_release(); }
  matrix_unit(const matrix_unit&) = delete;
  matrix_unit& operator=(const matrix_unit&) = delete;

  // c (rows x 32, c_stride apart) = A B, or += where `add`. meanwhile() is called once for each 64 cycles of the unit's work:
  // other work, of vectors, that the product need not wait for. Layer: A is read once, B again and again; lines of A, which come
  // from L2, then leave those of B in L1.
  template <class Format, bool Layer = false, class Meanwhile>
  MH_INLINE void product(const unit_a& a, const unit_b& b, const unit_terms& terms, const unit_extent& size, float* c,
                         int64_t c_stride, bool add, Meanwhile meanwhile, const unit_scores& = {},
                         lines_ahead* = nullptr) const {
    const int64_t steps = steps_of(size.sums);
    const auto stride = static_cast<int>(c_stride * 4);
    const int64_t row = a.row * 2;
    const bool both = size.rows > 16;
    asm volatile("" ::: "memory");  // nor that the loads do: what they read is to be written before
    if (add) {
      _tile_loadd(0, c, stride);
      _tile_loadd(1, c + 16, stride);
      if (both) {
        _tile_loadd(2, c + 16 * c_stride, stride);
        _tile_loadd(3, c + 16 * c_stride + 16, stride);
      }
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int i = 0; i < terms.a_parts; ++i) {
      for (int64_t step = 0; step < steps; ++step) {
        const uint16_t* at = a.base + i * a.part + step * a.step;
        if constexpr (Layer) {
          _tile_stream_loadd(4, at, row);
          if (both) _tile_stream_loadd(5, at + 16 * a.row, row);
        } else {
          _tile_loadd(4, at, row);
          if (both) _tile_loadd(5, at + 16 * a.row, row);
        }
        for (int j = 0; j < terms.b_parts[i]; ++j) {
          const uint32_t* bt = b.base + j * b.part + step * b.step;
          _tile_loadd(6, bt, 128);
          _tile_loadd(7, bt + 16, 128);
          multiply(Format{}, both);
          meanwhile();
        }
      }
    }
    _tile_stored(0, c, stride);
    _tile_stored(1, c + 16, stride);
    if (!both) return;
    _tile_stored(2, c + 16 * c_stride, stride);
    _tile_stored(3, c + 16 * c_stride + 16, stride);
  }

 private:
  static MH_INLINE void multiply(in_bf16, bool both) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (!both) return;
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  static MH_INLINE void multiply(in_f16, bool both) {
    tile_dpfp16ps<0, 4, 6>();
    tile_dpfp16ps<1, 4, 7>();
    if (!both) return;
    tile_dpfp16ps<2, 5, 6>();
    tile_dpfp16ps<3, 5, 7>();
  }
};

#elif defined(__AVX512BF16__)

class matrix_unit {
 public:
  static constexpr int turn_lines = 0;  // it asks itself

  // c (rows x 32, c_stride apart) = A B, or += where `add`. meanwhile() is called between stretches of rows. Layer: B, which
  // comes from far away, is asked for by the first stretch. ahead: lines to be asked for, one with each pair of the sum, until none is
  // left: 24 between stretches, which take 400 cycles with heads of 64, would fill the buffers that other loads need.
  template <class Format, bool Layer = false, class Meanwhile>
  MH_INLINE void product(const unit_a& a, const unit_b& b, const unit_terms& terms, const unit_extent& size, float* c,
                         int64_t c_stride, bool add, Meanwhile meanwhile, const unit_scores& scores = {},
                         lines_ahead* ahead = nullptr) const {
    const bool halved = !Layer && size.columns <= unit_rows / 2;
    for (int i = 0; i < terms.a_parts; ++i) {
      for (int j = 0; j < terms.b_parts[i]; ++j) {
        stretch at{reinterpret_cast<const char*>(a.base + i * a.part),
                   2 * a.row,
                   2 * a.pair,
                   reinterpret_cast<const char*>(b.base + j * b.part),
                   (size.sums + 1) / 2,
                   c,
                   c_stride,
                   scores.top,
                   scores.open,
                   scores.scale,
                   0,
                   ahead};
        const result kind = add                      ? result::added
                            : scores.scale != 1      ? result::set_scaled
                            : scores.open != nullptr ? result::set_open
                            : scores.top != nullptr  ? result::set_with_tops
                                                     : result::set;
        for (int64_t left = size.rows; left > 0; meanwhile()) {
          const int64_t count = at_once(left, halved ? most_of_half : most_rows);
          const asks asking = ahead != nullptr && !ahead->empty() ? asks::lines
                              : Layer && at.first == 0            ? asks::words
                                                                  : asks::nothing;
          const rows_fn* const fns =
              halved ? halves[static_cast<int>(kind)].of
                     : rows_of[static_cast<int>(asking)].of_kind[static_cast<int>(kind)].with_last[at.pairs >= 2].of;
          fns[count](at);
          at.a += count * at.row;
          at.c += count * c_stride;
          at.first += static_cast<int>(count);
          left -= count;
        }
        add = true;
      }
    }
  }

 private:
  enum class result { set, set_with_tops, set_open, set_scaled, added };  // `set_` each do what those before do
  enum class asks { nothing, lines, words };  // for lines of `ahead`; for B, `weights_ahead` on, as the layer does

  // Rows, of one part of each operand; distances of A in bytes.
  struct stretch {
    const char* a;
    int64_t row, pair;
    const char* b;
    int64_t pairs;
    float* c;
    int64_t c_row;
    float* top;
    const uint32_t* open;
    float scale;
    int first;  // of the rows that `open` speaks of
    lines_ahead* ahead;
  };

  // Of so many that are left: shared out, as few rows wait for their sums.
  static MH_INLINE int64_t at_once(int64_t left, int64_t most) {
    return left <= most ? left : left >= 2 * most ? most : (left + 1) / 2;
  }

  // The first M of them. The `Last` pairs go row by row, each row stored before the next one is multiplied: with 24 stores
  // after all of them Zen 4 multiplied nothing for the 48 cycles that they take, of 400 or 800.
  // Not in line: the caller holds vectors too. Few arguments: what g++ 12 has no registers for it moves to others of vectors
  // and back, in the queue of the multiply-adds. Vectors: of columns.
  template <int M, result Kind, int Last, asks Asks, int Vectors = 2>
  static __attribute__((noinline)) void rows(const stretch& of) {
    const char *a = of.a, *b = of.b;
    const int64_t row = of.row, pair = of.pair;
    constexpr int half = (M + 1) / 2;
    __m512 sum[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) sum[m][0] = sum[m][1] = _mm512_setzero_ps();
    const char* a_high = a + half * row;
    int64_t row3 = 3 * row, row5 = 5 * row, row7 = 7 * row;
#if defined(__clang__)  // else it adds the distance row by row, each add waiting for the last
    asm("" : "+r"(row3), "+r"(row5), "+r"(row7));
#endif
    const int64_t of_row[8] = {0, row, 2 * row, row3, 4 * row, row5, 2 * row3, row7};
    static_assert(half <= 8);
    const auto of_b = [&](int vector)
                          MH_INLINE_LAMBDA { return reinterpret_cast<__m512bh>(_mm512_load_si512(b + vector * 64)); };
    const auto times = [&](int m, int64_t from, __m512bh left, __m512bh right) MH_INLINE_LAMBDA {
      int32_t x;
      memcpy(&x, (m < half ? a : a_high) + of_row[m % half] + from, sizeof(x));
      const auto both = reinterpret_cast<__m512bh>(_mm512_set1_epi32(x));
      sum[m][0] = _mm512_dpbf16_ps(sum[m][0], both, left);
      if constexpr (Vectors == 2) sum[m][1] = _mm512_dpbf16_ps(sum[m][1], both, right);
    };
    for (int64_t left_over = of.pairs - Last; left_over > 0;) {
      line_run line{nullptr, 0, left_over};
      if constexpr (Asks == asks::lines) line = of.ahead->walk.run(left_over);
      left_over -= line.count;
      for (int64_t n = line.count; n > 0; --n) {
        __m512bh left = of_b(0), right = Vectors == 2 ? of_b(1) : left;
        asm("" : "+v"(left));  // else g++ 12 loads them for each of three rows
        if constexpr (Vectors == 2) asm("" : "+v"(right));
        if constexpr (Asks == asks::lines) {
          __builtin_prefetch(line.at, 0, 2);
          line.at += line.step;
        }
        if constexpr (Asks == asks::words) {
          __builtin_prefetch(b + weights_ahead);
          __builtin_prefetch(b + weights_ahead + 64);
        }
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) times(m, 0, left, right);
        a += pair;
        a_high += pair;
        b += 128;
      }
    }
    float* c = of.c;
    __m512bh left[Last + 1], right[Last + 1];
#pragma GCC unroll 2
    for (int k = 0; k < Last; ++k) {
      left[k] = of_b(2 * k);
      if constexpr (Vectors == 2) right[k] = of_b(2 * k + 1);
    }
    constexpr bool adds = Kind == result::added;
    constexpr bool scales = Kind == result::set_scaled, closes = scales || Kind == result::set_open,
                   has_tops = closes || Kind == result::set_with_tops;
    __m512 top[2] = {};
    __m512i open[2] = {};
#pragma GCC unroll 2
    for (int v = 0; has_tops && v < Vectors; ++v) {
      top[v] = _mm512_load_ps(of.top + 16 * v);
      open[v] = _mm512_set1_epi32(-1);
      if (closes && of.open != nullptr)
        open[v] = _mm512_srl_epi32(_mm512_load_si512(of.open + 16 * v), _mm_cvtsi32_si128(of.first));
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
      for (int k = 0; k < Last; ++k) times(m, k * pair, left[k], right[k]);
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v) {
        if (scales) sum[m][v] = _mm512_mul_ps(sum[m][v], _mm512_set1_ps(of.scale));
        if (closes) {
          const __mmask16 closed = _mm512_testn_epi32_mask(open[v], _mm512_set1_epi32(1 << m));
          sum[m][v] = _mm512_mask_mov_ps(sum[m][v], closed, _mm512_set1_ps(-infinity<float>));
        }
        put(c + 16 * v, sum[m][v], adds);
        top[v] = larger<float>(top[v], sum[m][v]);
      }
      if (Vectors == 1 && !adds) put(c + 16, _mm512_setzero_ps(), false);
      c += of.c_row;
      asm volatile("" : "+r"(c)::"memory");  // else the compiler brings stores together, and takes all addresses before
    }
#pragma GCC unroll 2
    for (int v = 0; has_tops && v < Vectors; ++v) _mm512_store_ps(of.top + 16 * v, top[v]);
  }
  static MH_INLINE void put(float* c, __m512 x, bool add) {
    _mm512_store_ps(c, add ? _mm512_add_ps(_mm512_load_ps(c), x) : x);
  }

  static constexpr int most_rows = 12, most_of_half = 16;
  using rows_fn = void (*)(const stretch&);
  template <int M, result Kind>
  static constexpr rows_fn half = rows<M, Kind, 0, asks::nothing, 1>;
  // The layer stores and adds alone, and one row or two have no time to ask for words.
  template <int M, result Kind, asks Asks>
  static constexpr asks needed =
      Asks != asks::words || (M > 2 && (Kind == result::set || Kind == result::added)) ? Asks : asks::nothing;
  struct rows_fns {
    rows_fn of[most_rows + 1];  // by their number
  };
  struct kind_fns {
    rows_fns with_last[2];  // without and with pairs that go row by row
  };
  struct asks_fns {
    kind_fns of_kind[5];
  };
  template <asks Asks, result Kind, int Last>
  static constexpr rows_fns up_to_most = {
      {nullptr, rows<1, Kind, 0, needed<1, Kind, Asks>>, rows<2, Kind, 0, needed<2, Kind, Asks>>,
       rows<3, Kind, 0, needed<3, Kind, Asks>>, rows<4, Kind, Last, needed<4, Kind, Asks>>,
       rows<5, Kind, Last, needed<5, Kind, Asks>>, rows<6, Kind, Last, needed<6, Kind, Asks>>,
       rows<7, Kind, Last, needed<7, Kind, Asks>>, rows<8, Kind, Last, needed<8, Kind, Asks>>,
       rows<9, Kind, Last, needed<9, Kind, Asks>>, rows<10, Kind, Last, needed<10, Kind, Asks>>,
       rows<11, Kind, Last, needed<11, Kind, Asks>>, rows<12, Kind, Last, needed<12, Kind, Asks>>}};
  template <asks Asks, result Kind>
  static constexpr kind_fns rows_of_kind = {{up_to_most<Asks, Kind, 0>, up_to_most<Asks, Kind, 2>}};
  template <asks Asks>
  static constexpr asks_fns rows_that_ask = {
      {rows_of_kind<Asks, result::set>, rows_of_kind<Asks, result::set_with_tops>, rows_of_kind<Asks, result::set_open>,
       rows_of_kind<Asks, result::set_scaled>, rows_of_kind<Asks, result::added>}};
  static constexpr asks_fns rows_of[] = {rows_that_ask<asks::nothing>, rows_that_ask<asks::lines>,
                                         rows_that_ask<asks::words>};
  // Of half the columns: a stretch of 10 rows, as 32 are shared out else, would wait for its sums.
  struct half_fns {
    rows_fn of[most_of_half + 1];
  };
  template <result Kind>
  static constexpr half_fns half_of = {{nullptr, half<1, Kind>, half<2, Kind>, half<3, Kind>, half<4, Kind>,
                                        half<5, Kind>, half<6, Kind>, half<7, Kind>, half<8, Kind>, half<9, Kind>,
                                        half<10, Kind>, half<11, Kind>, half<12, Kind>, half<13, Kind>, half<14, Kind>,
                                        half<15, Kind>, half<16, Kind>}};
  static constexpr half_fns halves[] = {half_of<result::set>, half_of<result::set_with_tops>, half_of<result::set_open>,
                                        half_of<result::set_scaled>, half_of<result::added>};
};

#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

class matrix_unit {
 public:
  static constexpr int turn_lines = 0;  // it takes no turns

  // c (rows x 32, c_stride apart) = A B, or += where `add`.
  template <class Format, bool Layer = false, class Meanwhile>
  MH_INLINE void product(const unit_a& a, const unit_b& b, const unit_terms& terms, const unit_extent& size, float* c,
                         int64_t c_stride, bool add, Meanwhile, const unit_scores& = {}, lines_ahead* = nullptr) const {
    const int64_t steps = steps_of(size.sums);
    for (int64_t m = 0; m < size.rows; m += 8) {
      for (int64_t n = 0; n < unit_rows; n += 8) {
        float32x4_t sum[4][4];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) sum[i / 4][i % 4] = vdupq_n_f32(0);
#pragma GCC unroll 2
        for (int i = 0; i < terms.a_parts; ++i) {
          for (int64_t step = 0; step < steps; ++step) {
            const uint16_t* at = a.base + i * a.part + step * a.step + unit_place(m, 0);
            const uint32_t* bt = b.base + step * b.step + unit_place(n, 0) / 2;
            for (int64_t k = 0; k < unit_step; k += 4, at += 32, bt += 16) {
              bfloat16x8_t row[4];
#pragma GCC unroll 4
              for (int x = 0; x < 4; ++x) row[x] = vreinterpretq_bf16_u16(vld1q_u16(at + 8 * x));
#pragma GCC unroll 2
              for (int j = 0; j < terms.b_parts[i]; ++j) {
#pragma GCC unroll 4
                for (int y = 0; y < 4; ++y) {
                  const bfloat16x8_t column = vreinterpretq_bf16_u32(vld1q_u32(bt + j * b.part + 4 * y));
#pragma GCC unroll 4
                  for (int x = 0; x < 4; ++x) sum[x][y] = vbfmmlaq_f32(sum[x][y], row[x], column);
                }
              }
            }
          }
        }
        // What c holds is added at the end: that addition rounds to nearest, those of BFMMLA to odd.
#pragma GCC unroll 4
        for (int x = 0; x < 4; ++x) {
#pragma GCC unroll 2
          for (int y = 0; y < 4; y += 2) {
            const float64x2_t left = vreinterpretq_f64_f32(sum[x][y]), right = vreinterpretq_f64_f32(sum[x][y + 1]);
            float* to = c + (m + 2 * x) * c_stride + n + 2 * y;
            put(to, vreinterpretq_f32_f64(vzip1q_f64(left, right)), add);
            put(to + c_stride, vreinterpretq_f32_f64(vzip2q_f64(left, right)), add);
          }
        }
      }
    }
  }

 private:
  static MH_INLINE void put(float* c, float32x4_t x, bool add) { vst1q_f32(c, add ? vaddq_f32(vld1q_f32(c), x) : x); }
};

#else

class matrix_unit {
 public:
  static constexpr int turn_lines = 4;

  template <class Format, bool Layer = false, class Meanwhile>
  void product(const unit_a& a, const unit_b& b, const unit_terms& terms, const unit_extent& size, float* c,
               int64_t c_stride, bool add, Meanwhile meanwhile, const unit_scores& scores = {},
               lines_ahead* = nullptr) const {
    for (int64_t m = 0; m < size.rows; ++m) {
      for (int64_t n = 0; n < unit_rows; ++n) {
        if (unit_takes_halves && n >= unit_rows / 2 && size.columns <= unit_rows / 2) {
          if (!add) c[m * c_stride + n] = 0;
          continue;
        }
        double sum = add ? static_cast<double>(c[m * c_stride + n]) : 0.0;
        for (int i = 0; i < terms.a_parts; ++i) {
          for (int j = 0; j < terms.b_parts[i]; ++j) {
            for (int64_t k = 0; k < round_up<unit_grain.sums>(size.sums); k += 2) {
              const int64_t step = k / unit_step, of_step = k % unit_step / 2;
              const uint16_t* pair = a.base + i * a.part + step * a.step + m * a.row + of_step * a.pair;
              const uint32_t word = b.base[j * b.part + step * b.step + of_step * unit_rows + n];
              sum += times(Format::widen(pair[0]), Format::widen(static_cast<uint16_t>(word))) +
                     times(Format::widen(pair[1]), Format::widen(static_cast<uint16_t>(word >> 16)));
            }
          }
        }
        const bool closed = scores.open != nullptr && (scores.open[n] >> m & 1U) == 0;
        const float x = c[m * c_stride + n] = closed ? -infinity<float> : static_cast<float>(sum) * scores.scale;
        if (scores.top != nullptr && x > scores.top[n]) scores.top[n] = x;
        meanwhile();
      }
    }
  }

 private:
  static double times(float a, float b) { return static_cast<double>(a) * static_cast<double>(b); }
};

#endif

}  // namespace
}  // namespace manyhead::MH_ISA
