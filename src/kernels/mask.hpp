// Which keys a row may attend. Positions (lengths, causal, window) give each row an interval of keys; boolean masks
// give bits. A tile of keys is classified from the intervals alone into skip, full or partial; for a partial tile all
// restrictions are joined into one bit per (row, key), and applied by one pass. Full tiles run no mask code.
#pragma once

#include "kernel_api.hpp"
#include "positions.hpp"
#include "simd.hpp"

namespace manyhead::MH_ISA {
namespace {

inline constexpr int64_t word_keys = 32;  // keys of one visibility word

// Row r of a kv head's rows: the query and the query head's place in its group. Stepping saves two divisions a row.
struct row_of {
  int64_t query, member;
  MH_INLINE row_of(const kernel_call& c, int64_t r) : query(r / c.group), member(r - query * c.group) {}
  MH_INLINE void step(const kernel_call& c) {
    if (++member == c.group) {
      member = 0;
      ++query;
    }
  }
};

inline constexpr int64_t most_lanes = 64;  // of a panel

// fn(lane, row) for the lanes of rows from `row` on; those behind the last row get its row.
template <class Fn>
MH_INLINE void for_each_lane(const kernel_call& c, int64_t row, int64_t count, int64_t width, Fn fn) {
  row_of r(c, row);
  for (int64_t l = 0; l < width; ++l) {
    fn(l, r);
    if (l + 1 < count) r.step(c);
  }
}

// What positions are made of, for one batch entry.
struct positions {
  int64_t used;    // keys in use, without the extra keys
  int64_t offset;  // the position of query i is i + offset
};

MH_INLINE positions positions_of(const kernel_call& c, int64_t batch) {
  positions p;
  p.used = c.seqused_k != nullptr ? index_at(c.seqused_k, c.index_type, batch) : c.kv_len - c.extra_keys;
  p.offset = offset_of(c.align, p.used, c.q_len, c.q_offset);
  if (c.q_offsets != nullptr) p.offset = index_at(c.q_offsets, c.index_type, batch);
  return p;
}

// Those of them that query i may attend: in use. May be empty with begin > end.
MH_INLINE key_range range_of(const kernel_call& c, const positions& at, int64_t query) {
  const key_range r = reach_of(c, query + at.offset);
  return {min_of(max_of(0, r.begin), at.used), min_of(at.used, r.end)};
}

// Bits [begin, end) of a word, for any integers.
MH_INLINE uint32_t bit_range(int64_t begin, int64_t end) {
  begin = max_of(begin, 0);
  end = min_of(end, word_keys);
  if (begin >= end) return 0;
  return (0xffffffffU >> (word_keys - (end - begin))) << begin;
}

enum class visibility { none, some, all };

// The same for each lane.
template <class T>
MH_INLINE xsimd::batch<bits<T>, MH_ARCH> bit_range(signed_vec<T> begin, signed_vec<T> end) {
  using U = xsimd::batch<bits<T>, MH_ARCH>;
  const auto from = [](signed_vec<T> x) MH_INLINE_LAMBDA {  // bits x and up
    const signed_vec<T> last(word_keys - 1);
    const U some = U(~bits<T>(0)) << xsimd::bitwise_cast<bits<T>>(xsimd::max(signed_vec<T>(0), xsimd::min(x, last)));
    return xsimd::select(xsimd::batch_bool_cast<bits<T>>(x > last), U(bits<T>(0)), some);
  };
  return xsimd::bitwise_andnot(from(begin), from(end));
}

// Fills words[word * width + lane] for the rows [row, row + count) of a kv head against keys [begin, end), at most
// most_tile_keys. width is a multiple of the lanes; those behind the last row see what it sees. Says whether the rows
// see none, some or all of the tile.
template <class T>
__attribute__((noinline)) visibility see_tile(const kernel_call& c, const positions& at, int64_t batch, int64_t kv_head,
                                              int64_t row, int64_t count, int64_t width, int64_t begin, int64_t end,
                                              bits<T>* words) {
  using U = xsimd::batch<bits<T>, MH_ARCH>;
  using I = signed_vec<T>;
  using integer = typename I::value_type;
  constexpr int64_t most_words = most_tile_keys / word_keys;
  const int64_t masked = min_of(end, c.kv_len - c.extra_keys) - begin;  // keys that masks speak of, may be <= 0
  // Of each word: its keys, those that masks do not speak of, those that the key mask leaves.
  bits<T> full[most_words], extra[most_words], shared[most_words];
  int64_t n = 0;
  for (int64_t first = 0; first < end - begin; first += word_keys, ++n) {
    full[n] = bit_range(0, end - begin - first);
    extra[n] = full[n] & ~bit_range(0, masked - first);
    shared[n] = full[n];
    if (c.key_mask != nullptr && first < masked) {
      shared[n] = nonzero_bytes(c.key_mask + batch * c.key_mask_strides[0] + (begin + first) * c.key_mask_strides[1],
                                c.key_mask_strides[1], min_of(word_keys, masked - first));
    }
  }

  // Positions: ranges are those of the first query, moved by as many keys as a row's query lies behind it.
  alignas(64) integer behind[most_lanes];
  const int64_t first_query = row / c.group;
  for_each_lane(c, row, count, width,
                [&](int64_t l, const row_of& r) { behind[l] = static_cast<integer>(r.query - first_query); });
  const auto near = [&](int64_t key) MH_INLINE_LAMBDA {
    constexpr int64_t far = 1 << 20;
    return I(static_cast<integer>(max_of(-far, min_of(key - begin, far))));
  };
  const key_range reach = reach_of(c, first_query + at.offset);
  const I reach_begin = near(reach.begin), reach_end = near(reach.end), used = near(at.used);
  for (int64_t l = 0; l < width; l += lanes<T>) {
    const I moved = I::load_aligned(behind + l);
    I from = reach_begin + moved;
    I to = xsimd::min(used, reach_end + moved);
    for (int64_t i = 0; i < n; ++i) {
      ((bit_range<T>(from, to) & U(shared[i])) | U(extra[i])).store_unaligned(words + i * width + l);
      from = from - I(word_keys);
      to = to - I(word_keys);
    }
  }

  const bool has_mask = c.mask != nullptr && masked > 0;
  alignas(64) bits<T> open[most_words][most_lanes];
  if (has_mask) {
    const uint8_t* const base = c.mask + batch * c.mask_strides[0] + begin * c.mask_strides[3];
    const int64_t stride = c.mask_strides[3], whole = stride == 1 ? masked / word_keys : 0;
    const uint8_t* last = nullptr;
    for_each_lane(c, row, count, width, [&](int64_t l, const row_of& r) MH_INLINE_LAMBDA {
      const uint8_t* const mask =
          base + (kv_head * c.group + r.member) * c.mask_strides[1] + r.query * c.mask_strides[2];
      if (mask == last) {  // many lanes may share it
        for (int64_t i = 0; i < n; ++i) open[i][l] = open[i][l - 1];
        return;
      }
      last = mask;
      for (int64_t i = 0; i < whole; ++i) open[i][l] = nonzero_bytes(mask + i * word_keys, 1, word_keys);
      for (int64_t i = whole; i < n; ++i) {
        const int64_t first = i * word_keys;
        open[i][l] = extra[i];
        if (first < masked)
          open[i][l] |= nonzero_bytes(mask + first * stride, stride, min_of(word_keys, masked - first));
      }
    });
  }

  U any(bits<T>(0)), hidden(bits<T>(0));
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t l = 0; l < width; l += lanes<T>) {
      U word = U::load_unaligned(words + i * width + l);
      if (has_mask) {
        word = word & U::load_aligned(open[i] + l);
        word.store_unaligned(words + i * width + l);
      }
      any = any | word;
      hidden = hidden | (word ^ U(full[i]));
    }
  }
  const U none(bits<T>(0));
  return xsimd::all(any == none) ? visibility::none : xsimd::all(hidden == none) ? visibility::all : visibility::some;
}

}  // namespace
}  // namespace manyhead::MH_ISA
