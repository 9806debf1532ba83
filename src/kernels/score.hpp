// Passes over a tile of scores while it is in L1: softcap, ALiBi, bias, visibility. Each is applied where the problem
// asks for it, in this order, on natural scores (kernel_api.hpp: exp_scale). A tile is either
//   transposed: s[key * width + lane], lanes over rows (tile route), or
//   row-major:  s[lane * width + key], lanes over keys (decode route).
#pragma once

#include "dtype.hpp"
#include "exponential.hpp"
#include "mask.hpp"

namespace manyhead::MH_ISA {
namespace {

// adds_bias: whether the bias does something else than to close keys (closing.hpp).
MH_INLINE bool has_score_passes(const kernel_call& c, bool adds_bias) {
  return c.softcap > 0 || c.alibi_slopes != nullptr || adds_bias;
}

// The largest of x(0) ... x(n - 1) and `top`, in chains: one would wait 4 cycles a key.
template <class T, class X>
MH_INLINE vec<T> top_of(vec<T> top, int64_t n, const X& x) {
  constexpr int chains = 4;
  vec<T> tops[chains];
  for (vec<T>& some : tops) some = top;
  int64_t k = 0;
  for (; k + chains <= n; k += chains) {
#pragma GCC unroll 4
    for (int i = 0; i < chains; ++i) tops[i] = larger<T>(tops[i], x(k + i));
  }
  for (; k < n; ++k) tops[0] = larger<T>(tops[0], x(k));
#pragma GCC unroll 4
  for (const vec<T>& some : tops) top = larger<T>(top, some);
  return top;
}

// Passes may be given scores that are still to be multiplied with `scale`: the first one of a tile. Passes
// of ALiBi and bias raise column_max to the largest score of each lane, if given: the tile is in hand anyway.

// Any layout: n contiguous scores, n a multiple of the lanes. Rough: tanh_of.
template <class T, bool Rough = false>
__attribute__((noinline)) void softcap_pass(const kernel_call& c, T* s, int64_t n, double scale = 1) {
  constexpr int64_t w = lanes<T>;
  const T cap = static_cast<T>(c.softcap);
  const vec<T> inverse(static_cast<T>(scale / c.softcap * tanh_units<T>));
  const auto some = [&]<int N>(T* p) MH_INLINE_LAMBDA {
    vec<T> x[N];
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) x[i] = load(p + i * w) * inverse;
    tanh_of<T, Rough>(x, cap);
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) store<T>(p + i * w, x[i]);
  };
  constexpr int at_once = exp2_vectors;
  int64_t i = 0;
  for (; i + at_once * w <= n; i += at_once * w) some.template operator()<at_once>(s + i);
  for (; i < n; i += w) some.template operator()<1>(s + i);
}

template <class T>
MH_INLINE T slope_of(const kernel_call& c, const tile_at& t, const row_of& r) {
  return static_cast<const T*>(c.alibi_slopes)[t.batch * c.alibi_batch_stride + t.head(c, r)];
}

// s + slope * (key - position), or s - slope * |position - key|; `distance` is position - key.
template <class T>
MH_INLINE vec<T> alibi_of(vec<T> s, vec<T> slope, vec<T> distance, bool is_signed) {
  return xsimd::fnma(slope, is_signed ? distance : xsimd::abs(distance), s);
}

MH_INLINE int64_t bias_offset(const kernel_call& c, const tile_at& t, const row_of& r) {
  return t.batch * c.bias_strides[0] + t.head(c, r) * c.bias_strides[1] + r.query * c.bias_strides[2];
}

// Hands a pass what multiplies a score with `scale`.
template <class T, class Pass>
MH_INLINE void with_scale(double scale, const Pass& pass) {
  if (scale == 1) return pass([](vec<T> x) MH_INLINE_LAMBDA { return x; });
  const vec<T> factor(static_cast<T>(scale));
  pass([factor](vec<T> x) MH_INLINE_LAMBDA { return x * factor; });
}

// Biases up to this, near the lowest number of f32 and of bf16, close keys, as sums with them have no weight beside any other, unless
// a product of Q and K is as large: but for rows that see no other (closing.hpp).
template <class T>
inline constexpr T least_bias = sizeof(T) == 4 ? T(-0x1.fp127) : T(-0x1.fp1023);

// Of row i.
template <class T>
MH_INLINE T closed_to_of(uint64_t least, int64_t i) {
  return (least >> i & 1U) != 0 ? -infinity<T> : least_bias<T>;
}

// What is added to the scores of a panel's rows, looked up once a tile. Passes over some of its keys take the rest from
// their tile_at.
template <class T>
struct row_terms {
  int64_t begin;  // of the tile
  alignas(64) T slope[most_lanes];
  alignas(64) T position[most_lanes];   // relative to the tile: exact where it matters
  int64_t bias[most_lanes];             // where a row's begins
  alignas(64) T closed_to[most_lanes];  // biases up to this close the row's keys

  // least: rows that attend keys of the lowest bias (closing.hpp), a bit each.
  __attribute__((noinline)) void look_up(const kernel_call& c, const positions& at, const tile_at& t, int64_t width,
                                         bool adds_bias, uint64_t least = 0) {
    begin = t.begin;
    if (c.alibi_slopes != nullptr) {
      for_each_lane(c, t.row, t.count, width, [&](int64_t l, const row_of& r) {
        slope[l] = slope_of<T>(c, t, r);
        position[l] = static_cast<T>(r.query + at.offset - t.begin);
      });
    }
    if (!adds_bias) return;
    for_each_lane(c, t.row, t.count, width, [&](int64_t l, const row_of& r) { bias[l] = bias_offset(c, t, r); });
    for (int64_t l = 0; l < width; ++l) closed_to[l] = closed_to_of<T>(least, l);
  }
};

template <class T>
__attribute__((noinline)) void alibi_pass_transposed(const kernel_call& c, const row_terms<T>& rows, const tile_at& t,
                                                     int64_t width, T* s, double scale = 1, T* column_max = nullptr) {
  const bool is_signed = c.alibi_mode == MH_ALIBI_SIGNED;
  const auto pass = [&](auto scaled) MH_INLINE_LAMBDA {
    for (int64_t l0 = 0; l0 < width; l0 += lanes<T>) {
      const vec<T> slopes = load(rows.slope + l0);
      const vec<T> from = load(rows.position + l0) - vec<T>(static_cast<T>(t.begin - rows.begin));
      const vec<T> top = top_of<T>(vec<T>(-infinity<T>), t.keys(), [&](int64_t k) MH_INLINE_LAMBDA {
        T* const p = s + k * width + l0;
        const vec<T> x = alibi_of<T>(scaled(load(p)), slopes, from - vec<T>(static_cast<T>(k)), is_signed);
        store<T>(p, x);
        return x;
      });
      if (column_max != nullptr) store<T>(column_max + l0, larger<T>(load(column_max + l0), top));
    }
  };
  with_scale<T>(scale, pass);
}

template <class T>
__attribute__((noinline)) void alibi_pass_rows(const kernel_call& c, const positions& at, const tile_at& t,
                                               int64_t width, T* s) {
  const bool is_signed = c.alibi_mode == MH_ALIBI_SIGNED;
  row_of r(c, t.row);
  for (int64_t lane = 0; lane < t.count; ++lane, r.step(c)) {
    const vec<T> slope(slope_of<T>(c, t, r));
    vec<T> distance = vec<T>(static_cast<T>(r.query + at.offset - t.begin)) - lane_numbers<T>();
    for (int64_t k = 0; k < t.keys(); k += lanes<T>) {
      T* p = s + lane * width + k;
      store<T>(p, alibi_of<T>(load(p), slope, distance, is_signed));
      distance = distance - vec<T>(static_cast<T>(lanes<T>));
    }
  }
}

// Adding keeps NaN away from slots that the bias closes: -inf there, whatever the score was.
template <class T>
MH_INLINE vec<T> biased(vec<T> s, vec<T> b, vec<T> closed_to) {
  return xsimd::select(b <= closed_to, vec<T>(-infinity<T>), s + b);
}

// How many of a tile's keys have a bias. Extra keys, the last ones, have none, and a tile may be extra keys alone.
MH_INLINE int64_t biased_keys(const kernel_call& c, const tile_at& t) {
  return max_of(0, min_of(t.keys(), c.kv_len - c.extra_keys - t.begin));
}

MH_INLINE int64_t bias_bytes(const kernel_call& c) {
  return c.bias_dtype == MH_DTYPE_F64 ? 8 : c.bias_dtype == MH_DTYPE_F32 ? 4 : 2;
}

// How many of the first of `keys` keys lie before the first whole line of a row: where the rows of a bias lie in one set of
// L1, which would have to hold both lines of each vector, and a tile has keys enough to pay for one that is not whole.
template <class T>
MH_INLINE int64_t keys_before_line(const kernel_call& c, const T* row, int64_t keys) {
  constexpr uintptr_t line = 64;
  constexpr int64_t w = lanes<T>;
  if (w * sizeof(T) != line || keys < 4 * w || c.bias_strides[2] * static_cast<int64_t>(sizeof(T)) % set_stride != 0)
    return 0;
  return static_cast<int64_t>((line - reinterpret_cast<uintptr_t>(row) % line) % line / sizeof(T));
}

// Calls f(key of its block, its bias for all lanes) for what vector v of a transposed block holds: a key's, or two keys' in
// bf16.
template <bool Pairs, class T, class F>
MH_INLINE void each_key(int64_t v, vec<T> x, const F& f) {
  if constexpr (Pairs) {
    vec<T> even, odd;
    bf16::widen_pair(x, even, odd);
    f(2 * v, even);
    f(2 * v + 1, odd);
  } else {
    f(v, x);
  }
}

// Rows that lie as T are read in place, a vector of each and the vectors transposed; but for one row for all, and tiles of
// fewer keys than a vector. Rows in bf16 are read in place too, a vector of each holding twice as many keys, whose pairs come
// apart once they are transposed (AMX 1.07 to 1.18, AVX-512 and AVX2 1.0 to 1.06). Copies of all of them first: 0.95 to 1.00 of
// the whole call's speed. Last keys that are fewer than such a vector come with the vector that ends with them, first ones
// (keys_before_line: 1024 keys of f32 1.014 to 1.02, AVX2 1.0, tiles of 32 keys 0.97) with the first.
// Closes: as biased(). Not on the matrix route, which does again whatever is not finite: 1.02 to 1.04 times as fast.
template <class T, bool Closes = true>
__attribute__((noinline)) void bias_pass_transposed(const kernel_call& c, const row_terms<T>& of, const tile_at& t,
                                                    int64_t width, T* s, double scale = 1, T* column_max = nullptr) {
  constexpr int64_t w = lanes<T>;
  alignas(64) T copies[w * most_tile_keys];
  int64_t copy_at[w];
  const int64_t keys = biased_keys(c, t);
  const int64_t pitch = round_up<w>(keys);
  const bool one_row = c.bias_strides[2] == 0 && (c.bias_strides[1] == 0 || c.group == 1);
  const bool may = c.bias_strides[3] == 1 && !one_row;
  const bool in_place = may && c.bias_dtype == (sizeof(T) == 4 ? MH_DTYPE_F32 : MH_DTYPE_F64) && keys >= w;
  const bool in_pairs = may && c.bias_dtype == MH_DTYPE_BF16 && sizeof(T) == 4 && keys >= 2 * w;
  const T* const rows = in_place ? static_cast<const T*>(c.bias) + t.begin : copies;
  const uint16_t* const pairs = static_cast<const uint16_t*>(c.bias) + t.begin;
  const auto copy = [&](int64_t l, T* to) MH_INLINE_LAMBDA {
    const int64_t first = t.begin * c.bias_strides[3];
    widen_any<T>(c.bias_dtype, c.bias, of.bias[l] + first, c.bias_strides[3], keys, to);
  };
  if (one_row) copy(0, copies);
  // Those within it copy what they capture: what a function out of line can reach is read from memory for each key.
  const auto pass = [&]<bool Pairs>(auto scaled) MH_INLINE_LAMBDA {
    constexpr int64_t block = Pairs ? 2 * w : w;  // keys whose bias is transposed at a time
    for (int64_t l0 = 0; l0 < width; l0 += w) {
      T* const from = s + l0;
      vec<T> top(-infinity<T>);
      const vec<T> closed_to = load(of.closed_to + l0);
      const auto add = [=](int64_t k, vec<T> b) MH_INLINE_LAMBDA {
        const vec<T> x = scaled(load(from + k * width));
        const vec<T> sum = Closes ? biased<T>(x, b, closed_to) : x + b;
        store<T>(from + k * width, sum);
        return sum;
      };
      if (one_row) {
        top = top_of<T>(top, keys, [&](int64_t k) MH_INLINE_LAMBDA { return add(k, vec<T>(copies[k])); });
      } else {
        const int64_t* row_at = of.bias + l0;
        if (!Pairs && !in_place) {
          for (int64_t l = 0; l < w; ++l) copy(l0 + l, copies + (copy_at[l] = l * pitch));
          row_at = copy_at;
        }
        // The bias of keys k, k + 1, ... for all lanes, or of two keys in each vector.
        const auto turned = [=](int64_t k, vec<T>(&x)[w]) MH_INLINE_LAMBDA {
#pragma GCC unroll 16
          for (int64_t l = 0; l < w; ++l) {
            if constexpr (Pairs)
              x[l] = load(reinterpret_cast<const T*>(pairs + k + row_at[l]));
            else
              x[l] = load(rows + k + row_at[l]);
          }
          transpose<T>(x);
        };
        // Keys [k, end) of those in the vectors at k0. By way of memory, so that whole vectors need not go there.
        const auto add_some = [=](int64_t k0, int64_t k, int64_t end, vec<T> so_far) __attribute__((noinline)) {
          vec<T> x[w];
          turned(k0, x);
          alignas(64) T stored[block * w];
#pragma GCC unroll 16
          for (int64_t v = 0; v < w; ++v) {
            each_key<Pairs, T>(v, x[v], [&](int64_t i, vec<T> b) MH_INLINE_LAMBDA { b.store_aligned(stored + i * w); });
          }
          return top_of<T>(so_far, end - k, [&](int64_t i) MH_INLINE_LAMBDA {
            return add(k + i, vec<T>::load_aligned(stored + (k - k0 + i) * w));
          });
        };
        int64_t k = in_place ? keys_before_line(c, rows + row_at[0], keys) : 0;
        if (k > 0) top = add_some(0, 0, k, top);
        for (; k + block <= keys; k += block) {
          vec<T> x[w];
          turned(k, x);
          vec<T> tops[4];  // as top_of, but unrolled: the rows stay in registers
          for (vec<T>& some : tops) some = top;
#pragma GCC unroll 16
          for (int64_t v = 0; v < w; ++v) {
            each_key<Pairs, T>(v, x[v], [&](int64_t i, vec<T> b) MH_INLINE_LAMBDA {
              tops[i % 4] = larger<T>(tops[i % 4], add(k + i, b));
            });
          }
          top = larger<T>(larger<T>(tops[0], tops[1]), larger<T>(tops[2], tops[3]));
        }
        if (k < keys) top = add_some(Pairs || in_place ? keys - block : k, k, keys, top);
      }
      // Extra keys have no bias.
      top = top_of<T>(top, t.keys() - keys, [&](int64_t k) MH_INLINE_LAMBDA {
        const vec<T> x = scaled(load(from + (keys + k) * width));
        store<T>(from + (keys + k) * width, x);
        return x;
      });
      if (column_max != nullptr) store<T>(column_max + l0, larger<T>(load(column_max + l0), top));
    }
  };
  with_scale<T>(scale, [&](auto scaled) MH_INLINE_LAMBDA {
    if constexpr (sizeof(T) == 4) {
      if (in_pairs) return pass.template operator()<true>(scaled);
    }
    pass.template operator()<false>(scaled);
  });
}

template <class T>
__attribute__((noinline)) void bias_pass_rows(const kernel_call& c, const tile_at& t, int64_t width, uint64_t least,
                                              T* s) {
  constexpr int64_t w = lanes<T>;
  const int64_t keys = biased_keys(c, t), whole = round_down<w>(keys), stride = c.bias_strides[3];
  const bool in_place = stride == 1 && bias_bytes(c) == sizeof(T);
  alignas(64) T copy[most_tile_keys];
  row_of r(c, t.row);
  for (int64_t lane = 0; lane < t.count; ++lane, r.step(c)) {
    T* const p = s + lane * width;
    const vec<T> closed_to(closed_to_of<T>(least, lane));
    const auto add = [=](int64_t k, vec<T> bias)
                         MH_INLINE_LAMBDA { store<T>(p + k, biased<T>(load(p + k), bias, closed_to)); };
    const int64_t first = bias_offset(c, t, r) + t.begin * stride;
    // Later slots of the last vector are extra keys or padding: add 0.
    if (in_place) {
      const T* const bias = static_cast<const T*>(c.bias) + first;
      for (int64_t k = 0; k < whole; k += w) add(k, load(bias + k));
      if (whole < keys) {
        alignas(64) T some[w];
        load_some(bias + whole, keys - whole, some);
        add(whole, vec<T>::load_aligned(some));
      }
    } else {
      widen_any<T>(c.bias_dtype, c.bias, first, stride, keys, copy);
      for (int64_t k = keys; k < round_up<w>(keys); ++k) copy[k] = T(0);
      for (int64_t k = 0; k < keys; k += w) add(k, vec<T>::load_aligned(copy + k));
    }
  }
}

template <class T>
MH_INLINE vec<T> visible(vec<T> s, xsimd::batch<bits<T>, MH_ARCH> word, xsimd::batch<bits<T>, MH_ARCH> bit) {
  const auto hidden = (word & bit) == xsimd::batch<bits<T>, MH_ARCH>(bits<T>(0));
  return xsimd::select(xsimd::batch_bool_cast<T>(hidden), vec<T>(-infinity<T>), s);
}

// Where all rows of a vector see all keys of a word, as most do that lie on the diagonal of a causal problem, only the
// maxima are left to take.
template <class T>
__attribute__((noinline)) void visibility_pass_transposed(const bits<T>* words, int64_t keys, int64_t width, T* s,
                                                          T* column_max) {
  using U = xsimd::batch<bits<T>, MH_ARCH>;
  for (int64_t k0 = 0; k0 < keys; k0 += word_keys, words += width) {
    const int64_t n = min_of(word_keys, keys - k0);
    for (int64_t l = 0; l < width; l += lanes<T>) {
      const U word = U::load_unaligned(words + l);
      T* const from = s + k0 * width + l;
      vec<T> top = load(column_max + l);
      if (xsimd::all(word == U(bits<T>(bit_range(0, n))))) {
        top = top_of<T>(top, n, [&](int64_t k) MH_INLINE_LAMBDA { return load(from + k * width); });
      } else {
        top = top_of<T>(top, n, [&](int64_t k) MH_INLINE_LAMBDA {
          const vec<T> x = visible<T>(load(from + k * width), word, U(bits<T>(1) << k));
          store<T>(from + k * width, x);
          return x;
        });
      }
      store<T>(column_max + l, top);
    }
  }
}

// words[word * words_width + lane]; closes the padding behind the last key too.
template <class T>
__attribute__((noinline)) void visibility_pass_rows(const bits<T>* words, int64_t words_width, int64_t count,
                                                    int64_t keys, int64_t width, T* s) {
  using U = xsimd::batch<bits<T>, MH_ARCH>;
  alignas(64) bits<T> bit[lanes<T>];
  for (int64_t l = 0; l < lanes<T>; ++l) bit[l] = bits<T>(1) << l;
  const U lane_bit = U::load_aligned(bit);
  for (int64_t lane = 0; lane < count; ++lane) {
    for (int64_t k = 0; k < keys; k += lanes<T>) {
      const bits<T> word = words[k / word_keys * words_width + lane] >> (k % word_keys);
      T* p = s + lane * width + k;
      store<T>(p, visible<T>(load(p), U(word), lane_bit));
    }
  }
}

}  // namespace
}  // namespace manyhead::MH_ISA
