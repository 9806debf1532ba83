// The two products of the decode route on a matrix unit with tiles (AMX), for 16-bit types that are the unit's own: few rows
// against K and V as they lie in memory.
//
//   S^T[16 keys][rows] = K[16 keys][32 dims a step] Q^T     A: K where it is; B: Q^T, packed once
//   O[rows][16 dims] += P[rows][32 keys a step] V           A: the weights; B: V as pairs of keys
//
// A product takes as many cycles as A has rows: 16 for K, whatever the rows of Q, and as many as there are rows for V. Both
// are a quarter or less of what multiply-adds take for four rows. Nothing is widened; two neighbouring rows of V are joined,
// even and odd dims apart, in which order results stay until they are written (dtype.hpp: pairs_apart). K is not copied: reading
// it in place is 1.2 to 1.4 times as fast.
// Weights are rounded, of f16 to two parts (unit_number.hpp), as on the matrix route (matrix.hpp), whose limits hold too: what the
// unit cannot do is left to multiply-adds, row by row.
//
// Tile registers: 0, 1 scores of 16 keys each, 2 and 3 K, or pairs of V, 4 Q, 5 weights, 6 and 7 results.
#pragma once

#include "decode_pairs.hpp"
#include "panel.hpp"
#include "unit_number.hpp"

namespace manyhead::MH_ISA {
namespace {

// Whether numbers of D are of one part to such a unit.
template <class D>
constexpr bool whole_for_unit() {
#if MH_MATRIX && !MH_UNIT_COLUMNS && !defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  if constexpr (sizeof(typename D::storage) == 2) return unit_number<D>::values::parts == 1 && lanes<float> == 16;
#endif
  return false;
}
template <class D>
inline constexpr bool unit_takes_tiles = whole_for_unit<D>();

#if defined(__AMX_BF16__)

template <class Format>
class step_unit {
 public:
  explicit step_unit(int64_t rows) { _tile_loadconfig(&shapes[rows - 1]); }
  ~step_unit() { _tile_release(); }
  step_unit(const step_unit&) = delete;
  step_unit& operator=(const step_unit&) = delete;

  // to[16 * Blocks][16] = K Q^T, K's rows `stride` bytes apart; meanwhile(step) after each of `steps`.
  template <int Blocks, class Meanwhile>
  static MH_INLINE void scores(const uint16_t* k, int64_t stride, const uint32_t* q, int64_t steps, float* to,
                               Meanwhile meanwhile) {
    const char* block = reinterpret_cast<const char*>(k);
    const char* second = block + 16 * stride;
    asm volatile("" ::: "memory");
    _tile_zero(0);
    if constexpr (Blocks == 2) _tile_zero(1);
    for (int64_t step = 0; step < steps; ++step, q += 256, block += 64, second += 64) {
      _tile_loadd(4, q, 64);
      _tile_loadd(2, block, stride);
      add_score(Format{});
      if constexpr (Blocks == 2) {
        _tile_loadd(3, second, stride);
        add_second_score(Format{});
      }
      meanwhile(step);
    }
    _tile_stored(0, to, 64);
    if constexpr (Blocks == 2) _tile_stored(1, to + 256, 64);
  }

  // out[rows][v_dim] = P V, or += where `add`, for 32 keys. p: Parts tiles, `part` apart. v: [v_dim / 16] tiles of pairs;
  // meanwhile(i) after each two of them.
  template <int Parts, class Meanwhile>
  static MH_INLINE void values(const uint32_t* p, int64_t part, const uint32_t* v, int64_t v_dim, float* out, bool add,
                               int64_t, Meanwhile meanwhile) {
    asm volatile("" ::: "memory");
    if constexpr (Parts == 1) _tile_loadd(5, p, 64);
    for (int64_t d = 0; d < v_dim; d += 32, v += 512) {
      if (add) {
        _tile_loadd(6, out + d, v_dim * 4);
        _tile_loadd(7, out + d + 16, v_dim * 4);
      } else {
        _tile_zero(6);
        _tile_zero(7);
      }
      _tile_loadd(2, v, 64);
      if constexpr (Parts == 2) _tile_loadd(5, p, 64);
      add_value(Format{});
      _tile_loadd(3, v + 256, 64);
      add_second_value(Format{});
      if constexpr (Parts == 2) {
        _tile_loadd(5, p + part, 64);
        add_value(Format{});
        add_second_value(Format{});
      }
      meanwhile(d / 32);
      _tile_stored(6, out + d, v_dim * 4);
      _tile_stored(7, out + d + 16, v_dim * 4);
    }
    asm volatile("" ::: "memory");
  }

 private:
  static MH_INLINE void add_score(in_bf16) { _tile_dpbf16ps(0, 2, 4); }
  static MH_INLINE void add_second_score(in_bf16) { _tile_dpbf16ps(1, 3, 4); }
  static MH_INLINE void add_value(in_bf16) { _tile_dpbf16ps(6, 5, 2); }
  static MH_INLINE void add_second_value(in_bf16) { _tile_dpbf16ps(7, 5, 3); }
  static MH_INLINE void add_score(in_f16) { tile_dpfp16ps<0, 2, 4>(); }
  static MH_INLINE void add_second_score(in_f16) { tile_dpfp16ps<1, 3, 4>(); }
  static MH_INLINE void add_value(in_f16) { tile_dpfp16ps<6, 5, 2>(); }
  static MH_INLINE void add_second_value(in_f16) { tile_dpfp16ps<7, 5, 3>(); }

  // For rows of weights and of results, 1 to 16.
  static constexpr tile_shapes shapes[16] = {tile_shapes(1),  tile_shapes(2),  tile_shapes(3),  tile_shapes(4),
                                             tile_shapes(5),  tile_shapes(6),  tile_shapes(7),  tile_shapes(8),
                                             tile_shapes(9),  tile_shapes(10), tile_shapes(11), tile_shapes(12),
                                             tile_shapes(13), tile_shapes(14), tile_shapes(15), tile_shapes(16)};
};

#else

template <class Format>
class step_unit {
 public:
  explicit step_unit(int64_t) {}

  template <int Blocks, class Meanwhile>
  static void scores(const uint16_t* k, int64_t stride, const uint32_t* q, int64_t steps, float* to,
                     Meanwhile meanwhile) {
    for (int64_t key = 0; key < 16 * Blocks; ++key) {
      const uint16_t* row = k + key * (stride / 2);
      for (int64_t n = 0; n < 16; ++n) {
        double sum = 0;
        for (int64_t i = 0; i < 16 * steps; ++i) sum += product(row[2 * i], row[2 * i + 1], q[i * 16 + n]);
        to[key * 16 + n] = static_cast<float>(sum);
      }
    }
    for (int64_t step = 0; step < steps; ++step) meanwhile(step);
  }

  template <int Parts, class Meanwhile>
  static void values(const uint32_t* p, int64_t part, const uint32_t* v, int64_t v_dim, float* out, bool add,
                     int64_t rows, Meanwhile meanwhile) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t d = 0; d < v_dim; ++d) {
        double sum = add ? static_cast<double>(out[r * v_dim + d]) : 0.0;
        for (int64_t n = 0; n < 16 * Parts; ++n) {
          const int64_t i = n % 16;
          const uint32_t pair = p[n / 16 * part + r * 16 + i];
          sum += product(static_cast<uint16_t>(pair), static_cast<uint16_t>(pair >> 16),
                         v[d / 16 * 256 + i * 16 + d % 16]);
        }
        out[r * v_dim + d] = static_cast<float>(sum);
      }
    }
    for (int64_t i = 0; i < v_dim / 32; ++i) meanwhile(i);
  }

 private:
  static double product(uint16_t low, uint16_t high, uint32_t pair) {
    const auto times = [](uint16_t a, uint32_t b) {
      return static_cast<double>(Format::widen(a)) * static_cast<double>(Format::widen(static_cast<uint16_t>(b)));
    };
    return times(low, pair) + times(high, pair >> 16);
  }
};

#endif

template <class D>
using step_unit_of = step_unit<typename unit_number<D>::values::format>;

// A vector of a row's elements from d on, or zeros where there is none. Not matrix_operands::pairs_of_row, nor load_pairs where a row
// is there: 4 and 8 rows of 128 from L3 and memory 0.92 to 0.98 times as fast, though instructions are fewer (why is not known;
// the lines asked for come closer together).
MH_INLINE word_vec words_of_row(const uint16_t* row, int64_t stride, int64_t d) {
  constexpr int64_t count = 2 * lanes<float>;
  if (row == nullptr) return word_vec(0U);
  if (__builtin_expect(stride == 1, 1)) return load_words(row + d);
  alignas(64) uint16_t apart[count];
  for (int64_t i = 0; i < count; ++i) apart[i] = row[(d + i) * stride];
  return load_words(apart);
}

// Rows of a head as the unit takes them: one block of up to 16, or two of the same size.
struct unit_blocks {
  int64_t count, size;
  explicit unit_blocks(int64_t rows) : count(rows > 16 ? 2 : 1), size((rows + count - 1) / count) {}
  int64_t rows() const { return count * size; }
};

// What the unit takes of a decode task, a head and 32 keys at a time, and what becomes of it.
template <class D>
struct step_operands {
  static constexpr int64_t w = lanes<float>;  // 16: pairs, rows or dims of a tile
  static constexpr int64_t step = 32;         // keys, or dims, of a product
  static constexpr int64_t words = 256;       // of a tile

  const kernel_call& c;
  unit_blocks of{1};
  int64_t dim_steps;
  int64_t asks_of_k, asks_of_v;  // rows asked for with each step of a product, so that all are
  uint32_t* q;                   // [heads][of.count][dim_steps] tiles [16 pairs of dims][16 rows]
  float* products;               // [of.count][step][16 rows]: scores as the unit leaves them
  uint32_t* weights;             // [parts][of.rows()][16 pairs of keys]
  uint32_t* pairs;               // [v_dim / 16] tiles [16 pairs of keys][16 dims]
  uint16_t* k_rows;              // [16][head_dim], where K is copied

  explicit step_operands(const kernel_call& call) : c(call), dim_steps(call.head_dim / step) {}

  // With MH_FLAG_FAST_EXP too: steps stay as exact as without.
  static constexpr int weight_parts() { return unit_number<D>::values::weight_parts(false); }
  // Words of a part of all rows' weights.
  MH_INLINE int64_t weight_part() const { return of.rows() * w; }

  template <class Ask>
  static MH_INLINE void ask_some(int64_t at, int64_t each, int64_t all, Ask ask) {
    for (int64_t i = at * each; i < min_of((at + 1) * each, all); ++i) ask(i);
  }

  void carve(carver& from, int64_t heads, int64_t rows) {
    of = unit_blocks(rows);
    asks_of_k = (step + dim_steps - 1) / dim_steps;
    asks_of_v = (w + c.v_dim / step - 1) / (c.v_dim / step);
    q = from.take<uint32_t>(heads * of.count * dim_steps * words);
    products = from.take<float>(of.count * step * w);
    weights = from.take<uint32_t>(weight_parts() * weight_part());
    pairs = from.take<uint32_t>(c.v_dim / w * words);
    k_rows = from.take<uint16_t>(w * c.head_dim);
  }

  // Q^T of head h of the task. False: its numbers are not for the unit (matrix_operands.hpp: is_usual). f16 always is: none is
  // that large, and denormal ones are multiplied. left_rows: zeros for such rows, and a bit there for each.
  __attribute__((noinline)) bool pack_rows(const kernel_task& task, int64_t h, uint32_t* left_rows = nullptr) const {
    constexpr bool looks = std::is_same_v<D, bf16>;
    pair_magnitudes seen;
    row_walk<const uint16_t> r = rows_of_q<D>(c, task.batch, task.kv_head_begin + h, task.row_begin);
    int64_t left = task.row_end - task.row_begin;
    uint32_t* to = q + h * of.count * dim_steps * words;
    for (int64_t b = 0; b < of.count; ++b) {
      const uint16_t* from[w] = {};
      for (int64_t l = 0; l < of.size && left > 0; ++l, --left, r.step(c)) {
        from[l] = r.at;
        if (!looks || left_rows == nullptr || is_usual_row(r.at, c.q_strides[3], c.head_dim)) continue;
        *left_rows |= 1U << (b * of.size + l);
        from[l] = nullptr;
      }
      for (int64_t s = 0; s < dim_steps; ++s) {
        word_vec x[w];
#pragma GCC unroll 16
        for (int64_t l = 0; l < w; ++l) {
          x[l] = words_of_row(from[l], c.q_strides[3], s * step);
          if constexpr (looks) seen.take(x[l]);
        }
        transpose_words(x);
#pragma GCC unroll 16
        for (int64_t i = 0; i < w; ++i, to += w) x[i].store_aligned(to);
      }
    }
    return seen.all_usual();
  }

  // 16 rows of K, zeros behind the last of `keys`.
  MH_INLINE void copy_k(const uint16_t* k, int64_t keys) const {
    for (int64_t n = 0; n < w; ++n) {
      for (int64_t d = 0; d < c.head_dim; d += step) {
        const word_vec x = words_of_row(n < keys ? k + n * c.k_strides[2] : nullptr, c.k_strides[3], d);
        memcpy(k_rows + n * c.head_dim + d, &x, sizeof(x));
      }
    }
  }

  // K Q^T of head h for up to 32 keys, whose rows of K begin at k. Meanwhile ask(i) for each of 32 rows.
  template <class Ask>
  __attribute__((noinline)) void multiply_k(int64_t h, const uint16_t* k, int64_t keys, Ask ask) const {
    const int64_t row = c.k_strides[2];
    const bool dense = c.k_strides[3] == 1;
    for (int64_t b = 0; b < of.count; ++b) {
      const uint32_t* const of_q = q + (h * of.count + b) * dim_steps * words;
      float* const to = products + b * step * w;
      if (keys == step && dense) {
        step_unit_of<D>::template scores<2>(k, row * 2, of_q, dim_steps, to, [&](int64_t at) MH_INLINE_LAMBDA {
          if (b == 0) ask_some(at, asks_of_k, step, ask);
        });
        continue;
      }
      for (int64_t half = 0; half < keys; half += w) {
        const uint16_t* from = k + half * row;
        int64_t from_row = row;
        if (keys - half < w || !dense) {
          copy_k(from, keys - half);
          from = k_rows;
          from_row = c.head_dim;
        }
        step_unit_of<D>::template scores<1>(from, from_row * 2, of_q, dim_steps, to + half * w, [](int64_t) {});
      }
    }
  }

  // Scores of what multiply_k did: s[rows][s_row].
  MH_INLINE void put_scores(int64_t keys, float* s, int64_t s_row) const {
    const vec<float> scale(static_cast<float>(c.q_scale));
    for (int64_t b = 0; b < of.count; ++b) {
      for (int64_t half = 0; half < keys; half += w) {
        vec<float> x[w];
#pragma GCC unroll 16
        for (int64_t i = 0; i < w; ++i) x[i] = vec<float>::load_aligned(products + (b * step + half + i) * w);
        transpose<float>(x);
        float* const to = s + b * of.size * s_row + half;
#pragma GCC unroll 16
        for (int64_t r = 0; r < w; ++r) {
          if (r < of.size) (x[r] * scale).store_aligned(to + r * s_row);
        }
      }
    }
  }

  // Pairs of up to 32 keys, whose rows of V begin at v, with zeros for those left out, a bit each. Meanwhile ask(i) for each of 16
  // rows.
  template <class Ask>
  __attribute__((noinline)) void pack_v(const uint16_t* v, int64_t keys, uint32_t left_out, Ask ask) const {
    const int64_t row = c.v_strides[2], dims = c.v_dim;
    const bool whole = keys == step && c.v_strides[3] == 1 && left_out == 0;
    for (int64_t i = 0; i < w; ++i) {
      const uint16_t* one = v + 2 * i * row;
      const uint16_t* other = one + row;
      uint32_t* to = pairs + i * w;
      const auto put = [&](word_vec a, word_vec b) MH_INLINE_LAMBDA {
        word_vec even, odd;
        join_rows(a, b, even, odd);
        even.store_aligned(to);
        odd.store_aligned(to + words);
        to += 2 * words;
      };
      if (whole) {
        for (int64_t d = 0; d < dims; d += step) put(words_of_row(one, 1, d), words_of_row(other, 1, d));
        ask(i);
      } else {
        if (2 * i >= keys || (left_out >> (2 * i) & 1U) != 0) one = nullptr;
        if (2 * i + 1 >= keys || (left_out >> (2 * i + 1) & 1U) != 0) other = nullptr;
        for (int64_t d = 0; d < dims; d += step) {
          put(words_of_row(one, c.v_strides[3], d), words_of_row(other, c.v_strides[3], d));
        }
      }
    }
  }

  // O, out[rows][v_dim], = P V or += where `add`. Meanwhile ask(16 + i) for each of 16 rows.
  template <class Ask>
  __attribute__((noinline)) void multiply_v(float* out, bool add, Ask ask) const {
    for (int64_t b = 0; b < of.count; ++b) {
      step_unit_of<D>::template values<weight_parts()>(
          weights + b * of.size * w, weight_part(), pairs, c.v_dim, out + b * of.size * c.v_dim, add, of.size,
          [&](int64_t at) MH_INLINE_LAMBDA {
            if (b == 0) ask_some(at, asks_of_v, w, [&](int64_t i) MH_INLINE_LAMBDA { ask(w + i); });
          });
    }
  }
};

}  // namespace
}  // namespace manyhead::MH_ISA
