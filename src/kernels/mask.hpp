// Which keys a row may attend. Positions (lengths, causal, window) give each row an interval of keys; boolean masks
// give bits. A tile of keys is classified from the intervals alone into skip, full or partial; for a partial tile all
// restrictions are joined into one bit per (row, key), and applied by one pass. Full tiles run no mask code.
#pragma once

#include "kernel_api.hpp"
#include "positions.hpp"
#include "simd.hpp"

namespace manyhead::MH_ISA {
namespace {

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

// Rows of a kv head where they lie, one after the other. X: elements, or bytes.
template <class X>
struct row_walk {
  row_of of;
  X* at;
  int64_t to_member, to_query;  // the next one in the group; from the last of a group to the next query

  // From row `row` on, with the first of all rows at `first`.
  MH_INLINE row_walk(const kernel_call& c, int64_t row, X* first, int64_t member_stride, int64_t query_stride)
      : of(c, row),
        at(first + of.member * member_stride + of.query * query_stride),
        to_member(member_stride),
        to_query(query_stride - (c.group - 1) * member_stride) {}
  MH_INLINE void step(const kernel_call& c) {
    of.step(c);
    at += of.member == 0 ? to_query : to_member;
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

// The rows of a tile, and its keys.
struct tile_at {
  int64_t batch, kv_head;
  int64_t row;         // first row
  int64_t count;       // rows that exist
  int64_t begin, end;  // keys
  MH_INLINE int64_t keys() const { return end - begin; }
  MH_INLINE int64_t head(const kernel_call& c, const row_of& r) const { return kv_head * c.group + r.member; }
};

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

// The key that a chunk begins with.
MH_INLINE int64_t chunk_begin(const kernel_call& c, const positions& at, int64_t chunk) {
  return chunks_from(c, range_of(c, at, 0).begin, c.block_kv) + chunk * c.chunk_keys;
}

// From the first key of either to behind the last.
MH_INLINE key_range joined(const key_range& a, const key_range& b) {
  return {min_of(a.begin, b.begin), max_of(a.end, b.end)};
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

MH_INLINE uint32_t* row_of_openings(const openings& open, int64_t batch, int64_t query) {
  return open.words + batch * open.batch_words + query * open.query_words;
}

// fill(row, words + lane) for the rows of a tile, which set n words each, words[word * pitch + lane]; many lanes may share a row.
template <class T, class X, class Fill>
MH_INLINE void for_each_row(const kernel_call& c, const tile_at& t, int64_t width, row_walk<const X> row, int64_t n,
                            int64_t pitch, bits<T>* words, Fill fill) {
  const X* last = nullptr;
  for (int64_t l = 0; l < width; ++l) {
    if (row.at == last) {
      for (int64_t i = 0; i < n; ++i) words[i * pitch + l] = words[i * pitch + l - 1];
    } else {
      last = row.at;
      fill(last, words + l);
    }
    if (l + 1 < t.count) row.step(c);
  }
}

// Looks up n words of each row of a tile, words[word * pitch + lane] as see_tile has them. The bits behind the last key are anything.
template <class T>
__attribute__((noinline)) void look_up_openings(const kernel_call& c, const openings& open, const tile_at& t,
                                                int64_t width, int64_t n, int64_t pitch, bits<T>* words) {
  const int64_t shift = t.begin % word_keys;
  const uint32_t* const first = row_of_openings(open, t.batch, 0) + t.begin / word_keys;
  for_each_row<T>(c, t, width, row_walk<const uint32_t>(c, t.row, first, 0, open.query_words), n, pitch, words,
                  [=](const uint32_t* row, bits<T>* of_lane) MH_INLINE_LAMBDA {
                    for (int64_t i = 0; i < n; ++i) {
                      uint64_t two;
                      memcpy(&two, row + i, sizeof two);
                      of_lane[i * pitch] = static_cast<uint32_t>(two >> shift);
                    }
                  });
}

// What openings say of no queries, and of those of two.
MH_INLINE opening opening_of_none(const kernel_call& c) { return {c.kv_len, 0, 0, c.kv_len, false, false}; }
MH_INLINE opening joined(const opening& a, const opening& b) {
  return {min_of(a.any_begin, b.any_begin), max_of(a.any_end, b.any_end), max_of(a.all_begin, b.all_begin),
          min_of(a.all_end, b.all_end),     a.closes || b.closes,         a.adds || b.adds};
}
// Of rows [row, row + count), or of some more.
__attribute__((noinline)) opening opening_of_rows(const kernel_call& c, const openings& open, int64_t batch,
                                                  int64_t row, int64_t count) {
  opening of = opening_of_none(c);
  const opening* const blocks = open.blocks + batch * open.batch_blocks;
  if (open.query_words == 0) return *blocks;
  const int64_t last = (row + count - 1) / c.group / opening_queries;
  for (int64_t i = row / c.group / opening_queries; i <= last; ++i) of = joined(of, blocks[i]);
  return of;
}

// Fills words[word * width + lane] for the rows and keys of a tile, at most most_tile_keys. width is a multiple of the lanes; those
// behind the last row see what it sees. also_open: what something else leaves open, in the same order. Says whether the rows see
// none, some or all of the tile.
template <class T>
__attribute__((noinline)) visibility see_tile(const kernel_call& c, const positions& at, const tile_at& t,
                                              int64_t width, bits<T>* words, const bits<T>* also_open = nullptr) {
  using U = xsimd::batch<bits<T>, MH_ARCH>;
  using I = signed_vec<T>;
  using integer = typename I::value_type;
  constexpr int64_t most_words = most_tile_keys / word_keys;
  const int64_t begin = t.begin, end = t.end;
  const int64_t masked = min_of(end, c.kv_len - c.extra_keys) - begin;  // keys that masks speak of, may be <= 0
  const uint8_t* mask = nullptr;                                        // of the kv head's first row
  int64_t to_member = 0, to_query = 0;
  if (c.mask != nullptr && masked > 0) {
    to_member = c.group == 1 ? 0 : c.mask_strides[1];
    to_query = c.q_len == 1 ? 0 : c.mask_strides[2];
    mask = c.mask + t.batch * c.mask_strides[0] + t.kv_head * c.group * c.mask_strides[1] + begin * c.mask_strides[3];
  }
  const bool rows_share = to_member == 0 && to_query == 0;
  // Of each word: its keys, those that masks do not speak of, those that masks leave to all rows.
  bits<T> full[most_words], extra[most_words], shared[most_words];
  int64_t n = 0;
  for (int64_t first = 0; first < end - begin; first += word_keys, ++n) {
    full[n] = bit_range(0, end - begin - first);
    extra[n] = full[n] & ~bit_range(0, masked - first);
    shared[n] = full[n];
    const auto leave = [&](const uint8_t* keys, int64_t stride) MH_INLINE_LAMBDA {
      shared[n] &= nonzero_bytes(keys + first * stride, stride, min_of(word_keys, masked - first));
    };
    if (first >= masked) continue;
    if (c.key_mask != nullptr)
      leave(c.key_mask + t.batch * c.key_mask_strides[0] + begin * c.key_mask_strides[1], c.key_mask_strides[1]);
    if (mask != nullptr && rows_share) leave(mask, c.mask_strides[3]);
  }

  // What the mask leaves to each row.
  const bool rows_differ = mask != nullptr && !rows_share;
  alignas(64) bits<T> open[most_words][most_lanes];
  if (rows_differ && c.mask_open.words != nullptr) {
    look_up_openings<T>(c, c.mask_open, t, width, n, most_lanes, open[0]);
  } else if (rows_differ) {
    const int64_t stride = c.mask_strides[3], whole = stride == 1 ? masked / word_keys : 0;
    for_each_row<T>(c, t, width, row_walk<const uint8_t>(c, t.row, mask, to_member, to_query), n, most_lanes, open[0],
                    [&](const uint8_t* row, bits<T>* of_lane) MH_INLINE_LAMBDA {
                      for (int64_t i = 0; i < whole; ++i)
                        of_lane[i * most_lanes] = nonzero_bytes(row + i * word_keys, 1, word_keys);
                      for (int64_t i = whole; i < n; ++i) {
                        const int64_t first = i * word_keys;
                        bits<T>& word = of_lane[i * most_lanes] = extra[i];
                        if (first < masked)
                          word |= nonzero_bytes(row + first * stride, stride, min_of(word_keys, masked - first));
                      }
                    });
  }

  // Positions: ranges are those of the first query, moved by as many keys as a row's query lies behind it.
  const int64_t first_query = t.row / c.group, queries = (t.row + t.count - 1) / c.group - first_query;
  const key_range reach = reach_of(c, first_query + at.offset);
  const bool reach_all =
      reach.begin + queries <= begin && min_of(reach.end, at.used) >= min_of(end, c.kv_len - c.extra_keys);
  const auto near = [&](int64_t key) MH_INLINE_LAMBDA {
    constexpr int64_t far = 1 << 20;
    return I(static_cast<integer>(max_of(-far, min_of(key - begin, far))));
  };
  const I reach_begin = near(reach.begin), reach_end = near(reach.end), used = near(at.used);
  alignas(64) integer behind[most_lanes];
  if (!reach_all) {
    for_each_lane(c, t.row, t.count, width,
                  [&](int64_t l, const row_of& r) { behind[l] = static_cast<integer>(r.query - first_query); });
  }
  const U none(bits<T>(0));
  U any = none, hidden = none;
  for (int64_t l = 0; l < width; l += lanes<T>) {
    I from(integer(0)), to(integer(0));
    if (!reach_all) {
      const I moved = I::load_aligned(behind + l);
      from = reach_begin + moved;
      to = xsimd::min(used, reach_end + moved);
    }
    for (int64_t i = 0; i < n; ++i) {
      U word(shared[i]);
      if (!reach_all) {
        word = word & bit_range<T>(from, to);
        from = from - I(word_keys);
        to = to - I(word_keys);
      }
      word = word | U(extra[i]);
      if (rows_differ) word = word & U::load_aligned(open[i] + l);
      if (also_open != nullptr) word = word & U::load_unaligned(also_open + i * width + l);
      word.store_unaligned(words + i * width + l);
      any = any | word;
      hidden = hidden | (word ^ U(full[i]));
    }
  }
  return xsimd::all(any == none) ? visibility::none : xsimd::all(hidden == none) ? visibility::all : visibility::some;
}

// Of a tile's keys, counted from its first: from the first that a row sees to behind the last. words: of a vector of rows.
template <class T>
MH_INLINE key_range seen_keys(const bits<T>* words, int64_t width, int64_t keys) {
  using U = xsimd::batch<bits<T>, MH_ARCH>;
  const auto either = [](const U& a, const U& b) MH_INLINE_LAMBDA { return a | b; };
  key_range seen{keys, 0};
  for (int64_t first = 0; first < keys; first += word_keys, words += width) {
    const auto some = static_cast<uint32_t>(xsimd::reduce(either, U::load_unaligned(words)));
    if (some == 0) continue;
    seen.begin = min_of(seen.begin, first + __builtin_ctz(some));
    seen.end = first + word_keys - __builtin_clz(some);
  }
  return seen;
}

// Whether all rows see all keys.
template <class T>
MH_INLINE bool see_all(const bits<T>* words, int64_t width, int64_t keys) {
  using U = xsimd::batch<bits<T>, MH_ARCH>;
  U hidden(bits<T>(0));
  for (int64_t first = 0; first < keys; first += word_keys, words += width) {
    const U full(bits<T>(bit_range(0, keys - first)));
    for (int64_t l = 0; l < width; l += lanes<T>)
      hidden = hidden | xsimd::bitwise_andnot(full, U::load_unaligned(words + l));
  }
  return xsimd::all(hidden == U(bits<T>(0)));
}

}  // namespace
}  // namespace manyhead::MH_ISA
