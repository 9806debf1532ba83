// Which keys a row may attend. Positions (lengths, causal, window) give each row an interval of keys; boolean masks
// give bits. A tile of keys is classified from the intervals alone into skip, full or partial; for a partial tile all
// restrictions are joined into one bit per (row, key), and applied by one pass. Full tiles run no mask code.
#pragma once

#include "kernel_api.hpp"
#include "simd.hpp"

namespace manyhead::MH_ISA {
namespace {

inline constexpr int64_t word_keys = 32;  // keys of one visibility word

struct key_range {
  int64_t begin, end;
};

MH_INLINE int64_t index_at(const void* p, int32_t type, int64_t i) {
  return type == MH_INDEX_I32 ? static_cast<const int32_t*>(p)[i] : static_cast<const int64_t*>(p)[i];
}

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

// What positions are made of, for one batch entry.
struct positions {
  int64_t used;    // keys in use, without the extra keys
  int64_t offset;  // the position of query i is i + offset
};

MH_INLINE positions positions_of(const kernel_call& c, int64_t batch) {
  positions p;
  p.used = c.seqused_k != nullptr ? index_at(c.seqused_k, c.index_type, batch) : c.kv_len - c.extra_keys;
  switch (c.align) {
    case MH_ALIGN_BOTTOM_RIGHT:
      p.offset = p.used - c.q_len;
      break;
    case MH_ALIGN_OFFSET:
      p.offset = c.q_offsets != nullptr ? index_at(c.q_offsets, c.index_type, batch) : c.q_offset;
      break;
    default:
      p.offset = 0;
  }
  return p;
}

// The keys that query i may attend as far as positions go. Both ends grow with i. May be empty with begin > end.
MH_INLINE key_range range_of(const kernel_call& c, const positions& at, int64_t query) {
  const int64_t p = query + at.offset;
  key_range r{0, at.used};
  if (c.causal) r.end = min_of(r.end, p + 1);
  if (c.window_right >= 0) r.end = min_of(r.end, p + c.window_right + 1);
  if (c.window_left >= 0) r.begin = max_of(0, p - c.window_left);
  return r;
}

// Bits [begin, end) of a word, for any integers.
MH_INLINE uint32_t bit_range(int64_t begin, int64_t end) {
  begin = max_of(begin, 0);
  end = min_of(end, word_keys);
  if (begin >= end) return 0;
  return (0xffffffffU >> (word_keys - (end - begin))) << begin;
}

enum class visibility { none, some, all };

// Fills words[word * width + lane] for the rows [row, row + count) of a kv head against keys [begin, end). Lanes
// count..width-1 (padding) see everything. Says whether the rows see none, some or all of the tile.
template <class T>
MH_INLINE visibility see_tile(const kernel_call& c, const positions& at, int64_t batch, int64_t kv_head, int64_t row,
                              int64_t count, int64_t width, int64_t begin, int64_t end, bits<T>* words) {
  const int64_t ordinary_keys = c.kv_len - c.extra_keys;  // those that masks speak of
  uint32_t any = 0;
  uint32_t hidden = 0;
  for (int64_t first = begin; first < end; first += word_keys, words += width) {
    const int64_t n = min_of(word_keys, end - first);
    const uint32_t full = bit_range(0, n);
    const uint32_t extra = bit_range(ordinary_keys - first, n);
    const int64_t masked = min_of(n, ordinary_keys - first);  // keys of this word that masks speak of, may be <= 0
    uint32_t shared = full;
    if (c.key_mask != nullptr && masked > 0) {
      shared = nonzero_bytes(c.key_mask + batch * c.key_mask_strides[0] + first * c.key_mask_strides[1],
                             c.key_mask_strides[1], masked);
    }
    int64_t last_query = -1;
    const uint8_t* last_mask = nullptr;
    uint32_t in_range = 0;
    uint32_t in_mask = full;
    row_of at_lane(c, row);
    for (int64_t lane = 0; lane < width; ++lane) {
      uint32_t w = full;
      if (lane < count) {
        const int64_t query = at_lane.query;
        if (query != last_query) {
          const key_range r = range_of(c, at, query);
          in_range = bit_range(r.begin - first, r.end - first);
          last_query = query;
        }
        const int64_t head = kv_head * c.group + at_lane.member;
        at_lane.step(c);
        if (c.mask != nullptr && masked > 0) {
          const uint8_t* m = c.mask + batch * c.mask_strides[0] + head * c.mask_strides[1] + query * c.mask_strides[2] +
                             first * c.mask_strides[3];
          if (m != last_mask) in_mask = nonzero_bytes(m, c.mask_strides[3], masked);
          last_mask = m;
        }
        w = ((in_range & shared & in_mask) | extra) & full;
        any |= w;
        hidden |= w ^ full;
      }
      words[lane] = w;
    }
  }
  return any == 0 ? visibility::none : hidden == 0 ? visibility::all : visibility::some;
}

}  // namespace
}  // namespace manyhead::MH_ISA
